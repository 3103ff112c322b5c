// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace kvferry::ipc::detail {
/// Logs and aborts.
[[noreturn]] void check_failed(const char* expression,
                               std::string_view message,
                               const char* file,
                               int line) noexcept;
}  // namespace kvferry::ipc::detail

/// For our own mistakes (broken precondition, illegal state move): on in every build, aborts.
#define KVFERRY_CHECK(cond, message)                                              \
  do {                                                                            \
    if (!(cond)) [[unlikely]] {                                                   \
      ::kvferry::ipc::detail::check_failed(#cond, (message), __FILE__, __LINE__); \
    }                                                                             \
  } while (false)
