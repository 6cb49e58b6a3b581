// linear: input @ weight.T + bias. The bits of a row of the result do not depend on the other rows.
// (A matrix library chooses the order of summation by the number of rows, so a token's logits would
// depend on how many tokens are scored together.)
//
// Each output element is summed in float32 with fused multiply-add in a fixed order. For few input
// rows, 16 lanes sum:
//
//   float32:  lane l takes the elements l, l + 16, l + 32, ... of in_features
//   bfloat16: lane l takes 2l + 1, 2l, 2l + 33, 2l + 32, 2l + 65, ... (pairs, as vdpbf16ps does)
//
// in_features is padded with zeros to a whole number of lanes. At the end lane l + 8 is added to
// lane l, the 8 sums to each other at distance 4, then 2, then 1. For many rows, a sum of its own
// takes each block of 256 elements, and the sums of blocks are added one after the other:
//
//   float32:  elements 0, 1, 2, 3, ...
//   bfloat16: elements 1, 0, 3, 2, ... (in_features is padded with a zero to pairs)
//
// In both, the bias is added to the sum, which is rounded once.
//
// On matrix units (specdec/cpu/isa.h), all rows of bfloat16 have one order. For each 32 elements, one
// sum takes 0, 2, 4, ..., another one 1, 3, 5, ..., both from zero on. Their sum is added to the sum
// of the elements before (in_features is padded with zeros). Numbers and sums that are subnormal are
// zero. So does AMX's tdpbf16ps.
//
// Instead of weights, a matrix may have codes of 8 or 4 bits. The weight of a code is the float32
// code * scale + offset, rounded once; the inputs become float32, and the order is that of float32.
// For many rows of bfloat16, the weight is rounded to bfloat16 instead, and the order is that of
// bfloat16.
//
// But for few rows of bfloat16 inputs, codes are multiplied as integers, unless they stand for
// levels. 64 inputs share an exponent: e is the least number from -111 on for which all of their
// magnitudes are below 2^e, and input x becomes the integer nearest to x * 2^(15 - e), ties to even.
// So an input of at least 2^(e - 8) is exact, and every other one off by at most 2^(e - 16). For
// each 64 inputs, one after the other, the 16 lanes add
//
//   float32(sum of code * integer) * (scale * 2^(e - 15)), then, if there are offsets,
//   float32(sum of integers) * (offset * 2^(e - 15))
//
// with fused multiply-add. The sums of integers are exact; codes of 4 bits without offsets are -8 to
// 7 in them. Lane 8 * (i / 64 % 2) + 4 * (i / 32 % 2) + i % 16 / 4 takes input i. If an input is not
// finite, all outputs of its row are NaN. On matrix units, there is one sum instead of lanes if each 64
// inputs share scales, and integers have one bit less: 14 takes the place of 15, 7 that of 8.
//
// A transposed matrix stores its columns, the weights of an input, one after the other. Its weights
// and inputs become float32, and the order is always that of float32 for many rows, in which each
// column is read once and as it is.
#pragma once

#include <span>

#include "specdec/core/float_types.h"
#include "specdec/core/parallel.h"

namespace specdec {

// What the codes of a matrix stand for. Codes of 8 bits are int8 [outs, ins]. Codes of 4 bits are
// unsigned, in blocks of kCodeBlock inputs: byte l of a block has input l in its low half and input
// 16 + l in its high half. Each group of inputs of an output has a scale.
struct WeightCodes {
  int bits;              // 8 or 4; 0: the matrix has weights
  const void* scales;    // [outs, groups] contiguous
  FloatType scale_type;  // float32 or bfloat16
  bool has_offsets;      // scales is [outs, groups, 2]: a scale and an offset
  int64_t groups;
  int64_t group_size;   // inputs; a multiple of kCodeBlock if there are several groups
  const float* levels;  // [16] the numbers that codes of 4 bits stand for. Null: 0 to 15, or
                        // -8 to 7 without offsets
};

constexpr int64_t kCodeBlock = 32;

struct LinearParams {
  FloatType type;  // float32 or bfloat16, of input, weight, bias and output
  // [rows, in_features], last dimension contiguous. Row r starts at element
  // r / inner_rows * outer_stride + r % inner_rows * inner_stride.
  const void* input;
  int64_t inner_rows;
  int64_t outer_stride;
  int64_t inner_stride;
  // [out_features, in_features], or transposed [in_features, out_features]; last dimension contiguous
  const void* weight;
  int64_t weight_stride;  // elements; bytes for codes
  bool is_transposed;     // never codes
  WeightCodes codes;
  const void* bias;  // [out_features] contiguous, or null
  int64_t rows;
  int64_t in_features;
  int64_t out_features;

  void* output;  // [rows, out_features], last dimension contiguous
  int64_t output_stride;
  // Which order: for many rows, the fastest from about 32 rows on, or for few.
  bool many_rows;
};

namespace cpu {
void linear(const LinearParams& params, const ParallelFor& parallel_for);
// Several weights with the same input, of which all products have the same description but for
// the kind of weights: one parallel loop for each run of products with the same kind.
void linears(std::span<const LinearParams> products, const ParallelFor& parallel_for);
}  // namespace cpu

}  // namespace specdec
