// What the kernels of sample_filter.cu share: the segments of a row and what is known about them.
//
// A segment is 128 consecutive tokens, four per lane of a warp. A chunk is what a block takes where
// a row has several blocks.
#pragma once

#include "score_group.cuh"
#include "specdec/sample_filter.h"

namespace specdec {

constexpr int kSegment = kGroup * kWarpSize;
constexpr int kChunkThreads = 256;
constexpr int kChunkWarps = kChunkThreads / kWarpSize;
constexpr int kWarpSegments = 2;  // of a chunk, for a warp
constexpr int kChunkSegments = kChunkWarps * kWarpSegments;

constexpr int32_t kNaNKey = INT32_MAX;  // above the key of +inf

// A key that is below all keys: nothing is removed.
constexpr KeptTokens kAllTokens{INT32_MIN, 0};

struct FilterWorkspace {
  uint64_t* masses;       // [rows, segments] if the row has a nucleus of all its tokens
  KeptTokens* kept;       // [rows]
  int32_t* largest_keys;  // [rows, segments] kNaNKey if a score is NaN
  int64_t segments;
  int64_t chunks;
};

// Whether every group of the rows begins at a multiple of its size.
struct FilterAlignment {
  bool logits;
  bool scores;
};

__device__ __forceinline__ bool has_top_k(const SampleFilterParams& params, int64_t row) {
  return params.top_k[row] > 0 && params.top_k[row] < params.vocab;
}

// The part of a row that a block of kChunkThreads takes.
struct FilterChunk {
  int64_t row;
  int64_t first_segment;  // of the warp
  int64_t segments;       // of the row

  __device__ explicit FilterChunk(const FilterWorkspace& workspace)
      : row(blockIdx.x / workspace.chunks),
        first_segment(blockIdx.x % workspace.chunks * kChunkSegments +
                      threadIdx.x / kWarpSize * kWarpSegments),
        segments(workspace.segments) {}

  // Calls visit(i, segment, first token of the lane) for the segments of the warp.
  template <typename Visit>
  __device__ __forceinline__ void for_each_segment(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kWarpSegments; ++i) {
      const int64_t segment = first_segment + i;
      if (segment < segments)
        visit(i, segment, segment * kSegment + threadIdx.x % kWarpSize * kGroup);
    }
  }
};

// The scores of a row, for a block of kSearchThreads.
struct FilterRow {
  const float* scores;
  const int32_t* largest_keys;  // of the segments
  int32_t vocab;
  int32_t segments;
  bool aligned;
  int32_t largest_key = kMinusInfinityKey;

  // Calls visit(token, key). Each lane of a warp looks at one segment; then the warp loads four of
  // those that are not skipped at a time.
  template <typename Visit>
  __device__ void for_each_token(int32_t low, const Visit& visit) const {
    constexpr int kAtOnce = 4;
    const int lane = threadIdx.x % kWarpSize;
    for (int first = threadIdx.x - lane; first < segments; first += blockDim.x) {
      const bool is_wanted = first + lane < segments && largest_keys[first + lane] >= low;
      for (uint32_t wanted = ballot(is_wanted); wanted != 0;) {
        int32_t tokens[kAtOnce];
        ScoreGroup<float> groups[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i, wanted &= wanted - 1) {
          const int segment = first + __ffs(static_cast<int>(wanted)) - 1;
          tokens[i] = wanted != 0 ? segment * kSegment + lane * kGroup : vocab;
          groups[i] = load_scores(scores, tokens[i], vocab, aligned);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
          for (int j = 0; j < kGroup; ++j) {
            if (tokens[i] + j < vocab) visit(tokens[i] + j, score_key(groups[i].values[j]));
          }
        }
      }
    }
  }

  template <typename Visit>
  __device__ void for_each(int32_t low, const Visit& visit) const {
    for_each_token(low, [&](int32_t, int32_t key) { visit(key); });
  }
};

// The largest keys of a row's segments.
struct SegmentMaxima {
  const FilterRow& row;

  template <typename Visit>
  __device__ void for_each(int32_t, const Visit& visit) const {
    for (int segment = threadIdx.x; segment < row.segments; segment += blockDim.x) {
      visit(row.largest_keys[segment]);
    }
  }
};

// The indices of the tokens with a given key.
struct TokensWithKey {
  const FilterRow& row;
  int32_t key;

  template <typename Visit>
  __device__ void for_each(int32_t, const Visit& visit) const {
    row.for_each_token(key, [&](int32_t token, int32_t token_key) {
      if (token_key == key) visit(token);
    });
  }
};

}  // namespace specdec
