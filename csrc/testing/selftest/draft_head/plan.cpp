// The schedule of the fused draft_head against sequences written by hand, and its tiles.
#include "specdec/draft_head/plan.h"

#include <algorithm>
#include <string>
#include <vector>

#include "testing/selftest/check.h"

namespace specdec {
namespace {

// One word per phase; a pass begins with its kind and level, its first row and its number of rows,
// as in "new0:32+4". Layers after the first end in a quote mark.
std::string walk(const DraftPlan& plan, int num_new) {
  const char* ops[] = {"gather", "fc",      "projections", "rotate", "attend",
                       "output", "gate_up", "down",        "logits", "grow"};
  const char* kinds[] = {"new", "kept", "frontier"};
  std::string text;
  for (DraftCursor cursor(plan, num_new); !cursor.is_done(); cursor.next()) {
    const DraftPass& pass = cursor.pass();
    if (cursor.begins_pass()) {
      if (!text.empty()) text += "| ";
      text += kinds[static_cast<int>(pass.kind)] + std::to_string(pass.level) + ":" +
              std::to_string(pass.first_row) + "+" + std::to_string(pass.num_rows) + " ";
    }
    text += ops[static_cast<int>(cursor.op())] + std::string(cursor.layer(), '\'') + " ";
  }
  return text;
}

DraftPlan plan_of(int num_layers, int batch, const std::vector<int16_t>& widths) {
  DraftPlan plan{};
  plan.num_layers = num_layers;
  plan.has_fc = true;
  plan.batch = batch;
  plan.depth = static_cast<int>(widths.size());
  for (int level = 0; level < plan.depth; ++level) plan.widths[level] = widths[level];
  return plan;
}

void test_one_layer() {
  DraftPlan plan = plan_of(1, 1, {1, 1});
  CHECK(walk(plan, 3) ==
        "new0:0+3 fc projections rotate "
        "| kept0:0+1 attend output gate_up down logits grow "
        "| frontier1:0+1 projections rotate attend output gate_up down logits grow ");
  CHECK(plan.max_width() == 1);
  // EAGLE-1 also feeds drafted nodes through fc.
  plan.feeds_fc = true;
  CHECK(walk(plan, 3) ==
        "new0:0+3 fc projections rotate "
        "| kept0:0+1 attend output gate_up down logits grow "
        "| frontier1:0+1 fc projections rotate attend output gate_up down logits grow ");
  // Features with and without norm.
  plan = plan_of(1, 1, {1});
  plan.gathers = true;
  CHECK(
      walk(plan, 1) ==
      "new0:0+1 gather fc projections rotate | kept0:0+1 attend output gate_up down logits grow ");
  plan.gathers = plan.has_fc = false;
  CHECK(walk(plan, 1) ==
        "new0:0+1 projections rotate | kept0:0+1 attend output gate_up down logits grow ");
}

// 20 new elements fit into a pass, 36 need two; 48 nodes of a level need two more; grow follows the
// last pass of a level.
void test_passes() {
  const DraftPlan plan = plan_of(1, 6, {1, 8});
  const std::string drafting =
      "| kept0:0+6 attend output gate_up down logits grow "
      "| frontier1:0+32 projections rotate attend output gate_up down logits "
      "| frontier1:32+16 projections rotate attend output gate_up down logits grow ";
  CHECK(walk(plan, 20) == "new0:0+20 fc projections rotate " + drafting);
  CHECK(walk(plan, 32) == "new0:0+32 fc projections rotate " + drafting);
  CHECK(walk(plan, 36) ==
        "new0:0+32 fc projections rotate | new0:32+4 fc projections rotate " + drafting);
  CHECK(plan.max_width() == 8);
}

// New elements need all of the first layer, but only keys and values of the second.
void test_two_layers() {
  CHECK(walk(plan_of(2, 1, {1, 1}), 2) ==
        "new0:0+2 fc projections rotate attend output gate_up down projections' rotate' "
        "| kept0:0+1 attend' output' gate_up' down' logits grow "
        "| frontier1:0+1 projections rotate attend output gate_up down "
        "projections' rotate' attend' output' gate_up' down' logits grow ");
}

// Last elements and mask elements give all levels: no frontier, 36 lists, one grow.
void test_parallel() {
  DraftPlan plan = plan_of(1, 12, {1, 1, 1});
  plan.is_parallel = true;
  CHECK(plan.kept_width() == 3 && plan.max_width() == 3);
  CHECK(walk(plan, 30) ==
        "new0:0+30 fc projections rotate "
        "| kept0:0+32 attend output gate_up down logits "
        "| kept0:32+4 attend output gate_up down logits grow ");
}

// Every row of a matrix is in one tile of one block, neighbouring tiles go to the same or
// neighbouring blocks, and blocks differ by at most one tile, or one pair.
void check_tiles(int64_t outs, bool is_paired, int num_blocks) {
  const TileSchedule schedule{static_cast<int>(outs), is_paired};
  const int64_t unit = is_paired ? 2 : 1;
  std::vector<int> seen(outs);
  int64_t fewest = outs, most = 0, expected = 0;
  CHECK(schedule.first_tile(0, num_blocks) == 0);
  for (int block = 0; block < num_blocks; ++block) {
    const int64_t first = schedule.first_tile(block, num_blocks);
    const int64_t end = schedule.first_tile(block + 1, num_blocks);
    CHECK(first == expected && (end - first) % unit == 0);
    expected = end;
    fewest = std::min(fewest, end - first);
    most = std::max(most, end - first);
    for (int64_t tile = first; tile < end; ++tile) {
      const int num_outs = schedule.num_outs(tile);
      CHECK(num_outs >= 1 && num_outs <= kTileOuts);
      for (int out = 0; out < num_outs; ++out) ++seen.at(schedule.first_out(tile) + out);
      if (is_paired && tile % 2 == 1) {
        CHECK(schedule.first_out(tile) == schedule.first_out(tile - 1) + outs / 2);
        CHECK(num_outs == schedule.num_outs(tile - 1));
      }
    }
  }
  CHECK(expected == tiles_of(outs / unit) * unit);
  CHECK(most - fewest <= unit);
  for (const int count : seen) CHECK(count == 1);
}

void test_tiles() {
  for (int num_blocks : {1, 2, 3, 4, 5, 6, 7, 132}) {
    for (int64_t outs : {1, 7, 8, 9, 77, 1000, 1201, 6144}) {
      check_tiles(outs, false, num_blocks);
      check_tiles(2 * outs, true, num_blocks);
    }
  }
}

// A GPU that can't keep all blocks resident, and a caller who asks for it, get one launch per
// phase: at least as many as there are phases with the most elements, and no phase twice.
void test_launches() {
  CHECK(choose_launches(true, false) == DraftLaunches::kOne);
  CHECK(choose_launches(true, true) == DraftLaunches::kOnePerPhase);
  CHECK(choose_launches(false, false) == DraftLaunches::kOnePerPhase);
  DraftPlan plan{};
  plan.num_layers = 1;
  plan.has_fc = true;
  plan.batch = 3;
  plan.depth = 2;
  plan.widths[0] = plan.widths[1] = 1;
  // fc, projections, rotate | attend to grow: 6 | level 1: 8; 11 elements each are a second pass.
  CHECK(most_phases(plan, 10) == 3 + 6 + 8);
  CHECK(most_phases(plan, 11) == 2 * 3 + 6 + 8);
}

}  // namespace

void test_draft_plan() {
  test_launches();
  test_one_layer();
  test_passes();
  test_two_layers();
  test_parallel();
  test_tiles();
}

}  // namespace specdec
