// The best of many scores, found by one warp: lane i gets the i-th best.
#pragma once

#include "specdec/device/cuda.cuh"
#include "specdec/math/pick.h"

namespace specdec {

// The pick of a score; kNoPick for -inf and NaN.
__device__ __forceinline__ Pick pick_of(float score, int64_t token) {
  if (!(score > bits_to_float(kMinusInfinityBits))) return kNoPick;
  return make_pick(ordered_key(canonical_bits(score)), token);
}

// All lanes call all functions together.
class WarpPicks {
 public:
  // The best `count` (1 .. 32) picks so far: lane i has the i-th.
  __device__ __forceinline__ WarpPicks(int count, Pick own) : last_(count - 1), own_(own) {}

  __device__ __forceinline__ Pick own() const { return own_; }

  // Adds one pick per lane. Returns whether any of them was among the best. They are inserted one
  // after the other, which is cheap because after a while few are.
  __device__ __forceinline__ bool add(Pick pick) {
    const int lane = threadIdx.x % kWarpSize;
    bool any = false;
    while (true) {
      const uint32_t entering = ballot(pick > shuffle(own_, last_));
      if (entering == 0) return any;
      const int source = __ffs(static_cast<int>(entering)) - 1;
      const Pick next = shuffle(pick, source);
      const int place = __popc(ballot(own_ > next));
      const Pick above = shuffle_up(own_, 1);
      own_ = lane < place ? own_ : lane == place ? next : above;
      if (lane == source) pick = kNoPick;
      any = true;
    }
  }

 private:
  int last_;
  Pick own_;
};

// The best `count` picks of several lists. Each list is sorted, best first, and ends with kNoPick;
// no pick occurs twice. load(list, place) with place < count reads one; only the places that matter
// are read.
template <typename Load>
__device__ __forceinline__ Pick merge_picks(int num_lists, int count, const Load& load) {
  constexpr int kGroup = 4;  // loads in flight
  const int lane = threadIdx.x % kWarpSize;
  WarpPicks best(count, kNoPick);
  bool any = true;
  for (int place = 0; place < count && any; ++place) {
    any = false;
    for (int first = 0; first < num_lists; first += kGroup * kWarpSize) {
      Pick picks[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int list = first + i * kWarpSize + lane;
        picks[i] = list < num_lists ? load(list, place) : kNoPick;
      }
#pragma unroll
      for (const Pick pick : picks) any |= best.add(pick);
    }
  }
  return best.own();
}

}  // namespace specdec
