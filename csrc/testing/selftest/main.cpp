// Self test of the torch-free library: the emulator of CUDA on correct kernels and on kernels with
// planted bugs, CPU ops against literal examples, and small CUDA kernels, compiled for the host,
// against the CPU ops. Emulated kernels run in three thread orders. python_tests/ops tests all ops.
#include "check.h"
#include "cuda_runtime.h"
#include "specdec/cpu/isa.h"

int main() {
  using namespace specdec;
  test_numbers();
  test_number_formats();
  test_sampled_walk();
  test_device_answer();
  test_thread_team();
  test_draft_plan();
  test_draft_head();
  test_draft_scratch();
  for (ThreadOrder order :
       {ThreadOrder::kForward, ThreadOrder::kBackward, ThreadOrder::kShuffled}) {
    Emulation::order = order;
    test_emulator_features();
    test_emulator_copies();
    test_emulator_finds_bugs();
    test_ops();
  }
  std::printf("%d checks passed (CPU ops as %s, kernels emulated)\n", num_checks,
              cpu::cpu_isa_name(cpu::cpu_isa()));
}
