// A C function for tests (python_tests/helpers/ops/emulation.py) that sets the order of threads.
#include "cuda_runtime.h"

extern "C" __attribute__((visibility("default"))) void specdec_set_thread_order(int order) {
  specdec::Emulation::order = static_cast<specdec::ThreadOrder>(order);
  // Copies land latest in this order, so the way of an older GPU is tested in it.
  specdec::Emulation::has_bulk_copies =
      specdec::Emulation::order != specdec::ThreadOrder::kBackward;
}
