// NgramIndex (csrc/retrieval/ngram_index.h) for Python.
#include "retrieval/ngram_index.h"

#include "arrays.h"
#include "host.h"

namespace specdec::bindings {
namespace {

using Indexes = Instances<NgramIndex>;

NgramIndex* create(const Arguments& arguments) {
  long long min_ngram, max_ngram;
  unsigned long long hash_multiplier = NgramIndex::kHashMultiplier;
  arguments.parse("LL|$K:NgramIndex", {"min_ngram", "max_ngram", "hash_multiplier"}, &min_ngram,
                  &max_ngram, &hash_multiplier);
  return new NgramIndex(min_ngram, max_ngram, hash_multiplier);
}

Object extend(PyObject* self, const Arguments& arguments) {
  PyObject* tokens;
  arguments.parse("O:extend", {"tokens"}, &tokens);
  const Array array = Array::require_int64(tokens, "tokens", 1);
  {
    const ReleaseGil released;
    Class<NgramIndex>::value(self).extend(array.view());
  }
  return Object::none();
}

Object propose(PyObject* self, const Arguments& arguments) {
  long long num_tokens, num_branches = 1;
  arguments.parse("L|L:propose", {"num_tokens", "num_branches"}, &num_tokens, &num_branches);
  const cpu::TokenTrie draft = Class<NgramIndex>::value(self).propose(num_tokens, num_branches);
  return tuple_of(to_array(draft.tokens()), to_array(draft.parents()));
}

Object match_length(PyObject* self, const Arguments& arguments) {
  arguments.parse(":match_length", {});
  return integer(Class<NgramIndex>::value(self).match_length());
}

Object memory_bytes(PyObject* self, const Arguments& arguments) {
  arguments.parse(":memory_bytes", {});
  return integer(Class<NgramIndex>::value(self).memory_bytes());
}

Object extend_batch(PyObject*, const Arguments& arguments) {
  PyObject *index_list, *tokens, *counts;
  arguments.parse("OOO:extend_batch", {"indexes", "tokens", "counts"}, &index_list, &tokens,
                  &counts);
  const Indexes indexes(index_list, "indexes", "an NgramIndex");
  const Array token_array = Array::require_int64(tokens, "tokens", 2);
  const Array count_array = Array::require_int64(counts, "counts", 1);
  const int64_t rows = indexes.size();
  if (token_array.size(0) != rows || count_array.size(0) != rows) {
    throw std::invalid_argument("tokens and counts must have one row for each of the " +
                                std::to_string(rows) + " indexes, got " +
                                std::to_string(token_array.size(0)) + " and " +
                                std::to_string(count_array.size(0)));
  }
  // Everything is checked before anything is appended.
  std::vector<TokenView> views;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t count = count_array.view()[row];
    if (count < 0 || count > token_array.size(1)) {
      throw std::invalid_argument("counts[" + std::to_string(row) + "] must be in [0, " +
                                  std::to_string(token_array.size(1)) +
                                  "], the number of columns of tokens, got " +
                                  std::to_string(count));
    }
    views.push_back(token_array.view_row(row, count));
    if (const auto column = find_invalid_token(views.back())) {
      throw std::invalid_argument("tokens[" + std::to_string(row) + ", " + std::to_string(*column) +
                                  "] is " + std::to_string(views.back()[*column]) +
                                  ": token ids must be in [0, " + std::to_string(kMaxTokenId) +
                                  "]; leave padding out by a smaller counts[" +
                                  std::to_string(row) + "]");
    }
  }
  {
    const ReleaseGil released;
    for (int64_t row = 0; row < rows; ++row) indexes[row].extend(views[row]);
  }
  return Object::none();
}

Object propose_batch(PyObject*, const Arguments& arguments) {
  PyObject* index_list;
  long long num_tokens, num_branches = 1;
  arguments.parse("OL|L:propose_batch", {"indexes", "num_tokens", "num_branches"}, &index_list,
                  &num_tokens, &num_branches);
  const Indexes indexes(index_list, "indexes", "an NgramIndex");
  const int64_t rows = indexes.size();
  for (int64_t row = 0; row < rows; ++row) {
    if (indexes[row].size() == 0) {
      throw std::invalid_argument("indexes[" + std::to_string(row) +
                                  "] is empty, but the root of its tree is its last token; extend "
                                  "it with the prompt first");
    }
  }
  check_draft_size(num_tokens, num_branches);  // before num_tokens sizes an array
  const int64_t num_nodes = num_tokens + 1;
  const Array tokens = Array::make<int64_t>({rows, num_nodes}),
              parents = Array::make<int64_t>({rows, num_nodes});
  int64_t* row_tokens = tokens.data<int64_t>();
  int64_t* row_parents = parents.data<int64_t>();
  {
    const ReleaseGil released;
    for (int64_t row = 0; row < rows; ++row) {
      const cpu::TokenTrie draft = indexes[row].propose(num_tokens, num_branches);
      draft.write(num_nodes, row_tokens, row_parents);
      row_tokens += num_nodes;
      row_parents += num_nodes;
    }
  }
  return tuple_of(tokens, parents);
}

constexpr const char* kClassDoc =
    R"(NgramIndex(min_ngram, max_ngram, *, hash_multiplier=0x9E3779B97F4A7C15)
--

Incremental n-gram index over the token ids of one sequence.

Drafts by copying what followed an earlier occurrence of the last tokens: the longest n in
[min_ngram, max_ngram] that occurred before, most recent occurrence first. The full rule is in
specdec_ext.reference.ngram.

Args:
    min_ngram: shortest match that may draft, at least 1.
    max_ngram: longest match that is looked for, at most 64. Each length from min_ngram to
        max_ngram costs at most 24 bytes per token; the tokens cost at most 8.
    hash_multiplier: for tests. With 0 all n-grams collide, which makes the index slow, not wrong.

Raises:
    ValueError: unless 1 <= min_ngram <= max_ngram <= 64.

An index must not be used by two threads at once: calls release the GIL.)";

constexpr const char* kExtendDoc = R"(extend($self, tokens)
--

Append tokens: int64 array [n], of any stride.

Raises TypeError for another type, and ValueError for another rank, for an id outside [0, 2**31 - 1]
and for more than 2**31 - 1 tokens in total; then nothing was appended.)";

constexpr const char* kProposeDoc = R"(propose($self, num_tokens, num_branches=1)
--

Draft at most num_tokens nodes on at most num_branches paths.

Returns:
    (tokens, parents), int64 [n] with n <= num_tokens, both empty if nothing matched. The root is
    left out: entry i is tree node i + 1, and parents[i] <= i, where 0 is the root. num_branches = 1
    drafts a chain.

Raises:
    ValueError: num_tokens < 0 or num_branches < 1.)";

constexpr const char* kExtendBatchDoc = R"(extend_batch(indexes, tokens, counts)
--

Append the first counts[r] tokens of row r to indexes[r].

Args:
    indexes: a list of NgramIndex, one per row.
    tokens: int64 [rows, n], of any strides. What lies beyond counts[r] is not read.
    counts: int64 [rows], each in [0, n].

Raises as extend does; nothing was appended then.)";

constexpr const char* kProposeBatchDoc = R"(propose_batch(indexes, num_tokens, num_branches=1)
--

Draft one tree per row.

Returns:
    (tokens, parents), int64 [rows, num_tokens + 1]. Column 0 is the root: the last token of the
    row, with parent -1. Unused nodes come last, with token 0 and parent -2.

Raises:
    ValueError: an index is empty, num_tokens < 0 or num_branches < 1.)";

constexpr const char* kMatchLengthDoc =
    "match_length($self)\n--\n\n"
    "The largest n in [min_ngram, max_ngram] whose last n tokens occurred before, or 0.";

constexpr const char* kMemoryBytesDoc =
    "memory_bytes($self)\n--\n\nBytes allocated, unused capacity included.";

}  // namespace

void define_ngram_index(PyObject* module) {
  using NgramClass = Class<NgramIndex>;
  NgramClass::define<create, &NgramIndex::size>(
      module, "NgramIndex", kClassDoc,
      {method<extend>("extend", kExtendDoc), method<propose>("propose", kProposeDoc),
       method<match_length>("match_length", kMatchLengthDoc),
       method<memory_bytes>("memory_bytes", kMemoryBytesDoc),
       method<extend_batch>("extend_batch", kExtendBatchDoc, METH_STATIC),
       method<propose_batch>("propose_batch", kProposeBatchDoc, METH_STATIC)});
  NgramClass::constant("MAX_OCCURRENCES", kMaxOccurrences);
}

}  // namespace specdec::bindings
