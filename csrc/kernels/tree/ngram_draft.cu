// ngram_draft: drafts by copying what followed earlier occurrences of a row's last tokens. Rule and
// meaning of the arguments: specdec/tree/ngram_draft.h.
//
// In:  columns [batch, capacity], lengths, num_padded [batch]
// Out: tokens, parents [batch, nodes], match_lengths [batch]
//
// One launch, one block per row; lengths are read from device memory.
//   1. scan: the warps take tiles of the text in turn, from its end on. A lane compares kPositions
//      tokens with the last token and, where they are equal, the tokens before them. The warp keeps
//      the best kMaxOccurrences of what it finds, two per lane, sorted.
//   2. merge: the lists of the warps are merged in pairs, to one in the first warp.
//   3. trie: that warp builds the tree. All occurrences walk down the trie at once, each as far as
//      its continuation goes. The first of them, in the order of the rule, that stands above a leaf
//      adds its branch; then the others walk on. A leaf never becomes an inner node before the last
//      step, so an occurrence that has reached one can add nothing, as in the order of the rule.
// An occurrence is (length, end) in 64 bits, so the larger number comes first in the order of the
// rule, all numbers are distinct, and the result does not depend on the order of the scan.
//
// Example: specdec/tree/ngram_draft.h; the two occurrences are (1, 4) and (1, 0), in lanes 0 and 1.
// Both stand at the root, so lane 0 adds 6 9 5. Then lane 0 stands at a leaf and lane 1 at the node
// 6, which is above a leaf, and adds 7.
//
// Cost: 8 bytes per token of the text are read, by one multiprocessor: at most 64 bytes per cycle
// from the L2 cache, where 64 KB are in flight. An estimate for an H100 is 1 us for 8k tokens and
// 10 us for 128k, over which the target's pass takes milliseconds.
#include <algorithm>
#include <bit>

#include "specdec/device/cuda.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

constexpr int kMaxWarps = 32;
constexpr int kPositions = 8;  // per lane of a tile
constexpr int kTile = kWarpSize * kPositions;
static_assert(kMaxOccurrences == 2 * kWarpSize, "two occurrences per lane");

using Text = View1<const int64_t>;
using Occurrence = uint64_t;  // 0: none

__device__ Occurrence make_occurrence(int64_t length, int end) {
  return static_cast<uint64_t>(length) << 32 | static_cast<uint32_t>(end);
}
__device__ int64_t length_of(Occurrence occurrence) {
  return static_cast<int64_t>(occurrence >> 32);
}

struct Shared {
  SharedArray<Occurrence, kMaxWarps * kMaxOccurrences> lists;  // of the warps
  // The trie; node 0 is the root.
  SharedArray<int64_t, kMaxNodes> tokens;
  SharedArray<int32_t, kMaxNodes> newest_child;  // 0: none
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

// The best occurrences that a warp knows, in descending order: lane i holds those of rank i and
// i + 32.
class BestOccurrences {
 public:
  __device__ __forceinline__ Occurrence upper() const { return upper_; }
  __device__ __forceinline__ Occurrence lower() const { return lower_; }

  // The occurrence of a rank, in all lanes.
  __device__ __forceinline__ Occurrence at(int rank) const {
    return shuffle(rank < kWarpSize ? upper_ : lower_, rank % kWarpSize);
  }

  // Adds an occurrence in place of the last one, which it must exceed.
  __device__ __forceinline__ void insert(Occurrence occurrence) {
    if (threadIdx.x % kWarpSize == kWarpSize - 1) lower_ = occurrence;
    order();
  }

  // Keeps the best of this list and another one.
  __device__ __forceinline__ void merge(Shared& shared, int list) {
    const int lane = threadIdx.x % kWarpSize, last = (list + 1) * kMaxOccurrences - 1;
    const Occurrence other_lower = shared.lists[last - lane];
    const Occurrence other_upper = shared.lists[last - kWarpSize - lane];
    upper_ = max(upper_, other_lower);
    lower_ = max(lower_, other_upper);
    order();
  }

  __device__ __forceinline__ void store(Shared& shared, int list) const {
    const int first = list * kMaxOccurrences + threadIdx.x % kWarpSize;
    shared.lists[first] = upper_;
    shared.lists[first + kWarpSize] = lower_;
  }

 private:
  // Sorts a bitonic sequence. A descending list with another last element is one, and so are the
  // larger ones of each element of a descending list and of another one that is read backwards:
  // these are the best elements of both.
  __device__ __forceinline__ void order() {
    if (upper_ < lower_) {
      const Occurrence swapped = upper_;
      upper_ = lower_;
      lower_ = swapped;
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      const bool keeps_larger = (threadIdx.x & distance) == 0;
      const Occurrence other_upper = shuffle_xor(upper_, distance);
      const Occurrence other_lower = shuffle_xor(lower_, distance);
      upper_ = keeps_larger ? max(upper_, other_upper) : min(upper_, other_upper);
      lower_ = keeps_larger ? max(lower_, other_lower) : min(lower_, other_lower);
    }
  }

  Occurrence upper_ = 0;
  Occurrence lower_ = 0;
};

// ---- 1. scan -----------------------------------------------------------------------------------

__device__ BestOccurrences scan(const NgramDraftParams& params, const Text& text, int last) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int stride = static_cast<int>(blockDim.x) / kWarpSize * kTile;
  const int last_rank = static_cast<int>(params.occurrences()) - 1;
  const int64_t last_token = text[last];
  BestOccurrences best;
  Occurrence floor = 0;  // a further occurrence must exceed it
  for (int first = last - 1 - warp * kTile; first >= 0; first -= stride) {
    uint32_t equal = 0;
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      const int end = first - i * kWarpSize - lane;
      if (end >= 0 && text[end] == last_token) equal |= 1u << i;
    }
    if (!warp_any(equal != 0)) continue;
    for (int i = 0; i < kPositions; ++i) {
      const int end = first - i * kWarpSize - lane;
      const int64_t length =
          (equal >> i & 1) != 0 ? match_length(text, end, last, params.max_ngram) : 0;
      Occurrence found = length >= params.min_ngram ? make_occurrence(length, end) : 0;
      while (const uint32_t better = ballot(found > floor)) {
        const int source = __ffs(static_cast<int>(better)) - 1;
        best.insert(shuffle(found, source));
        floor = best.at(last_rank);
        if (lane == source) found = 0;
      }
    }
    // The other tiles of this warp have earlier positions.
    if (length_of(floor) == params.max_ngram) break;
  }
  return best;
}

// ---- 2. merge ----------------------------------------------------------------------------------

// The best occurrences of all warps, in the first one.
__device__ void merge_lists(Shared& shared, BestOccurrences& best) {
  const int warp = threadIdx.x / kWarpSize;
  best.store(shared, warp);
  for (int half = static_cast<int>(blockDim.x) / kWarpSize / 2; half > 0; half /= 2) {
    block_barrier();  // the lists of the previous round are complete
    if (warp < half) {
      best.merge(shared, warp + half);
      best.store(shared, warp);
    }
  }
}

// ---- 3. trie, by one warp ----------------------------------------------------------------------

// A node of the trie that the continuation of an occurrence has reached.
struct Place {
  int end;     // of the occurrence; -1: there is none
  int offset;  // the next token of the continuation, below the period
  int node;
};

class Trie {
 public:
  __device__ Trie(Shared& shared, const NgramDraftParams& params, const Text& text, int64_t row,
                  int last)
      : shared_(shared),
        text_(text),
        tokens_(params.tokens + row * params.nodes),
        parents_(params.parents + row * params.nodes),
        nodes_(static_cast<int>(params.nodes)),
        last_(last) {
    if (lane() > 0) return;
    shared_.newest_child[0] = 0;
    tokens_[0] = text[last];
    parents_[0] = kRootParent;
  }

  __device__ int num_free() const { return nodes_ - num_used_; }

  __device__ static Place start(Occurrence occurrence) {
    return {occurrence == 0 ? -1 : static_cast<int>(static_cast<uint32_t>(occurrence)), 0, 0};
  }

  // Walks down as far as the continuation goes. It has to look at the newest child only: all
  // occurrences walk on after each branch, so it was not the older ones that they waited for.
  __device__ void descend(Place& place) {
    if (place.end < 0) return;
    const int period = last_ - place.end;
    for (;;) {
      const int64_t token = text_[place.end + 1 + place.offset];
      const int child = shared_.newest_child[place.node];
      if (child == 0 || shared_.tokens[child] != token) return;
      place.node = child;
      place.offset = place.offset + 1 < period ? place.offset + 1 : 0;
    }
  }

  // Whether a branch can begin here.
  __device__ bool is_above_leaf(const Place& place) {
    return place.end >= 0 && (place.node == 0 || shared_.newest_child[place.node] > 0);
  }

  // Adds a chain of `count` tokens of the continuation; the place is the same in all lanes.
  __device__ void append(const Place& place, int count) {
    const auto period = static_cast<uint32_t>(last_ - place.end);
    warp_barrier();  // no lane walks any more
    for (int i = lane(); i < count; i += kWarpSize) {
      const int node = num_used_ + i;
      const int parent = i == 0 ? place.node : node - 1;
      const auto offset = (static_cast<uint32_t>(place.offset) + static_cast<uint32_t>(i)) % period;
      const int64_t token = text_[int64_t{place.end} + 1 + offset];
      if (i == 0) shared_.newest_child[parent] = node;
      shared_.tokens[node] = token;
      shared_.newest_child[node] = i + 1 < count ? node + 1 : 0;
      tokens_[node] = token;
      parents_[node] = parent;
    }
    num_used_ += count;
    warp_barrier();  // the chain is complete
  }

 private:
  __device__ static int lane() { return threadIdx.x % kWarpSize; }

  Shared& shared_;
  const Text& text_;
  int64_t* tokens_;
  int64_t* parents_;
  int nodes_;
  int last_;
  int num_used_ = 1;
};

__device__ Place shuffle_place(const Place& place, int lane) {
  return {shuffle(place.end, lane), shuffle(place.offset, lane), shuffle(place.node, lane)};
}

// Returns the number of nodes, the root included.
__device__ int build_trie(Trie& trie, const NgramDraftParams& params, const BestOccurrences& best) {
  Place upper = Trie::start(best.upper()), lower = Trie::start(best.lower());
  warp_barrier();  // the root is complete
  for (int64_t branches = 0; branches < params.num_branches && trie.num_free() > 0; ++branches) {
    trie.descend(upper);
    trie.descend(lower);
    const uint32_t in_upper = ballot(trie.is_above_leaf(upper));
    const uint32_t in_lower = ballot(trie.is_above_leaf(lower));
    if ((in_upper | in_lower) == 0) break;
    const Place first = in_upper != 0 ? shuffle_place(upper, __ffs(static_cast<int>(in_upper)) - 1)
                                      : shuffle_place(lower, __ffs(static_cast<int>(in_lower)) - 1);
    trie.append(first, (trie.num_free() + 1) / 2);
  }
  trie.descend(upper);
  const Place first = shuffle_place(upper, 0);
  const int num_free = trie.num_free();
  if (first.end >= 0) trie.append(first, num_free);
  return static_cast<int>(params.nodes) - trie.num_free();
}

__device__ void write_inactive(const NgramDraftParams& params, int64_t row, int first_node) {
  for (int64_t node = first_node + threadIdx.x; node < params.nodes; node += kWarpSize) {
    params.tokens[row * params.nodes + node] = 0;
    params.parents[row * params.nodes + node] = kInactiveParent;
  }
}

// ------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kMaxWarps* kWarpSize)
    ngram_draft_kernel(NgramDraftParams params) {
  SPECDEC_SHARED(Shared, shared);
  const int64_t row = blockIdx.x;
  BestOccurrences best;
  int num_nodes = 0;
  const auto [text, size] = params.text(row);
  if (size > 0) {
    const int last = static_cast<int>(size) - 1;
    best = scan(params, text, last);
    merge_lists(shared, best);
    if (threadIdx.x >= kWarpSize) return;
    Trie trie(shared, params, text, row, last);
    num_nodes = build_trie(trie, params, best);
  }
  if (threadIdx.x >= kWarpSize) return;
  write_inactive(params, row, num_nodes);
  if (threadIdx.x == 0) params.match_lengths[row] = length_of(best.upper());
}

}  // namespace

cudaError_t launch_ngram_draft(const NgramDraftParams& params, cudaStream_t stream) {
  if (params.nodes < 1 || params.nodes > kMaxNodes || params.max_ngram > kMaxNgram) {
    return cudaErrorInvalidValue;
  }
  const auto tiles = static_cast<uint64_t>((params.capacity + kTile - 1) / kTile);
  const uint64_t warps = std::min<uint64_t>(std::bit_ceil(tiles), kMaxWarps);  // a power of two
  return launch(ngram_draft_kernel, {params.batch, 1, static_cast<int>(warps) * kWarpSize, stream},
                params);
}

}  // namespace specdec
