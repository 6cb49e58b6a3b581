// Glue of linear: checks, output. The op exists for CPU tensors only.
#include "specdec/linear.h"

#include <optional>
#include <string>
#include <vector>

#include "ops/common/glue.h"
#include "ops/common/register.h"
#include "ops/common/weight_codes.h"
#include "specdec/cpu/isa.h"

#ifndef SPECDEC_EMULATED  // there is no kernel to emulate

namespace specdec::glue {
namespace {

constexpr const char* kOp = "linear";

// Merges the dimensions before the last into rows with at most two strides.
void describe_rows(const Argument& argument, const Tensor& input, LinearParams& params) {
  int64_t outer_rows = 1;
  params.inner_rows = 1;
  for (int64_t dim = input.dim() - 2; dim >= 0; --dim) {
    const int64_t size = input.size(dim), stride = input.stride(dim);
    if (size == 1) continue;
    if (params.inner_rows == 1) {
      params.inner_rows = size;
      params.inner_stride = stride;
    } else if (outer_rows == 1 && stride == params.inner_rows * params.inner_stride) {
      params.inner_rows *= size;
    } else if (outer_rows == 1) {
      outer_rows = size;
      params.outer_stride = stride;
    } else if (stride == outer_rows * params.outer_stride) {
      outer_rows *= size;
    } else {
      fail(argument.prefix() + " of shape " + describe_shape(input) +
           " has rows at three or more independent strides; call .contiguous() on it");
    }
  }
  params.rows = outer_rows * params.inner_rows;
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
              bool many_rows, const std::optional<Tensor>& scales,
              const std::optional<Tensor>& levels) {
  const Argument input_arg(kOp, "input", input), weight_arg(kOp, "weight", weight);
  if (!input.is_cpu()) {
    fail(input_arg.prefix() + " must be on the CPU; elsewhere use torch.nn.functional.linear");
  }
  LinearParams params{};
  params.type = check_float_type(input_arg, input, /*takes_float16=*/false);
  if (input.dim() < 1) fail(input_arg.prefix() + " must be [..., in_features], got shape []");
  input_arg.has_contiguous_rows();
  params.in_features = input.size(input.dim() - 1);
  weight_arg.has_dim(2, "[out_features, in_features]").is_on_device_of(input_arg);
  params.out_features = weight.size(0);
  if (scales) {
    params.codes = read_codes(weight_arg, weight, Argument(kOp, "scales", *scales), *scales,
                              read_levels(kOp, levels), params.out_features, params.in_features);
  } else {
    weight_arg.has_dtype(dtype_of(input));
    // A weight that is contiguous in both dimensions counts as one of rows.
    params.is_transposed = weight.stride(1) != 1 && weight.stride(0) == 1 && params.in_features > 1;
    if (!params.is_transposed) weight_arg.has_contiguous_rows();
    weight_arg.has_shape({params.out_features, params.in_features}, "[out_features, in_features]");
  }
  if (bias) {
    const Argument bias_arg(kOp, "bias", *bias);
    bias_arg.has_dtype(dtype_of(input)).has_shape({params.out_features}, "[out_features]");
    bias_arg.is_on_device_of(input_arg).has_contiguous_rows();
    params.bias = bias->const_data_ptr();
  }
  const auto sizes = input.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = params.out_features;
  const Tensor output = empty(input, shape, dtype_of(input));
  if (output.numel() > 0) {
    describe_rows(input_arg, input, params);
    params.input = input.const_data_ptr();
    params.weight = weight.const_data_ptr();
    params.weight_stride = weight.stride(params.is_transposed ? 1 : 0);
    params.output = output.mutable_data_ptr();
    params.output_stride = params.out_features;
    params.many_rows = many_rows;
    cpu::linear(params, kTorchParallelFor);
  }
  return output;
}

std::string cpu_instructions() {
  switch (cpu::matrix_units()) {
    case cpu::MatrixUnits::kAmx:
      return "amx";
    case cpu::MatrixUnits::kEmulated:
      return "amx-emulated";
    case cpu::MatrixUnits::kNone:
      break;
  }
  return cpu::cpu_isa_name(cpu::cpu_isa());
}

}  // namespace

SPECDEC_REGISTER(linear)
SPECDEC_REGISTER_WITHOUT_TENSORS(cpu_instructions)

}  // namespace specdec::glue

#endif
