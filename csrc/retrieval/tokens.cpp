#include "tokens.h"

#include <stdexcept>
#include <string>

namespace specdec {

std::optional<int64_t> find_invalid_token(const TokenView& tokens) {
  for (int64_t i = 0; i < tokens.count; ++i) {
    if (tokens[i] < 0 || tokens[i] > kMaxTokenId) return i;
  }
  return std::nullopt;
}

void check_tokens(const TokenView& tokens) {
  if (const auto i = find_invalid_token(tokens)) {
    throw std::invalid_argument("tokens[" + std::to_string(*i) + "] is " +
                                std::to_string(tokens[*i]) + ": token ids must be in [0, " +
                                std::to_string(kMaxTokenId) + "]; leave padding out");
  }
}

}  // namespace specdec
