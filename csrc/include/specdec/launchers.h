// The CUDA entry points: each takes params with raw pointers and a stream, and returns a
// cudaError_t.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "specdec/adjust_logits.h"
#include "specdec/couple_logits.h"
#include "specdec/draft_head/kernel_params.h"
#include "specdec/kv_compact.h"
#include "specdec/round_commit.h"
#include "specdec/sample_filter.h"
#include "specdec/tree/build_dynamic_tree.h"
#include "specdec/tree/merge_trees.h"
#include "specdec/tree/ngram_draft.h"
#include "specdec/tree/tree_mask.h"
#include "specdec/tree_attention.h"
#include "specdec/verify_match.h"
#include "specdec/verify_sampled.h"

namespace specdec {

cudaError_t launch_build_dynamic_tree(const BuildDynamicTreeParams& params, cudaStream_t stream);

cudaError_t launch_merge_trees(const MergeTreesParams& params, cudaStream_t stream);

cudaError_t launch_ngram_draft(const NgramDraftParams& params, cudaStream_t stream);

cudaError_t launch_tree_mask(const TreeMaskParams& params, cudaStream_t stream);

// counters: [batch], zero before and after the launch. Launches that may run at the same time need
// separate counters.
cudaError_t launch_verify_match(const VerifyMatchParams& params, uint32_t* counters,
                                void* workspace, cudaStream_t stream);

cudaError_t launch_verify_sampled(const VerifySampledParams& params, void* workspace,
                                  cudaStream_t stream);

cudaError_t launch_sample_filter(const SampleFilterParams& params, void* workspace,
                                 cudaStream_t stream);

cudaError_t launch_adjust_logits(const AdjustLogitsParams& params, cudaStream_t stream);

cudaError_t launch_couple_logits(const CoupleLogitsParams& params, cudaStream_t stream);

// One launch takes the keys and values of 128 layers, with up to eight different layouts; more are
// divided over several launches. Everything that a launch reads from the host is in its parameters,
// so a CUDA graph can repeat it.
constexpr int64_t kMaxCachesPerLaunch = 256;
constexpr int64_t kMaxLayoutsPerLaunch = 8;
cudaError_t launch_kv_compact(std::span<const CacheTensor> caches, const KvMoves& moves,
                              cudaStream_t stream);

// The same limits; the last launch has the features and changes the state of the rows.
cudaError_t launch_round_commit(std::span<const CacheTensor> caches,
                                std::span<const FeatureTensor> features,
                                const RoundCommitParams& params, cudaStream_t stream);

// The number of blocks of the fused draft_head on this device, which its scratch memory depends on.
cudaError_t draft_head_blocks(FloatType type, DraftWeightType weights, int64_t* num_blocks);
// A float32 head has float32 weights only. params.sync must not be used by two calls at the same
// time. phase_launches makes every phase a launch of its own, for profilers.
cudaError_t launch_draft_head(const DraftKernelParams& params, FloatType type,
                              DraftWeightType weights, bool phase_launches, cudaStream_t stream);

cudaError_t launch_tree_attention(const TreeAttentionParams& params, void* workspace,
                                  cudaStream_t stream);

}  // namespace specdec
