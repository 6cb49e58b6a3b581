// Launches the fused draft_head (draft_head.cuh) for the types of a head.
#include "launch.cuh"
#include "specdec/launchers.h"

namespace specdec {
namespace {

// Calls function(DraftLaunch<T, W>{}); returns an error for types without a kernel.
template <typename Function>
cudaError_t with_types(FloatType type, DraftWeightType weights, const Function& function) {
  const auto with_weights = [&](auto element) -> cudaError_t {
    using T = decltype(element);
    if (weights == DraftWeightType::kInt8) return function(DraftLaunch<T, Int8>{});
    if (weights == DraftWeightType::kFloat8) return function(DraftLaunch<T, Float8>{});
    return function(DraftLaunch<T, T>{});
  };
  if (type == FloatType::kBFloat16) return with_weights(__nv_bfloat16{});
  if (type == FloatType::kFloat16) return with_weights(__half{});
  if (weights != DraftWeightType::kSame) return cudaErrorInvalidValue;
  return function(DraftLaunch<float, float>{});
}

}  // namespace

cudaError_t draft_head_blocks(FloatType type, DraftWeightType weights, int64_t* num_blocks) {
  return with_types(type, weights, [&](auto entry) { return entry.blocks(num_blocks); });
}

cudaError_t launch_draft_head(const DraftKernelParams& params, FloatType type,
                              DraftWeightType weights, bool phase_launches, cudaStream_t stream) {
  bool can_cooperate = false;
  const cudaError_t error = has_cooperative_launch(&can_cooperate);
  if (error != cudaSuccess) return error;
  const DraftLaunches launches = choose_launches(can_cooperate, phase_launches);
  return with_types(type, weights, [&](auto entry) { return entry.run(params, launches, stream); });
}

}  // namespace specdec
