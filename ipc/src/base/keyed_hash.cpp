// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/keyed_hash.hpp"

#include <bit>
#include <cstdint>
#include <cstring>

namespace kvferry::ipc {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::size_t kWord = sizeof(std::uint64_t);

std::uint64_t word_at(const std::uint8_t* bytes, std::size_t size = kWord) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, size);
  return word;
}

/// The state and its steps, in the paper's names and numbers.
class SipState {
 public:
  SipState(std::uint64_t k0, std::uint64_t k1) noexcept
      : v0_(k0 ^ 0x736f6d6570736575ULL),
        v1_(k1 ^ 0x646f72616e646f6dULL ^ 0xee),  // for 128 bits
        v2_(k0 ^ 0x6c7967656e657261ULL),
        v3_(k1 ^ 0x7465646279746573ULL) {}

  void take(std::uint64_t word) noexcept {
    v3_ ^= word;
    round(2);
    v0_ ^= word;
  }
  /// Of the two halves of the result.
  std::uint64_t first() noexcept {
    v2_ ^= 0xee;
    return end();
  }
  std::uint64_t second() noexcept {
    v1_ ^= 0xdd;
    return end();
  }

 private:
  std::uint64_t end() noexcept {
    round(4);
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }
  void round(int times) noexcept {
    for (; times > 0; --times) {
      v0_ += v1_;
      v1_ = std::rotl(v1_, 13) ^ v0_;
      v0_ = std::rotl(v0_, 32);
      v2_ += v3_;
      v3_ = std::rotl(v3_, 16) ^ v2_;
      v0_ += v3_;
      v3_ = std::rotl(v3_, 21) ^ v0_;
      v2_ += v1_;
      v1_ = std::rotl(v1_, 17) ^ v2_;
      v2_ = std::rotl(v2_, 32);
    }
  }

  std::uint64_t v0_;
  std::uint64_t v1_;
  std::uint64_t v2_;
  std::uint64_t v3_;
};

}  // namespace

Digest keyed_hash(const Digest& key, const void* data, std::size_t size) noexcept {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  SipState state(word_at(key.bytes.data()), word_at(key.bytes.data() + kWord));
  std::size_t at = 0;
  for (; at + kWord <= size; at += kWord) state.take(word_at(bytes + at));
  // Nothing is read of an input that has ended at a word.
  const std::uint64_t rest = at < size ? word_at(bytes + at, size - at) : 0;
  state.take(rest | (std::uint64_t{size} << 56U));
  Digest hash;
  const std::uint64_t first = state.first();
  const std::uint64_t second = state.second();
  std::memcpy(hash.bytes.data(), &first, kWord);
  std::memcpy(hash.bytes.data() + kWord, &second, kWord);
  return hash;
}

}  // namespace kvferry::ipc
