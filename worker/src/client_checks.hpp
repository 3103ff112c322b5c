// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <string_view>
#include <utility>

/// What a client's calls look at before they are sent, and in what comes back.
namespace kvferry::worker {

/// A reply that does not fit its request: nothing of it is used.
template <typename... Args>
ipc::Error bad_reply(fmt::format_string<Args...> format, Args&&... args) {
  return KVFERRY_ERROR(kProtocol, "{}", fmt::format(format, std::forward<Args>(args)...));
}

/// Whether a message may hold so many.
inline ipc::Status check_count(std::size_t count, std::string_view what) {
  if (count == 0 || count > ipc::kMaxWireElements) {
    return KVFERRY_ERROR(kInvalidArgument, "{} {}; 1 to {} are allowed", count, what,
                         ipc::kMaxWireElements);
  }
  return ipc::ok();
}

}  // namespace kvferry::worker
