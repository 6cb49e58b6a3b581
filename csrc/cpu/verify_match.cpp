// CPU op verify_match: all rows walk in lock step, one depth per parallel loop. A task is one row's
// visited node x one chunk of the vocabulary; a thread scans its adjacent chunks of a node
// together. Only visited nodes are read.
//
// The scan processes blocks of kBlock tokens in loops that compilers vectorise:
//   1. load as float32; find the largest key and the largest |bits| (to detect NaN) of the block;
//   2. compute the random bits, unless the block stays below the best score so far even with the
//      largest possible noise (after top-k, top-p or min-p that holds for nearly every block);
//   3. compute the noise, unless the block stays below with the bound that its smallest bits give:
//      even without filters, only about log(blocks) of the blocks get this far;
//   4. if the block improves on the best score, find the first token that attains it.
// Skipping is exact, because float addition is monotonic and a tie loses to the lower token found
// before. Per token: 0.2 ns to load and compare, 0.33 ns for the bits (Zen 4, AVX-512).
//
// The loop is compiled for several instruction sets, of which one is chosen at run time. All give
// the same bits: float operations are elementwise with explicit rounding (specdec/sampling/rng.h),
// reductions are in integers. SPECDEC_CPU_ISA=baseline|avx2|avx512 forces one.
#include "specdec/verify_match.h"

#include <algorithm>
#include <vector>

#include "cpu/math/philox.h"
#include "specdec/cpu/isa.h"
#include "specdec/math/pick.h"
#include "specdec/sampling/rng.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kBlock = kBulkTokens;
constexpr int64_t kChunk = 8192;         // tokens per task, a multiple of kBlock
constexpr int64_t kGrainTokens = 32768;  // below this, waking a thread costs more than it saves

// Loads the block of tokens from `first` on as float32, with -inf beyond `end`.
template <typename T>
SPECDEC_HOST_DEVICE void load_block(const T* values, int64_t first, int64_t end, float* scores) {
  if (end - first >= kBlock) {
    for (int64_t i = 0; i < kBlock; ++i) scores[i] = to_float(values[first + i]);
  } else {
    std::fill_n(scores, kBlock, bits_to_float(kMinusInfinityBits));
    for (int64_t i = 0; i < end - first; ++i) scores[i] = to_float(values[first + i]);
  }
}

SPECDEC_HOST_DEVICE int32_t largest_key(const float* scores) {
  int32_t largest = INT32_MIN;
  for (int64_t i = 0; i < kBlock; ++i) {
    largest = std::max(largest, ordered_key(canonical_bits(scores[i])));
  }
  return largest;
}

SPECDEC_HOST_DEVICE int32_t largest_magnitude(const float* scores) {
  int32_t largest = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    largest = std::max(largest, float_to_bits(scores[i]) & 0x7FFFFFFF);
  }
  return largest;
}

SPECDEC_HOST_DEVICE uint32_t smallest(const uint32_t* bits) {
  uint32_t smallest = UINT32_MAX;
  for (int64_t i = 0; i < kBlock; ++i) smallest = std::min(smallest, bits[i]);
  return smallest;
}

// Whether noise of up to `bound` can lift a logit with this key above the best score.
SPECDEC_HOST_DEVICE bool may_win(int32_t key, float bound, int32_t best_key) {
  const float score = exact_add(bits_to_float(ordered_key(key)), bound);
  return ordered_key(canonical_bits(score)) > best_key;
}

// The best of tokens [begin, end); begin is a multiple of kBlock. Without noise if `noise` is null.
template <typename T>
SPECDEC_HOST_DEVICE Pick scan_tokens(const void* logits, int64_t begin, int64_t end,
                                     const NoiseStream* noise, BulkBits fill_bits) {
  const T* values = static_cast<const T*>(logits);
  int32_t best_key = kMinusInfinityKey;
  int64_t best_token = -1;
  int32_t magnitude = 0;
  for (int64_t first = begin; first < end; first += kBlock) {
    float scores[kBlock];
    load_block(values, first, end, scores);
    magnitude = std::max(magnitude, largest_magnitude(scores));
    int32_t block_key = largest_key(scores);
    if (noise != nullptr) {
      if (!may_win(block_key, kMaxGumbel, best_key)) continue;
      uint32_t bits[kBlock];
      fill_bits(*noise, static_cast<uint32_t>(first / 4), bits);
      if (!may_win(block_key, gumbel_bound(smallest(bits)), best_key)) continue;
      for (int64_t i = 0; i < kBlock; ++i) scores[i] = exact_add(scores[i], gumbel(bits[i]));
      block_key = largest_key(scores);
    }
    if (block_key > best_key) {
      int64_t i = 0;
      while (i < kBlock - 1 && ordered_key(canonical_bits(scores[i])) != block_key) ++i;
      best_key = block_key;
      best_token = first + i;
    }
  }
  if (magnitude > kInfinityBits) return kNaNPick;
  return best_token < 0 ? kNoPick : make_pick(best_key, best_token);
}

using ScanFunction = Pick (*)(const void* logits, int64_t begin, int64_t end,
                              const NoiseStream* noise, BulkBits fill_bits);

// The walk of one row.
struct Walk {
  int64_t row;
  int64_t node;
  int64_t depth;
  const std::byte* logits;  // logits of the visited node
  NoiseStream noise;        // noise of the token that is drawn at this depth
};

class Walker {
 public:
  explicit Walker(const VerifyMatchParams& params)
      : params_(params),
        scan_(with_float_type(
            params.logits_type,
            []<typename T>(T) -> ScanFunction { return build_for<scan_tokens<T>>(cpu_isa()); })),
        fill_bits_(bulk_bits(cpu_isa())) {}

  void start(int64_t row) const {
    std::fill_n(params_.path + row * params_.nodes, params_.nodes, -1);
    params_.num_accepted[row] = -1;
    params_.next_token[row] = -1;
    params_.status[row] = static_cast<int64_t>(MatchStatus::kOk);
  }

  Walk at(int64_t row, int64_t node, int64_t depth) const {
    const int64_t offset = row * params_.logits_batch_stride + node * params_.logits_node_stride;
    return {
        row, node, depth,
        static_cast<const std::byte*>(params_.logits) + offset * element_size(params_.logits_type),
        NoiseStream::make(params_.seeds[row], params_.row_ids[row],
                          params_.root_positions[row] + depth + 1)};
  }

  // The best of tokens [begin, end) at the visited node.
  Pick pick(const Walk& walk, int64_t begin, int64_t end) const {
    return scan_(walk.logits, begin, end, params_.stochastic[walk.row] ? &walk.noise : nullptr,
                 fill_bits_);
  }

  // Records the visited node and its pick; returns true if the walk goes on at a child.
  bool advance(Walk& walk, const Pick& pick) const {
    const int64_t row = walk.row;
    if (pick == kNaNPick || pick == kNoPick) {
      params_.status[row] =
          static_cast<int64_t>(pick == kNaNPick ? MatchStatus::kNaN : MatchStatus::kNoFiniteLogit);
      params_.num_accepted[row] = walk.depth - 1;
      return false;
    }
    const int64_t token = picked_token(pick);
    params_.path[row * params_.nodes + walk.depth] = walk.node;
    params_.num_accepted[row] = walk.depth;
    for (int64_t child = walk.node + 1; child < params_.nodes; ++child) {
      if (params_.parents(row, child) == walk.node && params_.tokens(row, child) == token) {
        walk = at(row, child, walk.depth + 1);
        return true;
      }
    }
    params_.next_token[row] = token;
    return false;
  }

 private:
  const VerifyMatchParams& params_;
  ScanFunction scan_;
  BulkBits fill_bits_;
};

}  // namespace

void verify_match(const VerifyMatchParams& params, const ParallelFor& parallel_for) {
  const Walker walker(params);
  std::vector<Walk> walks;
  walks.reserve(params.batch);
  for (int64_t row = 0; row < params.batch; ++row) {
    walker.start(row);
    if (params.parents(row, 0) == kRootParent) walks.push_back(walker.at(row, 0, 0));
  }

  const int64_t chunks = (params.vocab + kChunk - 1) / kChunk;
  const int64_t grain = std::max<int64_t>(1, kGrainTokens / std::min(params.vocab, kChunk));
  std::vector<Pick> picks(walks.size() * chunks);
  while (!walks.empty()) {
    const int64_t tasks = static_cast<int64_t>(walks.size()) * chunks;
    parallel_for(tasks, grain, [&](int64_t begin, int64_t end) {
      std::fill(picks.begin() + begin, picks.begin() + end, kNoPick);
      for (int64_t task = begin; task < end;) {
        const int64_t walk = task / chunks;
        const int64_t last = std::min(end, (walk + 1) * chunks);
        picks[task] = walker.pick(walks[walk], (task - walk * chunks) * kChunk,
                                  std::min((last - walk * chunks) * kChunk, params.vocab));
        task = last;
      }
    });
    size_t num_going_on = 0;
    for (size_t i = 0; i < walks.size(); ++i) {
      const auto first = picks.begin() + i * chunks;
      const Pick pick = *std::max_element(first, first + chunks);
      Walk walk = walks[i];
      if (walker.advance(walk, pick)) walks[num_going_on++] = walk;
    }
    walks.resize(num_going_on);
  }
}

}  // namespace specdec::cpu
