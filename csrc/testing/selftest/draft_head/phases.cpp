// gather_features, rotate_heads and attend of the fused draft_head, each in a kernel of its own,
// against plain loops in double. The bits must not depend on the number of blocks or on other batch
// rows. Slots of the cache that must not be read hold NaN.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/draft_head/phases/attention.cuh"
#include "testing/selftest/check.h"

namespace specdec {
namespace {

enum class Phase { kGather, kRotate, kAttend };

template <typename T>
__global__ void run_phase(const DraftKernelParams params, const DraftPass pass, const PassRow* rows,
                          Phase phase, int layer) {
  SPECDEC_SHARED(DraftShared, shared);
  SPECDEC_DYNAMIC_SHARED(unsigned char, memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < pass.num_rows) shared.rows[thread] = rows[thread];
  block_barrier();
  if (thread >= kDraftThreads) return;
  const DraftBlock<T> block{params, shared, memory, memory.template as<float>(), 0};
  if (phase == Phase::kGather) gather_features(block, pass);
  if (phase == Phase::kRotate) rotate_heads(block, pass, layer);
  if (phase == Phase::kAttend) attend(block, pass, layer);
}

using Doubles = std::vector<double>;

struct Shape {
  int batch = 1;
  int layers = 1;
  int heads = 2;
  int kv_heads = 1;
  int head_dim = 64;
  int half = 32;
  int hidden = 32;
  int num_features = 3;
  int capacity = 64;
  int window = 0;
  int depth = 3;
  bool is_parallel = false;
  std::vector<int> widths{1, 3, 4};  // of a row's frontier at each level
  std::vector<int64_t> counts, lengths, positions;
};

// A head and a call, with all memory that the phases use.
template <typename T>
class Draft {
 public:
  explicit Draft(const Shape& a_shape) : shape(a_shape), random_(7) {
    DraftKernelParams& p = params;
    p.plan.num_layers = shape.layers;
    p.plan.is_parallel = shape.is_parallel;
    p.plan.batch = shape.batch;
    p.plan.depth = shape.depth;
    for (int level = 0; level < shape.depth; ++level) {
      p.plan.widths[level] = static_cast<int16_t>(shape.widths[level]);
      p.first_slots[level] =
          static_cast<int16_t>(level < 2 ? 0 : p.first_slots[level - 1] + p.plan.widths[level - 1]);
    }
    p.hidden = shape.hidden;
    p.heads = shape.heads;
    p.kv_heads = shape.kv_heads;
    p.head_dim = shape.head_dim;
    p.num_features = shape.num_features;
    p.feature_width = shape.num_features * shape.hidden;
    p.eps = 1e-5f;
    p.rotary_half = shape.half;
    p.capacity = shape.capacity;
    p.words = 2;
    p.counts = {shape.counts.data(), 1};
    p.lengths = {shape.lengths.data(), 1};
    p.positions = {shape.positions.data(), 1};
    rows_ = p.lists() + kPassRows;
    for (int layer = 0; layer < shape.layers; ++layer) p.layers[layer].window = shape.window;
    make_memory();
  }

  float uniform() { return static_cast<float>(random_() % 4001) / 1000.0f - 2.0f; }
  void fill(std::vector<T>& x) {
    for (T& value : x) store_float(&value, uniform());
  }
  std::vector<T> numbers(int64_t count) {
    std::vector<T> x(count);
    fill(x);
    return x;
  }

  // Adds the rows of a pass; all elements except the first `others` are lists.
  void add_row(int batch_row, int place, int list, int64_t slot, int64_t position) {
    const int memory = list >= 0 ? list : params.lists() + static_cast<int>(rows.size());
    const bool is_active = shape.counts[batch_row] > 0;
    rows.push_back({batch_row, place, list, memory, is_active, is_active ? slot : int64_t{1} << 40,
                    is_active ? position : int64_t{1} << 40, 0,
                    hidden.data() + int64_t{std::ssize(rows)} * params.feature_width});
  }

  void run(Phase phase, const DraftPass& pass, int layer, int blocks) {
    CHECK(launch(run_phase<T>, {blocks, 1, kDraftThreads, nullptr, kReduceBytes, true}, params,
                 pass, rows.data(), phase, layer) == cudaSuccess);
    for (uint32_t arrivals : arrivals_) CHECK(arrivals == 0);
  }

  int64_t cache_size() const {
    return int64_t{shape.layers} * shape.batch * shape.kv_heads * shape.capacity * slot_stride();
  }
  int slot_stride() const { return shape.head_dim + 8; }  // with a gap that must not be accessed
  int64_t place(int layer, int batch_row, int kv_head, int64_t slot) const {
    return (((int64_t{layer} * shape.batch + batch_row) * shape.kv_heads + kv_head) *
                shape.capacity +
            slot) *
           slot_stride();
  }

  Shape shape;
  DraftKernelParams params{};
  std::vector<PassRow> rows;
  std::vector<T> keys, values, features, residual, projected, queries, attended, hidden;
  std::vector<T> input_norm, fc_norm, hidden_norm, query_norm, key_norm;
  std::vector<float> cosines, sines;
  std::vector<uint64_t> ancestors;

 private:
  void make_memory() {
    DraftKernelParams& p = params;
    const auto use = [&](std::vector<T>& x, int64_t count) {
      x = numbers(count);
      return x.data();
    };
    p.scratch.features = use(features, int64_t{kPassRows} * p.feature_width);
    p.scratch.residual = use(residual, int64_t{rows_} * p.hidden);
    p.scratch.projected = use(projected, int64_t{rows_} * p.projection_outs());
    p.scratch.queries = use(queries, int64_t{rows_} * p.query_outs());
    p.scratch.attended = use(attended, int64_t{rows_} * p.query_outs());
    use(hidden, int64_t{kPassRows} * p.feature_width);
    use(input_norm, p.feature_width);
    use(fc_norm, p.feature_width);
    use(hidden_norm, p.hidden);
    use(query_norm, p.head_dim);
    use(key_norm, p.head_dim);
    split_sums_.resize(int64_t{kPassRows} * p.heads * kMaxSplits);
    split_values_.resize(std::ssize(split_sums_) * p.head_dim, NAN);
    p.scratch.split_sums = split_sums_.data();
    p.scratch.split_values = split_values_.data();
    ancestors.resize(int64_t{2} * p.plan.batch * p.plan.max_width() * p.words);
    p.scratch.ancestors = ancestors.data();
    arrivals_.resize(int64_t{kPassRows} * p.heads * ((p.head_dim + 63) / 64));
    p.sync.arrivals = arrivals_.data();
    const int64_t kv = int64_t{shape.capacity} * slot_stride();
    const auto make_cache = [&](std::vector<T>& cache) -> HeadCache {
      cache.resize(cache_size());
      for (T& value : cache) store_float(&value, NAN);
      return {cache.data(), shape.batch * shape.kv_heads * kv, shape.kv_heads * kv, kv,
              slot_stride()};
    };
    p.keys = make_cache(keys);
    p.values = make_cache(values);
    constexpr int kPositions = 4096;
    for (int64_t i = 0; i < int64_t{kPositions} * shape.half; ++i) {
      cosines.push_back(std::cos(static_cast<float>(i)));
      sines.push_back(std::sin(static_cast<float>(i)));
    }
    p.num_positions = kPositions;
    p.cosines = {cosines.data(), shape.half, 1};
    p.sines = {sines.data(), shape.half, 1};
  }

  std::mt19937 random_;
  int rows_;
  std::vector<ExpSum> split_sums_;
  std::vector<float> split_values_;
  std::vector<uint32_t> arrivals_;
};

template <typename T>
double number(const T& x) {
  return double{load_float(&x)};
}

// The error of rounding to T, for values up to 8.
template <typename T>
double tolerance() {
  if (std::is_same_v<T, float>) return 2e-5;
  return std::is_same_v<T, __half> ? 0x1p-8 : 0x1p-5;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <typename T>
void check_close(const T* x, const Doubles& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(std::abs(number(x[i]) - expected[i]) <=
          tolerance<T>() * std::max(1.0, std::abs(expected[i]) / 4));
  }
}

// `expected` is in double, but rounded to T where the op rounds.
template <typename T>
Doubles rounded(Doubles x) {
  for (double& value : x) {
    T t;
    store_float(&t, static_cast<float>(value));
    value = number(t);
  }
  return x;
}

template <typename T>
Doubles doubles(const T* x, int64_t count) {
  Doubles result;
  for (int64_t i = 0; i < count; ++i) result.push_back(number(x[i]));
  return result;
}

template <typename T>
Doubles rms_norm(const Doubles& x, const T* weight, double eps) {
  double sum = 0;
  for (double value : x) sum += value * value;
  Doubles out;
  for (size_t i = 0; i < x.size(); ++i) {
    out.push_back(x[i] / std::sqrt(sum / static_cast<double>(x.size()) + eps) * number(weight[i]));
  }
  return out;
}

template <typename T>
void test_gather(bool has_input_norm, bool has_fc_norm) {
  std::vector<T> first;
  for (const int blocks : {1, 2, 5}) {
    Draft<T> draft({.hidden = 296, .counts = {5}, .lengths = {0}, .positions = {0}});
    DraftKernelParams& p = draft.params;
    if (has_input_norm) p.input_norm = draft.input_norm.data();
    if (has_fc_norm) p.fc_norm = draft.fc_norm.data();
    for (int i = 0; i < 5; ++i) draft.add_row(0, i, -1, i, i);
    const std::vector<T> before = draft.features;
    draft.run(Phase::kGather, {PassKind::kNew, 0, 0, 5, true}, 0, blocks);
    for (int i = 0; i < kPassRows; ++i) {
      const int width = p.feature_width;
      const T* out = draft.features.data() + int64_t{i} * width;
      if (i >= 5) {
        CHECK(std::memcmp(out, before.data() + int64_t{i} * width, width * sizeof(T)) == 0);
        continue;
      }
      Doubles x = doubles(static_cast<const T*>(draft.rows[i].hidden), width);
      if (has_input_norm) x = rounded<T>(rms_norm(x, draft.input_norm.data(), p.eps));
      for (int part = 0; part < width && has_fc_norm; part += p.hidden) {
        const Doubles whole(x.begin() + part, x.begin() + part + p.hidden);
        const Doubles normed = rms_norm(whole, draft.fc_norm.data() + part, p.eps);
        std::copy(normed.begin(), normed.end(), x.begin() + part);
      }
      check_close(out, x);
    }
    if (first.empty()) first = draft.features;
    CHECK(same_bits(first, draft.features));
  }
}

template <typename T>
Doubles rotated(const Draft<T>& draft, const T* x, const void* norm, int64_t position) {
  const int dim = draft.shape.head_dim, half = draft.shape.half;
  Doubles head = doubles(x, dim);
  if (norm != nullptr) head = rms_norm(head, static_cast<const T*>(norm), draft.params.eps);
  for (int i = 0; i < half; ++i) {
    const double cosine = double{draft.params.cosines(position, i)};
    const double sine = double{draft.params.sines(position, i)};
    const double low = head[i], high = head[half + i];
    head[i] = low * cosine - high * sine;
    head[half + i] = high * cosine + low * sine;
  }
  return head;
}

struct RotateCase {
  PassKind kind;
  int layer;
  bool has_norms, has_fc, gathers, norm_before_residual, is_eagle1;
};

// Two active rows around one without new elements. Of the first row only the last element is kept.
template <typename T>
void add_rotated_rows(Draft<T>& draft, PassKind kind) {
  if (kind == PassKind::kNew) {
    for (int i = 0; i < 4; ++i) draft.add_row(0, i, i < 3 ? -1 : 0, 3 + i, 10 + i);
    draft.add_row(2, 0, 2, 20, 7);
    return;
  }
  for (int b = 0; b < 3; ++b) {
    for (int i = 0; i < 3; ++i) draft.add_row(b, i, b * 3 + i, 21 + i, 30 + i);
  }
}

template <typename T>
void check_rotated(const Draft<T>& draft, const Draft<T>& before, const RotateCase& c) {
  const DraftKernelParams& p = draft.params;
  const int dim = p.head_dim;
  int64_t kept = 0, written = 0;
  for (size_t i = 0; i < draft.rows.size(); ++i) {
    const PassRow& row = draft.rows[i];
    const T* projected = draft.projected.data() + int64_t{row.memory} * p.projection_outs();
    const bool goes_on = row.list >= 0 || c.layer == 0;
    for (int head = 0; head < p.heads; ++head) {
      const int64_t at = int64_t{row.memory} * p.query_outs() + head * dim;
      const T* query = draft.queries.data() + at;
      if (!goes_on || !row.is_active) {
        CHECK(std::memcmp(query, before.queries.data() + at, dim * sizeof(T)) == 0);
        continue;
      }
      check_close(query, rotated(draft, projected + head * dim, p.layers[c.layer].query_norm,
                                 row.position));
    }
    const int64_t at = int64_t{row.memory} * p.hidden;
    const T* residual = draft.residual.data() + at;
    const T* h = static_cast<const T*>(row.hidden);
    if (c.kind == PassKind::kNew && c.gathers) h = draft.features.data() + i * p.feature_width;
    if (c.kind == PassKind::kNew && c.has_fc) h = before.residual.data() + at;
    if (c.is_eagle1 || c.layer > 0) h = before.residual.data() + at;
    Doubles expected = doubles(h, p.hidden);
    if (c.norm_before_residual && c.layer == 0 && !c.is_eagle1) {
      expected = rms_norm(expected, draft.hidden_norm.data(), p.eps);
    }
    check_close(residual, expected);
    if (!row.is_active) continue;
    for (int kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
      const T* key = projected + p.query_outs() + kv_head * dim;
      const int64_t slot = draft.place(c.layer, row.batch_row, kv_head, row.slot);
      check_close(draft.keys.data() + slot,
                  rotated(draft, key, p.layers[c.layer].key_norm, row.position));
      CHECK(std::memcmp(draft.values.data() + slot, key + p.kv_heads * dim, dim * sizeof(T)) == 0);
      written += dim;
    }
  }
  for (const T& value : draft.values) kept += std::isnan(number(value)) ? 1 : 0;
  CHECK(kept + written == draft.cache_size());
}

template <typename T>
void test_rotate(const Shape& shape, const RotateCase& c) {
  std::vector<T> first[3];
  for (const int blocks : {1, 2, 5}) {
    Draft<T> draft(shape);
    DraftKernelParams& p = draft.params;
    p.plan.has_fc = c.has_fc;
    p.plan.gathers = c.gathers;
    p.norm_before_residual = c.norm_before_residual;
    p.hidden_norm = c.is_eagle1 ? nullptr : draft.hidden_norm.data();
    p.is_eagle1 = c.is_eagle1;
    if (c.has_norms) {
      p.layers[c.layer].query_norm = draft.query_norm.data();
      p.layers[c.layer].key_norm = draft.key_norm.data();
    }
    add_rotated_rows(draft, c.kind);
    const Draft<T> before = draft;
    draft.run(
        Phase::kRotate,
        {c.kind, c.kind == PassKind::kNew ? 0 : 1, 0, static_cast<int>(draft.rows.size()), true},
        c.layer, blocks);
    check_rotated(draft, before, c);
    int i = 0;
    for (const std::vector<T>* result : {&draft.queries, &draft.residual, &draft.keys}) {
      if (blocks == 1) first[i] = *result;
      CHECK(same_bits(first[i++], *result));
    }
  }
}

// The slots that a row sees, computed in the simplest way.
template <typename T>
std::vector<int64_t> seen(const Draft<T>& draft, const DraftPass& pass, const PassRow& row) {
  const Shape& s = draft.shape;
  const int64_t committed = s.lengths[row.batch_row] + s.counts[row.batch_row];
  const int64_t slot_zero = s.positions[row.batch_row] - s.lengths[row.batch_row];
  const bool is_frontier = pass.kind == PassKind::kFrontier;
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot <= row.slot && (!is_frontier || slot < committed); ++slot) {
    if (s.window == 0 || slot_zero + slot > row.position - s.window) slots.push_back(slot);
  }
  if (!is_frontier) return slots;
  const int max_width = draft.params.plan.max_width();
  const uint64_t* words =
      &draft.ancestors[((pass.level % 2 * s.batch + row.batch_row) * max_width + row.place) *
                       draft.params.words];
  int nodes = 0;
  for (int64_t j = 64 * draft.params.words - 1; j >= 0; --j) {
    if ((words[j / 64] >> j % 64 & 1) == 0) continue;
    if (s.window == 0 || nodes < s.window) slots.push_back(committed + j);
    ++nodes;
  }
  return slots;
}

template <typename T>
Doubles attention(const Draft<T>& draft, const PassRow& row, int layer, int head,
                  const std::vector<int64_t>& slots) {
  const DraftKernelParams& p = draft.params;
  const int dim = p.head_dim, kv_head = head / (p.heads / p.kv_heads);
  const T* query =
      draft.queries.data() + int64_t{row.memory} * p.query_outs() + int64_t{head} * dim;
  Doubles scores, out(dim);
  for (const int64_t slot : slots) {
    const T* key = draft.keys.data() + draft.place(layer, row.batch_row, kv_head, slot);
    double score = 0;
    for (int d = 0; d < dim; ++d) score += number(query[d]) * number(key[d]);
    scores.push_back(score / std::sqrt(dim));
  }
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    const double weight = std::exp(scores[i] - largest);
    const T* value = draft.values.data() + draft.place(layer, row.batch_row, kv_head, slots[i]);
    for (int d = 0; d < dim; ++d) out[d] += weight * number(value[d]);
    sum += weight;
  }
  for (double& value : out) value /= sum;
  return out;
}

// Fills the slots of a row up to its last one.
template <typename T>
void fill_cache(Draft<T>& draft, int layer) {
  std::vector<int64_t> ends(draft.shape.batch, 0);
  for (const PassRow& row : draft.rows) {
    if (row.is_active) ends[row.batch_row] = std::max(ends[row.batch_row], row.slot + 1);
  }
  for (int b = 0; b < draft.shape.batch; ++b) {
    std::mt19937 random(static_cast<unsigned>(100 + draft.shape.lengths[b]));  // of the row alone
    for (int64_t slot = 0; slot < ends[b]; ++slot) {
      for (int kv_head = 0; kv_head < draft.shape.kv_heads; ++kv_head) {
        for (int d = 0; d < draft.shape.head_dim; ++d) {
          const int64_t at = draft.place(layer, b, kv_head, slot) + d;
          store_float(&draft.keys[at], static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
          store_float(&draft.values[at], static_cast<float>(random() % 2001) / 500.0f - 2.0f);
        }
      }
    }
  }
}

// The rows of pass `pass` of a plan whose elements are all of one kind.
struct Element {
  int batch_row, place, list;
  int64_t slot, position;
};

std::vector<Element> elements_of(const Shape& s, PassKind kind, int level) {
  std::vector<Element> elements;
  for (int b = 0; b < s.batch; ++b) {
    const int kept = s.is_parallel ? s.depth : 1;
    const int64_t length = s.lengths[b], count = s.counts[b], position = s.positions[b];
    if (kind == PassKind::kNew && count > 0) {
      for (int i = 0; i < count + kept - 1; ++i) {
        const int list = i < count - 1 ? -1 : b * kept + i - static_cast<int>(count) + 1;
        elements.push_back({b, i, list, length + i, position + i});
      }
    } else if (kind == PassKind::kKept) {
      for (int i = 0; i < kept; ++i) {
        const int place = static_cast<int>(count) - 1 + i;
        elements.push_back({b, place, b * kept + i, length + place, position + place});
      }
    } else if (kind == PassKind::kFrontier) {
      int first_slot = 0;
      for (int above = 1; above < level; ++above) first_slot += s.widths[above];
      for (int i = 0; i < s.widths[level]; ++i) {
        elements.push_back({b, i, b * s.widths[level] + i, length + count + first_slot + i,
                            position + count + level - 1});
      }
    }
  }
  return elements;
}

// Frontiers up to `last`: the parent of node i is node (3 i + 1) % width of the level above.
template <typename T>
void fill_ancestors(Draft<T>& draft, int last) {
  const Shape& s = draft.shape;
  const int words = draft.params.words, max_width = draft.params.plan.max_width();
  for (int level = 1; level <= last; ++level) {
    for (int b = 0; b < s.batch; ++b) {
      for (int i = 0; i < s.widths[level]; ++i) {
        const auto node = [&](int l, int place) {
          return draft.ancestors.data() + ((l % 2 * s.batch + b) * max_width + place) * words;
        };
        uint64_t* bits = node(level, i);
        for (int word = 0; word < words; ++word) {
          bits[word] = level == 1 ? 0 : node(level - 1, (3 * i + 1) % s.widths[level - 1])[word];
        }
        const int own = draft.params.first_slots[level] + i;
        bits[own / 64] |= uint64_t{1} << own % 64;
      }
    }
  }
}

// Runs all passes of a kind; returns `attended` of each list or other row, in order.
template <typename T>
std::vector<T> attend_all(const Shape& shape, PassKind kind, int level, int blocks,
                          bool is_checked) {
  const int layer = shape.layers - 1;
  const std::vector<Element> elements = elements_of(shape, kind, level);
  const int total = static_cast<int>(elements.size());
  std::vector<T> all;
  for (int first = 0; first < total; first += kPassRows) {
    Draft<T> draft(shape);
    const int num_rows = std::min(total - first, kPassRows);
    for (int i = first; i < first + num_rows; ++i) {
      const Element& e = elements[i];
      draft.add_row(e.batch_row, e.place, e.list, e.slot, e.position);
    }
    fill_ancestors(draft, level);
    fill_cache(draft, layer);
    // The queries of an element do not depend on its place.
    for (int i = 0; i < num_rows; ++i) {
      const PassRow& row = draft.rows[i];
      std::mt19937 random(static_cast<unsigned>(shape.lengths[row.batch_row] * 1000 + row.place));
      T* query = &draft.queries[int64_t{row.memory} * draft.params.query_outs()];
      for (int d = 0; d < draft.params.query_outs(); ++d) {
        store_float(query + d, static_cast<float>(random() % 2001) / 500.0f - 2.0f);
      }
    }
    const DraftPass pass{kind, level, first, num_rows, first + num_rows == total};
    draft.run(Phase::kAttend, pass, layer, blocks);
    for (const PassRow& row : draft.rows) {
      const T* out = &draft.attended[int64_t{row.memory} * draft.params.query_outs()];
      if (!row.is_active) continue;
      all.insert(all.end(), out, out + draft.params.query_outs());
      const std::vector<int64_t> slots = seen(draft, pass, row);
      for (int head = 0; head < shape.heads && is_checked; ++head) {
        check_close(out + int64_t{head} * shape.head_dim,
                    attention(draft, row, layer, head, slots));
      }
    }
  }
  return all;
}

Shape alone(const Shape& shape, int b) {
  Shape one = shape;
  one.batch = 1;
  one.counts = {shape.counts[b]};
  one.lengths = {shape.lengths[b]};
  one.positions = {shape.positions[b]};
  return one;
}

template <typename T>
void test_attend(const Shape& shape, PassKind kind, int level = 0) {
  const std::vector<T> expected = attend_all<T>(shape, kind, level, 1, true);
  CHECK(same_bits(expected, attend_all<T>(shape, kind, level, 5, false)));
  // The results of batch rows follow each other.
  std::vector<T> parts;
  for (int b = 0; b < shape.batch; ++b) {
    const std::vector<T> part = attend_all<T>(alone(shape, b), kind, level, 2, false);
    parts.insert(parts.end(), part.begin(), part.end());
  }
  CHECK(same_bits(expected, parts));
}

const std::vector<int64_t> kCounts{6, 0, 1, 13}, kLengths{20, 1 << 20, 0, 150},
    kPositions{40, 1 << 20, 0, 150};

template <typename T>
void test_all_kinds() {
  const Shape ragged{.batch = 4,
                     .layers = 2,
                     .heads = 6,
                     .kv_heads = 2,
                     .head_dim = 64,
                     .capacity = 200,
                     .counts = kCounts,
                     .lengths = kLengths,
                     .positions = kPositions};
  for (const int window : {0, 2, 18}) {
    Shape shape = ragged;
    shape.window = window;
    test_attend<T>(shape, PassKind::kNew);
    test_attend<T>(shape, PassKind::kFrontier, 2);
    if (window == 2) continue;
    test_attend<T>(shape, PassKind::kKept);
    test_attend<T>(shape, PassKind::kFrontier, 1);
  }
}

template <typename T>
void test_dims() {
  for (const auto& [head_dim, heads, kv_heads] : {std::array{8, 1, 1},
                                                  {16, 3, 1},
                                                  {24, 10, 2},
                                                  {64, 5, 1},
                                                  {72, 8, 8},
                                                  {128, 17, 1},
                                                  {256, 2, 1}}) {
    Shape shape{.batch = 2,
                .heads = heads,
                .kv_heads = kv_heads,
                .head_dim = head_dim,
                .half = head_dim / 2,
                .capacity = 80,
                .depth = 4,
                .widths = {1, 5, 9, 9},
                .counts = {2, 1},
                .lengths = {37, 5},
                .positions = {37, 5}};
    test_attend<T>(shape, PassKind::kFrontier, 3);
    shape.is_parallel = true;
    test_attend<T>(shape, PassKind::kKept);
  }
}

// Cases for splits: several of them; nodes beyond the first word of their bits; longer splits.
template <typename T>
void test_splits() {
  Shape shape{.batch = 2,
              .heads = 4,
              .kv_heads = 2,
              .head_dim = 16,
              .half = 8,
              .capacity = 700,
              .depth = 3,
              .widths = {1, 61, 8},
              .counts = {3, 2},
              .lengths = {500, 250},
              .positions = {500, 250}};
  for (const int window : {0, 200}) {
    shape.window = window;
    test_attend<T>(shape, PassKind::kNew);
    test_attend<T>(shape, PassKind::kFrontier, 2);
  }
}

// Splits of twice the length.
template <typename T>
void test_long_splits() {
  constexpr int kSlots = kSplitKeys * kMaxSplits;
  test_attend<T>({.heads = 1,
                  .head_dim = 8,
                  .half = 4,
                  .capacity = kSlots + 100,
                  .counts = {3},
                  .lengths = {kSlots + 40},
                  .positions = {kSlots + 40}},
                 PassKind::kFrontier, 2);
}

template <typename T>
void test_rotations() {
  const Shape shape{.batch = 3,
                    .layers = 2,
                    .heads = 4,
                    .kv_heads = 2,
                    .head_dim = 72,
                    .half = 33,
                    .hidden = 264,
                    .num_features = 1,
                    .counts = {4, 0, 1},
                    .lengths = {3, 1 << 20, 20},
                    .positions = {10, 1 << 20, 7}};
  for (const PassKind kind : {PassKind::kNew, PassKind::kFrontier}) {
    // Some of the combinations, with both values of each option.
    for (int bits = kind == PassKind::kNew ? 0 : 2; bits < 64; bits += 5) {
      test_rotate<T>(shape, {kind, bits & 1, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0,
                             (bits & 16) != 0, (bits & 32) != 0});
    }
  }
}

}  // namespace

void test_draft_phases() {
  for (const bool has_input_norm : {false, true}) {
    for (const bool has_fc_norm : {false, true}) {
      test_gather<float>(has_input_norm, has_fc_norm);
      test_gather<__nv_bfloat16>(has_input_norm, has_fc_norm);
    }
  }
  test_rotations<float>();
  test_rotations<__nv_bfloat16>();
  test_all_kinds<float>();
  test_all_kinds<__nv_bfloat16>();
  if (Emulation::order != ThreadOrder::kShuffled) return;  // tests that take long run in one order
  test_dims<float>();
  test_dims<__nv_bfloat16>();
  test_dims<__half>();
  test_splits<float>();
  test_splits<__nv_bfloat16>();
  test_long_splits<__nv_bfloat16>();
}

}  // namespace specdec
