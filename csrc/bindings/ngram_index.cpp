// NgramIndex (csrc/host/ngram_index.h) for Python.
#include "../host/ngram_index.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

#include "arrays.h"
#include "bind.h"

namespace specdec::bindings {
namespace {

using IndexList = std::vector<std::shared_ptr<NgramIndex>>;

void require_indexes(const IndexList& indexes) {
  for (size_t row = 0; row < indexes.size(); ++row) {
    if (indexes[row] == nullptr) {
      throw py::type_error("indexes[" + std::to_string(row) + "] must be an NgramIndex, got None");
    }
  }
}

void extend(NgramIndex& self, const py::object& tokens) {
  const py::array array = require_int64_array(tokens, "tokens", 1);
  const TokenView view{static_cast<const std::byte*>(array.data()), array.shape(0),
                       array.strides(0)};
  py::gil_scoped_release release;
  self.extend(view);
}

py::tuple propose(const NgramIndex& self, int64_t num_tokens, int64_t num_branches) {
  const NgramDraft draft = self.propose(num_tokens, num_branches);
  return py::make_tuple(to_array(draft.tokens), to_array(draft.parents));
}

void extend_batch(const IndexList& indexes, const py::object& tokens, const py::object& counts) {
  require_indexes(indexes);
  const py::array token_array = require_int64_array(tokens, "tokens", 2);
  const py::array count_array = require_int64_array(counts, "counts", 1);
  const auto rows = static_cast<int64_t>(indexes.size());
  if (token_array.shape(0) != rows || count_array.shape(0) != rows) {
    throw py::value_error("tokens and counts must have one row for each of the " +
                          std::to_string(rows) + " indexes, got " +
                          std::to_string(token_array.shape(0)) + " and " +
                          std::to_string(count_array.shape(0)));
  }
  const TokenView count_view{static_cast<const std::byte*>(count_array.data()), rows,
                             count_array.strides(0)};
  // Everything is checked before anything is appended.
  std::vector<TokenView> views;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t count = count_view[row];
    if (count < 0 || count > token_array.shape(1)) {
      throw py::value_error("counts[" + std::to_string(row) + "] must be in [0, " +
                            std::to_string(token_array.shape(1)) +
                            "], the number of columns of tokens, got " + std::to_string(count));
    }
    views.push_back(view_row(token_array, row, count));
    if (const auto column = specdec::find_invalid_token(views.back())) {
      throw py::value_error("tokens[" + std::to_string(row) + ", " + std::to_string(*column) +
                            "] is " + std::to_string(views.back()[*column]) +
                            ": token ids must be in [0, " + std::to_string(specdec::kMaxTokenId) +
                            "]; leave padding out by a smaller counts[" + std::to_string(row) +
                            "]");
    }
  }
  py::gil_scoped_release release;
  for (int64_t row = 0; row < rows; ++row) indexes[row]->extend(views[row]);
}

py::tuple propose_batch(const IndexList& indexes, int64_t num_tokens, int64_t num_branches) {
  require_indexes(indexes);
  const auto rows = static_cast<int64_t>(indexes.size());
  for (int64_t row = 0; row < rows; ++row) {
    if (indexes[row]->size() == 0) {
      throw py::value_error("indexes[" + std::to_string(row) +
                            "] is empty, but the root of its tree is its last token; extend it "
                            "with the prompt first");
    }
  }
  specdec::check_draft_size(num_tokens, num_branches);  // before num_tokens sizes an array
  const int64_t num_nodes = num_tokens + 1;
  py::array_t<int64_t> tokens({rows, num_nodes});
  py::array_t<int64_t> parents({rows, num_nodes});
  int64_t* row_tokens = tokens.mutable_data();
  int64_t* row_parents = parents.mutable_data();
  {
    py::gil_scoped_release release;
    for (const auto& index : indexes) {
      const NgramDraft draft = index->propose(num_tokens, num_branches);
      row_tokens[0] = index->last_token();
      row_parents[0] = kRootParent;
      auto* token = std::copy(draft.tokens.begin(), draft.tokens.end(), row_tokens + 1);
      auto* parent = std::copy(draft.parents.begin(), draft.parents.end(), row_parents + 1);
      row_tokens += num_nodes;
      row_parents += num_nodes;
      std::fill(token, row_tokens, 0);
      std::fill(parent, row_parents, kInactive);
    }
  }
  return py::make_tuple(tokens, parents);
}

constexpr const char* kClassDoc = R"(Incremental n-gram index over the token ids of one sequence.

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

constexpr const char* kExtendDoc = R"(Append tokens: int64 array [n], of any stride.

Raises TypeError for another type, and ValueError for another rank, for an id outside [0, 2**31 - 1]
and for more than 2**31 - 1 tokens in total; then nothing was appended.)";

constexpr const char* kProposeDoc = R"(Draft at most num_tokens nodes on at most num_branches paths.

Returns:
    (tokens, parents), int64 [n] with n <= num_tokens, both empty if nothing matched. The root is
    left out: entry i is tree node i + 1, and parents[i] <= i, where 0 is the root. num_branches = 1
    drafts a chain.

Raises:
    ValueError: num_tokens < 0 or num_branches < 1.)";

constexpr const char* kExtendBatchDoc = R"(Append the first counts[r] tokens of row r to indexes[r].

Args:
    indexes: a list of NgramIndex, one per row.
    tokens: int64 [rows, n], of any strides. What lies beyond counts[r] is not read.
    counts: int64 [rows], each in [0, n].

Raises as extend does; nothing was appended then.)";

constexpr const char* kProposeBatchDoc = R"(Draft one tree per row.

Returns:
    (tokens, parents), int64 [rows, num_tokens + 1]. Column 0 is the root: the last token of the
    row, with parent -1. Unused nodes come last, with token 0 and parent -2.

Raises:
    ValueError: an index is empty, num_tokens < 0 or num_branches < 1.)";

}  // namespace

void bind_ngram_index(py::module_& module) {
  py::class_<NgramIndex, std::shared_ptr<NgramIndex>> cls(module, "NgramIndex", kClassDoc);
  cls.def(py::init<int64_t, int64_t, uint64_t>(), py::arg("min_ngram"), py::arg("max_ngram"),
          py::kw_only(), py::arg("hash_multiplier") = NgramIndex::kHashMultiplier)
      .def("extend", &extend, py::arg("tokens"), kExtendDoc)
      .def("propose", &propose, py::arg("num_tokens"), py::arg("num_branches") = 1, kProposeDoc)
      .def("match_length", &NgramIndex::match_length,
           "The largest n in [min_ngram, max_ngram] whose last n tokens occurred before, or 0.")
      .def("__len__", &NgramIndex::size)
      .def("memory_bytes", &NgramIndex::memory_bytes, "Bytes allocated, unused capacity included.")
      .def_static("extend_batch", &extend_batch, py::arg("indexes"), py::arg("tokens"),
                  py::arg("counts"), kExtendBatchDoc)
      .def_static("propose_batch", &propose_batch, py::arg("indexes"), py::arg("num_tokens"),
                  py::arg("num_branches") = 1, kProposeBatchDoc);
  cls.attr("MAX_OCCURRENCES") = NgramIndex::kMaxOccurrences;
}

}  // namespace specdec::bindings
