// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <algorithm>
#include <string>

namespace kvferry::cache_manager {

/// Engine names become parts of socket names: kInvalidArgument outside [A-Za-z0-9._-]{1,64}.
[[nodiscard]] inline ipc::Status check_engine_name(const std::string& name) {
  constexpr std::size_t kLongest = 64;
  const bool good =
      !name.empty() && name.size() <= kLongest && std::all_of(name.begin(), name.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '.' || c == '_' || c == '-';
      });
  if (!good) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "engine name of {} characters: use 1 to {} of letters, digits, . _ -",
                         name.size(), kLongest);
  }
  return ipc::ok();
}

/// Namespaces are shown to people and kept in the pool's catalogue: kInvalidArgument for more than
/// 128 bytes, none, or control characters.
[[nodiscard]] inline ipc::Status check_namespace(const std::string& name) {
  constexpr std::size_t kLongestNamespace = 128;
  constexpr char kFirstPrintable = ' ';
  constexpr char kDelete = 0x7f;
  const bool is_printable = std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) >= static_cast<unsigned char>(kFirstPrintable) &&
           c != kDelete;
  });
  if (name.empty() || name.size() > kLongestNamespace || !is_printable) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "namespace of {} bytes: use 1 to {} without control characters",
                         name.size(), kLongestNamespace);
  }
  return ipc::ok();
}

}  // namespace kvferry::cache_manager
