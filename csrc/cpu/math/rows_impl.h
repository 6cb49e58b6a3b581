// The loops of rows.h for one instruction set. rows.cpp includes this file once for each, and
// defines SPECDEC_ROWS_ISA, a namespace, and SPECDEC_ROWS_TARGET, a target attribute or nothing.
// The loops are plain, for compilers to vectorise.

namespace specdec::cpu::SPECDEC_ROWS_ISA {
namespace {

// Combines all lanes into lane 0, by halves.
template <typename Combine>
SPECDEC_HOST_DEVICE float combine_lanes(float* lanes, const Combine& combine) {
  _Pragma("GCC unroll 8") for (int64_t distance = kRowLanes / 2; distance > 0; distance /= 2) {
    for (int64_t lane = 0; lane < distance; ++lane) {
      lanes[lane] = combine(lanes[lane], lanes[lane + distance]);
    }
  }
  return lanes[0];
}

SPECDEC_HOST_DEVICE float larger(float a, float b) { return a > b ? a : b; }

// 1 / sqrt(mean((x - centre)^2) + eps)
template <typename T>
SPECDEC_HOST_DEVICE float inverse_root_mean_square(const T* x, int64_t count, float eps,
                                                   float centre = 0.0f) {
  float sums[kRowLanes] = {};
  int64_t i = 0;
  for (; i + kRowLanes <= count; i += kRowLanes) {
    for (int64_t lane = 0; lane < kRowLanes; ++lane) {
      const float value = exact_add(to_float(x[i + lane]), -centre);
      sums[lane] = exact_fma(value, value, sums[lane]);
    }
  }
  for (int64_t lane = 0; i + lane < count; ++lane) {
    const float value = exact_add(to_float(x[i + lane]), -centre);
    sums[lane] = exact_fma(value, value, sums[lane]);
  }
  return 1.0f /
         std::sqrt(exact_add(combine_lanes(sums, exact_add) / static_cast<float>(count), eps));
}

template <typename T>
SPECDEC_HOST_DEVICE void norm_row(const T* __restrict x, const RowNorm& norm, int64_t count,
                                  T* __restrict out) {
  const float inverse = inverse_root_mean_square(x, count, norm.eps);
  const T* __restrict weight = static_cast<const T*>(norm.weight);
  for (int64_t i = 0; i < count; ++i) {
    from_float(exact_mul(exact_mul(to_float(x[i]), inverse), to_float(weight[i])), out + i);
  }
}

template <typename T>
SPECDEC_HOST_DEVICE float normed(const T* x, const T* weight, float inverse, int64_t i) {
  const float value = to_float(x[i]);
  return weight == nullptr ? value : exact_mul(exact_mul(value, inverse), to_float(weight[i]));
}

template <typename T>
SPECDEC_HOST_DEVICE void rotate_row(const T* __restrict x, const RowNorm& norm,
                                    const Rotation& rotation, int64_t head_dim, T* __restrict out) {
  const T* __restrict weight = static_cast<const T*>(norm.weight);
  const float inverse = weight ? inverse_root_mean_square(x, head_dim, norm.eps) : 1.0f;
  const int64_t half = rotation.half;
  for (int64_t i = 0; i < half; ++i) {
    const float cosine = rotation.cosines[i], sine = rotation.sines[i];
    const float first = normed(x, weight, inverse, i);
    const float second = normed(x, weight, inverse, half + i);
    from_float(exact_add(exact_mul(first, cosine), -exact_mul(second, sine)), out + i);
    from_float(exact_add(exact_mul(second, cosine), exact_mul(first, sine)), out + half + i);
  }
  for (int64_t i = 2 * half; i < head_dim; ++i) from_float(normed(x, weight, inverse, i), out + i);
}

template <typename T>
SPECDEC_HOST_DEVICE void round_row(const float* __restrict x, const void* bias, int64_t count,
                                   T* __restrict out) {
  const T* __restrict b = static_cast<const T*>(bias);
  if (b == nullptr) {
    for (int64_t i = 0; i < count; ++i) from_float(x[i], out + i);
  } else {
    for (int64_t i = 0; i < count; ++i) from_float(exact_add(x[i], to_float(b[i])), out + i);
  }
}

template <typename T>
SPECDEC_HOST_DEVICE void add_row(const T* __restrict y, int64_t count, T* __restrict x) {
  for (int64_t i = 0; i < count; ++i) from_float(exact_add(to_float(x[i]), to_float(y[i])), x + i);
}

template <typename T>
SPECDEC_HOST_DEVICE void gate_row(const T* __restrict gate_up, int64_t count, T* __restrict out) {
  for (int64_t i = 0; i < count; ++i) {
    from_float(exact_mul(silu(to_float(gate_up[i])), to_float(gate_up[count + i])), out + i);
  }
}

template <typename T>
SPECDEC_HOST_DEVICE float mean(const T* x, int64_t count) {
  float sums[kRowLanes] = {};
  int64_t i = 0;
  for (; i + kRowLanes <= count; i += kRowLanes) {
    for (int64_t lane = 0; lane < kRowLanes; ++lane) {
      sums[lane] = exact_add(sums[lane], to_float(x[i + lane]));
    }
  }
  for (int64_t lane = 0; i + lane < count; ++lane) {
    sums[lane] = exact_add(sums[lane], to_float(x[i + lane]));
  }
  return combine_lanes(sums, exact_add) / static_cast<float>(count);
}

template <NormKind kind, typename T>
SPECDEC_HOST_DEVICE void module_norm_row(const T* x, const ModuleNorm& norm, int64_t count,
                                         T* out) {
  const T* __restrict weight = static_cast<const T*>(norm.weight);
  const T* __restrict bias = static_cast<const T*>(norm.bias);
  const float centre = kind == NormKind::kLayer ? mean(x, count) : 0.0f;
  const float inverse = inverse_root_mean_square(x, count, norm.eps, centre);
  for (int64_t i = 0; i < count; ++i) {
    const float factor = to_float(weight[i]);
    float value = exact_mul(exact_add(to_float(x[i]), -centre), inverse);
    if constexpr (kind == NormKind::kRms) value = rounded<T>(value);
    value = exact_mul(value, kind == NormKind::kRmsOffset ? exact_add(1.0f, factor) : factor);
    if (kind == NormKind::kLayer && bias != nullptr) value = exact_add(value, to_float(bias[i]));
    from_float(value, out + i);
  }
}

template <typename T>
SPECDEC_HOST_DEVICE void module_norm_any(const T* x, const ModuleNorm& norm, int64_t count,
                                         T* out) {
  switch (norm.kind) {
    case NormKind::kRms:
      return module_norm_row<NormKind::kRms>(x, norm, count, out);
    case NormKind::kRmsWide:
      return module_norm_row<NormKind::kRmsWide>(x, norm, count, out);
    case NormKind::kRmsOffset:
      return module_norm_row<NormKind::kRmsOffset>(x, norm, count, out);
    case NormKind::kLayer:
      return module_norm_row<NormKind::kLayer>(x, norm, count, out);
  }
}

template <typename T, typename Table>
SPECDEC_HOST_DEVICE T turned(float x, Table cosine, float other, Table sine) {
  T sum;
  from_float(exact_add(rounded<Table>(exact_mul(x, to_float(cosine))),
                       rounded<Table>(exact_mul(other, to_float(sine)))),
             &sum);
  return sum;
}

template <typename Table, typename T>
SPECDEC_HOST_DEVICE void turn_row(const T* x, const ModuleRotation& rotation, T* __restrict out) {
  const Table* __restrict cosines = static_cast<const Table*>(rotation.cosines);
  const Table* __restrict sines = static_cast<const Table*>(rotation.sines);
  const int64_t half = rotation.rotary / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(x[i]), second = to_float(x[half + i]);
    out[i] = turned<T>(first, cosines[i], -second, sines[i]);
    out[half + i] = turned<T>(second, cosines[half + i], first, sines[half + i]);
  }
}

template <typename T>
SPECDEC_HOST_DEVICE void module_rotate_row(T* x, const ModuleNorm& norm,
                                           const ModuleRotation& rotation, int64_t head_dim,
                                           T* __restrict out) {
  if (norm.weight != nullptr) module_norm_any(x, norm, head_dim, x);
  if (rotation.type == FloatType::kFloat32) {
    turn_row<float>(x, rotation, out);
  } else {
    turn_row<BFloat16>(x, rotation, out);
  }
  for (int64_t i = rotation.rotary; i < head_dim; ++i) out[i] = x[i];
}

// gelu_tanh of PyTorch operations, each of which stores a tensor.
template <typename T>
SPECDEC_HOST_DEVICE float gelu_new(float x) {
  const float cube = rounded<T>(exact_mul(rounded<T>(exact_mul(x, x)), x));
  const float inner = rounded<T>(exact_add(x, rounded<T>(exact_mul(kGeluCubic, cube))));
  const float tanh = rounded<T>(tanh_approx(rounded<T>(exact_mul(kGeluScale, inner))));
  return exact_mul(rounded<T>(exact_mul(0.5f, x)), rounded<T>(exact_add(1.0f, tanh)));
}

template <float (*activation)(float), typename T>
SPECDEC_HOST_DEVICE void module_activate_row(const T* __restrict gate, const T* __restrict up,
                                             int64_t count, T* __restrict out) {
  if (up == nullptr) {
    for (int64_t i = 0; i < count; ++i) from_float(activation(to_float(gate[i])), out + i);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      from_float(exact_mul(rounded<T>(activation(to_float(gate[i]))), to_float(up[i])), out + i);
    }
  }
}

template <typename T>
SPECDEC_HOST_DEVICE void module_activate_any(Activation activation, const T* gate, const T* up,
                                             int64_t count, T* out) {
  switch (activation) {
    case Activation::kSilu:
      return module_activate_row<silu>(gate, up, count, out);
    case Activation::kGelu:
      return module_activate_row<gelu>(gate, up, count, out);
    case Activation::kGeluTanh:
      return module_activate_row<gelu_tanh>(gate, up, count, out);
    case Activation::kGeluNew:
      return module_activate_row<gelu_new<T>>(gate, up, count, out);
  }
}

template <typename T>
SPECDEC_HOST_DEVICE void module_add_row(const T* __restrict y, float scale, int64_t count,
                                        T* __restrict x) {
  for (int64_t i = 0; i < count; ++i) {
    from_float(exact_add(to_float(x[i]), rounded<T>(exact_mul(to_float(y[i]), scale))), x + i);
  }
}

template <typename T>
SPECDEC_HOST_DEVICE void module_add_gated_row(const T* __restrict y, const T* gate, int64_t count,
                                              T* __restrict x) {
  module_add_row(y, rounded<T>(sigmoid(to_float(*gate))), count, x);
}

template <typename T>
SPECDEC_HOST_DEVICE void module_route_row(const T* __restrict logits, const ModuleRouting& routing,
                                          int64_t experts, float* __restrict weights) {
  float largest = -std::numeric_limits<float>::infinity(), sum = 0.0f;
  for (int64_t i = 0; i < experts; ++i) largest = larger(to_float(logits[i]), largest);
  for (int64_t i = 0; i < experts; ++i) {
    weights[i] = exp_nonpositive(exact_add(to_float(logits[i]), -largest));
  }
  for (int64_t i = 0; i < experts; ++i) sum = exact_add(sum, weights[i]);
  for (int64_t i = 0; i < experts; ++i) weights[i] = exact_div(weights[i], sum);
  choose_experts(routing, experts, weights);
  if (routing.is_wide) return;
  for (int64_t i = 0; i < experts; ++i) weights[i] = rounded<T>(weights[i]);
}

template <typename T>
SPECDEC_HOST_DEVICE void module_weigh_row(const T* __restrict y, float weight, bool is_wide,
                                          int64_t count, float* __restrict sums) {
  for (int64_t i = 0; i < count; ++i) {
    const float product = exact_mul(to_float(y[i]), weight);
    sums[i] = exact_add(sums[i], is_wide ? product : rounded<T>(product));
  }
}

SPECDEC_ROWS_TARGET void module_norm(FloatType type, const void* x, const ModuleNorm& norm,
                                     int64_t count, void* out) {
  if (type == FloatType::kFloat32) {
    return module_norm_any(static_cast<const float*>(x), norm, count, static_cast<float*>(out));
  }
  module_norm_any(static_cast<const BFloat16*>(x), norm, count, static_cast<BFloat16*>(out));
}

SPECDEC_ROWS_TARGET void module_rotate(FloatType type, void* x, const ModuleNorm& norm,
                                       const ModuleRotation& rotation, int64_t head_dim,
                                       void* out) {
  if (type == FloatType::kFloat32) {
    return module_rotate_row(static_cast<float*>(x), norm, rotation, head_dim,
                             static_cast<float*>(out));
  }
  module_rotate_row(static_cast<BFloat16*>(x), norm, rotation, head_dim,
                    static_cast<BFloat16*>(out));
}

SPECDEC_ROWS_TARGET void module_activate(FloatType type, Activation activation, const void* gate,
                                         const void* up, int64_t count, void* out) {
  if (type == FloatType::kFloat32) {
    return module_activate_any(activation, static_cast<const float*>(gate),
                               static_cast<const float*>(up), count, static_cast<float*>(out));
  }
  module_activate_any(activation, static_cast<const BFloat16*>(gate),
                      static_cast<const BFloat16*>(up), count, static_cast<BFloat16*>(out));
}

SPECDEC_ROWS_TARGET void module_add(FloatType type, const void* y, float scale, int64_t count,
                                    void* x) {
  if (type == FloatType::kFloat32) {
    return module_add_row(static_cast<const float*>(y), scale, count, static_cast<float*>(x));
  }
  module_add_row(static_cast<const BFloat16*>(y), scale, count, static_cast<BFloat16*>(x));
}

SPECDEC_ROWS_TARGET void module_add_gated(FloatType type, const void* y, const void* gate,
                                          int64_t count, void* x) {
  if (type == FloatType::kFloat32) {
    return module_add_gated_row(static_cast<const float*>(y), static_cast<const float*>(gate),
                                count, static_cast<float*>(x));
  }
  module_add_gated_row(static_cast<const BFloat16*>(y), static_cast<const BFloat16*>(gate), count,
                       static_cast<BFloat16*>(x));
}

SPECDEC_ROWS_TARGET void module_route(FloatType type, const void* logits,
                                      const ModuleRouting& routing, int64_t experts,
                                      float* weights) {
  if (type == FloatType::kFloat32) {
    return module_route_row(static_cast<const float*>(logits), routing, experts, weights);
  }
  module_route_row(static_cast<const BFloat16*>(logits), routing, experts, weights);
}

SPECDEC_ROWS_TARGET void module_weigh(FloatType type, const void* y, float weight, bool is_wide,
                                      int64_t count, float* sums) {
  if (type == FloatType::kFloat32) {
    return module_weigh_row(static_cast<const float*>(y), weight, is_wide, count, sums);
  }
  module_weigh_row(static_cast<const BFloat16*>(y), weight, is_wide, count, sums);
}

SPECDEC_ROWS_TARGET void norm(FloatType type, const void* x, const RowNorm& norm, int64_t count,
                              void* out) {
  if (type == FloatType::kFloat32) {
    return norm_row(static_cast<const float*>(x), norm, count, static_cast<float*>(out));
  }
  norm_row(static_cast<const BFloat16*>(x), norm, count, static_cast<BFloat16*>(out));
}

SPECDEC_ROWS_TARGET void rotate(FloatType type, const void* x, const RowNorm& norm,
                                const Rotation& rotation, int64_t head_dim, void* out) {
  if (type == FloatType::kFloat32) {
    return rotate_row(static_cast<const float*>(x), norm, rotation, head_dim,
                      static_cast<float*>(out));
  }
  rotate_row(static_cast<const BFloat16*>(x), norm, rotation, head_dim,
             static_cast<BFloat16*>(out));
}

SPECDEC_ROWS_TARGET void round(FloatType type, const float* x, const void* bias, int64_t count,
                               void* out) {
  if (type == FloatType::kFloat32) return round_row(x, bias, count, static_cast<float*>(out));
  round_row(x, bias, count, static_cast<BFloat16*>(out));
}

SPECDEC_ROWS_TARGET void add(FloatType type, const void* y, int64_t count, void* x) {
  if (type == FloatType::kFloat32) {
    return add_row(static_cast<const float*>(y), count, static_cast<float*>(x));
  }
  add_row(static_cast<const BFloat16*>(y), count, static_cast<BFloat16*>(x));
}

SPECDEC_ROWS_TARGET void gate(FloatType type, const void* gate_up, int64_t count, void* out) {
  if (type == FloatType::kFloat32) {
    return gate_row(static_cast<const float*>(gate_up), count, static_cast<float*>(out));
  }
  gate_row(static_cast<const BFloat16*>(gate_up), count, static_cast<BFloat16*>(out));
}

SPECDEC_ROWS_TARGET LogitSum sum_logits(float scale, int64_t count, float* logits) {
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  const int64_t padded = (count + kRowLanes - 1) / kRowLanes * kRowLanes;
  float maxima[kRowLanes];
  std::fill_n(maxima, kRowLanes, kMinusInfinity);
  std::fill(logits + count, logits + padded, std::numeric_limits<float>::quiet_NaN());
  for (int64_t i = 0; i < padded; i += kRowLanes) {
    for (int64_t lane = 0; lane < kRowLanes; ++lane) {
      const float logit = exact_mul(logits[i + lane], scale);
      logits[i + lane] = logit == logit ? logit : kMinusInfinity;
      maxima[lane] = larger(logits[i + lane], maxima[lane]);
    }
  }
  const float largest = combine_lanes(maxima, larger);
  if (largest == -kMinusInfinity) return {largest, std::numeric_limits<float>::quiet_NaN()};
  if (largest == kMinusInfinity) return {largest, 0.0f};  // other blocks may have larger logits
  float sums[kRowLanes] = {};
  for (int64_t i = 0; i < padded; i += kRowLanes) {
    for (int64_t lane = 0; lane < kRowLanes; ++lane) {
      sums[lane] = exact_add(sums[lane], exp_nonpositive(exact_add(logits[i + lane], -largest)));
    }
  }
  return {largest, combine_lanes(sums, exact_add)};
}

SPECDEC_ROWS_TARGET void couple_logits(float scale, float temperature, const float* noise,
                                       int64_t count, float* logits) {
  for (int64_t i = 0; i < count; ++i) {
    logits[i] = coupled_logit(exact_mul(logits[i], scale), temperature, noise[i]);
  }
}

SPECDEC_ROWS_TARGET void pick_logits(const float* logits, int64_t count, int64_t first,
                                     BestPicks* best) {
  for (int64_t begin = 0; begin < count; begin += kRowLanes) {
    const Pick bar = best->bar();
    const float lowest = bar == kNoPick ? std::numeric_limits<float>::lowest() : pick_score(bar);
    uint32_t candidates = 0;
    for (int64_t lane = 0; lane < kRowLanes; ++lane) {
      candidates |= logits[begin + lane] >= lowest ? uint32_t{1} << lane : 0;
    }
    for (; candidates != 0; candidates &= candidates - 1) {
      const int64_t i = begin + std::countr_zero(candidates);
      const Pick pick = make_pick(ordered_key(canonical_bits(logits[i])), first + i);
      if (pick > best->bar()) best->insert(pick);
    }
  }
}

constexpr RowOps kRows{.norm = norm,
                       .rotate = rotate,
                       .round = round,
                       .add = add,
                       .gate = gate,
                       .module_norm = module_norm,
                       .module_rotate = module_rotate,
                       .module_activate = module_activate,
                       .module_add = module_add,
                       .module_add_gated = module_add_gated,
                       .module_route = module_route,
                       .module_weigh = module_weigh,
                       .sum_logits = sum_logits,
                       .couple_logits = couple_logits,
                       .pick_logits = pick_logits};

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ROWS_ISA
