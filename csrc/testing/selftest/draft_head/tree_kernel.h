// The kernel of tree_phases.cpp: a fused draft_head without layers. The logits of a node are one of
// a few tables.
#pragma once

#include <algorithm>

#include "kernels/draft_head/phases/begin.cuh"
#include "kernels/draft_head/phases/grow.cuh"

namespace specdec::draft_test {

// Replaces the layers.
struct Model {
  const float* tables;  // [num_tables, draft_vocab] logits, not scaled
  int num_tables;
  int draft_vocab;
  DraftNode* nodes;     // [depth, batch, frontier_width] what each level expanded
  uint64_t* ancestors;  // [depth, batch, frontier_width, words]

  // The table of a node's children. In a parallel head all nodes of a level have the root's.
  const float* logits(int64_t row, int64_t level, int64_t token, int64_t candidate) const {
    const int64_t hash = row * 7 + level * 13 + token * 3 + (candidate + 1) * 5;
    return tables + hash % num_tables * draft_vocab;
  }
};

// The rows of a pass of lists, as far as these phases read them.
template <typename T>
void load_rows(const DraftBlock<T>& block, const DraftPass& pass) {
  const DraftPlan& plan = block.params.plan;
  const int width = pass.kind == PassKind::kKept ? plan.kept_width() : plan.widths[pass.level];
  if (static_cast<int>(threadIdx.x) < pass.num_rows) {
    const int list = pass.first_row + static_cast<int>(threadIdx.x);
    PassRow row{};
    row.batch_row = list / width;
    row.place = list % width;
    row.list = row.memory = list;
    block.shared.rows[threadIdx.x] = row;
  }
  for (int row = block.warp(); row < pass.num_rows; row += kDraftWarps) {
    const void* residual =
        block.row(block.params.scratch.residual, pass.first_row + row, block.params.hidden);
    const float inverse =
        inverse_root_mean_square<T>(residual, block.params.hidden, block.params.eps);
    if (block.lane() == 0) block.shared.inverses[row] = inverse;
  }
  block.sync();
}

template <typename T>
const float* logits_of(const DraftBlock<T>& block, const DraftPass& pass, int row,
                       const Model& model) {
  const PassRow element = block.shared.rows[row];
  const int64_t root = block.params.roots[element.batch_row];
  if (pass.kind == PassKind::kKept) {
    return model.logits(element.batch_row, element.place, root, kRootParent);
  }
  const int first = block.shared.first_element[element.batch_row];
  if (block.shared.first_element[element.batch_row + 1] == first) return model.tables;
  const DraftTreeRow tree(block.params, element.batch_row);
  const DraftNode node = tree.nodes(pass.level)[element.place];
  if (!node.is_alive) return model.tables;
  return model.logits(element.batch_row, pass.level, node.token, node.candidate);
}

// Feeds the panels of the product with lm_head.
template <typename T>
void run_logits(const DraftBlock<T>& block, const DraftPass& pass, const Model& model) {
  const TileSchedule schedule{model.draft_vocab, false};
  const int64_t end = schedule.first_tile(block.index() + 1, block.count());
  begin_logits(block, pass);
  for (int64_t first = schedule.first_tile(block.index(), block.count()); first < end;
       first += kPanelTiles) {
    for (int row = block.warp(); row < pass.num_rows; row += kDraftWarps) {
      const float* logits = logits_of(block, pass, row, model);
      PanelValues values;
      for (int i = 0; i < 2; ++i) {
        const int64_t tile = first + i * 4 + block.lane() / 8;
        const bool exists = tile < end && block.lane() % 8 < schedule.num_outs(tile);
        values.out[i] = exists ? schedule.first_out(tile) + block.lane() % 8 : -1;
        values.value[i] = exists ? logits[values.out[i]] : 1e30f;
      }
      add_logits(block, row, values);
    }
  }
  finish_logits(block, pass);
}

// Stores the nodes that this level expands, for the comparison.
template <typename T>
void record(const DraftBlock<T>& block, int level, const Model& model) {
  const DraftKernelParams& params = block.params;
  const int64_t width = params.plan.frontier_width(), words = params.words;
  for (int64_t row = 0; row < params.plan.batch; ++row) {
    const DraftTreeRow tree(params, row);
    const int64_t at = (level * params.plan.batch + row) * width;
    std::copy_n(tree.nodes(level), width, model.nodes + at);
    std::copy_n(tree.ancestors(level), width * words, model.ancestors + at * words);
  }
}

template <typename T>
__global__ void __launch_bounds__(kDraftThreads, 1)
    draft_trees(DraftKernelParams params, Model model) {
  SPECDEC_SHARED(DraftShared, shared);
  SPECDEC_DYNAMIC_SHARED(float, reduce);
  const DraftBlock<T> block{params, shared, reduce.template as<unsigned char>(), reduce, 0};
  count_elements(block);
  begin_draft(block);
  const int num_new = shared.first_element[params.plan.batch];
  if (num_new == 0) return;
  for (DraftCursor cursor(params.plan, num_new); !cursor.is_done(); cursor.next()) {
    const DraftPass pass = cursor.pass();
    if (cursor.op() != DraftOp::kLogits && cursor.op() != DraftOp::kGrow) continue;
    if (block.warp() < kDraftWarps) {
      if (cursor.op() == DraftOp::kGrow) {
        grow(block, pass);
      } else {
        load_rows(block, pass);
        run_logits(block, pass, model);
      }
    }
    grid_barrier(static_cast<GridBarrier*>(params.sync.barrier));
    const bool has_frontier = !params.plan.is_parallel && pass.level + 1 < params.plan.depth;
    if (cursor.op() == DraftOp::kGrow && has_frontier && block.index() == 0 && threadIdx.x == 0) {
      record(block, pass.level + 1, model);
    }
  }
}

}  // namespace specdec::draft_test
