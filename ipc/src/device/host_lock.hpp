// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <string_view>
#include <type_traits>
#include <utility>

namespace kvferry::ipc {

/// Mutual exclusion between processes of one user that leaves nothing behind: a listening socket
/// with an abstract name. The kernel drops it with its holder; those who wait are connected to it
/// and woken by its end.
/// @lifetime released by the destructor.
class HostLock {
 public:
  /// kTimeout names the holder.
  [[nodiscard]] static Result<HostLock> acquire(std::string_view device_name, Deadline deadline);

 private:
  explicit HostLock(UniqueFd listener) noexcept : listener_(std::move(listener)) {}
  UniqueFd listener_;
};

static_assert(std::is_nothrow_move_constructible_v<HostLock>);

}  // namespace kvferry::ipc
