// The layout of a draft's memory: DraftScratch in one allocation, DraftSync in a buffer that
// outlives the launches.
#pragma once

#include <algorithm>
#include <cstddef>

#include "specdec/draft_head/kernel_params.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace specdec {

constexpr int64_t kScratchAlignment = 256;
constexpr int64_t kBarrierBytes = 128;  // size of a GridBarrier and its padding
constexpr int64_t kBarrierAlignment = 128;

inline int64_t round_up(int64_t bytes, int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

inline std::byte* aligned(void* memory, int64_t alignment) {
  const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
  return static_cast<std::byte*>(memory) + (round_up(address, alignment) - address);
}

// Calls place(pointer, bytes) for every part of `scratch`; kernel_params.h has the shapes.
template <typename Place>
void place_scratch_parts(const DraftKernelParams& params, FloatType type, int64_t blocks,
                         DraftScratch& scratch, const Place& place) {
  const int64_t element = element_size(type), batch = params.plan.batch;
  const int64_t lists = params.lists(), rows = lists + kPassRows;
  const int64_t queries = params.query_outs(), hidden = params.hidden;
  const int64_t splits = int64_t{kPassRows} * params.heads * kMaxSplits;
  const int64_t candidates = batch * params.num_candidates;
  const int64_t frontiers = 2 * batch * params.plan.frontier_width();
  const auto array = [&](auto*& part, int64_t count) {
    place(part, count * static_cast<int64_t>(sizeof(*part)));
  };
  place(scratch.zeros, std::max<int64_t>(hidden, params.feature_width) * element);
  place(scratch.features, int64_t{kPassRows} * params.feature_width * element);
  place(scratch.residual, rows * hidden * element);
  place(scratch.projected, rows * params.projection_outs() * element);
  place(scratch.queries, rows * queries * element);
  place(scratch.attended, rows * queries * element);
  place(scratch.inner, rows * params.intermediate * element);
  place(scratch.feedback, 2 * lists * hidden * element);
  array(scratch.split_sums, splits);
  array(scratch.split_values, splits * params.head_dim);
  array(scratch.picks, lists * blocks * params.top_k);
  array(scratch.logit_sums, lists * blocks);
  array(scratch.child_tokens, lists * params.top_k);
  array(scratch.child_scores, lists * params.top_k);
  array(scratch.scores, candidates);
  array(scratch.tokens, candidates);
  array(scratch.parents, candidates);
  array(scratch.places, candidates);
  array(scratch.nodes, frontiers);
  array(scratch.ancestors, frontiers * params.words);
  array(scratch.selected, batch * params.nodes);
}

// Bytes from the begin of a part to that of the next one. With AddressSanitizer there is a gap.
inline int64_t part_pitch(int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  bytes += 1;
#endif
  return round_up(bytes, kScratchAlignment);
}

// Bytes of scratch memory, for any alignment of the allocation.
inline int64_t draft_scratch_bytes(const DraftKernelParams& params, FloatType type,
                                   int64_t blocks) {
  int64_t total = kScratchAlignment;
  DraftScratch scratch{};
  place_scratch_parts(params, type, blocks, scratch,
                      [&](auto*&, int64_t bytes) { total += part_pitch(bytes); });
  return total;
}

// The parts of `memory`, which has draft_scratch_bytes bytes.
inline DraftScratch place_draft_scratch(const DraftKernelParams& params, FloatType type,
                                        int64_t blocks, void* memory) {
  std::byte* next = aligned(memory, kScratchAlignment);
  DraftScratch scratch{};
  place_scratch_parts(params, type, blocks, scratch, [&](auto*& part, int64_t bytes) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(next);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(next + bytes, part_pitch(bytes) - bytes);
#endif
    next += part_pitch(bytes);
  });
  return scratch;
}

// Bytes of a sync buffer, for any alignment. The buffer must stay at its address.
inline int64_t draft_sync_bytes(int64_t heads, int64_t head_dim) {
  const int64_t panels = (head_dim + 63) / 64;
  return kBarrierAlignment + kBarrierBytes + kPassRows * heads * panels * int64_t{sizeof(uint32_t)};
}

inline DraftSync place_draft_sync(void* memory) {
  std::byte* barrier = aligned(memory, kBarrierAlignment);
  return {barrier, reinterpret_cast<uint32_t*>(barrier + kBarrierBytes)};
}

}  // namespace specdec
