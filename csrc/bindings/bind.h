// The parts of the module specdec_ext._host.
#pragma once

#include <pybind11/pybind11.h>

namespace specdec::bindings {

void bind_draft_schedule(pybind11::module_& module);
void bind_ngram_index(pybind11::module_& module);
void bind_suffix(pybind11::module_& module);

}  // namespace specdec::bindings
