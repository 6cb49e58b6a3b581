// The schedule of the fused draft_head (specdec/draft_head/plan.h) for Python: the kernel's
// sequence of phases, for tests and for the time model in profiling/.
#include <array>

#include "arrays.h"
#include "host.h"
#include "specdec/draft_head/plan.h"

namespace specdec::bindings {
namespace {

constexpr std::array<const char*, 10> kOpNames = {"gather", "fc",     "projections", "rotate",
                                                  "attend", "output", "gate_up",     "down",
                                                  "logits", "grow"};
static_assert(kOpNames.size() == static_cast<size_t>(DraftOp::kGrow) + 1);
constexpr std::array<const char*, 3> kPassNames = {"new", "kept", "frontier"};
static_assert(kPassNames.size() == static_cast<size_t>(PassKind::kFrontier) + 1);

int require_in(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    throw std::invalid_argument(std::string(name) + " must be in [" + std::to_string(low) + ", " +
                                std::to_string(high) + "], got " + std::to_string(value));
  }
  return static_cast<int>(value);
}

Object phases(PyObject*, const Arguments& arguments) {
  long long num_layers, num_new, batch = 1;
  PyObject* width_list;
  int gathers = 0, has_fc = 1, feeds_fc = 0, is_parallel = 0;
  arguments.parse(
      "LOL|$Lpppp:draft_phases",
      {"num_layers", "widths", "num_new", "batch", "gathers", "has_fc", "feeds_fc", "is_parallel"},
      &num_layers, &width_list, &num_new, &batch, &gathers, &has_fc, &feeds_fc, &is_parallel);
  const std::vector<int64_t> widths = integers_of(width_list);
  DraftPlan plan{};
  plan.num_layers = require_in("num_layers", num_layers, 1, kMaxDraftLayers);
  plan.gathers = gathers;
  plan.has_fc = has_fc;
  plan.feeds_fc = feeds_fc;
  plan.is_parallel = is_parallel;
  plan.batch = require_in("batch", batch, 1, kMaxDraftBatch);
  plan.depth = require_in("len(widths)", std::ssize(widths), 1, kMaxDraftDepth);
  for (size_t level = 0; level < widths.size(); ++level) {
    plan.widths[level] = static_cast<int16_t>(require_in("widths", widths[level], 1, INT16_MAX));
  }
  Object result(PyList_New(0));
  for (DraftCursor cursor(plan, require_in("num_new", num_new, 1, INT32_MAX)); !cursor.is_done();
       cursor.next()) {
    const DraftPass& pass = cursor.pass();
    const Object phase(Py_BuildValue("sisiii", kPassNames[static_cast<size_t>(pass.kind)],
                                     pass.level, kOpNames[static_cast<size_t>(cursor.op())],
                                     cursor.layer(), pass.first_row, pass.num_rows));
    if (PyList_Append(result.get(), phase.get()) < 0) throw PythonError{};
  }
  return result;
}

Object tiles(PyObject*, const Arguments& arguments) {
  long long outs, num_blocks;
  int is_paired = 0;
  arguments.parse("LL|$p:draft_tiles", {"outs", "num_blocks", "is_paired"}, &outs, &num_blocks,
                  &is_paired);
  require_in("outs", outs, 1, INT32_MAX);
  if (is_paired && outs % 2 != 0) {
    throw std::invalid_argument("outs of a pair must be even, got " + std::to_string(outs));
  }
  const int blocks = require_in("num_blocks", num_blocks, 1, INT16_MAX);
  const TileSchedule schedule{static_cast<int>(outs), is_paired != 0};
  const Array result = Array::make<int64_t>({schedule.first_tile(blocks, blocks), 3});
  int64_t* row = result.data<int64_t>();
  for (int block = 0; block < blocks; ++block) {
    const int end = schedule.first_tile(block + 1, blocks);
    for (int tile = schedule.first_tile(block, blocks); tile < end; ++tile, row += 3) {
      row[0] = block;
      row[1] = schedule.first_out(tile);
      row[2] = schedule.num_outs(tile);
    }
  }
  return result.object();
}

constexpr const char* kPhasesDoc =
    R"(draft_phases(num_layers, widths, num_new, *, batch=1, gathers=False, has_fc=True, feeds_fc=False, is_parallel=False)
--

The phases of a fused draft, in the order in which its kernel runs them.

Args:
    num_layers: number of layers of the head.
    widths: number of nodes of a row that are expanded for each level below the root: [1, 1, 1] for a
        chain of three, [1, 8, 8] for a dynamic tree of three levels with top_k = 8.
    num_new: number of new elements of all rows, at least 1, with a parallel head's mask elements.
    batch: number of rows.
    gathers, has_fc, feeds_fc, is_parallel: as in DraftPlan.

Returns:
    Tuples (pass, level, op, layer, first_row, num_rows). pass is "new", "kept" or "frontier"; level is
    the depth of a frontier's nodes; rows are counted over the passes of a kind.

Raises:
    ValueError: if a number is out of range.)";

constexpr const char* kTilesDoc = R"(draft_tiles(outs, num_blocks, *, is_paired=False)
--

The rows of a weight matrix that each block of a fused draft streams.

Args:
    outs: number of rows of the matrix.
    num_blocks: number of blocks of the launch.
    is_paired: the matrix has gate and up, whose tiles alternate.

Returns:
    int64 [tiles, 3]: (block, first row, number of rows) of every tile. The tiles of a block are in the
    order in which it streams them.

Raises:
    ValueError: if a number is out of range, or if a paired matrix has an odd number of rows.)";

}  // namespace

void define_draft_schedule(PyObject* module) {
  static PyMethodDef functions[] = {
      method<phases>("draft_phases", kPhasesDoc), method<tiles>("draft_tiles", kTilesDoc), {}};
  if (PyModule_AddFunctions(module, functions) < 0) throw PythonError{};
  for (const auto& [name, value] : {std::pair{"DRAFT_PASS_ROWS", kPassRows},
                                    {"DRAFT_TILE_OUTS", kTileOuts},
                                    {"DRAFT_PANEL_TILES", kPanelTiles},
                                    {"DRAFT_SLICE_BYTES", kSliceBytes},
                                    {"DRAFT_UNIT_BYTES", kUnitBytes}}) {
    if (PyModule_AddIntConstant(module, name, value) < 0) throw PythonError{};
  }
}

}  // namespace specdec::bindings
