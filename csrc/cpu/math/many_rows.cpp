// Products of many input rows: passes of up to 512 rows. A pass packs its inputs, then runs one
// parallel loop over groups of output columns, in which each thread transposes the weights that it
// multiplies (many_rows_kernel.h), block by block.
#include "many_rows.h"

#include <vector>

#include "products.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kPackGrain = 1 << 15;  // elements; below it, waking a thread does not pay

int64_t num_groups(const LinearParams& params) {
  return (params.out_features + kManyOuts - 1) / kManyOuts;
}

// Computes groups [begin, end) of all products, numbered through the products.
void run_groups(const Products& code, const ManyRowsPass& pass,
                std::span<const LinearParams> products, int64_t begin, int64_t end) {
  int64_t first = 0;
  for (const LinearParams& params : products) {
    const int64_t last = first + num_groups(params);
    const int64_t from = std::max(begin, first), to = std::min(end, last);
    if (from < to) {
      code.many_rows({params, pass.first_row, pass.rows, pass.inputs}, (from - first) * kManyOuts,
                     std::min((to - first) * kManyOuts, params.out_features));
    }
    first = last;
  }
}

}  // namespace

void many_rows_linears(std::span<const LinearParams> products, const ParallelFor& parallel_for) {
  thread_local std::vector<float> packed;
  const LinearParams& params = products[0];
  const Products code = cpu::products(params.type);
  int64_t groups = 0;
  for (const LinearParams& each : products) groups += num_groups(each);
  for (int64_t row = 0; row < params.rows; row += kManyPassRows) {
    const int64_t rows = std::min(kManyPassRows, params.rows - row);
    const size_t size = code.packed_size(rows, params.in_features);
    if (packed.size() < size) packed.resize(size);
    float* inputs = packed.data();
    parallel_for(rows, kPackGrain / (params.in_features + 1) + 1, [&](int64_t begin, int64_t end) {
      code.pack_inputs(params, row, rows, begin, end, inputs);
    });
    const ManyRowsPass pass{params, row, rows, inputs};
    parallel_for(groups, product_grain(kManyOuts, params.in_features, rows),
                 [&](int64_t begin, int64_t end) { run_groups(code, pass, products, begin, end); });
  }
}

}  // namespace specdec::cpu
