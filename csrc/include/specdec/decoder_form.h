// The norms, activation functions and routing of decoder layers. The order is that of Norm and
// Activation in specdec_ext/ops/decoder_layers.py.
#pragma once

#include <cstdint>

namespace specdec {

// With inverse = 1 / sqrt(mean(x^2) + eps), and for kLayer 1 / sqrt(variance(x) + eps).
enum class NormKind {
  kRms,        // x * inverse, rounded, times weight
  kRmsWide,    // x * inverse * weight, rounded once
  kRmsOffset,  // x * inverse * (1 + weight), rounded once
  kLayer,      // (x - mean(x)) * inverse * weight + bias, rounded once
};
constexpr int kNormKinds = 4;

enum class Activation {
  kSilu,      // x / (1 + exp(-x))
  kGelu,      // x (1 + erf(x / sqrt(2))) / 2
  kGeluTanh,  // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
  kGeluNew,   // the same, rounded after every operation
};
constexpr int kActivations = 4;

// A norm of the modules of a model. Without a weight there is no norm.
struct ModuleNorm {
  NormKind kind;
  const void* weight;  // [count]
  const void* bias;    // [count], or null; of kLayer only
  float eps;
};

// How a node chooses among the experts of a layer.
struct ModuleRouting {
  int64_t top_k;       // experts of a node
  bool is_normalised;  // the weights of the chosen experts are divided by their sum
  bool is_wide;        // weights and weighted outputs are float32, not rounded to the type
};

}  // namespace specdec
