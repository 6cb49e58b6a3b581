#include "ops/common/weight_codes.h"

#include <algorithm>

#ifndef SPECDEC_EMULATED

namespace specdec::glue {
namespace {

// The number of inputs of a group: all of them, or the power of two with so many groups.
int64_t find_group_size(const Argument& scales_arg, const Tensor& scales, int64_t ins) {
  const int64_t groups = scales.size(1);
  if (groups == 1) return std::max<int64_t>(ins, 1);
  int64_t size = kCodeBlock;
  while ((ins + size - 1) / size > groups && size < ins) size *= 2;
  if (groups < 1 || (ins + size - 1) / size != groups) {
    fail(scales_arg.prefix() + " must have one group, or one for each 32, 64, 128, ... of " +
         std::to_string(ins) + " inputs, got shape " + describe_shape(scales));
  }
  return size;
}

}  // namespace

const float* read_levels(const char* op, const std::optional<Tensor>& levels) {
  if (!levels) return nullptr;
  const Argument levels_arg(op, "levels", *levels);
  levels_arg.has_dtype(aoti_torch_dtype_float32()).has_shape({16}, "[16]").has_contiguous_rows();
  if (!levels->is_cpu()) fail(levels_arg.prefix() + " must be on the CPU");
  return static_cast<const float*>(levels->const_data_ptr());
}

WeightCodes read_codes(const Argument& weight_arg, const Tensor& weight, const Argument& scales_arg,
                       const Tensor& scales, const float* levels, int64_t outs, int64_t ins) {
  const int32_t dtype = dtype_of(weight), scale_dtype = dtype_of(scales);
  const bool is_8_bit = dtype == aoti_torch_dtype_int8();
  if (!is_8_bit && dtype != aoti_torch_dtype_uint8()) {
    fail(weight_arg.prefix() + " with scales must be torch.int8 (codes of 8 bits) or torch.uint8 " +
         "(packed codes of 4 bits), got " + dtype_name(dtype));
  }
  const int64_t width = is_8_bit ? ins : (ins + kCodeBlock - 1) / kCodeBlock * (kCodeBlock / 2);
  weight_arg.has_shape({outs, width}, is_8_bit ? "[outs, ins]" : "[outs, 16 * ceil(ins / 32)]");
  weight_arg.has_contiguous_rows();
  const bool has_offsets = scales.dim() == 3;
  const bool fits = (scale_dtype == aoti_torch_dtype_float32() ||
                     (scale_dtype == aoti_torch_dtype_bfloat16() && !has_offsets)) &&
                    (scales.dim() == 2 || (has_offsets && scales.size(2) == 2)) &&
                    scales.size(0) == outs && scales.is_contiguous();
  if (!fits) {
    fail(scales_arg.prefix() + " must be contiguous float32 or bfloat16 [" + std::to_string(outs) +
         ", groups], or float32 [" + std::to_string(outs) + ", groups, 2] with offsets, got " +
         dtype_name(scale_dtype) + " of shape " + describe_shape(scales));
  }
  scales_arg.is_on_device_of(weight_arg);
  return {.bits = is_8_bit ? 8 : 4,
          .scales = scales.const_data_ptr(),
          .scale_type = scale_dtype == aoti_torch_dtype_float32() ? FloatType::kFloat32
                                                                  : FloatType::kBFloat16,
          .has_offsets = has_offsets,
          .groups = scales.size(1),
          .group_size = find_group_size(scales_arg, scales, ins),
          .levels = is_8_bit ? nullptr : levels};
}

}  // namespace specdec::glue

#endif
