// CPU op round_commit: finds what every row emits, then moves, gathers and writes. The number of
// bytes is small, so only the moves of keys and values use threads.
#include "specdec/round_commit.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace specdec::cpu {
namespace {

using Number = RoundNumber;

bool is_void(const RoundCommitParams& params) {
  return std::any_of(params.status, params.status + params.batch,
                     [](int64_t status) { return status != 0; });
}

RowOutcome find_outcome(const RoundCommitParams& params, int64_t row) {
  const int64_t accepted = params.num_accepted[row];
  const int64_t length = params.numbers(Number::kTextLength, row);
  for (int64_t depth = 0; depth <= accepted; ++depth) {
    if (params.ends(row, params.walked_token(row, depth), length + depth + 1)) {
      return {depth + 1, true, 0};
    }
  }
  return {accepted + 1, false, 0};
}

std::vector<RowOutcome> find_outcomes(const RoundCommitParams& params) {
  const bool nothing = is_void(params);
  std::vector<RowOutcome> outcomes;
  for (int64_t row = 0; row < params.batch; ++row) {
    outcomes.push_back(nothing ? RowOutcome{0, false, params.status[row]}
                               : find_outcome(params, row));
  }
  return outcomes;
}

// The moves of a round. Refers to `kept`, which it fills.
KvMoves moves_of(const RoundCommitParams& params, const std::vector<RowOutcome>& outcomes,
                 std::vector<int64_t>& kept) {
  kept.clear();
  for (const RowOutcome& outcome : outcomes) kept.push_back(outcome.count - 1);
  KvMoves moves = params.moves();
  moves.num_accepted = {kept.data(), 1};
  return moves;
}

void gather(const RoundCommitParams& params, const FeatureTensor& features, int64_t row,
            int64_t count) {
  const View2<std::byte>& to = params.new_features;
  for (int64_t depth = 0; depth < count; ++depth) {
    const int64_t node = params.path[row * params.nodes + depth];
    std::memcpy(&to(row, depth) + features.offset,
                features.data + row * features.row_stride + node * features.node_stride,
                features.bytes);
  }
}

// Writes the state of a row and its part of the entry.
void write_row(const RoundCommitParams& params, int64_t row, const RowOutcome& outcome,
               int64_t* entry) {
  const int64_t batch = params.batch, nodes = params.nodes, count = outcome.count;
  const View2<int64_t>& numbers = params.numbers;
  const int64_t length = numbers(Number::kTextLength, row);
  int64_t* parts = entry + 1;
  int64_t* tokens = parts + 4 * batch + row * nodes;
  std::copy_n(params.path + row * nodes, nodes, tokens + batch * nodes);
  std::fill_n(tokens, nodes, -1);
  for (int64_t i = 0; i < count; ++i) {
    tokens[i] = params.walked_token(row, i);
    params.text(row, length + i) = tokens[i];
    params.new_tokens(row, i) = tokens[i];
  }
  parts[row] = count;
  parts[batch + row] = params.num_accepted[row];
  parts[2 * batch + row] = outcome.ended;
  parts[3 * batch + row] = outcome.status;
  for (const int64_t number :
       {Number::kRootPosition, Number::kEnd, Number::kLength, Number::kTextLength}) {
    numbers(number, row) += count;
  }
  numbers(Number::kCount, row) = count;
  if (count > 0) numbers(Number::kRoot, row) = tokens[count - 1];
  if (outcome.ended) numbers(Number::kRootParent, row) = kInactiveParent;
}

// The next block of nodes begins at the largest end of all rows: a pass over the next block also
// writes to rows that have ended, and must leave their text alone.
void move_block(const RoundCommitParams& params) {
  int64_t largest = 0;
  for (int64_t row = 0; row < params.batch; ++row) {
    largest = std::max(largest, params.numbers(Number::kEnd, row));
  }
  for (int64_t row = 0; row < params.batch; ++row) {
    params.numbers(Number::kBlockStart, row) = largest;
  }
}

std::optional<std::string> find_missing_room(const RoundCommitParams& params, int64_t row) {
  if (params.num_accepted[row] < 0 || params.has_room(row)) return std::nullopt;
  return element("text_lengths", row, params.numbers(Number::kTextLength, row)) +
         " with the limit " + std::to_string(params.numbers(Number::kLimit, row)) +
         "; expected 0 <= length < limit <= " + std::to_string(params.capacity) +
         ", the columns of text";
}

}  // namespace

std::optional<std::string> find_invalid_round(std::span<const CacheTensor> caches,
                                              const RoundCommitParams& params) {
  if (params.clock[0] < 0) {
    return "clock[0] = " + std::to_string(params.clock[0]) + "; expected a number of rounds";
  }
  for (int64_t row = 0; row < params.batch; ++row) {
    if (auto problem = find_invalid_path(params.moves(), row)) return problem;
  }
  if (is_void(params)) return std::nullopt;
  for (int64_t row = 0; row < params.batch; ++row) {
    if (auto problem = find_missing_room(params, row)) return problem;
  }
  std::vector<int64_t> kept;
  return find_invalid_move(caches, moves_of(params, find_outcomes(params), kept),
                           {.sources = "block_starts", .targets = "ends"});
}

void round_commit(std::span<const CacheTensor> caches, std::span<const FeatureTensor> features,
                  const RoundCommitParams& params, const ParallelFor& parallel_for) {
  const std::vector<RowOutcome> outcomes = find_outcomes(params);
  std::vector<int64_t> kept;
  kv_compact(caches, moves_of(params, outcomes, kept), parallel_for);
  int64_t* entry = &params.ring(params.clock[0] % params.num_entries, 0);
  for (int64_t row = 0; row < params.batch; ++row) {
    for (const FeatureTensor& tensor : features) gather(params, tensor, row, outcomes[row].count);
    write_row(params, row, outcomes[row], entry);
  }
  move_block(params);
  entry[0] = ++params.clock[0];
}

}  // namespace specdec::cpu
