// SuffixIndex and SuffixHistory (csrc/host/suffix_draft.h) for Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

#include "../host/suffix_draft.h"
#include "arrays.h"
#include "bind.h"

namespace specdec::bindings {
namespace {

using IndexList = std::vector<std::shared_ptr<SuffixIndex>>;

TokenView view_of(const py::array& array) {
  return {static_cast<const std::byte*>(array.data()), array.shape(0), array.strides(0)};
}

void append(SuffixIndex& self, const py::object& tokens) {
  const py::array array = require_int64_array(tokens, "tokens", 1);
  py::gil_scoped_release release;
  self.append(view_of(array));
}

void add(SuffixHistory& self, const py::object& tokens, const std::vector<int64_t>& counts) {
  const py::array array = require_int64_array(tokens, "tokens", 1);
  int64_t total = 0;
  for (const int64_t count : counts) {
    if (count < 0 || count > array.shape(0) - total) {
      throw py::value_error("counts must not be negative and add up to the " +
                            std::to_string(array.shape(0)) + " tokens");
    }
    total += count;
  }
  if (total != array.shape(0)) {
    throw py::value_error("counts add up to " + std::to_string(total) + ", but there are " +
                          std::to_string(array.shape(0)) + " tokens");
  }
  py::gil_scoped_release release;
  self.add(view_of(array), counts);
}

py::tuple outputs(const SuffixHistory& self) {
  std::vector<int64_t> tokens, counts;
  {
    py::gil_scoped_release release;
    self.copy(&tokens, &counts);
  }
  return py::make_tuple(to_array(tokens), to_array(counts));
}

std::vector<SuffixDraft> draft_rows(const IndexList& requests, const SuffixHistory* history,
                                    const SuffixRule& rule) {
  std::vector<SuffixDraft> drafts;
  for (const auto& request : requests) {
    drafts.push_back(draft_suffix(*request, *request, rule, {}));
    if (history != nullptr) {
      drafts.back() = history->draft(*request, rule, std::move(drafts.back()));
    }
  }
  return drafts;
}

py::tuple propose_batch(const IndexList& requests, const SuffixHistory* history,
                        int64_t num_draft_tokens, int64_t max_match, double factor, double offset,
                        double min_probability, bool tree) {
  const SuffixRule rule{num_draft_tokens, max_match, factor, offset, min_probability, tree};
  rule.check();
  const auto rows = static_cast<int64_t>(requests.size());
  for (int64_t row = 0; row < rows; ++row) {
    const std::string name = "requests[" + std::to_string(row) + "]";
    if (requests[row] == nullptr) {
      throw py::type_error(name + " must be a SuffixIndex, got None");
    }
    if (requests[row]->size() == 0) {
      throw py::value_error(name +
                            " is empty, but the root of its tree is its last token; append the "
                            "prompt first");
    }
  }
  std::vector<SuffixDraft> drafts;
  {
    py::gil_scoped_release release;
    drafts = draft_rows(requests, history, rule);
  }
  size_t longest = 0;
  for (const SuffixDraft& draft : drafts) longest = std::max(longest, draft.tokens.size());
  const auto num_nodes = static_cast<int64_t>(longest) + 1;
  py::array_t<int64_t> tokens({rows, num_nodes}), parents({rows, num_nodes}), matches(rows);
  py::array_t<double> scores(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const SuffixDraft& draft = drafts[row];
    int64_t* row_tokens = tokens.mutable_data(row, 0);
    int64_t* row_parents = parents.mutable_data(row, 0);
    std::fill_n(row_tokens, num_nodes, 0);
    std::fill_n(row_parents, num_nodes, kInactive);
    row_tokens[0] = requests[row]->text().back();
    row_parents[0] = kRootParent;
    std::copy(draft.tokens.begin(), draft.tokens.end(), row_tokens + 1);
    std::copy(draft.parents.begin(), draft.parents.end(), row_parents + 1);
    matches.mutable_at(row) = draft.match_length;
    scores.mutable_at(row) = draft.score;
  }
  return py::make_tuple(tokens, parents, matches, scores);
}

constexpr const char* kIndexDoc = R"(Suffixes of the text of one request, for suffix decoding.

Must not be used by two threads at once: calls release the GIL.)";

constexpr const char* kAppendDoc = R"(Append tokens: int64 array [n], of any stride.

Raises TypeError for another type, and ValueError for another rank, for an id outside [0, 2**31 - 1]
and for more than 2**30 tokens in total; then nothing was appended.)";

constexpr const char* kHistoryDoc =
    R"(Past outputs, in order; the oldest leave when there is no room.

Args:
    max_tokens: bound on the tokens held; each output counts as one more.

Safe to share between threads.)";

constexpr const char* kAddDoc = R"(Add outputs: the first counts[0] of tokens are the first one.

Args:
    tokens: int64 [sum of counts].
    counts: list of int. Of an output of max_tokens or more the end is kept.)";

constexpr const char* kProposeBatchDoc =
    R"(Draft one tree per row, by the rule of specdec_ext.reference.suffix.

Args:
    requests: a list of SuffixIndex, one per row, each with the text of its row so far.
    history: a SuffixHistory or None.

Returns:
    (tokens, parents, match_lengths, scores): int64 [rows, nodes] twice, with the row's last token as
    column 0 and parent -1, and with token 0 and parent -2 in unused nodes, which come last; int64
    [rows], the tokens that matched; float64 [rows], the accepted tokens to be expected.

Raises:
    ValueError: an index is empty, or an argument is out of its range.)";

}  // namespace

void bind_suffix(py::module_& module) {
  py::class_<SuffixIndex, std::shared_ptr<SuffixIndex>> index(module, "SuffixIndex", kIndexDoc);
  index.def(py::init<>())
      .def("append", &append, py::arg("tokens"), kAppendDoc)
      .def("__len__", &SuffixIndex::size)
      .def_property_readonly("num_runs", &SuffixIndex::num_runs)
      .def_property_readonly("nbytes", &SuffixIndex::memory_bytes,
                             "Bytes allocated, unused capacity included.");
  index.attr("DEPTH") = SuffixIndex::kDepth;
  index.attr("MAX_TIED") = SuffixIndex::kMaxTied;

  py::class_<SuffixHistory, std::shared_ptr<SuffixHistory>>(module, "SuffixHistory", kHistoryDoc)
      .def(py::init<int64_t>(), py::arg("max_tokens"))
      .def("add", &add, py::arg("tokens"), py::arg("counts"), kAddDoc)
      .def("outputs", &outputs, "(tokens, counts) of all outputs, int64, as add takes them.")
      .def("__len__", &SuffixHistory::num_outputs)
      .def_property_readonly("max_tokens", &SuffixHistory::max_tokens)
      .def_property_readonly("num_tokens", &SuffixHistory::num_tokens)
      .def_property_readonly("largest_token", &SuffixHistory::largest_token)
      .def_property_readonly("nbytes", &SuffixHistory::memory_bytes,
                             "Bytes allocated, unused capacity included.");

  module.def("propose_suffix", &propose_batch, py::arg("requests"), py::arg("history").none(true),
             py::kw_only(), py::arg("num_draft_tokens"), py::arg("max_match"), py::arg("factor"),
             py::arg("offset"), py::arg("min_probability"), py::arg("tree"), kProposeBatchDoc);
}

}  // namespace specdec::bindings
