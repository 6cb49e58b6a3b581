// SuffixIndex and SuffixHistory (csrc/retrieval/suffix_draft.h) for Python.
#include <algorithm>

#include "arrays.h"
#include "host.h"
#include "retrieval/suffix_draft.h"
#include "specdec/core/tree.h"

namespace specdec::bindings {
namespace {

using Requests = Instances<SuffixIndex>;

SuffixIndex* create_index(const Arguments& arguments) {
  arguments.parse(":SuffixIndex", {});
  return new SuffixIndex();
}

Object append(PyObject* self, const Arguments& arguments) {
  PyObject* tokens;
  arguments.parse("O:append", {"tokens"}, &tokens);
  const Array array = Array::require_int64(tokens, "tokens", 1);
  {
    const ReleaseGil released;
    Class<SuffixIndex>::value(self).append(array.view());
  }
  return Object::none();
}

SuffixHistory* create_history(const Arguments& arguments) {
  long long max_tokens;
  arguments.parse("L:SuffixHistory", {"max_tokens"}, &max_tokens);
  return new SuffixHistory(max_tokens);
}

Object add(PyObject* self, const Arguments& arguments) {
  PyObject *tokens, *count_list;
  arguments.parse("OO:add", {"tokens", "counts"}, &tokens, &count_list);
  const Array array = Array::require_int64(tokens, "tokens", 1);
  const std::vector<int64_t> counts = integers_of(count_list);
  int64_t total = 0;
  for (const int64_t count : counts) {
    if (count < 0 || count > array.size(0) - total) {
      throw std::invalid_argument("counts must not be negative and add up to the " +
                                  std::to_string(array.size(0)) + " tokens");
    }
    total += count;
  }
  if (total != array.size(0)) {
    throw std::invalid_argument("counts add up to " + std::to_string(total) + ", but there are " +
                                std::to_string(array.size(0)) + " tokens");
  }
  {
    const ReleaseGil released;
    Class<SuffixHistory>::value(self).add(array.view(), counts);
  }
  return Object::none();
}

Object outputs(PyObject* self, const Arguments& arguments) {
  arguments.parse(":outputs", {});
  std::vector<int64_t> tokens, counts;
  {
    const ReleaseGil released;
    Class<SuffixHistory>::value(self).copy(&tokens, &counts);
  }
  return tuple_of(to_array(tokens), to_array(counts));
}

std::vector<SuffixDraft> draft_rows(const Requests& requests, const SuffixHistory* history,
                                    const SuffixRule& rule) {
  std::vector<SuffixDraft> drafts;
  for (int64_t row = 0; row < requests.size(); ++row) {
    drafts.push_back(draft_suffix(requests[row], requests[row], rule, {}));
    if (history != nullptr) {
      drafts.back() = history->draft(requests[row], rule, std::move(drafts.back()));
    }
  }
  return drafts;
}

Object propose_batch(PyObject*, const Arguments& arguments) {
  PyObject *request_list, *history_object;
  long long num_draft_tokens, max_match;
  double factor, offset, min_probability;
  int tree;
  arguments.parse("OO$LLdddp:propose_suffix",
                  {"requests", "history", "num_draft_tokens", "max_match", "factor", "offset",
                   "min_probability", "tree"},
                  &request_list, &history_object, &num_draft_tokens, &max_match, &factor, &offset,
                  &min_probability, &tree);
  const SuffixRule rule{num_draft_tokens, max_match, factor, offset, min_probability, tree != 0};
  rule.check();
  const SuffixHistory* history = nullptr;
  if (Class<SuffixHistory>::is_type_of(history_object)) {
    history = &Class<SuffixHistory>::value(history_object);
  } else if (history_object != Py_None) {
    throw TypeError("history must be a SuffixHistory or None, got " + type_name(history_object));
  }
  const Requests requests(request_list, "requests", "a SuffixIndex");
  const int64_t rows = requests.size();
  for (int64_t row = 0; row < rows; ++row) {
    if (requests[row].size() == 0) {
      throw std::invalid_argument("requests[" + std::to_string(row) +
                                  "] is empty, but the root of its tree is its last token; append "
                                  "the prompt first");
    }
  }
  std::vector<SuffixDraft> drafts;
  {
    const ReleaseGil released;
    drafts = draft_rows(requests, history, rule);
  }
  size_t longest = 0;
  for (const SuffixDraft& draft : drafts) longest = std::max(longest, draft.tokens.size());
  const auto num_nodes = static_cast<int64_t>(longest) + 1;
  const Array tokens = Array::make<int64_t>({rows, num_nodes}),
              parents = Array::make<int64_t>({rows, num_nodes}),
              matches = Array::make<int64_t>({rows}), scores = Array::make<double>({rows});
  for (int64_t row = 0; row < rows; ++row) {
    const SuffixDraft& draft = drafts[row];
    int64_t* row_tokens = tokens.data<int64_t>() + row * num_nodes;
    int64_t* row_parents = parents.data<int64_t>() + row * num_nodes;
    std::fill_n(row_tokens, num_nodes, 0);
    std::fill_n(row_parents, num_nodes, kInactiveParent);
    row_tokens[0] = requests[row].text().back();
    row_parents[0] = kRootParent;
    std::copy(draft.tokens.begin(), draft.tokens.end(), row_tokens + 1);
    std::copy(draft.parents.begin(), draft.parents.end(), row_parents + 1);
    matches.data<int64_t>()[row] = draft.match_length;
    scores.data<double>()[row] = draft.score;
  }
  return tuple_of(tokens, parents, matches, scores);
}

constexpr const char* kIndexDoc = R"(SuffixIndex()
--

Suffixes of the text of one request, for suffix decoding.

Must not be used by two threads at once: calls release the GIL.)";

constexpr const char* kAppendDoc = R"(append($self, tokens)
--

Append tokens: int64 array [n], of any stride.

Raises TypeError for another type, and ValueError for another rank, for an id outside [0, 2**31 - 1]
and for more than 2**30 tokens in total; then nothing was appended.)";

constexpr const char* kHistoryDoc =
    R"(SuffixHistory(max_tokens)
--

Past outputs, in order; the oldest leave when there is no room.

Args:
    max_tokens: bound on the tokens held; each output counts as one more.

Safe to share between threads.)";

constexpr const char* kAddDoc = R"(add($self, tokens, counts)
--

Add outputs: the first counts[0] of tokens are the first one.

Args:
    tokens: int64 [sum of counts].
    counts: list of int. Of an output of max_tokens or more the end is kept.)";

constexpr const char* kProposeBatchDoc =
    R"(propose_suffix(requests, history, *, num_draft_tokens, max_match, factor, offset, min_probability, tree)
--

Draft one tree per row, by the rule of specdec_ext.reference.suffix.

Args:
    requests: a list of SuffixIndex, one per row, each with the text of its row so far.
    history: a SuffixHistory or None.

Returns:
    (tokens, parents, match_lengths, scores): int64 [rows, nodes] twice, with the row's last token as
    column 0 and parent -1, and with token 0 and parent -2 in unused nodes, which come last; int64
    [rows], the tokens that matched; float64 [rows], the accepted tokens to be expected.

Raises:
    ValueError: an index is empty, or an argument is out of its range.)";

constexpr const char* kOutputsDoc =
    "outputs($self)\n--\n\n(tokens, counts) of all outputs, int64, as add takes them.";

constexpr const char* kBytesDoc = "Bytes allocated, unused capacity included.";

}  // namespace

void define_suffix(PyObject* module) {
  Class<SuffixIndex>::define<create_index, &SuffixIndex::size>(
      module, "SuffixIndex", kIndexDoc, {method<append>("append", kAppendDoc)},
      {property<SuffixIndex, &SuffixIndex::num_runs>("num_runs"),
       property<SuffixIndex, &SuffixIndex::memory_bytes>("nbytes", kBytesDoc)});
  Class<SuffixIndex>::constant("DEPTH", SuffixIndex::kDepth);
  Class<SuffixIndex>::constant("MAX_TIED", SuffixIndex::kMaxTied);
  Class<SuffixHistory>::define<create_history, &SuffixHistory::num_outputs>(
      module, "SuffixHistory", kHistoryDoc,
      {method<add>("add", kAddDoc), method<outputs>("outputs", kOutputsDoc)},
      {property<SuffixHistory, &SuffixHistory::max_tokens>("max_tokens"),
       property<SuffixHistory, &SuffixHistory::num_tokens>("num_tokens"),
       property<SuffixHistory, &SuffixHistory::largest_token>("largest_token"),
       property<SuffixHistory, &SuffixHistory::memory_bytes>("nbytes", kBytesDoc)});
  static PyMethodDef functions[] = {method<propose_batch>("propose_suffix", kProposeBatchDoc), {}};
  if (PyModule_AddFunctions(module, functions) < 0) throw PythonError{};
}

}  // namespace specdec::bindings
