// Which of several experts with equal probabilities a model takes, torch.topk decides by the algorithms
// of the standard library. In bfloat16 such ties are frequent, so the same algorithms run here.
#include "routing.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "specdec/core/platform.h"

namespace specdec::cpu {
namespace {

using Expert = std::pair<float, int64_t>;  // probability, index

bool is_before(const Expert& a, const Expert& b) {
  return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
}

}  // namespace

void choose_experts(const ModuleRouting& routing, int64_t experts, float* probabilities) {
  thread_local std::vector<Expert> ordered;
  ordered.resize(experts);
  for (int64_t i = 0; i < experts; ++i) ordered[i] = {probabilities[i], i};
  const auto first = ordered.begin(), last = first + routing.top_k;
  if (routing.top_k * 64 <= experts) {
    std::partial_sort(first, last, ordered.end(), is_before);
  } else {
    std::nth_element(first, last - 1, ordered.end(), is_before);
    std::sort(first, last - 1, is_before);
  }
  std::fill_n(probabilities, experts, -1.0f);
  float sum = 0.0f;
  for (auto each = first; each != last; ++each) sum = exact_add(sum, each->first);
  for (auto each = first; each != last; ++each) {
    probabilities[each->second] = routing.is_normalised ? exact_div(each->first, sum) : each->first;
  }
}

}  // namespace specdec::cpu
