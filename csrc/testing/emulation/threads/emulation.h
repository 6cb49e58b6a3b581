// Control of the emulator: the order of threads, and the error for a broken kernel.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace specdec {

// Chooses which of the runnable threads runs: the first, the last, or the first in a pseudo-random
// order that is drawn for every block. (With fixed ranks threads drift apart as far as barriers
// allow, which shows more than a new choice each time: Burckhardt et al., "A randomized scheduler
// with probabilistic guarantees of finding bugs", ASPLOS 2010.)
enum class ThreadOrder { kForward, kBackward, kShuffled };

struct Emulation {
  inline static ThreadOrder order = ThreadOrder::kForward;
  inline static uint64_t seed = 0;            // for kShuffled
  inline static bool has_bulk_copies = true;  // false: the GPU is older than sm_90
  inline static int64_t num_bulk_copies = 0;  // of all launches
};

// Thrown by launch() if the kernel broke a rule of CUDA. The message names the kernel, the block
// and the thread. The next launch starts from a clean state.
class EmulationError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace specdec
