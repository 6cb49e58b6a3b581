// Parallel loops without a dependence on who provides the threads: the glue hands over torch's
// pool, the self test a plain loop.
#pragma once

#include <cstdint>

namespace specdec {

struct ParallelFor {
  using Body = void (*)(int64_t begin, int64_t end, void* context);
  // Calls body on disjoint ranges that cover [0, count), each of about `grain` or more.
  void (*run)(int64_t count, int64_t grain, Body body, void* context);

  // body(begin, end) must not throw.
  template <typename F>
  void operator()(int64_t count, int64_t grain, const F& body) const {
    if (count <= grain) {
      if (count > 0) body(int64_t{0}, count);
      return;
    }
    run(
        count, grain,
        [](int64_t begin, int64_t end, void* context) {
          (*static_cast<const F*>(context))(begin, end);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

}  // namespace specdec
