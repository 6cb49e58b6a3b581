// The Python module specdec_ext._host: native code that is not a tensor op.
#include "host.h"

PyMODINIT_FUNC PyInit__host() {
  static PyModuleDef definition{
      PyModuleDef_HEAD_INIT,
      "_host",
      "What specdec_ext does on the host: indexes over token ids, the order of work of kernels.",
      -1,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      nullptr};
  return specdec::bindings::translated<PyObject*>(nullptr, [] {
    specdec::bindings::Object module(PyModule_Create(&definition));
    specdec::bindings::define_draft_schedule(module.get());
    specdec::bindings::define_ngram_index(module.get());
    specdec::bindings::define_suffix(module.get());
    return module.release();
  });
}
