// Parallel loops that do not depend on where the threads come from: the glue passes torch's pool or
// a team of its threads, the self test a plain loop.
#pragma once

#include <algorithm>
#include <cstdint>

namespace specdec {

struct ParallelFor {
  using Body = void (*)(int64_t begin, int64_t end, void* context);
  // Calls body on disjoint ranges of at least about `grain` indices each, which cover [0, count).
  void (*run)(void* threads, int64_t count, int64_t grain, Body body, void* context);
  void* threads = nullptr;
  // Grains are chosen for threads that have to be woken. Threads that already wait take smaller
  // ones.
  int64_t grain_divisor = 1;

  // body(begin, end) must not throw.
  template <typename F>
  void operator()(int64_t count, int64_t grain, const F& body) const {
    grain = std::max<int64_t>(1, grain / grain_divisor);
    if (count <= grain) {
      if (count > 0) body(int64_t{0}, count);
      return;
    }
    run(
        threads, count, grain,
        [](int64_t begin, int64_t end, void* context) {
          (*static_cast<const F*>(context))(begin, end);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

}  // namespace specdec
