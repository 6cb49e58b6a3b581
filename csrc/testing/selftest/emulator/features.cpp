// Everything that kernels may use, on the emulator: 16-bit floats, collectives of warps and blocks,
// tensor cores, atomics and memory order, shared memory, cooperative launches. Every kernel here is
// sound, so a report of the race detector is a failure too.
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "specdec/device/cuda.cuh"
#include "testing/selftest/check.h"

namespace specdec {
namespace {

using Floats = std::vector<float>;

// Whether `rounded` is the nearest neighbour of `exact`, and the even one of two equally near.
template <typename T, typename ToFloat>
bool is_nearest(float exact, T rounded, const ToFloat& to_float) {
  const auto distance = [&](int step) {
    const T neighbour{static_cast<uint16_t>(rounded.bits + step)};
    return std::abs(double{to_float(neighbour)} - double{exact});
  };
  const bool even = rounded.bits % 2 == 0;
  const bool below = (rounded.bits & 0x7FFF) == 0 ||
                     (even ? distance(0) <= distance(-1) : distance(0) < distance(-1));
  return below && (even ? distance(0) <= distance(1) : distance(0) < distance(1));
}

template <typename T>
__global__ void lane_fragments(const float* a, const float* b, float* c) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
  uint32_t fragment_a[4], fragment_b[2];
  for (int i = 0; i < 4; ++i) {
    const float* pair = a + (g + i % 2 * 8) * 16 + t + i / 2 * 8;
    fragment_a[i] = pack<T>(pair[0], pair[1]);
  }
  for (int i = 0; i < 2; ++i) {
    fragment_b[i] = pack<T>(b[(t + i * 8) * 8 + g], b[(t + i * 8 + 1) * 8 + g]);
  }
  float fragment_c[4] = {0, 0, 0, 1};
  mma_m16n8k16<T>(fragment_c, fragment_a, fragment_b);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + t + i % 2] = fragment_c[i];
}

struct MatrixShared {
  SharedArray<uint16_t, 16 * 16> a;  // row-major
  SharedArray<uint16_t, 16 * 8> b;   // row-major: transposed on load
};

// The same product with fragments loaded by ldmatrix.
__global__ void matrix_fragments(const float* a, const float* b, float* c) {
  SPECDEC_SHARED(MatrixShared, shared);
  for (int i = threadIdx.x; i < 16 * 16; i += 32) {
    shared.a[i] = __bfloat16_as_ushort(__float2bfloat16(a[i]));
  }
  for (int i = threadIdx.x; i < 16 * 8; i += 32) {
    shared.b[i] = __bfloat16_as_ushort(__float2bfloat16(b[i]));
  }
  warp_barrier();
  const int lane = threadIdx.x;
  uint32_t fragment_a[4], matrices_b[4];
  ldmatrix_x4(fragment_a, shared.a.pointer(lane % 16 * 16 + lane / 16 * 8));
  ldmatrix_x4_trans(matrices_b, shared.b.pointer(lane % 16 * 8));
  const uint32_t fragment_b[2] = {matrices_b[0], matrices_b[1]};
  float fragment_c[4] = {0, 0, 0, 1};
  mma_m16n8k16<__nv_bfloat16>(fragment_c, fragment_a, fragment_b);
  for (int i = 0; i < 4; ++i) {
    c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = fragment_c[i];
  }
}

void test_tensor_cores() {
  std::mt19937 random(4);
  Floats a(16 * 16), b(16 * 8);
  for (Floats* matrix : {&a, &b}) {
    for (float& x : *matrix) x = static_cast<float>(static_cast<int>(random() % 255) - 127) / 64;
  }
  Floats expected(16 * 8);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float sum = i >= 8 && j % 2 == 1 ? 1 : 0;  // element 3 of the fragments starts at 1
      for (int k = 0; k < 16; ++k) sum += a[i * 16 + k] * b[k * 8 + j];
      expected[i * 8 + j] = sum;
    }
  }
  using Kernel = void (*)(const float*, const float*, float*);
  for (Kernel kernel : {Kernel{lane_fragments<__nv_bfloat16>}, Kernel{lane_fragments<__half>},
                        Kernel{matrix_fragments}}) {
    Floats c(16 * 8);
    CHECK(launch(kernel, {1, 1, 32, nullptr}, a.data(), b.data(), c.data()) == cudaSuccess);
    CHECK(c == expected);  // all numbers are short, so sums are exact
  }
}

struct WarpResults {
  int broadcast, xored, up, down, pair, max, min, sum;
  uint32_t votes, half_votes;
  bool any, all, none;
};

__global__ void warp_functions(WarpResults* results) {
  const int lane = threadIdx.x % 32, value = lane * lane;
  WarpResults& r = results[threadIdx.x];
  r.broadcast = shuffle(value, 5);
  r.xored = shuffle_xor(value, 3);
  r.up = shuffle_up(value, 2);
  r.down = shuffle_down(value, 4);
  // The halves of the warp act separately, at different places in the code.
  if (lane < 16) {
    r.pair = static_cast<int>(shuffle_xor(int64_t{value} << 33, 1, 0x0000FFFF) >> 33);
  } else {
    r.pair = shuffle_xor(value, 1, 0xFFFF0000);
  }
  r.max = warp_max(value);
  r.min = warp_min(value - 7);
  r.sum = warp_sum(value);
  r.votes = ballot(lane % 3 == 0);
  r.half_votes = lane < 16 ? ballot(lane % 3 == 0, 0xFFFF) : 0;
  r.any = warp_any(lane == 31);
  r.all = warp_all(lane != 31);
  r.none = !warp_any(false) && warp_all(true);
}

void test_warps() {
  std::vector<WarpResults> results(96);
  CHECK(launch(warp_functions, {1, 1, 96, nullptr}, results.data()) == cudaSuccess);
  for (int i = 0; i < 96; ++i) {
    const int lane = i % 32;
    const auto square = [](int x) { return x * x; };
    const WarpResults& r = results[static_cast<size_t>(i)];
    CHECK(r.broadcast == 25 && r.xored == square(lane ^ 3) && r.pair == square(lane ^ 1));
    CHECK(r.up == square(lane < 2 ? lane : lane - 2));
    CHECK(r.down == square(lane > 27 ? lane : lane + 4));
    CHECK(r.max == 31 * 31 && r.min == -7 && r.sum == 31 * 32 * 63 / 6);
    CHECK(r.votes == 0x49249249 && r.half_votes == (lane < 16 ? 0x9249u : 0u));
    CHECK(r.any && !r.all && r.none);
  }
}

struct BlockShared {
  SharedArray<uint8_t, 128> bytes;
  SharedArray<int32_t, 128> words;
  SharedArray<uint32_t, 8> bins;
  SharedValue<int32_t> total;
  SharedArray<uint32_t, 1> ready;
};

// Neighbouring bytes written by different threads, halves of the block with a barrier each, a
// histogram, and threads that end before a barrier.
__global__ void block_functions(int32_t* out) {
  SPECDEC_SHARED(BlockShared, shared);
  const int thread = threadIdx.x, half = thread / 64;
  shared.bytes[thread] = static_cast<uint8_t>(thread);
  if (thread < 8) shared.bins[thread] = 0;
  named_barrier(1 + half, 64);
  shared.words[thread] = shared.bytes[half * 64 + 63 - thread % 64];
  block_barrier();
  atomic_add(shared.bins.pointer(shared.words[thread] % 8), 1);
  if (thread >= 100) return;
  block_barrier();
  if (thread == 0) {
    shared.total = 0;
    for (int i = 0; i < 8; ++i) shared.total = shared.total + static_cast<int32_t>(shared.bins[i]);
  }
  block_barrier();
  out[thread] = shared.words[thread] + shared.total;
}

// Passes a value from thread 0 to thread 64 by a flag, with fences, and back with acquire and
// release, and to thread 32 with a relaxed load and a fence.
__global__ void memory_order(int32_t* out) {
  SPECDEC_SHARED(BlockShared, shared);
  if (threadIdx.x == 0) shared.ready[0] = 0;
  block_barrier();
  uint32_t* ready = shared.ready.pointer(0);
  if (threadIdx.x == 0) {
    shared.words[0] = 5;
    thread_fence();
    atomic_add(ready, 1);
    spin_until([&] { return load_acquire(ready) == 2; });
    out[0] = shared.words[1];
  }
  if (threadIdx.x == 32) {
    spin_until([&] { return load_relaxed(ready) == 2; });
    thread_fence();
    out[1] = shared.words[1];
  }
  if (threadIdx.x == 64) {
    spin_until([&] { return atomic_compare_exchange(ready, 7, 7) == 1; });
    thread_fence();
    shared.words[1] = shared.words[0] + 1;
    store_release(ready, 2);
  }
}

__global__ void dynamic_memory(float* out) {
  SPECDEC_DYNAMIC_SHARED(std::byte, memory);
  const auto floats = memory.subspan(0, 96 * 4).as<float>();
  const auto halves = memory.subspan(96 * 4, 96 * 2).as<uint16_t>();
  floats[threadIdx.x] = 1.5f;
  halves[95 - threadIdx.x] = static_cast<uint16_t>(threadIdx.x);
  block_barrier();
  floats[threadIdx.x] += static_cast<float>(halves[threadIdx.x]);
  out[blockIdx.y * 96 + threadIdx.x] = floats[threadIdx.x];
}

void test_blocks() {
  std::vector<int32_t> out(128, -1);
  CHECK(launch(block_functions, {3, 1, 128, nullptr}, out.data()) == cudaSuccess);
  for (int i = 0; i < 128; ++i) {
    CHECK(out[i] == (i < 100 ? i / 64 * 64 + 63 - i % 64 + 128 : -1));
  }
  CHECK(launch(memory_order, {1, 1, 96, nullptr}, out.data()) == cudaSuccess);
  CHECK(out[0] == 6 && out[1] == 6);
  Floats floats(2 * 96);
  CHECK(launch(dynamic_memory, {1, 2, 96, nullptr, 96 * 6}, floats.data()) == cudaSuccess);
  for (int i = 0; i < 2 * 96; ++i) CHECK(floats[i] == static_cast<float>(95 - i % 96) + 1.5f);
}

// In each round every block sums what all blocks wrote in the previous round.
__global__ void rounds_of_sums(GridBarrier* barrier, int64_t* values, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int64_t* from = values + round % 2 * gridDim.x;
    int64_t sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += from[i];
    if (threadIdx.x == 33) values[(round + 1) % 2 * gridDim.x + blockIdx.x] = sum + blockIdx.x;
    grid_barrier(barrier);
  }
}

void test_cooperative_launch() {
  int64_t blocks = 0;
  CHECK(resident_blocks(rounds_of_sums, 64, 0, &blocks) == cudaSuccess && blocks > 2);
  std::vector<int64_t> values(2 * blocks, 1), expected(blocks, 1);
  GridBarrier barrier{};
  for (int launches = 0; launches < 2; ++launches) {  // the barrier is not reset between them
    CHECK(launch(rounds_of_sums, {blocks, 1, 64, nullptr, 0, true}, &barrier, values.data(), 4) ==
          cudaSuccess);
    for (int round = 0; round < 4; ++round) {
      const int64_t sum = std::accumulate(expected.begin(), expected.end(), int64_t{0});
      for (int64_t i = 0; i < blocks; ++i) expected[i] = sum + i;
    }
    CHECK(std::equal(expected.begin(), expected.end(), values.begin()));
  }
}

void test_configuration() {
  float out = 0;
  CHECK(launch(dynamic_memory, {0, 1, 32, nullptr}, &out) == cudaErrorInvalidConfiguration);
  CHECK(launch(dynamic_memory, {1, 65536, 32, nullptr}, &out) == cudaErrorInvalidConfiguration);
  CHECK(launch(dynamic_memory, {1, 1, 1025, nullptr}, &out) == cudaErrorInvalidConfiguration);
  CHECK(launch(dynamic_memory, {1, 1, 32, nullptr, 233 * 1024}, &out) == cudaErrorInvalidValue);
  std::string message;
  try {
    launch(dynamic_memory, {17, 1, 1024, nullptr, 0, true}, &out);
  } catch (const EmulationError& error) {
    message = error.what();
  }
  CHECK(message.find("17 blocks with 1024 threads") != std::string::npos);
}

}  // namespace

void test_number_formats() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const __half half{static_cast<uint16_t>(bits)};
    const __nv_bfloat16 brain{static_cast<uint16_t>(bits)};
    const float wide = __half2float(half);
    CHECK(std::isnan(wide) || __float2half(wide).bits == bits);
    CHECK(std::isnan(wide) == ((bits & 0x7FFF) > 0x7C00));
    CHECK(std::isnan(__bfloat162float(brain)) ||
          __float2bfloat16(__bfloat162float(brain)).bits == bits);
  }
  CHECK(__half2float(__half{0x3555}) == 0.333251953125f &&
        __half2float(__half{0x8001}) == -0x1p-24f);
  for (const auto& [value, bits] : {std::pair{65519.996f, 0x7BFF},
                                    {65520.0f, 0x7C00},
                                    {-1e30f, 0xFC00},
                                    {0x1p-25f, 0},
                                    {0x1.8p-24f, 2}}) {
    CHECK(__float2half(value).bits == bits);
  }
  CHECK(__float2half(NAN).bits == 0x7FFF && __float2bfloat16(-NAN).bits == 0x7FFF);
  CHECK(__float2bfloat16(3.4e38f).bits == 0x7F80 && __float2bfloat16(INFINITY).bits == 0x7F80);
  std::mt19937 random(5);
  for (int i = 0; i < 100000; ++i) {
    // Exponents of all finite half numbers and a few smaller ones; some ties.
    const uint32_t fraction = random() & (i % 3 == 0 ? 0x7FF000 : 0x7FFFFF);
    const float value =
        std::bit_cast<float>(static_cast<uint32_t>(98 + random() % 44) << 23 | fraction);
    const __half half = __float2half(i % 2 == 0 ? value : -value);
    const __nv_bfloat16 brain = __float2bfloat16(value);
    if (value < 65504) CHECK(is_nearest(i % 2 == 0 ? value : -value, half, __half2float));
    CHECK(is_nearest(value, brain, __bfloat162float));
  }
}

void test_emulator_features() {
  test_tensor_cores();
  test_warps();
  test_blocks();
  test_cooperative_launch();
  test_configuration();
}

}  // namespace specdec
