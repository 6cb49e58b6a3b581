// The loops of the CPU op draft_head over one row, built once per instruction set. All builds give
// the same bits: operations are elementwise float32 with written-out roundings, sums are taken in
// kRowLanes lanes, lane l over the elements l, l + kRowLanes, ..., and then over the lanes by
// halves. Results are rounded to the type once.
#pragma once

#include "specdec/core/float_types.h"
#include "specdec/math/pick.h"

namespace specdec::cpu {

constexpr int64_t kRowLanes = 32;

// The rotation of a position: of element i with element i + half.
struct Rotation {
  const float* cosines;  // [half]
  const float* sines;    // [half]
  int64_t half;
};

// A weight [count] and the epsilon of a root mean square norm; without a weight there is no norm.
struct RowNorm {
  const void* weight;
  float eps;
};

// Of logits: the largest, and the sum of exp(logit - largest), which is NaN if the largest is +inf.
struct LogitSum {
  float largest;
  float sum;
};

// The best logits so far, in the order of picks (pick.h).
struct BestPicks {
  Pick* picks;  // [capacity], descending
  int64_t capacity;
  int64_t count;

  // What a pick must exceed to enter.
  SPECDEC_HOST_DEVICE Pick bar() const { return count == capacity ? picks[count - 1] : kNoPick; }
  // Every pick is compared: no branch that depends on where this one goes.
  SPECDEC_HOST_DEVICE void insert(Pick pick) {
    if (count < capacity) picks[count++] = kNoPick;
    for (int64_t i = 0; i < count; ++i) {
      const Pick lower = picks[i] < pick ? picks[i] : pick;
      picks[i] = picks[i] < pick ? pick : picks[i];
      pick = lower;
    }
  }
};

struct DraftHeadRows {
  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*norm)(FloatType type, const void* x, const RowNorm& norm, int64_t count, void* out);
  // out = x, normed and rotated; a head
  void (*rotate)(FloatType type, const void* x, const RowNorm& norm, const Rotation& rotation,
                 int64_t head_dim, void* out);
  // out = x + bias; bias null: out = x
  void (*round)(FloatType type, const float* x, const void* bias, int64_t count, void* out);
  // x += y
  void (*add)(FloatType type, const void* y, int64_t count, void* x);
  // out = silu(gate) * up, of [2, count]: gate, then up
  void (*gate)(FloatType type, const void* gate_up, int64_t count, void* out);
  // As the modules of a model compute them: rounded to the type after every operation.
  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*module_norm)(FloatType type, const void* x, const RowNorm& norm, int64_t count, void* out);
  // out = x * cosines + (-second half of x, first half of x) * sines, all [head_dim]; x is normed
  // before, in place, if there is a weight
  void (*module_rotate)(FloatType type, void* x, const RowNorm& norm, const void* cosines,
                        const void* sines, int64_t head_dim, void* out);
  // out = silu(gate) * up
  void (*module_gate)(FloatType type, const void* gate, const void* up, int64_t count, void* out);
  // Multiplies by scale in place, NaN becomes -inf, and sums up. `logits` has room up to a multiple
  // of kRowLanes.
  LogitSum (*sum_logits)(float scale, int64_t count, float* logits);
  // Adds logits above -inf, as sum_logits leaves them, to the best; logit i is that of token
  // first + i.
  void (*pick_logits)(const float* logits, int64_t count, int64_t first, BestPicks* best);
};

// Those of the instruction set that cpu_isa() chose.
const DraftHeadRows& draft_head_rows();

}  // namespace specdec::cpu
