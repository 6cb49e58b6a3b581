// round_commit: everything that a round of decoding changes, written at addresses that stay the
// same: the keys and values of accepted nodes, features and tokens for the next draft, text,
// positions, lengths, roots, ends of rows, and an entry of results for the host.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "specdec/kv_compact.h"

namespace specdec {

// The rows of `numbers`; specdec_ext/ops/round_commit.py describes them.
struct RoundNumber {
  enum : int64_t {
    kRootPosition,
    kEnd,
    kFirstSlot,
    kLength,
    kBlockStart,
    kRoot,
    kRootParent,
    kTextLength,
    kLimit,
    kCount,
    kHowMany,
  };
};

// The status of a row in an entry. 0 to 2 are those of the verification.
constexpr int64_t kIllegalNumbers = 3;

// The most sources of features.
constexpr int64_t kMaxFeatureTensors = 8;

// A source of features [batch, nodes, width]. Strides and offsets count bytes.
struct FeatureTensor {
  const std::byte* data;
  int64_t row_stride;
  int64_t node_stride;
  int64_t offset;  // of its columns in a row of new_features
  int64_t bytes;   // of a node
};

struct RoundCommitParams {
  View2<const int64_t> tokens;  // [batch, nodes] of the trees
  // The result of a verification.
  const int64_t* path;          // [batch, nodes]
  const int64_t* num_accepted;  // [batch]
  const int64_t* next_token;    // [batch]
  const int64_t* status;        // [batch]
  View1<const int64_t> eos;     // [num_eos]
  int64_t num_eos;

  View2<int64_t> numbers;         // [RoundNumber::kHowMany, batch]
  View2<int64_t> text;            // [batch, capacity]
  View2<int64_t> new_tokens;      // [batch, at least nodes]
  View2<std::byte> new_features;  // [batch, at least nodes] of width bytes; strides count bytes
  View2<int64_t> ring;            // [num_entries, at least entry_size()]
  int32_t* clock;                 // [2] number of rounds, number of blocks that have arrived

  int64_t num_entries;
  int64_t capacity;
  int64_t batch;
  int64_t nodes;

  // An entry: the number of the round; counts, num_accepted, ended and status [batch]; tokens and
  // path [batch, nodes].
  SPECDEC_HOST_DEVICE int64_t entry_size() const { return 1 + batch * (4 + 2 * nodes); }

  // The moves along the paths. Of num_accepted, the tokens after the end of a row must be cut.
  SPECDEC_HOST_DEVICE KvMoves moves() const {
    return {.path = {path, nodes, 1},
            .num_accepted = {num_accepted, 1},
            .source_starts = {&numbers(RoundNumber::kBlockStart, 0), numbers.column_stride},
            .target_starts = {&numbers(RoundNumber::kEnd, 0), numbers.column_stride},
            .page_table = {nullptr, 0, 0},
            .row_pages = 1,
            .batch = batch,
            .nodes = nodes};
  }

  // The token at `depth` of the walk through a row's tree: drafts, then the token after them.
  SPECDEC_HOST_DEVICE int64_t walked_token(int64_t row, int64_t depth) const {
    return depth < num_accepted[row] ? tokens(row, path[row * nodes + depth + 1]) : next_token[row];
  }

  // Whether a row ends with a token that makes its text `length` long.
  SPECDEC_HOST_DEVICE bool ends(int64_t row, int64_t token, int64_t length) const {
    if (length >= numbers(RoundNumber::kLimit, row)) return true;
    for (int64_t i = 0; i < num_eos; ++i) {
      if (eos[i] == token) return true;
    }
    return false;
  }

  SPECDEC_HOST_DEVICE bool is_node(int64_t node) const { return node >= 0 && node < nodes; }

  // Whether the text of a row has room, as far as one number per row tells.
  SPECDEC_HOST_DEVICE bool has_room(int64_t row) const {
    const int64_t length = numbers(RoundNumber::kTextLength, row);
    const int64_t limit = numbers(RoundNumber::kLimit, row);
    return length >= 0 && length < limit && limit <= capacity;
  }
};

// What a row emits in a round.
struct RowOutcome {
  int64_t count;  // number of tokens, 0 for an inactive row and in a void round
  bool ended;
  int64_t status;
};

namespace cpu {

// Returns what is wrong with the arguments, or nothing. Reads no cache and no features.
std::optional<std::string> find_invalid_round(std::span<const CacheTensor> caches,
                                              const RoundCommitParams& params);

// The arguments must be valid.
void round_commit(std::span<const CacheTensor> caches, std::span<const FeatureTensor> features,
                  const RoundCommitParams& params, const ParallelFor& parallel_for);

}  // namespace cpu

}  // namespace specdec
