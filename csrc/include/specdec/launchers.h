// The CUDA entry points: raw pointers in the params, a stream in, cudaError_t out.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "build_dynamic_tree.h"
#include "kv_compact.h"
#include "sample_filter.h"
#include "specdec/draft_head/kernel_params.h"
#include "tree_attention.h"
#include "tree_mask.h"
#include "verify_match.h"
#include "verify_sampled.h"

namespace specdec {

cudaError_t launch_build_dynamic_tree(const BuildDynamicTreeParams& params, cudaStream_t stream);

cudaError_t launch_tree_mask(const TreeMaskParams& params, cudaStream_t stream);

// counters: [batch], zero before and after; launches that may run at the same time need their own.
cudaError_t launch_verify_match(const VerifyMatchParams& params, uint32_t* counters,
                                void* workspace, cudaStream_t stream);

cudaError_t launch_verify_sampled(const VerifySampledParams& params, void* workspace,
                                  cudaStream_t stream);

cudaError_t launch_sample_filter(const SampleFilterParams& params, cudaStream_t stream);

// One launch per kMaxCachesPerLaunch tensors: keys and values of 256 layers.
constexpr int64_t kMaxCachesPerLaunch = 512;
cudaError_t launch_kv_compact(std::span<const CacheTensor> caches, const KvMoves& moves,
                              cudaStream_t stream);

// Blocks of the fused draft_head on this device; scratch memory depends on them.
cudaError_t draft_head_blocks(FloatType type, DraftWeightType weights, int64_t* num_blocks);
// float32 has weights of its own type only. One call at a time may use params.sync. phase_launches
// asks for a launch of each phase, as profilers like it.
cudaError_t launch_draft_head(const DraftKernelParams& params, FloatType type,
                              DraftWeightType weights, bool phase_launches, cudaStream_t stream);

cudaError_t launch_tree_attention(const TreeAttentionParams& params, void* workspace,
                                  cudaStream_t stream);

}  // namespace specdec
