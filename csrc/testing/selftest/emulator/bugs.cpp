// Kernels with one planted bug each. The emulator must name the bug, the kernel, the block and, if
// it is always the same one, the thread. After each, a sound kernel must run as if nothing had
// happened.
#include <string>
#include <vector>

#include "specdec/device/cuda.cuh"
#include "testing/selftest/check.h"

namespace specdec {
namespace {

constexpr int kThreads = 64;

struct Shared {
  SharedArray<float, kThreads> values;
  SharedArray<uint4, kThreads> wide;
  SharedArray<uint32_t, 2> flags;
  SharedArray<Mbarrier, 2> barriers;
};

void sound(float* out) {
  SPECDEC_SHARED(Shared, shared);
  shared.values[threadIdx.x] = static_cast<float>(threadIdx.x);
  block_barrier();
  out[threadIdx.x] = shared.values[kThreads - 1 - threadIdx.x];
}

using Bug = void (*)(const std::byte* in, float* out);

// Runs two blocks; the message must contain all `parts`.
void expect(Bug kernel, const char* name, const std::vector<std::string>& parts,
            bool cooperative = false) {
  const std::vector<uint4> in(2 * kThreads);
  std::vector<float> out(2 * kThreads);
  std::string message = "nothing";
  try {
    launch(kernel, {2, 1, kThreads, nullptr, 0, cooperative},
           reinterpret_cast<const std::byte*>(in.data()), out.data());
  } catch (const EmulationError& error) {
    message = error.what();
  }
  bool found = message.find("bugs.cpp") != std::string::npos;
  for (const std::string& part : parts) found &= message.find(part) != std::string::npos;
  if (!found) {
    std::fprintf(stderr, "bug %s: the emulator said: %s\nexpected:\n", name, message.c_str());
    for (const std::string& part : parts) std::fprintf(stderr, "  %s\n", part.c_str());
  }
  CHECK(found);
  CHECK(launch(sound, {1, 1, kThreads, nullptr}, out.data()) == cudaSuccess);
  for (int i = 0; i < kThreads; ++i) CHECK(out[i] == static_cast<float>(kThreads - 1 - i));
}

#define EXPECT_BUG(kernel, ...) expect(kernel, #kernel, {__VA_ARGS__})
#define EXPECT_COOPERATIVE_BUG(kernel, ...) expect(kernel, #kernel, {__VA_ARGS__}, true)

void missing_barrier(const std::byte*, float* out) {
  SPECDEC_SHARED(Shared, shared);
  shared.values[threadIdx.x] = 1;
  block_barrier();
  shared.values[threadIdx.x] += static_cast<float>(threadIdx.x);
  out[threadIdx.x] = shared.values[threadIdx.x ^ 1];
}

void shuffle_instead_of_barrier(const std::byte*, float* out) {
  SPECDEC_SHARED(Shared, shared);
  shared.values[threadIdx.x] = 1;
  shuffle_xor(0, 1);
  out[threadIdx.x] = shared.values[threadIdx.x ^ 1];
}

void two_writers(const std::byte*, float*) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x % 32 == 3) shared.values[5] = 1;
}

void write_after_read(const std::byte*, float* out) {
  SPECDEC_SHARED(Shared, shared);
  shared.values[threadIdx.x] = 1;
  block_barrier();
  out[threadIdx.x] = shared.values[threadIdx.x / 32];
  warp_barrier();
  if (threadIdx.x == 40) shared.values[0] = 2;
}

void flag_without_fence(const std::byte*, float* out) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x == 0) shared.flags[0] = 0;
  block_barrier();
  if (threadIdx.x == 0) {
    shared.values[0] = 1;
    atomic_add(shared.flags.pointer(0), 1);
  }
  if (threadIdx.x == 32) {
    spin_until([&] { return load_acquire(shared.flags.pointer(0)) != 0; });
    out[0] = shared.values[0];
  }
}

void relaxed_spin_without_fence(const std::byte*, float* out) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x == 0) shared.flags[0] = 0;
  block_barrier();
  if (threadIdx.x == 0) {
    shared.values[0] = 1;
    store_release(shared.flags.pointer(0), 1);
  }
  if (threadIdx.x == 32) {
    spin_until([&] { return load_relaxed(shared.flags.pointer(0)) != 0; });
    out[0] = shared.values[0];
  }
}

// grid_barrier with the fence at `fence`: 0 is none, 1 is before the polls, 2 after the barrier.
void polls(float* out, int fence) {
  uint32_t* arrived = reinterpret_cast<uint32_t*>(out);
  block_barrier();
  if (threadIdx.x == 0) {
    fetch_add_acq_rel(arrived, 1);
    if (fence == 1) thread_fence();
    spin_until([=] { return load_relaxed(arrived) == 2; });
  }
  block_barrier();
  if (fence == 2) thread_fence();
}
void grid_barrier_without_fence(const std::byte*, float* out) { polls(out, 0); }
void grid_barrier_fence_too_early(const std::byte*, float* out) { polls(out, 1); }
void grid_barrier_fence_too_late(const std::byte*, float* out) { polls(out, 2); }

void thread_ends_without_fence(const std::byte* in, float*) {
  if (threadIdx.x == 5) load_relaxed(reinterpret_cast<const uint32_t*>(in));
}

void atomic_and_plain(const std::byte*, float* out) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x == 0) shared.flags[0] = 0;
  block_barrier();
  if (threadIdx.x != 7) atomic_add(shared.flags.pointer(0), 1);
  if (threadIdx.x == 7) out[0] = static_cast<float>(shared.flags[0]);
}

void never_written(const std::byte*, float* out) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x != 9) shared.values[threadIdx.x] = 1;
  block_barrier();
  if (threadIdx.x == 33) out[0] = shared.values[9];
}

void index_too_large(const std::byte*, float*) {
  SPECDEC_SHARED(Shared, shared);
  const unsigned shift = blockIdx.x == 1 ? 1 : 0;
  shared.values[threadIdx.x + shift] = 1;
}

void vector_past_the_end(const std::byte*, float*) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x == 63) load_shared<uint4>(shared.wide.pointer(63) + 3);
}

void different_barriers(const std::byte*, float*) {
  if (threadIdx.x < 40) {
    block_barrier();
  } else {
    block_barrier();
  }
}

void barrier_and_shuffle(const std::byte*, float* out) {
  if (threadIdx.x == 20) {
    block_barrier();
  } else {
    out[threadIdx.x] = shuffle(1.0f, 0);
  }
}

void lane_ends(const std::byte*, float* out) {
  if (threadIdx.x == 37) return;
  out[threadIdx.x] = shuffle_down(1.0f, 1);
}

void lane_not_in_mask(const std::byte*, float* out) {
  if (threadIdx.x < 32) out[threadIdx.x] = shuffle_xor(1.0f, 1, 0xFFFFFFEF);
}

void reads_absent_lane(const std::byte*, float* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = shuffle(1.0f, 16, 0xFFFF);
}

void different_collectives(const std::byte*, float* out) {
  if (threadIdx.x % 2 == 0) {
    out[threadIdx.x] = static_cast<float>(ballot(true));
  } else {
    out[threadIdx.x] = static_cast<float>(warp_any(true));
  }
}

void different_reductions(const std::byte*, float* out) {
  if (threadIdx.x % 32 < 9) {
    out[threadIdx.x] = warp_max(1.0f);
  } else {
    out[threadIdx.x] = warp_max(2.0f);
  }
}

void named_barrier_too_few(const std::byte*, float*) {
  if (threadIdx.x < 32) named_barrier(3, 64);
}

void named_barrier_disagreement(const std::byte*, float*) {
  named_barrier(3, threadIdx.x < 32 ? 64 : 32);
}

void named_barrier_part_of_warp(const std::byte*, float*) { named_barrier(3, 48); }

void spins_forever(const std::byte*, float* out) {
  const auto* flag = reinterpret_cast<const uint32_t*>(out);
  if (threadIdx.x == 2) spin_until([&] { return load_acquire(flag) == 1; });
}

void grid_barrier_alone(const std::byte*, float*) {
  static GridBarrier barrier;
  grid_barrier(&barrier);
}

void misaligned_load(const std::byte* in, float*) {
  load_global<uint4>(in + (threadIdx.x == 11 ? 8 : 16));
}

void misaligned_row(const std::byte*, float*) {
  SPECDEC_SHARED(Shared, shared);
  shared.values[threadIdx.x] = 1;
  block_barrier();
  uint32_t r[4];
  ldmatrix_x4(r, shared.values.pointer(threadIdx.x == 30 ? 1 : 0));
}

void read_before_wait(const std::byte* in, float* out) {
  SPECDEC_SHARED(Shared, shared);
  cp_async_16(shared.wide.pointer(threadIdx.x), in, true);
  cp_async_commit();
  if (threadIdx.x == 50) out[0] = static_cast<float>(uint4(shared.wide[50]).x);
}

void wait_without_commit(const std::byte* in, float* out) {
  SPECDEC_SHARED(Shared, shared);
  cp_async_16(shared.wide.pointer(threadIdx.x), in, true);
  cp_async_wait<0>();
  out[threadIdx.x] = static_cast<float>(uint4(shared.wide[threadIdx.x]).x);
}

void wait_without_barrier(const std::byte* in, float* out) {
  SPECDEC_SHARED(Shared, shared);
  cp_async_16(shared.wide.pointer(threadIdx.x), in, true);
  cp_async_commit();
  cp_async_wait<0>();
  out[threadIdx.x] = static_cast<float>(uint4(shared.wide[threadIdx.x ^ 1]).x);
}

void wait_for_the_group_before(const std::byte* in, float* out) {
  SPECDEC_SHARED(Shared, shared);
  cp_async_16(shared.wide.pointer(threadIdx.x), in, true);
  cp_async_commit();
  cp_async_wait<1>();
  out[threadIdx.x] = static_cast<float>(uint4(shared.wide[threadIdx.x]).x);
}

// Thread 0 fills `wide` by a bulk copy, all threads read it; `count` arrivals, `bytes` announced.
void bulk(const std::byte* in, float* out, int count, int bytes, bool wait) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x == 0) mbarrier_init(&shared.barriers[0], count);
  block_barrier();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&shared.barriers[0], bytes);
    bulk_copy(shared.wide.pointer(0), in, 32, &shared.barriers[0]);
  }
  if (wait) mbarrier_wait(&shared.barriers[0], 0);
  out[threadIdx.x] = static_cast<float>(uint4(shared.wide[threadIdx.x / 32]).x);
}

void mbarrier_waits_for_too_many(const std::byte* in, float* out) { bulk(in, out, 3, 32, true); }
void mbarrier_waits_for_more_bytes(const std::byte* in, float* out) { bulk(in, out, 1, 48, true); }
void more_bytes_than_announced(const std::byte* in, float* out) { bulk(in, out, 1, 16, true); }
void read_before_bulk_copy(const std::byte* in, float* out) { bulk(in, out, 1, 32, false); }

void mbarrier_counts_too_few(const std::byte*, float* out) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x == 0) mbarrier_init(&shared.barriers[0], kThreads - 1);
  block_barrier();
  shared.values[threadIdx.x] = 1;
  mbarrier_arrive(&shared.barriers[0]);
  mbarrier_wait(&shared.barriers[0], 0);
  out[threadIdx.x] = shared.values[kThreads - 1 - threadIdx.x];
}

void mbarrier_init_without_barrier(const std::byte*, float*) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x == 31) mbarrier_init(&shared.barriers[0], kThreads);
  mbarrier_arrive(&shared.barriers[0]);
}

// The second copy may overwrite what slow threads still read, because nothing makes it wait for
// them.
void stage_reused_too_early(const std::byte* in, float* out) {
  SPECDEC_SHARED(Shared, shared);
  if (threadIdx.x < 2) mbarrier_init(&shared.barriers[threadIdx.x], 1);
  block_barrier();
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(&shared.barriers[round], 16);
      bulk_copy(shared.wide.pointer(0), in, 16, &shared.barriers[round]);
    }
    mbarrier_wait(&shared.barriers[round], 0);
    out[threadIdx.x] += static_cast<float>(uint4(shared.wide[0]).x);
  }
}

void test_races() {
  EXPECT_BUG(missing_barrier, "kernel void specdec::{anonymous}::missing_barrier(", "block (",
             "static shared memory", "a race");
  EXPECT_BUG(shuffle_instead_of_barrier, "a race");
  EXPECT_BUG(two_writers, "writes byte 20", "which thread ", " wrote (bugs.cpp:", "a race");
  EXPECT_BUG(write_after_read, "byte 0", "a race");
  EXPECT_BUG(flag_without_fence, "byte 0", "thread 0 wrote", "a race");
  EXPECT_BUG(relaxed_spin_without_fence, "byte 0", "thread 0 wrote", "a race");
  EXPECT_COOPERATIVE_BUG(grid_barrier_without_fence,
                         "thread 0: no thread_fence follows load_relaxed (bugs.cpp:");
  EXPECT_COOPERATIVE_BUG(grid_barrier_fence_too_early, "thread 0: no thread_fence follows");
  EXPECT_COOPERATIVE_BUG(grid_barrier_fence_too_late, "thread 0: no thread_fence follows");
  EXPECT_BUG(thread_ends_without_fence, "thread 5: no thread_fence follows");
  EXPECT_BUG(atomic_and_plain, " atomically", "a race");
  EXPECT_BUG(never_written, "thread 33: ", "reads byte 36", "which no thread has written");
}

void test_bounds_and_alignment() {
  EXPECT_BUG(index_too_large,
             "block (1, 0), thread 63: index 64 of shared memory with 64 elements");
  EXPECT_BUG(vector_past_the_end, "thread 63: ", "is not in the block's shared memory");
  EXPECT_BUG(misaligned_load,
             "thread 11: the address of load_global (bugs.cpp:", "is not aligned to 16 bytes");
  EXPECT_BUG(misaligned_row,
             "thread 30: the row of ldmatrix_x4 (bugs.cpp:", "is not aligned to 16 bytes");
}

void test_meetings() {
  EXPECT_BUG(different_barriers, "divergent barrier");
  EXPECT_BUG(barrier_and_shuffle, "deadlock",
             "thread 20 at block_barrier (bugs.cpp:", "at shuffle for lanes 0xFFFFFFFF");
  EXPECT_BUG(lane_ends, "divergent shuffle_down", "block (");
  EXPECT_BUG(lane_not_in_mask, "thread 4: shuffle_xor for lanes 0xFFFFFFEF", "lane 4");
  EXPECT_BUG(reads_absent_lane, "lane 16, which does not take part");
  EXPECT_BUG(different_collectives, "divergent", "ballot", "warp_any");
  EXPECT_BUG(different_reductions, "divergent shuffle_xor (bugs.cpp:");
  EXPECT_BUG(named_barrier_too_few, "deadlock", "threads 0 to 31 at named_barrier 3 with 32 of 64");
  EXPECT_BUG(named_barrier_disagreement, "named_barrier 3");
  EXPECT_BUG(named_barrier_part_of_warp, "must be whole warps");
  EXPECT_BUG(spins_forever, "deadlock", "threads 0 to 1 ended", "thread 2 at spin_until");
  EXPECT_BUG(grid_barrier_alone, "grid_barrier (bugs.cpp:", "in a launch that is not cooperative");
}

void test_asynchronous_copies() {
  EXPECT_BUG(read_before_wait, "thread 50: ", "copies asynchronously");
  EXPECT_BUG(wait_without_commit, "copies asynchronously");
  EXPECT_BUG(wait_without_barrier, "shared memory: reads byte");
  EXPECT_BUG(wait_for_the_group_before, "copies asynchronously");
  EXPECT_BUG(mbarrier_waits_for_too_many, "deadlock", "phase 0, which has 1 of 3 arrivals");
  EXPECT_BUG(mbarrier_waits_for_more_bytes, "deadlock", "waits for 16 bytes");
  EXPECT_BUG(more_bytes_than_announced, "16 bytes more");
  EXPECT_BUG(read_before_bulk_copy, "shared memory: reads byte");
  EXPECT_BUG(mbarrier_counts_too_few, "shared memory");
  EXPECT_BUG(mbarrier_init_without_barrier, "barrier");
  EXPECT_BUG(stage_reused_too_early, "static shared memory: ", "byte 256");
}

}  // namespace

void test_emulator_finds_bugs() {
  test_races();
  test_bounds_and_alignment();
  test_meetings();
  test_asynchronous_copies();
}

}  // namespace specdec
