#include "token_noise.h"

#include <algorithm>

#include "philox.h"

namespace specdec::cpu {
namespace {

SPECDEC_HOST_DEVICE void fill(const NoiseStream& noise, const View1<const int64_t>& ids,
                              int64_t first, int64_t count, BulkBits fill_bits, float* out) {
  // The bits of consecutive tokens. Most lists of ids are ascending, so they are used many times.
  uint32_t window[kBulkTokens];
  int64_t first_in_window = -1;
  for (int64_t done = 0; done < count; done += kBulkTokens) {
    const int64_t size = std::min(kBulkTokens, count - done);
    uint32_t bits[kBulkTokens] = {};
    for (int64_t i = 0; i < size; ++i) {
      const int64_t at = first + done + i;
      const uint32_t token = static_cast<uint32_t>(ids.data == nullptr ? at : ids[at]);
      const uint32_t place = token % kBulkTokens;
      if (token - place != first_in_window) {
        first_in_window = token - place;
        fill_bits(noise, (token - place) / 4, window);
      }
      bits[i] = window[place];
    }
    float values[kBulkTokens];
    for (int64_t i = 0; i < kBulkTokens; ++i) values[i] = gumbel(bits[i]);
    std::copy_n(values, size, out + done);
  }
}

}  // namespace

void fill_noise(const NoiseStream& noise, const View1<const int64_t>& ids, int64_t first,
                int64_t count, float* out) {
  static const auto fill_on_this_machine = build_for<fill>(cpu_isa());
  static const BulkBits fill_bits = bulk_bits(cpu_isa());
  fill_on_this_machine(noise, ids, first, count, fill_bits, out);
}

}  // namespace specdec::cpu
