// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/ids.hpp"

#include <fmt/format.h>
#include <sys/random.h>
#include <xxhash.h>

#include <bit>
#include <cerrno>
#include <cstring>

namespace kvferry::ipc {
namespace {

int hex_value(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

Digest Digest::random() {
  Digest digest;
  std::size_t filled = 0;
  while (filled < digest.bytes.size()) {
    // wait-brief: the kernel's random pool; it is filled once, early in the machine's start
    const ssize_t got = ::getrandom(digest.bytes.data() + filled, digest.bytes.size() - filled, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Exception(KVFERRY_ERRNO("getrandom"));
    filled += static_cast<std::size_t>(got);
  }
  return digest;
}

Result<Digest> Digest::from_hex(std::string_view hex) {
  Digest digest;
  if (hex.size() != digest.bytes.size() * 2) {
    return KVFERRY_ERROR(kInvalidArgument, "digest '{}' has {} hex digits, expected 32", hex,
                         hex.size());
  }
  for (std::size_t i = 0; i < digest.bytes.size(); ++i) {
    const int high = hex_value(hex[2 * i]);
    const int low = hex_value(hex[2 * i + 1]);
    if (high < 0 || low < 0) {
      return KVFERRY_ERROR(kInvalidArgument, "digest '{}' is not hexadecimal", hex);
    }
    digest.bytes[i] = static_cast<std::uint8_t>(high * 16 + low);
  }
  return digest;
}

Digest Digest::from_words(std::uint64_t high, std::uint64_t low) noexcept {
  Digest digest;
  for (std::size_t i = 0; i < 8; ++i) {
    digest.bytes[i] = static_cast<std::uint8_t>(high >> (56 - 8 * i));
    digest.bytes[8 + i] = static_cast<std::uint8_t>(low >> (56 - 8 * i));
  }
  return digest;
}

Digest Digest::hash(const void* data, std::size_t size, std::uint64_t seed) {
  const XXH128_hash_t hash = XXH3_128bits_withSeed(data, size, seed);
  return from_words(hash.high64, hash.low64);
}

std::string Digest::hex() const {
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const std::uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

std::uint64_t Digest::high() const noexcept {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < 8; ++i) word = (word << 8) | bytes[i];
  return word;
}

std::uint64_t Digest::low() const noexcept {
  std::uint64_t word = 0;
  for (std::size_t i = 8; i < 16; ++i) word = (word << 8) | bytes[i];
  return word;
}

}  // namespace kvferry::ipc
