// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvferry::cli {

/// A sequence as the reference model sees it: what it is fed with at each token, and what has come
/// out so far. Whole numbers, so that runs can be compared bit by bit.
/// The input of a token depends on all tokens before it, as keys and values do.
class SequenceModel {
 public:
  SequenceModel(std::uint64_t seed, std::uint32_t number) noexcept
      : prompt_(mixed(seed + 0x9E3779B97F4A7C15ULL * (number + 1ULL))) {}

  /// Of the next token of the context, which is made up.
  std::uint64_t read_context_token() noexcept {
    return input_ = mixed(input_ + mixed(prompt_ + ++tokens_));
  }
  /// Of the token that the last output stands for, or that follows the context.
  std::uint64_t next_input() noexcept {
    return input_ = mixed(input_ + 0x9E3779B97F4A7C15ULL * (token_ + 1ULL));
  }
  /// output: summed over all ranks.
  void take_output(std::uint64_t output) noexcept {
    token_ = mixed(output) % kVocabulary;
    checksum_ = mixed(checksum_ ^ output);
  }
  /// Of all outputs, in their order.
  [[nodiscard]] std::uint64_t checksum() const noexcept { return checksum_; }

 private:
  static constexpr std::uint64_t kVocabulary = 32'000;

  static constexpr std::uint64_t mixed(std::uint64_t x) noexcept {
    x += 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31U);
  }

  std::uint64_t prompt_;
  std::uint64_t tokens_ = 0;
  std::uint64_t input_ = 0;
  std::uint64_t token_ = 0;
  std::uint64_t checksum_ = 0;
};

}  // namespace kvferry::cli
