// Draft trees: parents[i] < i, node 0 is the root (the last committed token).
#pragma once

#include "specdec/core/platform.h"

namespace specdec {

constexpr int64_t kRootParent = -1;
constexpr int64_t kInactiveParent = -2;
// Bounds the shared memory of the CUDA kernels. The CPU ops have the same limit.
constexpr int64_t kMaxNodes = 1024;

// The parents of one row.
struct ParentsRow {
  const int64_t* data;
  int64_t stride;

  SPECDEC_HOST_DEVICE int64_t operator[](int64_t node) const { return data[node * stride]; }
  SPECDEC_HOST_DEVICE bool row_is_active() const { return data[0] == kRootParent; }
  // Whether the link from a node to its parent is legal. A node is active if all links up to the
  // root are legal.
  SPECDEC_HOST_DEVICE bool link_is_legal(int64_t node) const {
    const int64_t parent = (*this)[node];
    return node == 0 ? parent == kRootParent : parent >= 0 && parent < node;
  }
};

}  // namespace specdec
