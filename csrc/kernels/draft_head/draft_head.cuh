// draft_head on CUDA: computes the whole draft, from new elements to the finished tree, in one
// cooperative launch, or in one launch per phase (choose_launches in plan.h). Specification:
// specdec_ext/reference/draft_head.py. Schedule: plan.h. Memory: kernel_params.h.
//
// One block per multiprocessor. The weights of all phases stream through its ring (ring.cuh).
//
//   products      phases/product.cuh: a block computes its tiles of the matrix, for all rows of the
//                 pass
//   other phases  phases/rotate.cuh, attention.cuh, logits.cuh, grow.cuh
//
// Barriers: all blocks meet after each phase, so a phase can read what any block wrote in an
// earlier one. Inside a phase the threads of a block meet at block.sync().
//
// Numerics: products accumulate in float32; norms, rotation, softmax and logits are float32;
// results that go from one product to the next are rounded to the head's type once, as on the CPU.
// Sums are taken in another order than on the CPU. A launch is bitwise repeatable, and a row does
// not depend on the other rows. Only the sum over the vocabulary depends on the number of blocks.
//
// Bytes: all weights once per pass of 32 rows, and the keys and values of the context.
#pragma once

#include <algorithm>
#include <climits>

#include "kernels/draft_head/phases/attention.cuh"
#include "kernels/draft_head/phases/begin.cuh"
#include "kernels/draft_head/phases/grow.cuh"
#include "kernels/draft_head/phases/logits.cuh"
#include "kernels/draft_head/phases/product.cuh"
#include "kernels/draft_head/phases/rotate.cuh"
#include "launch.cuh"
#include "rows.cuh"
#include "specdec/device/device_answer.h"
#include "specdec/math/silu.h"

namespace specdec {

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  T element;
  store_float(&element, value);
  return load_float(&element);
}

// Stores the outputs of a product. All lanes of a warp call it.
template <typename T>
__device__ __forceinline__ void use_outputs(const DraftBlock<T>& block, DraftOp op, int first_out,
                                            int i, const PanelValues& values) {
  const DraftKernelParams& params = block.params;
  if (op == DraftOp::kLogits) return add_logits(block, i, values);
  const PassRow row = block.shared.rows[i];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t out = values.out[half];
    const float value = rounded<T>(values.value[half]);
    if (op == DraftOp::kGateUp) {
      // The same outputs of up are in the next tile, eight lanes on.
      const float up = shuffle_xor(value, kTileOuts);
      if (out >= 0 && block.lane() / kTileOuts % 2 == 0) {
        T* inner = block.row(params.scratch.inner, row.memory, params.intermediate);
        store_float(inner + out, exact_mul(silu(value), up));
      }
      continue;
    }
    if (out < 0) continue;
    if (op == DraftOp::kProjections) {
      T* projected = block.row(params.scratch.projected, row.memory, params.projection_outs());
      store_float(projected + first_out + out, value);
      continue;
    }
    T* residual = block.row(params.scratch.residual, row.memory, params.hidden) + out;
    const bool adds = op != DraftOp::kFc;
    store_float(residual, adds ? exact_add(load_float(residual), value) : value);
  }
}

// The products of all phases of a launch, as the source of the ring.
template <typename T, typename W>
struct DraftProducts {
  DraftCursor cursor;  // the phase whose product comes next
  int num_phases;      // number of phases left

  __device__ __forceinline__ bool next(const DraftBlock<T>& block, MatrixStages& stages) {
    for (; num_phases > 0 && !cursor.is_done(); cursor.next(), --num_phases) {
      if (!is_product(cursor.op())) continue;
      const PhaseProduct product =
          phase_product<T, W>(block, cursor.pass(), cursor.op(), cursor.layer());
      stages = stages_of<T, W>(product.matrix, product.is_paired, block.index(), block.count());
      if (stages.is_done()) continue;
      cursor.next();
      --num_phases;
      return true;
    }
    return false;
  }
};

template <typename T, typename W>
using DraftRing = Ring<T, DraftProducts<T, W>>;

template <typename T, typename W>
__device__ __forceinline__ void run_product(const DraftBlock<T>& block, DraftRing<T, W>& ring,
                                            const DraftPass& pass, DraftOp op, int layer) {
  const PhaseProduct product = phase_product<T, W>(block, pass, op, layer);
  const InputSegments segments = prepare_inputs(block, pass, op, layer);
  if (op == DraftOp::kLogits) begin_logits(block, pass);
  multiply_rows<T, W>(block, ring, product.matrix, product.is_paired, segments, pass.num_rows,
                      [&](int row, const PanelValues& values) {
                        use_outputs(block, op, product.first_out, row, values);
                      });
  if (op == DraftOp::kLogits) finish_logits(block, pass);
}

template <typename T, typename W>
__device__ __forceinline__ void run_phase(const DraftBlock<T>& block, DraftRing<T, W>& ring,
                                          const DraftPass& pass, DraftOp op, int layer) {
  switch (op) {
    case DraftOp::kGather:
      return gather_features(block, pass);
    case DraftOp::kRotate:
      return rotate_heads(block, pass, layer);
    case DraftOp::kAttend:
      return attend(block, pass, layer);
    case DraftOp::kGrow:
      return grow(block, pass);
    default:
      return run_product<T, W>(block, ring, pass, op, layer);
  }
}

// The part of a draft that a launch computes, and the size of its ring.
struct DraftSpan {
  int num_stages;
  bool has_bulk_copies;
  int first_phase;
  int num_phases;  // 1 or INT_MAX
};

template <typename T, typename W>
struct DraftHeadShared {
  DraftShared common;
  typename DraftRing<T, W>::Memory products;
};

template <typename T, typename W>
__global__ void __launch_bounds__(kDraftThreads, 1)
    draft_head_kernel(SPECDEC_GRID_CONSTANT const DraftKernelParams params, DraftSpan span) {
  using Shared = DraftHeadShared<T, W>;
  SPECDEC_SHARED(Shared, shared);
  SPECDEC_DYNAMIC_SHARED(unsigned char, memory);
  const int ring_bytes = span.num_stages * kStageBytes;
  const DraftBlock<T> block{params, shared.common, memory.subspan(0, ring_bytes),
                            memory.subspan(ring_bytes, kReduceBytes).template as<float>(),
                            span.num_stages};
  count_elements(block);
  if (span.first_phase == 0) begin_draft(block);
  const int num_new = block.shared.first_element[params.plan.batch];
  if (num_new == 0) return;  // the trees are their roots alone
  DraftCursor cursor(params.plan, num_new);
  for (int i = 0; i < span.first_phase && !cursor.is_done(); ++i) cursor.next();
  if (cursor.is_done()) return;  // there are fewer elements than the host assumed
  DraftRing<T, W> ring(block, shared.products, span.has_bulk_copies, {cursor, span.num_phases});
  load_pass_rows(block, cursor.pass());
  while (true) {
    run_phase<T, W>(block, ring, cursor.pass(), cursor.op(), cursor.layer());
    cursor.next();
    if (span.num_phases == 1 || cursor.is_done()) return;
    grid_barrier(static_cast<GridBarrier*>(params.sync.barrier));
    if (cursor.begins_pass()) load_pass_rows(block, cursor.pass());
  }
}

// Grids with as much shared memory per block as possible, so that there is one block per
// multiprocessor.
struct DraftGrid {
  int num_stages;
  int64_t shared_bytes;
  int64_t blocks;
};

template <typename T, typename W>
cudaError_t ask_draft_grid(DraftGrid* grid) {
  int64_t limit = 0;
  const cudaError_t error = dynamic_shared_limit(draft_head_kernel<T, W>, &limit);
  if (error != cudaSuccess) return error;
  const int64_t fit = (limit - kReduceBytes) / kStageBytes;
  grid->num_stages = static_cast<int>(std::min<int64_t>(fit, kMaxStages));
  grid->shared_bytes = grid->num_stages * int64_t{kStageBytes} + kReduceBytes;
  if (grid->num_stages < DraftRing<T, W>::kMinStages) return cudaErrorInvalidConfiguration;
  return resident_blocks(draft_head_kernel<T, W>, kDraftThreads, grid->shared_bytes, &grid->blocks);
}

// Computed once per thread and device, because the CUDA runtime takes microseconds to answer.
template <typename T, typename W>
cudaError_t draft_grid(DraftGrid* grid) {
  thread_local DeviceAnswer<DraftGrid> known;
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? known.get(device, ask_draft_grid<T, W>, grid) : error;
}

template <typename T, typename W>
cudaError_t DraftLaunch<T, W>::blocks(int64_t* num_blocks) {
  DraftGrid grid{};
  const cudaError_t error = draft_grid<T, W>(&grid);
  *num_blocks = grid.blocks;
  return error;
}

template <typename T, typename W>
cudaError_t DraftLaunch<T, W>::run(const DraftKernelParams& params, DraftLaunches launches,
                                   cudaStream_t stream) {
  DraftGrid grid{};
  DraftSpan span{};
  cudaError_t error = draft_grid<T, W>(&grid);
  if (error == cudaSuccess) error = has_bulk_copies(&span.has_bulk_copies);
  const bool is_one = launches == DraftLaunches::kOne;
  const int count = is_one ? 1 : most_phases(params.plan, params.num_new);
  span.num_stages = grid.num_stages;
  span.num_phases = is_one ? INT_MAX : 1;
  for (; span.first_phase < count && error == cudaSuccess; ++span.first_phase) {
    error = launch(draft_head_kernel<T, W>,
                   {.grid_x = grid.blocks,
                    .grid_y = 1,
                    .block = kDraftThreads,
                    .stream = stream,
                    .dynamic_shared_bytes = grid.shared_bytes,
                    .cooperative = is_one},
                   params, span);
  }
  return error;
}

}  // namespace specdec
