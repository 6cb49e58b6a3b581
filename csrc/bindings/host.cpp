// Python module specdec_ext._host: host-side state that is not a tensor op.
#include "bind.h"

PYBIND11_MODULE(_host, module) {
  module.doc() = "Host-side state of specdec_ext: indexes over token ids.";
  specdec::bindings::bind_ngram_index(module);
  specdec::bindings::bind_suffix(module);
}
