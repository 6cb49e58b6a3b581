// The layout of a draft's memory.
#include "specdec/draft_head/scratch.h"

#include <utility>
#include <vector>

#include "specdec/device/cuda.cuh"
#include "testing/selftest/check.h"

namespace specdec {
namespace {

static_assert(sizeof(GridBarrier) == kBarrierBytes && alignof(GridBarrier) == kBarrierAlignment);

// Two rows, a tree of depth 3 whose levels expand 1, 4 and 2 nodes.
DraftKernelParams small_draft() {
  DraftKernelParams params{};
  params.plan.batch = 2;
  params.plan.depth = 3;
  params.plan.widths[0] = 1;
  params.plan.widths[1] = 4;
  params.plan.widths[2] = 2;
  params.hidden = 24;
  params.intermediate = 48;
  params.heads = 4;
  params.kv_heads = 2;
  params.head_dim = 8;
  params.feature_width = 96;
  params.num_candidates = 9;
  params.top_k = 4;
  params.nodes = 10;
  params.words = 1;
  return params;
}

void test_parts() {
  const DraftKernelParams params = small_draft();
  const int64_t blocks = 5;
  const int64_t total = draft_scratch_bytes(params, FloatType::kBFloat16, blocks);
  std::vector<std::byte> memory(total + 1);
  DraftScratch scratch =
      place_draft_scratch(params, FloatType::kBFloat16, blocks, memory.data() + 1);

  // The parts are aligned, follow each other, and are all inside the allocation.
  std::vector<std::pair<std::byte*, int64_t>> parts;
  place_scratch_parts(params, FloatType::kBFloat16, blocks, scratch,
                      [&](auto*& part, int64_t bytes) {
                        parts.emplace_back(reinterpret_cast<std::byte*>(part), bytes);
                      });
  CHECK(parts.size() == sizeof(DraftScratch) / sizeof(void*));
  const std::byte* end = memory.data() + 1;
  for (const auto& [begin, bytes] : parts) {
    CHECK(begin >= end && bytes > 0 && reinterpret_cast<uintptr_t>(begin) % 256 == 0);
    end = begin + bytes;
  }
  CHECK(end <= memory.data() + 1 + total);

  // Sizes in bytes of some parts, from kernel_params.h: 8 lists, kPassRows more rows.
  const auto bytes_of = [&](const void* part) -> int64_t {
    for (const auto& [begin, bytes] : parts) {
      if (begin == part) return bytes;
    }
    return -1;
  };
  CHECK(bytes_of(scratch.zeros) == 96 * 2);
  CHECK(bytes_of(scratch.residual) == (8 + kPassRows) * 24 * 2);
  CHECK(bytes_of(scratch.projected) == (8 + kPassRows) * 64 * 2);
  CHECK(bytes_of(scratch.feedback) == 2 * 8 * 24 * 2);
  CHECK(bytes_of(scratch.split_values) == int64_t{kPassRows} * 4 * kMaxSplits * 8 * 4);
  CHECK(bytes_of(scratch.picks) == 8 * 5 * 4 * 8);
  CHECK(bytes_of(scratch.places) == 2 * 9 * 4);
  CHECK(bytes_of(scratch.nodes) == int64_t{2 * 2 * 4 * sizeof(DraftNode)});
  CHECK(bytes_of(scratch.ancestors) == 2 * 2 * 4 * 8);
}

// A parallel head keeps an element per level, and its frontiers may be wider.
void test_parallel_parts() {
  DraftKernelParams params = small_draft();
  params.plan.is_parallel = true;
  DraftScratch scratch{};
  int64_t lists = 0, nodes = 0;
  place_scratch_parts(params, FloatType::kFloat32, 1, scratch, [&](auto*& part, int64_t bytes) {
    if (static_cast<void*>(&part) == &scratch.logit_sums) lists = bytes / 8;
    if (static_cast<void*>(&part) == &scratch.nodes) nodes = bytes / int64_t{sizeof(DraftNode)};
  });
  CHECK(lists == 2 * 3 && nodes == 2 * 2 * 4);
}

void test_sync() {
  const int64_t bytes = draft_sync_bytes(4, 72);
  CHECK(bytes == 128 + 128 + kPassRows * 4 * 2 * 4);
  std::vector<std::byte> memory(bytes + 4);
  for (int64_t offset : {0, 4}) {
    const DraftSync sync = place_draft_sync(memory.data() + offset);
    std::byte* const barrier = static_cast<std::byte*>(sync.barrier);
    CHECK(reinterpret_cast<uintptr_t>(barrier) % 128 == 0 && barrier >= memory.data() + offset);
    CHECK(reinterpret_cast<std::byte*>(sync.arrivals) == barrier + 128);
    CHECK(reinterpret_cast<std::byte*>(sync.arrivals + kPassRows * 4 * 2) <=
          memory.data() + offset + bytes);
  }
}

}  // namespace

void test_draft_scratch() {
  test_parts();
  test_parallel_parts();
  test_sync();
}

}  // namespace specdec
