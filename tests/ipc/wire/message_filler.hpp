// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/messages.hpp"

#include <chrono>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace kvferry::test {

/// Fills every field of a message with seeded random values that are valid on the wire, edge values
/// among them.
class MessageFiller {
 public:
  explicit MessageFiller(std::uint64_t seed) : random_(seed) {}

  template <typename... T> void operator()(T&... fields) { (fill(fields), ...); }

  template <typename T>
  requires requires(T& t, MessageFiller& f) { t.visit(f); }
  void fill(T& message) { message.visit(*this); }
  void fill(bool& value) { value = pick(2) == 1; }
  void fill(double& value) { value = static_cast<double>(random_()) / 3.0; }
  void fill(std::string& text) {
    text.resize(pick_size());
    for (char& c : text) c = static_cast<char>('a' + pick(26));
  }
  void fill(ipc::Bytes& bytes) {
    bytes.resize(pick_size());
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(pick(256));
  }
  void fill(ipc::Digest& digest) { digest = ipc::Digest::from_words(random_(), random_()); }
  void fill(ipc::Error& error) {
    fill(error.code);
    fill(error.message);
    fill(error.native_code);
  }
  template <std::integral T> void fill(T& value) {
    switch (pick(4)) {
      case 0: value = std::numeric_limits<T>::max(); break;
      case 1: value = std::numeric_limits<T>::min(); break;
      case 2: value = static_cast<T>(pick(200)); break;
      default: value = static_cast<T>(random_());
    }
  }
  template <ipc::WireEnum E> void fill(E& value) {
    const std::uint64_t min = ipc::detail::lowest_wire_value<E>();
    value = static_cast<E>(min + pick(wire_max(E{}) - min + 1));
  }
  template <typename Tag, typename Int> void fill(ipc::Id<Tag, Int>& id) { fill(id.value); }
  template <typename Rep, typename Period> void fill(std::chrono::duration<Rep, Period>& d) {
    d = std::chrono::duration<Rep, Period>(static_cast<Rep>(pick(1'000'000)) - 500'000);
  }
  template <typename T> void fill(std::vector<T>& items) {
    items.resize(pick(5));
    for (T& item : items) fill(item);
  }
  template <typename T> void fill(std::optional<T>& item) {
    item.reset();
    if (pick(2) == 1) fill(item.emplace());
  }

 private:
  std::uint64_t pick(std::uint64_t count) { return random_() % count; }
  // Around the borders of msgpack's length encodings, the larger ones rarely.
  std::size_t pick_size() {
    constexpr std::size_t kSizes[] = {0, 1, 15, 31, 32, 33, 255, 256};
    return kSizes[pick(std::size(kSizes))];
  }

  std::mt19937_64 random_;
};

}  // namespace kvferry::test
