// Views and checks of token ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

namespace specdec {

// A strided, possibly unaligned view of int64 token ids that it does not own.
struct TokenView {
  const std::byte* data;
  int64_t count;
  int64_t stride_bytes;

  int64_t operator[](int64_t i) const {
    int64_t token;
    std::memcpy(&token, data + i * stride_bytes, sizeof(token));
    return token;
  }
};

// Largest token id: indices store tokens in 32 bits.
inline constexpr int64_t kMaxTokenId = INT32_MAX;

// The position of the first of `tokens` that is not in [0, kMaxTokenId].
std::optional<int64_t> find_invalid_token(const TokenView& tokens);

// Throws std::invalid_argument that names the first of `tokens` that is not in [0, kMaxTokenId].
void check_tokens(const TokenView& tokens);

}  // namespace specdec
