// The layers of a draft head, for elements of several rows. Products follow panels.h and attention
// follows tree_attention.h, so the bits of an element do not depend on the other elements.
#pragma once

#include <span>

#include "cpu/attention/split.h"
#include "cpu/math/rows.h"
#include "specdec/draft_head.h"

namespace specdec::cpu {

struct DraftElement {
  int64_t row;
  int64_t token;
  const void* features;  // [feature_width], or [hidden] feedback; null: zeros
  int64_t slot;
  int64_t position;
};

// What elements see: `batch` rows of `nodes` consecutive elements, in the terms of
// specdec/tree_attention.h.
struct DraftAttention {
  int64_t batch;
  int64_t nodes;
  const int64_t* rows;            // [batch] rows of the cache, ascending
  const int64_t* prefix_lengths;  // [batch] slots from 0 on that all elements see
  const int64_t* ancestors;       // [batch, nodes, words] bits of the slots behind the prefix
  int64_t words;

  int64_t elements() const { return batch * nodes; }
};

// Memory for elements of the head's type that is kept at its largest size.
class ElementBuffer {
 public:
  std::byte* at_least(int64_t bytes) {
    data_ = reinterpret_cast<std::byte*>(floats_.at_least(bytes / sizeof(float) + 1));
    return data_;
  }
  std::byte* data() const { return data_; }

 private:
  FloatBuffer floats_;
  std::byte* data_ = nullptr;
};

// Runs elements in two steps, because most new ones need only keys and values:
//   read    all layers but the last, and the last one up to its keys and values in the cache
//   finish  the rest of the last layer, for the elements that read() was told to keep
class DraftLayers {
 public:
  void begin(const DraftHeadParams& params, const ParallelFor& parallel_for);
  // Reads the next elements, in order of rows and slots. `attention` describes them in the same
  // order, for all layers but the last. If keep_at[i] is not negative, element i is kept there.
  void read(std::span<const DraftElement> elements, bool are_drafted,
            std::span<const DraftAttention> attention, std::span<const int64_t> keep_at,
            int64_t num_kept);
  // Finishes the kept elements: writes normed(), the input of lm_head, and feedback(), both [kept,
  // hidden].
  void finish(std::span<const DraftElement> kept, const DraftAttention& attention);
  const void* normed() const;
  const std::byte* feedback(int64_t i) const;

 private:
  struct Inputs {
    std::byte* embeddings;    // [n, hidden]
    std::byte* features;      // [n, features_stride], the input of fc
    int64_t features_stride;  // elements
  };
  struct Rows {           // of one layer
    std::byte* attended;  // [n, attended] input of the projections
    std::byte* residual;  // [n, hidden] becomes the layer's output
  };

  std::byte* row(std::byte* data, int64_t i, int64_t width) const {
    return data + i * width * size_;
  }
  void multiply(const HeadMatrix& matrix, const void* input, int64_t rows, void* output);
  void norm(const void* weight, const void* x, int64_t rows, int64_t width, void* out,
            int64_t out_stride) const;
  Inputs gather(std::span<const DraftElement> elements, bool are_drafted);
  Rows first_rows(std::span<const DraftElement> elements, bool are_drafted);
  void copy_features(const void* features, std::byte* out);
  void cache_keys_and_values(int64_t layer, std::span<const DraftElement> elements,
                             const std::byte* attended);
  void run_layer(int64_t layer, std::span<const DraftElement> elements,
                 std::span<const DraftAttention> attention, const Rows& rows);
  void attend(int64_t layer, const DraftAttention& attention, const void* queries, void* out);
  Rotation rotation(int64_t position) const;

  const DraftHeadParams* params_ = nullptr;
  const HeadWeights* head_ = nullptr;
  const ParallelFor* parallel_for_ = nullptr;
  const RowOps* rows_ = nullptr;
  int64_t size_ = 0;  // bytes of an element of the type
  ElementBuffer features_, embeddings_, state_, attended_, residual_, kept_attended_,
      kept_residual_;
  ElementBuffer projected_, queries_, heads_, inner_, normed_;
};

}  // namespace specdec::cpu
