// Products of many input rows, of transposed weights, and on matrix units: passes of up to 512 rows.
// A pass packs its inputs, then runs one parallel loop over groups of output columns
// (many_rows_kernel.h, matrix_units_kernel.h).
#include "many_rows.h"

#include <vector>

namespace specdec::cpu {
namespace {

constexpr int64_t kPackGrain = 1 << 12;  // elements; below it, waking a thread does not pay

}  // namespace

void many_rows_linears(const PassProducts& code, std::span<const LinearParams> products,
                       const ParallelFor& parallel_for) {
  thread_local std::vector<float> packed;
  const LinearParams& params = products[0];
  const int64_t groups = num_parts(products, kManyOuts);
  for (int64_t row = 0; row < params.rows; row += kManyPassRows) {
    const int64_t rows = std::min(kManyPassRows, params.rows - row);
    const size_t size = code.packed_size(params, rows);
    if (packed.size() < size) packed.resize(size);
    float* inputs = packed.data();
    const int64_t blocks = (rows + code.packed_rows - 1) / code.packed_rows;
    const int64_t block_work = code.packed_rows * params.in_features + 1;
    parallel_for(blocks, kPackGrain / block_work + 1, [&](int64_t begin, int64_t end) {
      code.pack_inputs(params, row, rows, begin * code.packed_rows,
                       std::min(rows, end * code.packed_rows), inputs);
    });
    parallel_for(groups, product_grain(kManyOuts, params.in_features, rows),
                 [&](int64_t begin, int64_t end) {
                   for_each_part(products, kManyOuts, begin, end,
                                 [&](const LinearParams& each, int64_t first, int64_t last) {
                                   code.run({each, row, rows, inputs}, first, last);
                                 });
                 });
  }
}

}  // namespace specdec::cpu
