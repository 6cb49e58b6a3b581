// sample_filter: applies temperature, top-k, top-p and min-p to every row. Definition:
// specdec/sample_filter.h.
//
// In:  logits [rows, vocab] f32/bf16/f16; temperature, top_k, top_p, min_p [rows]
// Out: scores [rows, vocab] f32, -inf where removed
//
// Four launches. In three of them a row has a block per 2048 tokens, so that a few rows of a large
// vocabulary fill the GPU; what they find is kept per segment of 128 tokens (filter_row.cuh).
//   1. divide: writes the scores; finds the largest key of each segment, and NaN.
//   2. weigh: the mass of each segment relative to the row's largest score, which is known now. Only
//      for rows with top-p and without top-k.
//   3. select, one block per row:
//      - top-k: the k-th largest of the segments' largest keys is a lower bound of the k-th largest
//        key; a search by counts between this bound and the largest key finds it.
//      - top-p: adds up the mass that is left. nucleus_bound() is a lower bound of the end of the
//        nucleus, a search by masses finds the end, and a search by counts over token indices
//        decides which ties are kept.
//      - min-p: a search without data, because weights never decrease with the score.
//      Searches (key_search.cuh) skip segments whose largest key is below their range: after the
//      bounds few are left. Example: k = 2, scores 9 4 7 7 in four segments: bound 7, range [7, 9];
//      the count from the top reaches 2 at 7, so 9 7 7 are kept.
//   4. remove: writes -inf below the threshold.
//
// All sums are sums of integers, so the results do not depend on how a row is divided: they are
// bitwise repeatable and equal to the CPU op's.
//
// Bytes: the logits are read once from memory, the scores are written once; weigh and remove read
// them again from L2, remove only the segments that keep a token. ESTIMATE for 16 rows of 128k
// tokens in bf16 on an H200, 1008 blocks: divide 4 us (12 MB), weigh 3 us (170 million
// instructions), remove 3 us (8 MB), select 5 to 15 us with one block per row; one block per row for
// everything took 23 us for the masses of a row alone (128k exponentials of 40 instructions on one
// multiprocessor).
#include "filter_row.cuh"
#include "key_search.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

template <typename T>
__global__ void __launch_bounds__(kChunkThreads)
    divide_kernel(const SPECDEC_GRID_CONSTANT SampleFilterParams params,
                  const SPECDEC_GRID_CONSTANT FilterWorkspace workspace, FilterAlignment aligned) {
  const FilterChunk chunk(workspace);
  const T* logits = static_cast<const T*>(params.logits) + chunk.row * params.logits_row_stride;
  float* scores = params.scores + chunk.row * params.vocab;
  const float temperature = params.temperature[chunk.row];
  ScoreGroup<float> groups[kWarpSegments];  // all loads come before the first store
  chunk.for_each_segment([&](int i, int64_t, int64_t first) {
    groups[i] = load_scores(logits, first, params.vocab, aligned.logits);
  });
  chunk.for_each_segment([&](int i, int64_t segment, int64_t first) {
    int32_t largest_key = kMinusInfinityKey;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float score = exact_div(groups[i].values[j], temperature);
      groups[i].values[j] = score;
      const bool is_nan = (float_to_bits(score) & 0x7FFFFFFF) > kInfinityBits;
      largest_key = max(largest_key, is_nan ? kNaNKey : score_key(score));
    }
    store_scores(scores, first, params.vocab, aligned.scores, groups[i]);
    largest_key = warp_max(largest_key);
    if (threadIdx.x % kWarpSize == 0) {
      workspace.largest_keys[chunk.row * workspace.segments + segment] = largest_key;
    }
  });
}

__global__ void __launch_bounds__(kChunkThreads)
    weigh_kernel(const SPECDEC_GRID_CONSTANT SampleFilterParams params,
                 const SPECDEC_GRID_CONSTANT FilterWorkspace workspace, FilterAlignment aligned) {
  using WarpKeys = SharedArray<int32_t, kChunkWarps>;
  SPECDEC_SHARED(WarpKeys, warp_keys);
  const FilterChunk chunk(workspace);
  if (params.top_p[chunk.row] >= 1.0f || has_top_k(params, chunk.row)) return;
  const int32_t* largest_keys = workspace.largest_keys + chunk.row * workspace.segments;
  int32_t largest_key = kMinusInfinityKey;
  for (int64_t segment = threadIdx.x; segment < workspace.segments; segment += kChunkThreads) {
    largest_key = max(largest_key, largest_keys[segment]);
  }
  largest_key = warp_max(largest_key);
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) warp_keys[threadIdx.x / kWarpSize] = largest_key;
  block_barrier();  // all warps have stored their largest keys
  largest_key = warp_max(int32_t(warp_keys[lane % kChunkWarps]));
  if (largest_key == kNaNKey || largest_key == kMinusInfinityKey) return;

  const RowWeights weights = RowWeights::make(largest_key);
  const float* scores = params.scores + chunk.row * params.vocab;
  chunk.for_each_segment([&](int, int64_t segment, int64_t first) {
    const ScoreGroup<float> group = load_scores(scores, first, params.vocab, aligned.scores);
    uint64_t mass = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) mass += weights.mass(group.values[i]);
    mass = warp_sum(mass);
    if (lane == 0) workspace.masses[chunk.row * workspace.segments + segment] = mass;
  });
}

__device__ int32_t top_k_threshold(SearchShared& shared, const FilterRow& row, uint64_t k) {
  KeyRange range{kMinusInfinityKey, row.largest_key};
  if (k <= static_cast<uint64_t>(row.segments)) {
    range.low = KeySearch{shared, range, k}.key(SegmentMaxima{row}, CountWeight{});
  }
  return KeySearch{shared, range, k}.key(row, CountWeight{});
}

// The mass of the tokens with keys at or above `low`; `masses` are those of the segments, or null.
__device__ uint64_t mass_above(SearchShared& shared, const FilterRow& row, const MassWeight& mass,
                               int32_t low, const uint64_t* masses) {
  uint64_t total = 0;
  if (masses == nullptr) {
    row.for_each(low, [&](int32_t key) { total += key >= low ? mass(key) : 0; });
  } else {
    for (int segment = threadIdx.x; segment < row.segments; segment += kSearchThreads) {
      total += masses[segment];
    }
  }
  return reduce_block(shared.warp_sums, total, [](uint64_t value) { return warp_sum(value); });
}

// The nucleus of the tokens with keys at or above `low`, which have the mass `total`.
__device__ KeptTokens nucleus(SearchShared& shared, const FilterRow& row, const MassWeight& mass,
                              int32_t low, uint64_t total, float top_p) {
  const uint64_t target = nucleus_mass(total, top_p);
  const int32_t bound =
      nucleus_bound(mass.weights, row.largest_key, total, target, row.vocab, WarpSearch{});
  KeySearch search{shared, {max(low, bound), row.largest_key}, target};
  search.refine(row, mass, WeightPosition{mass.weights});
  const int32_t key = search.key(row, mass);
  const uint64_t each = mass(key), num_ties = search.inside / each;
  const uint64_t num_kept = (target - search.above + each - 1) / each;
  if (num_kept >= num_ties) return {key, 0};
  KeySearch cut{shared, {0, row.vocab - 1}, num_kept};
  return {key, cut.key(TokensWithKey{row, key}, CountWeight{})};
}

__device__ KeptTokens select(SearchShared& shared, const SampleFilterParams& params, int64_t index,
                             const FilterRow& row, const uint64_t* masses) {
  if (row.largest_key == kNaNKey || row.largest_key == kMinusInfinityKey) return kAllTokens;
  KeptTokens kept{kMinusInfinityKey, 0};
  const float top_p = params.top_p[index], min_p = params.min_p[index];
  const bool top_k = has_top_k(params, index);
  if (top_k) kept.threshold = top_k_threshold(shared, row, params.top_k[index]);
  if (top_p < 1.0f) {
    const MassWeight mass{RowWeights::make(row.largest_key)};
    const uint64_t total = mass_above(shared, row, mass, kept.threshold, top_k ? nullptr : masses);
    kept = nucleus(shared, row, mass, kept.threshold, total, top_p);
  }
  if (min_p > 0.0f) {
    const int32_t threshold =
        min_p_threshold(RowWeights::make(row.largest_key), row.largest_key, min_p, WarpSearch{});
    if (threshold > kept.threshold) kept = {threshold, 0};
  }
  return kept;
}

__global__ void __launch_bounds__(kSearchThreads, 1)
    select_kernel(const SPECDEC_GRID_CONSTANT SampleFilterParams params,
                  const SPECDEC_GRID_CONSTANT FilterWorkspace workspace, FilterAlignment aligned) {
  SPECDEC_SHARED(SearchShared, shared);
  const int64_t index = blockIdx.x;
  FilterRow row{
      params.scores + index * params.vocab, workspace.largest_keys + index * workspace.segments,
      static_cast<int32_t>(params.vocab), static_cast<int32_t>(workspace.segments), aligned.scores};
  SegmentMaxima{row}.for_each(kMinusInfinityKey,
                              [&](int32_t key) { row.largest_key = max(row.largest_key, key); });
  row.largest_key = reduce_block(shared.warp_keys, row.largest_key,
                                 [](int32_t value) { return warp_max(value); });
  const KeptTokens kept =
      select(shared, params, index, row, workspace.masses + index * workspace.segments);
  if (threadIdx.x == 0) workspace.kept[index] = kept;
}

__global__ void __launch_bounds__(kChunkThreads)
    remove_kernel(const SPECDEC_GRID_CONSTANT SampleFilterParams params,
                  const SPECDEC_GRID_CONSTANT FilterWorkspace workspace, FilterAlignment aligned) {
  const FilterChunk chunk(workspace);
  const KeptTokens kept = workspace.kept[chunk.row];
  if (kept.threshold <= kMinusInfinityKey) return;
  const float minus_infinity = key_score(kMinusInfinityKey);
  const int32_t* largest_keys = workspace.largest_keys + chunk.row * workspace.segments;
  float* scores = params.scores + chunk.row * params.vocab;
  chunk.for_each_segment([&](int, int64_t segment, int64_t first) {
    ScoreGroup<float> group{minus_infinity, minus_infinity, minus_infinity, minus_infinity};
    if (largest_keys[segment] >= kept.threshold) {
      group = load_scores(scores, first, params.vocab, aligned.scores);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int32_t smallest = kept.threshold + (first + i < kept.first_tie);
        if (score_key(group.values[i]) < smallest) group.values[i] = minus_infinity;
      }
    }
    store_scores(scores, first, params.vocab, aligned.scores, group);
  });
}

int64_t num_segments(const SampleFilterParams& params) {
  return (params.vocab + kSegment - 1) / kSegment;
}

}  // namespace

int64_t sample_filter_workspace_bytes(const SampleFilterParams& params) {
  const int64_t segment_bytes = sizeof(uint64_t) + sizeof(int32_t);
  return params.rows *
         (num_segments(params) * segment_bytes + static_cast<int64_t>(sizeof(KeptTokens)));
}

cudaError_t launch_sample_filter(const SampleFilterParams& params, void* memory,
                                 cudaStream_t stream) {
  if (params.vocab < 1 || params.vocab > kMaxFilterVocab) return cudaErrorInvalidValue;
  FilterWorkspace workspace{};
  workspace.segments = num_segments(params);
  workspace.chunks = (workspace.segments + kChunkSegments - 1) / kChunkSegments;
  workspace.masses = static_cast<uint64_t*>(memory);
  workspace.kept =
      reinterpret_cast<KeptTokens*>(workspace.masses + params.rows * workspace.segments);
  workspace.largest_keys = reinterpret_cast<int32_t*>(workspace.kept + params.rows);
  return with_float_type(params.logits_type, [&]<typename T>(T) {
    const auto begins_at = [](const void* rows, size_t bytes) {
      return reinterpret_cast<uintptr_t>(rows) % bytes == 0;
    };
    const bool whole_groups = params.vocab % kGroup == 0;
    const FilterAlignment aligned{
        .logits = whole_groups && params.logits_row_stride % kGroup == 0 &&
                  begins_at(params.logits, sizeof(ScoreGroup<T>)),
        .scores = whole_groups && begins_at(params.scores, sizeof(ScoreGroup<float>))};
    const LaunchConfig chunks{params.rows * workspace.chunks, 1, kChunkThreads, stream};
    const LaunchConfig rows{params.rows, 1, kSearchThreads, stream};
    cudaError_t error = launch(divide_kernel<T>, chunks, params, workspace, aligned);
    if (error == cudaSuccess) error = launch(weigh_kernel, chunks, params, workspace, aligned);
    if (error == cudaSuccess) error = launch(select_kernel, rows, params, workspace, aligned);
    if (error == cudaSuccess) error = launch(remove_kernel, chunks, params, workspace, aligned);
    return error;
  });
}

}  // namespace specdec
