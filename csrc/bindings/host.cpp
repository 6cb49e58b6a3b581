// Python module specdec_ext._host: what runs on the host and is not a tensor op.
#include "bind.h"

PYBIND11_MODULE(_host, module) {
  module.doc() =
      "What specdec_ext does on the host: indexes over token ids, the order of work of kernels.";
  specdec::bindings::bind_draft_schedule(module);
  specdec::bindings::bind_ngram_index(module);
  specdec::bindings::bind_suffix(module);
}
