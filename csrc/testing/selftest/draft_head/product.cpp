// Products of the fused draft_head against sums in double: every type of weights, odd sizes, pairs,
// one and two normed segments, any number of rows and blocks. The bits do not depend on the numbers
// of rows and blocks.
#include "kernels/draft_head/phases/product.cuh"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "testing/selftest/check.h"

namespace specdec {
namespace {

struct Case {
  int ins, outs, num_rows, segments;
  bool is_paired, is_normed;
};

struct Inputs {
  const void* data[2 * kPassRows];
};

// The stages of a matrix, twice: the second time the ring starts in its middle.
struct TwiceStages {
  MatrixStages first;
  int round;

  template <typename T>
  bool next(const DraftBlock<T>&, MatrixStages& stages) {
    if (round == 2 || first.is_done()) return false;
    stages = first;
    ++round;
    return true;
  }
};

template <typename T>
struct ProductShared {
  DraftShared common;
  typename Ring<T, TwiceStages>::Memory ring;
};

template <typename T, typename W>
__global__ void product_kernel(SPECDEC_GRID_CONSTANT const DraftKernelParams params,
                               DraftMatrix matrix, bool is_paired, InputSegments segments,
                               Inputs inputs, int num_rows, int num_stages, bool has_bulk_copies,
                               float* out) {
  using Shared = ProductShared<T>;
  SPECDEC_SHARED(Shared, shared);
  SPECDEC_DYNAMIC_SHARED(unsigned char, memory);
  const int ring_bytes = num_stages * kStageBytes;
  const DraftBlock<T> block{params, shared.common, memory.subspan(0, ring_bytes),
                            memory.subspan(ring_bytes, kReduceBytes).template as<float>(),
                            num_stages};
  for (int at = block.warp(); at < 2 * kPassRows; at += kDraftWarps) {
    if (at / kPassRows >= segments.count || at % kPassRows >= num_rows) continue;
    const float inverse = inverse_root_mean_square<T>(inputs.data[at], segments.width, params.eps);
    if (block.lane() == 0) {
      block.shared.inputs[at] = inputs.data[at];
      block.shared.inverses[at] = inverse;
    }
  }
  const MatrixStages stages = stages_of<T, W>(matrix, is_paired, block.index(), block.count());
  Ring<T, TwiceStages> ring(block, shared.ring, has_bulk_copies, {stages, 0});
  for (int i = 0; i < 2; ++i) {
    multiply_rows<T, W>(block, ring, matrix, is_paired, segments, num_rows,
                        [&](int row, const PanelValues& values) {
                          for (int half = 0; half < 2; ++half) {
                            if (values.out[half] < 0) continue;
                            out[row * matrix.outs + values.out[half]] = values.value[half];
                          }
                        });
  }
}

// Writes the bits of a number near `value` that T can represent to `to`, and returns the number.
template <typename T>
float put(float value, T* to) {
  store_float(to, value);
  return load_float(to);
}
float put(float value, Int8* to) {
  const float whole = std::clamp(std::round(value * 60.0f), -128.0f, 127.0f);
  to->bits = static_cast<uint8_t>(static_cast<int8_t>(whole));
  return whole;
}
float put(float value, Float8* to) {
  const int code = static_cast<int>(std::abs(value) * 60.0f) % 0x7F;  // includes subnormals
  to->bits = static_cast<uint8_t>(code | (value < 0 ? 0x80 : 0));
  const int exponent = code >> 3, fraction = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(fraction / 8.0f, -6)
                                        : std::ldexp(1.0f + fraction / 8.0f, exponent - 7);
  return value < 0 ? -magnitude : magnitude;
}

template <typename T>
struct Factors {
  std::vector<std::vector<T>> rows;  // [segment * kPassRows + row]
  std::vector<T> norms[2], bias;
  std::vector<float> scale;
};

template <typename T, typename W>
void check_product(const Case& c, double tolerance) {
  std::mt19937 random(static_cast<unsigned>(c.ins * 31 + c.outs * 7 + c.num_rows));
  std::normal_distribution<float> normal;
  const int width = c.ins / c.segments;
  const float eps = 1e-5f;
  Factors<T> f;
  std::vector<W> weight(static_cast<size_t>(c.ins) * c.outs);
  std::vector<double> weights(weight.size());
  for (size_t i = 0; i < weight.size(); ++i) weights[i] = put(normal(random), &weight[i]);
  std::vector<std::vector<double>> left(c.num_rows, std::vector<double>(c.ins));
  for (int segment = 0; segment < c.segments; ++segment) {
    f.norms[segment].resize(width);
    for (T& value : f.norms[segment]) put(normal(random), &value);
  }
  f.rows.assign(2 * kPassRows, {});
  Inputs inputs{};
  for (int segment = 0; segment < c.segments; ++segment) {
    for (int row = 0; row < c.num_rows; ++row) {
      std::vector<T>& data = f.rows[segment * kPassRows + row];
      data.resize(width);
      double squares = 0;
      for (T& value : data) squares += std::pow(put(normal(random), &value), 2);
      const double inverse = 1 / std::sqrt(squares / width + eps);
      for (int k = 0; k < width; ++k) {
        double value = load_float(&data[k]);
        if (c.is_normed) {
          T element;
          value =
              put(static_cast<float>(value * inverse * load_float(&f.norms[segment][k])), &element);
        }
        left[row][segment * width + k] = value;
      }
      inputs.data[segment * kPassRows + row] = data.data();
    }
  }
  f.bias.resize(c.outs);
  f.scale.resize(c.outs);
  for (int out = 0; out < c.outs; ++out) {
    put(normal(random), &f.bias[out]);
    f.scale[out] = std::abs(normal(random));
  }
  DraftKernelParams params{};
  params.eps = eps;
  const DraftMatrix matrix{weight.data(), f.scale.data(), f.bias.data(), c.outs, c.ins};
  const InputSegments segments{c.segments,
                               width,
                               {c.is_normed ? f.norms[0].data() : nullptr,
                                c.is_normed && c.segments > 1 ? f.norms[1].data() : nullptr}};
  std::vector<float> first;
  for (const int num_blocks : {1, 3}) {
    for (const bool bulk : {true, false}) {
      std::vector<float> out(static_cast<size_t>(c.num_rows) * c.outs, NAN);
      const int num_stages = Ring<T, TwiceStages>::kMinStages;
      CHECK(launch(product_kernel<T, W>,
                   {.grid_x = num_blocks,
                    .grid_y = 1,
                    .block = kDraftThreads,
                    .stream = nullptr,
                    .dynamic_shared_bytes = num_stages * kStageBytes + kReduceBytes,
                    .cooperative = false},
                   params, matrix, c.is_paired, segments, inputs, c.num_rows, num_stages, bulk,
                   out.data()) == cudaSuccess);
      if (first.empty()) first = out;
      CHECK(out == first);
    }
  }
  for (int row = 0; row < c.num_rows; ++row) {
    for (int out = 0; out < c.outs; ++out) {
      double sum = 0, magnitude = 0;
      for (int k = 0; k < c.ins; ++k) {
        const double product = left[row][k] * weights[static_cast<size_t>(out) * c.ins + k];
        sum += product;
        magnitude += std::abs(product);
      }
      const double expected = sum * f.scale[out] + load_float(&f.bias[out]);
      const double bound = tolerance * (magnitude * f.scale[out] + std::abs(expected) + 1e-3);
      CHECK(std::abs(first[static_cast<size_t>(row) * c.outs + out] - expected) <= bound);
    }
  }
}

}  // namespace

void test_draft_product() {
  // Norms are rounded to 16 bits on both sides, so a tie may go either way: 2^-8 or 2^-11.
  check_product<float, float>({24, 21, 3, 1, false, true}, 1e-6);
  check_product<float, float>({1048, 70, 17, 2, false, true}, 1e-6);
  check_product<float, float>({64, 46, 9, 1, true, false}, 1e-6);
  check_product<__nv_bfloat16, __nv_bfloat16>({2080, 33, 32, 1, false, false}, 1e-6);
  check_product<__nv_bfloat16, __nv_bfloat16>({48, 130, 8, 2, true, true}, 8e-3);
  check_product<__half, __half>({1032, 17, 1, 1, false, true}, 1e-3);
  check_product<__nv_bfloat16, Int8>({2064, 20, 5, 1, false, false}, 1e-6);
  check_product<__half, Int8>({64, 9, 16, 2, false, true}, 1e-3);
  check_product<__nv_bfloat16, Float8>({96, 24, 26, 1, true, true}, 8e-3);
  check_product<__half, Float8>({4112, 8, 2, 1, false, false}, 1e-6);
}

}  // namespace specdec
