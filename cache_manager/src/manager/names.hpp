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

}  // namespace kvferry::cache_manager
