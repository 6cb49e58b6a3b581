// Asynchronous copies on the emulator, as sound kernels use them: a pipeline of cp.async groups,
// and a ring of stages that a producer warp fills by bulk copies and consumer warps drain. All
// threads sum all numbers, weighted by position, so that a wrong stage changes the sum.
#include <numeric>
#include <vector>

#include "specdec/device/cuda.cuh"
#include "testing/selftest/check.h"

namespace specdec {
namespace {

constexpr int kStages = 3;
constexpr int kTile = 64;  // numbers per stage
constexpr int kTiles = 10;
constexpr int kConsumers = 64;

using Numbers = std::vector<int32_t>;

struct PipelineShared {
  SharedArray<int32_t, kStages * kTile> stages;
};

// 32 threads; the first 16 copy 4 numbers each per tile. The last tile is short.
__global__ void pipeline(const int32_t* numbers, int count, int64_t* out) {
  SPECDEC_SHARED(PipelineShared, shared);
  const int lane = threadIdx.x;
  const auto fetch = [&](int tile) {
    const int first = tile * kTile + lane % 16 * 4;
    if (lane < 16 && tile < kTiles) {
      const bool valid = first < count;
      cp_async_16(shared.stages.pointer(tile % kStages * kTile + lane * 4),
                  valid ? numbers + first : numbers, valid);
    }
    cp_async_commit();  // also an empty group, so that waiting can count groups
  };
  fetch(0);
  fetch(1);
  int64_t sum = 0;
  for (int tile = 0; tile < kTiles; ++tile) {
    cp_async_wait<1>();
    warp_barrier();  // all lanes' copies of this tile are there, all reads of the stage reused next
                     // done
    fetch(tile + 2);
    for (int i = 0; i < kTile; ++i) {
      sum += int64_t{shared.stages[tile % kStages * kTile + i]} * (tile * kTile + i);
    }
  }
  out[lane] = sum;
}

struct RingShared {
  SharedArray<int32_t, kStages * kTile> stages;
  SharedArray<Mbarrier, kStages> full, empty;
};

__device__ void produce(RingShared& shared, const int32_t* numbers) {
  if (threadIdx.x != kConsumers) return;
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages, use = tile / kStages;
    mbarrier_wait(&shared.empty[stage], (use + 1) % 2);  // passes at the first use
    // Two copies per stage.
    mbarrier_arrive_expect(&shared.full[stage], kTile * 4);
    bulk_copy(shared.stages.pointer(stage * kTile), numbers + tile * kTile, kTile * 2,
              &shared.full[stage]);
    bulk_copy(shared.stages.pointer(stage * kTile + kTile / 2), numbers + tile * kTile + kTile / 2,
              kTile * 2, &shared.full[stage]);
  }
}

__device__ int64_t consume(RingShared& shared) {
  int64_t sum = 0;
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages, use = tile / kStages;
    mbarrier_wait(&shared.full[stage], use % 2);
    for (int i = 0; i < kTile; ++i) {
      sum += int64_t{shared.stages[stage * kTile + i]} * (tile * kTile + i);
    }
    warp_barrier();  // the lane that arrives does so for its warp
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.empty[stage]);
  }
  return sum;
}

__global__ void ring(const int32_t* numbers, int64_t* out) {
  SPECDEC_SHARED(RingShared, shared);
  if (threadIdx.x < kStages) {
    mbarrier_init(&shared.full[threadIdx.x], 1);
    mbarrier_init(&shared.empty[threadIdx.x], kConsumers / 32);
  }
  block_barrier();
  if (threadIdx.x >= kConsumers) {
    produce(shared, numbers);
  } else {
    out[blockIdx.x * kConsumers + threadIdx.x] = consume(shared);
  }
}

int64_t expected_sum(const Numbers& numbers, int count) {
  int64_t sum = 0;
  for (int i = 0; i < count; ++i) sum += int64_t{numbers[static_cast<size_t>(i)]} * i;
  return sum;
}

}  // namespace

void test_emulator_copies() {
  alignas(16) static int32_t numbers[kTiles * kTile];
  std::iota(numbers, numbers + kTiles * kTile, 1000);
  const Numbers all(numbers, numbers + kTiles * kTile);
  std::vector<int64_t> sums(32);
  for (int count : {kTiles * kTile, kTiles * kTile - 20}) {
    CHECK(launch(pipeline, {1, 1, 32, nullptr}, +numbers, count, sums.data()) == cudaSuccess);
    for (int64_t sum : sums) CHECK(sum == expected_sum(all, count));
  }
  sums.assign(2 * kConsumers, 0);
  CHECK(launch(ring, {2, 1, kConsumers + 32, nullptr}, +numbers, sums.data()) == cudaSuccess);
  for (int64_t sum : sums) CHECK(sum == expected_sum(all, kTiles * kTile));
}

}  // namespace specdec
