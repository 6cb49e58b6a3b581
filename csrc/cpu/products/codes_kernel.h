// Expands codes to float32 weights, compiled for each instruction set. A format of linear_kernel.h
// with float32 elements also has, for a block of kCodeBlock inputs in the layout of linear.h,
//
//   expand_bytes(codes, scale, offset, out)           codes of 8 bits
//   expand_nibbles(codes, scale, offset, out)         codes of 4 bits
//   expand_levels(codes, levels, scale, offset, out)  codes of 4 bits that stand for levels
#pragma once

#include <algorithm>
#include <cstring>

#include "products.h"

namespace specdec::cpu {

// A block of codes: outputs [first_out, first_out + num_outs), inputs [first_in, first_in + num_ins).
struct CodeBlock {
  const LinearParams& params;
  int64_t first_out;
  int64_t num_outs;
  int64_t first_in;  // a multiple of kCodeBlock
  int64_t num_ins;
  int64_t next;  // bytes from an output's codes to those that are prefetched meanwhile
};

template <class F>
class CodesKernel {
 public:
  // Writes the weights of each output to a row of `weights`, of which there is room for a multiple
  // of kCodeBlock; what follows the last weight is undefined. Rows are `stride` apart.
  SPECDEC_LINEAR_TARGET static void expand(const CodeBlock& block, float* weights, int64_t stride) {
    const WeightCodes& codes = block.params.codes;
    if (codes.bits == 8) return expand_rows<Kind::kBytes>(block, weights, stride);
    if (codes.levels) return expand_rows<Kind::kLevels>(block, weights, stride);
    expand_rows<Kind::kNibbles>(block, weights, stride);
  }

 private:
  enum class Kind { kBytes, kNibbles, kLevels };

  struct Scale {
    float scale, offset;
  };

  template <Kind kKind>
  SPECDEC_LINEAR_TARGET static void expand_rows(const CodeBlock& block, float* weights,
                                                int64_t stride) {
    constexpr int64_t kBits = kKind == Kind::kBytes ? 8 : 4;
    constexpr int64_t kLineIns = kStepBytes * 8 / kBits;
    const WeightCodes& codes = block.params.codes;
    const int64_t first_group = block.first_in / codes.group_size;
    const int64_t first_end = (first_group + 1) * codes.group_size - block.first_in;
    for (int64_t i = 0; i < block.num_outs; ++i) {
      const int64_t out = block.first_out + i;
      const uint8_t* row = static_cast<const uint8_t*>(block.params.weight) +
                           out * block.params.weight_stride + block.first_in * kBits / 8;
      int64_t group = out * codes.groups + first_group, group_end = first_end;
      for (int64_t in = 0; in < block.num_ins; ++group, group_end += codes.group_size) {
        const Scale scale = read_scale<kKind>(codes, group);
        for (const int64_t end = std::min(group_end, block.num_ins); in < end; in += kCodeBlock) {
          // The hardware prefetcher restarts with each row.
          if (in % kLineIns == 0) __builtin_prefetch(row + in * kBits / 8 + block.next, 0, 2);
          expand_block<kKind>(codes, row + in * kBits / 8, block.num_ins - in, scale,
                              weights + i * stride + in);
        }
      }
    }
  }

  template <Kind kKind>
  SPECDEC_LINEAR_INLINE static void expand_block(const WeightCodes& codes, const uint8_t* block,
                                                 int64_t count, const Scale& scale, float* out) {
    if constexpr (kKind == Kind::kNibbles) {
      F::expand_nibbles(block, scale.scale, scale.offset, out);
    } else if constexpr (kKind == Kind::kLevels) {
      F::expand_levels(block, codes.levels, scale.scale, scale.offset, out);
    } else if (count >= kCodeBlock) {
      F::expand_bytes(reinterpret_cast<const int8_t*>(block), scale.scale, scale.offset, out);
    } else {
      int8_t padded[kCodeBlock] = {};
      std::memcpy(padded, block, count);
      F::expand_bytes(padded, scale.scale, scale.offset, out);
    }
  }

  template <Kind kKind>
  SPECDEC_LINEAR_INLINE static Scale read_scale(const WeightCodes& codes, int64_t group) {
    if (codes.has_offsets) {
      const float* pair = static_cast<const float*>(codes.scales) + 2 * group;
      return {pair[0], pair[1]};
    }
    const float scale = codes.scale_type == FloatType::kFloat32
                            ? static_cast<const float*>(codes.scales)[group]
                            : to_float(static_cast<const BFloat16*>(codes.scales)[group]);
    return {scale, kKind == Kind::kNibbles ? -8.0f * scale : 0.0f};
  }
};

}  // namespace specdec::cpu
