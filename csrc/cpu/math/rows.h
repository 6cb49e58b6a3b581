// The operations of decoder layers and draft heads on one row, compiled once per instruction set.
// All builds give the same bits: operations are elementwise float32 with explicit rounding. Sums
// use kRowLanes lanes, lane l for the elements l, l + kRowLanes, ..., which are then added by
// halves. Results are rounded to the type once.
#pragma once

#include "specdec/core/float_types.h"
#include "specdec/decoder_form.h"
#include "specdec/math/pick.h"

namespace specdec::cpu {

constexpr int64_t kRowLanes = 32;

// The rotation of a position, which combines element i with element i + half.
struct Rotation {
  const float* cosines;  // [half]
  const float* sines;    // [half]
  int64_t half;
};

// The weight [count] and the epsilon of an RMS norm. Without a weight there is no norm.
struct RowNorm {
  const void* weight;
  float eps;
};

// The rotation of a position by a model's modules: x becomes x * cosines + (-second half of x, first
// half of x) * sines for the first `rotary` numbers x of a head; the others stay.
struct ModuleRotation {
  FloatType type;       // that of x, or float32, in which the result is then rounded once
  const void* cosines;  // [rotary]
  const void* sines;
  int64_t rotary;
};

// The largest of some logits, and the sum of exp(logit - largest), which is NaN if the largest is
// +inf.
struct LogitSum {
  float largest;
  float sum;
};

// The best logits so far, as picks (specdec/math/pick.h).
struct BestPicks {
  Pick* picks;  // [capacity], descending
  int64_t capacity;
  int64_t count;

  // A pick must be larger than this to enter.
  SPECDEC_HOST_DEVICE Pick bar() const { return count == capacity ? picks[count - 1] : kNoPick; }
  // Compares with every pick, so that there is no branch on the place of insertion.
  SPECDEC_HOST_DEVICE void insert(Pick pick) {
    if (count < capacity) picks[count++] = kNoPick;
    for (int64_t i = 0; i < count; ++i) {
      const Pick lower = picks[i] < pick ? picks[i] : pick;
      picks[i] = picks[i] < pick ? pick : picks[i];
      pick = lower;
    }
  }
};

struct RowOps {
  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*norm)(FloatType type, const void* x, const RowNorm& norm, int64_t count, void* out);
  // out = x, normed and rotated; x is one head
  void (*rotate)(FloatType type, const void* x, const RowNorm& norm, const Rotation& rotation,
                 int64_t head_dim, void* out);
  // out = x + bias; bias null: out = x
  void (*round)(FloatType type, const float* x, const void* bias, int64_t count, void* out);
  // x += y
  void (*add)(FloatType type, const void* y, int64_t count, void* x);
  // out = silu(gate) * up for [2, count]: gate, then up
  void (*gate)(FloatType type, const void* gate_up, int64_t count, void* out);
  // The next seven compute like the modules of a model, which round to the type after every
  // operation.
  void (*module_norm)(FloatType type, const void* x, const ModuleNorm& norm, int64_t count,
                      void* out);
  // out = x, rotated; x is one head. If there is a weight, x is first normed in place.
  void (*module_rotate)(FloatType type, void* x, const ModuleNorm& norm,
                        const ModuleRotation& rotation, int64_t head_dim, void* out);
  // out = activation(gate) * up; up null: activation(gate)
  void (*module_activate)(FloatType type, Activation activation, const void* gate, const void* up,
                          int64_t count, void* out);
  // x += y * scale
  void (*module_add)(FloatType type, const void* y, float scale, int64_t count, void* x);
  // x += y * sigmoid(gate); gate is one number
  void (*module_add_gated)(FloatType type, const void* y, const void* gate, int64_t count, void* x);
  // weights[i] = the weight of expert i, -1 if it is not chosen
  void (*module_route)(FloatType type, const void* logits, const ModuleRouting& routing,
                       int64_t experts, float* weights);
  // sums += y * weight
  void (*module_weigh)(FloatType type, const void* y, float weight, bool is_wide, int64_t count,
                       float* sums);
  // Multiplies by scale in place, replaces NaN by -inf, and sums. `logits` has room up to a
  // multiple of kRowLanes.
  LogitSum (*sum_logits)(float scale, int64_t count, float* logits);
  // logits = logits * scale / temperature + noise
  void (*couple_logits)(float scale, float temperature, const float* noise, int64_t count,
                        float* logits);
  // Adds logits above -inf, as sum_logits leaves them, to the best ones. Logit i belongs to token
  // first + i.
  void (*pick_logits)(const float* logits, int64_t count, int64_t first, BestPicks* best);
};

// The operations for the instruction set that cpu_isa() chose.
const RowOps& row_ops();

}  // namespace specdec::cpu
