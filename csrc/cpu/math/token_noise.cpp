#include "token_noise.h"

#include <algorithm>

#include "philox.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kBlock = 4 * kBulkTokens;  // tokens at a time
// The bits of all tokens between the smallest and the largest id of a block are computed if these
// are no more. The ids of a draft vocabulary ascend, and it has at least an eighth of the tokens.
constexpr int64_t kMostSpanned = 8 * kBlock;

// The bits of the tokens ids[0 .. size - 1].
SPECDEC_HOST_DEVICE void bits_of_ids(const NoiseStream& noise, const uint32_t* ids, int64_t size,
                                     BulkBits fill_bits, uint32_t* bits) {
  uint32_t smallest = UINT32_MAX, largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    smallest = std::min(smallest, ids[i]);
    largest = std::max(largest, ids[i]);
  }
  const uint32_t first = smallest / kBulkTokens * kBulkTokens;
  if (largest - first >= kMostSpanned) {
    for (int64_t i = 0; i < size; ++i) bits[i] = noise.token_bits(ids[i]);
    return;
  }
  uint32_t spanned[kMostSpanned];
  for (uint32_t begin = 0; begin <= largest - first; begin += kBulkTokens) {
    fill_bits(noise, (first + begin) / 4, spanned + begin);
  }
  for (int64_t i = 0; i < size; ++i) bits[i] = spanned[ids[i] - first];
}

SPECDEC_HOST_DEVICE void fill(const NoiseStream& noise, const View1<const int64_t>& ids,
                              int64_t first, int64_t count, BulkBits fill_bits, float* out) {
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t size = std::min(kBlock, count - done), begin = first + done;
    uint32_t tokens[kBlock], bits[kBlock];
    for (int64_t i = 0; i < size; ++i) {
      tokens[i] = static_cast<uint32_t>(ids.data == nullptr ? begin + i : ids[begin + i]);
    }
    bits_of_ids(noise, tokens, size, fill_bits, bits);
    for (int64_t i = 0; i < size; ++i) out[done + i] = gumbel(bits[i]);
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
