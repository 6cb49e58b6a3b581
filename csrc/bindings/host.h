// The parts of the module specdec_ext._host.
#pragma once

#include "python.h"

namespace specdec::bindings {

void define_draft_schedule(PyObject* module);
void define_ngram_index(PyObject* module);
void define_suffix(PyObject* module);

}  // namespace specdec::bindings
