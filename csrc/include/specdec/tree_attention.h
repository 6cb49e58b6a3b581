// tree_attention: attention of the nodes of draft trees to the committed tokens and to their own
// ancestors.
//
// A node at depth d, in a row whose prefix has P tokens, sees an ordered list of keys: positions 0
// .. P - 1 of the prefix, then its ancestor at depth j as position P + j for j = 0 .. d (itself). A
// window keeps the last `window` of them. The output is softmax(scores) times the values of the
// list. It depends on this list alone: not on the other nodes, their number, the batch, or on where
// the slots are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"
#include "specdec/core/tree.h"

namespace specdec {

// More slots than any memory has. Sums of a few such slots and lengths do not overflow.
constexpr int64_t kMaxSlot = int64_t{1} << 60;

// Keys or values: [batch, kv_heads, slots, head_dim], or pools of pages
// [num_pages, kv_heads, page_size, head_dim]; the last dimension is contiguous.
struct KvTensor {
  const void* data;
  int64_t page_stride;  // stride of a batch row or a page, in elements like all strides
  int64_t head_stride;
  int64_t slot_stride;
};

// Limits of the CUDA kernels. Rows of query, key and value must also be aligned to 16 bytes, and
// their size must be a multiple of 16 bytes.
constexpr int64_t kMaxCudaTreeNodes = 128;
constexpr int64_t kMaxCudaHeadDim = 256;
constexpr int64_t kMaxCudaGroup = 16;  // heads / kv_heads

struct TreeAttentionParams {
  const void* query;  // [batch, heads, nodes, head_dim], last dimension contiguous
  FloatType type;     // of query, key, value and output
  int64_t query_batch_stride;
  int64_t query_head_stride;
  int64_t query_node_stride;
  KvTensor key;
  KvTensor value;
  View2<const int64_t> page_table;  // [batch, pages]; null data: one page per row
  int64_t num_pages;                // of key and value; without a page table: batch
  int64_t page_size;                // slots of a page; without a page table: slots of a row
  int64_t pages_per_row;            // columns of the page table; without one: 1
  // [batch, nodes, words] bits of the node and its ancestors. On the CPU, null if the nodes are a
  // chain whose slots follow the prefix (a prompt). Then prefix_lengths may be negative: so many
  // nodes before the first token are padding and see nothing, and there may be any number of nodes.
  const int64_t* ancestors;
  int64_t ancestors_batch_stride;
  int64_t ancestors_node_stride;
  int64_t ancestors_word_stride;
  View1<const int64_t> prefix_starts;   // [batch] slot of position 0
  View1<const int64_t> prefix_lengths;  // [batch] committed tokens
  View1<const int64_t> block_starts;    // [batch] slot of node 0
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;  // divides heads
  int64_t nodes;     // 1 .. kMaxNodes
  int64_t words;     // ceil(nodes / 64)
  int64_t head_dim;
  float scale;     // of the dot products
  int64_t window;  // keys with query position - key position < window are seen; 0: all
  float softcap;   // scores become softcap * tanh(scores / softcap); 0: unchanged

  void* output;  // [batch, nodes, heads, head_dim]; zeros for a node without bits

  SPECDEC_HOST_DEVICE uint64_t ancestor_word(int64_t row, int64_t node, int64_t word) const {
    return static_cast<uint64_t>(
        ancestors[row * ancestors_batch_stride + node * ancestors_node_stride +
                  word * ancestors_word_stride]);
  }

  SPECDEC_HOST_DEVICE int64_t slots_per_row() const { return page_size * pages_per_row; }

  // Location of a slot of a row: the only function that knows about pages. Slots are below 2^31.
  struct Place {
    int64_t page;
    int64_t slot;
  };
  SPECDEC_HOST_DEVICE Place place(int64_t row, int64_t slot) const {
    if (page_table.data == nullptr) return {row, slot};
    const uint32_t index = static_cast<uint32_t>(slot), size = static_cast<uint32_t>(page_size);
    return {page_table(row, index / size), index % size};
  }
  SPECDEC_HOST_DEVICE int64_t offset(const KvTensor& tensor, const Place& at,
                                     int64_t kv_head) const {
    return at.page * tensor.page_stride + kv_head * tensor.head_stride +
           at.slot * tensor.slot_stride;
  }
};

// Bytes of device memory that launch_tree_attention needs. The memory need not be initialised.
int64_t tree_attention_workspace_bytes(const TreeAttentionParams& params);

namespace cpu {

// Returns what is wrong with the slots that would be read, or nothing. Reads no keys and values.
std::optional<std::string> find_invalid_slot(const TreeAttentionParams& params);

// The slots must be valid.
void tree_attention(const TreeAttentionParams& params, const ParallelFor& parallel_for);

}  // namespace cpu

}  // namespace specdec
