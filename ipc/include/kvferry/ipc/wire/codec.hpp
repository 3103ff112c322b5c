// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

/// msgpack codec. A message is a struct with
///   template <typename V> void visit(V& v) { v(field_a, field_b, …); }
/// and is written as an array of its fields in that order. Decoding trusts nothing: types, ranges,
/// enum bounds, element counts and sizes are checked, and any surprise is kProtocol.
namespace kvferry::ipc {

using Bytes = std::vector<std::uint8_t>;

/// Largest element count of any array in a message.
inline constexpr std::uint32_t kMaxWireElements = 1U << 20;
/// Largest encoded message, and so of any text or byte string in one.
inline constexpr std::size_t kMaxWireBytes = std::size_t{16} << 20;
/// Deepest nesting of structs and arrays.
inline constexpr int kMaxWireDepth = 16;
/// Longest duration, either sign: far from overflow when added to a point in time.
inline constexpr std::chrono::hours kMaxWireDuration{24 * 365 * 100};

/// Enums on the wire give their largest enumerator by overloading this for argument-dependent
/// lookup: constexpr std::uint64_t wire_max(MyEnum) { return ...; }. Values are 1..max; an enum
/// that has a zero says so with constexpr std::uint64_t wire_min(MyEnum) { return 0; }.
template <typename E>
concept WireEnum = std::is_enum_v<E> && requires(E e) {
  { wire_max(e) } -> std::convertible_to<std::uint64_t>;
};

namespace detail {
template <WireEnum E> constexpr std::uint64_t lowest_wire_value() {
  if constexpr (requires(E e) { wire_min(e); }) {
    return wire_min(E{});
  } else {
    return 1;
  }
}
}  // namespace detail

class Encoder {
 public:
  Encoder();
  ~Encoder();
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  template <typename... T> void operator()(const T&... fields) {
    begin_array(sizeof...(T));
    (write(fields), ...);
  }
  [[nodiscard]] Bytes take();

 private:
  void begin_array(std::uint64_t count);
  void put_uint(std::uint64_t value);
  void put_int(std::int64_t value);
  void put_double(double value);
  void put_bool(bool value);
  void put_string(std::string_view text);
  void put_bytes(std::span<const std::uint8_t> bytes);

  void write(bool value) { put_bool(value); }
  void write(double value) { put_double(value); }
  void write(const std::string& text) { put_string(text); }
  void write(const Bytes& bytes) { put_bytes(bytes); }
  void write(const Digest& digest) { put_bytes(digest.bytes); }
  template <std::unsigned_integral T> void write(T value) { put_uint(value); }
  template <std::signed_integral T> void write(T value) { put_int(value); }
  template <WireEnum E> void write(E value) { put_uint(static_cast<std::uint64_t>(value)); }
  template <typename Tag, typename Int> void write(const Id<Tag, Int>& id) { put_uint(id.value); }
  template <typename Rep, typename Period> void write(const std::chrono::duration<Rep, Period>& d) {
    put_int(d.count());
  }
  template <typename T> void write(const std::vector<T>& items) {
    begin_array(items.size());
    for (const T& item : items) write(item);
  }
  template <typename T> void write(const std::optional<T>& item) {
    begin_array(item ? 1 : 0);
    if (item) write(*item);
  }
  void write(const Error& error) {
    (*this)(static_cast<std::uint64_t>(error.code), error.message,
            static_cast<std::int64_t>(error.native_code));
  }
  template <typename T>
  requires requires(T& t, Encoder& e) { t.visit(e); }
  void write(const T& message) {
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): visit() serves both ways; we only read
    const_cast<T&>(message).visit(*this);
  }

  template <typename T> friend Bytes encode(const T& message);

  struct State;
  std::unique_ptr<State> state_;
};

class Decoder {
 public:
  explicit Decoder(std::span<const std::uint8_t> bytes);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  template <typename... T> void operator()(T&... fields) {
    expect_array(sizeof...(T));
    (read(fields), ...);
    end_array();
  }
  /// Ok when everything was read and nothing is left over.
  [[nodiscard]] Status finish(std::string_view message_name);

 private:
  void expect_array(std::uint64_t count);
  std::uint64_t begin_any_array();
  void end_array();
  void fail(std::string_view what);
  [[nodiscard]] bool failed() const noexcept;
  std::uint64_t get_uint(std::uint64_t max);
  std::uint64_t get_enum(std::uint64_t min, std::uint64_t max);
  std::int64_t get_int(std::int64_t min, std::int64_t max);
  double get_double();
  bool get_bool();
  std::string get_string();
  Bytes get_bytes();

  void read(bool& value) { value = get_bool(); }
  void read(double& value) { value = get_double(); }
  void read(std::string& text) { text = get_string(); }
  void read(Bytes& bytes) { bytes = get_bytes(); }
  void read(Digest& digest);
  void read(Error& error);
  template <std::unsigned_integral T> void read(T& value) {
    value = static_cast<T>(get_uint(std::numeric_limits<T>::max()));
  }
  template <std::signed_integral T> void read(T& value) {
    value = static_cast<T>(get_int(std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
  }
  template <WireEnum E> void read(E& value) {
    value = static_cast<E>(get_enum(detail::lowest_wire_value<E>(), wire_max(E{})));
  }
  template <typename Tag, typename Int> void read(Id<Tag, Int>& id) { read(id.value); }
  template <typename Rep, typename Period> void read(std::chrono::duration<Rep, Period>& d) {
    using Wire = std::chrono::duration<std::int64_t, Period>;
    constexpr std::int64_t kMost = std::chrono::duration_cast<Wire>(kMaxWireDuration).count();
    d = std::chrono::duration<Rep, Period>(static_cast<Rep>(get_int(-kMost, kMost)));
  }
  template <typename T> void read(std::vector<T>& items) {
    const std::uint64_t count = begin_any_array();
    items.clear();
    for (std::uint64_t i = 0; i < count && !failed(); ++i) read(items.emplace_back());
    end_array();
  }
  template <typename T> void read(std::optional<T>& item) {
    const std::uint64_t count = begin_any_array();
    item.reset();
    if (count > 1) fail("optional with more than one element");
    if (count == 1 && !failed()) read(item.emplace());
    end_array();
  }
  template <typename T>
  requires requires(T& t, Decoder& d) { t.visit(d); }
  void read(T& message) { message.visit(*this); }

  template <typename T>
  friend Result<T> decode(std::span<const std::uint8_t> bytes, std::string_view message_name);

  struct State;
  std::unique_ptr<State> state_;
};

template <typename T> [[nodiscard]] Bytes encode(const T& message) {
  Encoder encoder;
  encoder.write(message);
  return encoder.take();
}

template <typename T>
[[nodiscard]] Result<T> decode(std::span<const std::uint8_t> bytes, std::string_view message_name) {
  T message{};
  Decoder decoder(bytes);
  decoder.read(message);
  KVFERRY_TRY(decoder.finish(message_name));
  return message;
}

}  // namespace kvferry::ipc
