// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

/// What the targets share. A target is one file with one LLVMFuzzerTestOneInput that calls what the
/// processes call; a KVFERRY_CHECK that fails, an exception that escapes and whatever a sanitizer
/// reports are findings.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace kvferry::fuzz {

/// The bytes of one input, taken from the front. Short ones read as zeros.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : bytes_(data, size) {}

  [[nodiscard]] bool empty() const noexcept { return bytes_.empty(); }
  [[nodiscard]] std::span<const std::uint8_t> take(std::size_t count) noexcept {
    const auto taken = bytes_.first(std::min(count, bytes_.size()));
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }
  [[nodiscard]] std::uint64_t number(std::size_t bytes) noexcept {
    std::uint64_t value = 0;
    for (const std::uint8_t byte : take(bytes)) value = value << 8U | byte;
    return value;
  }
  [[nodiscard]] std::uint8_t byte() noexcept { return static_cast<std::uint8_t>(number(1)); }
  [[nodiscard]] std::span<const std::uint8_t> rest() noexcept { return take(bytes_.size()); }
  [[nodiscard]] std::string_view text() noexcept {
    const auto all = rest();
    return {reinterpret_cast<const char*>(all.data()), all.size()};
  }

 private:
  std::span<const std::uint8_t> bytes_;
};

/// What a decoder accepts must be something that can be said: it encodes, and that decodes to the
/// same bytes again.
template <typename T> void round_trip(const T& message) {
  const ipc::Bytes bytes = ipc::encode(message);
  const auto again = ipc::decode<T>(bytes, "encoded message");
  KVFERRY_CHECK(again.has_value(), again ? "" : again.error().to_string());
  KVFERRY_CHECK(ipc::encode(*again) == bytes, "another message after a round trip");
}

/// Decodes and, when that works, holds the message to its round trip.
template <typename T> ipc::Result<T> decode_and_check(std::span<const std::uint8_t> bytes) {
  auto message = ipc::decode<T>(bytes, "fuzzed message");
  if (message) round_trip(*message);
  return message;
}

namespace detail {
/// Before the first input: what the product says about bad bytes is no finding.
inline const bool kQuiet = [] {
  ipc::init_logging("fuzz", ipc::LogLevel::kError);
  return true;
}();
}  // namespace detail

}  // namespace kvferry::fuzz
