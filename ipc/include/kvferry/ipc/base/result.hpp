// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/error.hpp"

#include <fmt/format.h>

#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

namespace kvferry::ipc {

/// A value or the Error that prevented it. Member names are those of std::expected, which
/// gcc 12 lacks, so that this class can become an alias of it.
template <typename T> class [[nodiscard]] Result {
 public:
  using value_type = T;

  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  [[nodiscard]] bool has_value() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }

  /// @pre has_value(); a violation aborts with the error's text.
  T& value() & {
    require_value();
    return *std::get_if<0>(&state_);
  }
  [[nodiscard]] const T& value() const& {
    require_value();
    return *std::get_if<0>(&state_);
  }
  T&& value() && {
    require_value();
    return std::move(*std::get_if<0>(&state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  /// @pre !has_value().
  [[nodiscard]] const Error& error() const& {
    KVFERRY_CHECK(!has_value(), "error() of a Result that holds a value");
    return *std::get_if<1>(&state_);
  }
  Error&& error() && {
    KVFERRY_CHECK(!has_value(), "error() of a Result that holds a value");
    return std::move(*std::get_if<1>(&state_));
  }

  template <typename U> [[nodiscard]] T value_or(U&& fallback) const& {
    return has_value() ? *std::get_if<0>(&state_) : static_cast<T>(std::forward<U>(fallback));
  }

 private:
  void require_value() const { KVFERRY_CHECK(has_value(), std::get_if<1>(&state_)->to_string()); }

  std::variant<T, Error> state_;
};

/// Success or an Error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}

  [[nodiscard]] bool has_value() const noexcept { return !error_.has_value(); }
  explicit operator bool() const noexcept { return has_value(); }
  [[nodiscard]] const Error& error() const& {
    KVFERRY_CHECK(error_.has_value(), "error() of a Status that is ok");
    return *error_;
  }
  Error&& error() && {
    KVFERRY_CHECK(error_.has_value(), "error() of a Status that is ok");
    return std::move(*error_);
  }

 private:
  std::optional<Error> error_;
};

inline Status ok() { return {}; }

/// For constructors, which cannot return an Error: the value, or an Exception with the error.
template <typename T> [[nodiscard]] T value_or_throw(Result<T> result) {
  if (!result) throw Exception(std::move(result).error());
  return std::move(result).value();
}

}  // namespace kvferry::ipc

#define KVFERRY_CONCAT_INNER(a, b) a##b
#define KVFERRY_CONCAT(a, b) KVFERRY_CONCAT_INNER(a, b)

/// Returns the error of a Status or Result expression from the enclosing function.
#define KVFERRY_TRY(expr)                           \
  do {                                              \
    auto&& kvferry_try_status = (expr);             \
    if (!kvferry_try_status.has_value()) {          \
      return std::move(kvferry_try_status).error(); \
    }                                               \
  } while (false)

// NOLINTBEGIN(bugprone-macro-parentheses): a declaration cannot stand in parentheses.
/// KVFERRY_ASSIGN(auto fd, open_it()) declares fd or returns the error.
#define KVFERRY_ASSIGN(decl, expr) \
  KVFERRY_ASSIGN_INNER(KVFERRY_CONCAT(kvferry_result_, __LINE__), decl, expr)
#define KVFERRY_ASSIGN_INNER(temp, decl, expr) \
  auto temp = (expr);                          \
  if (!temp.has_value()) {                     \
    return std::move(temp).error();            \
  }                                            \
  decl = std::move(temp).value()
// NOLINTEND(bugprone-macro-parentheses)
