// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cstddef>

namespace kvferry::ipc {

/// What a process keeps free of its limit of open files. Some libraries below end the process when
/// they find none left (ZeroMQ does, when it accepts a connection or makes a context), so ours asks
/// first and refuses work while it still can.
inline constexpr std::size_t kReservedDescriptors = 16;

/// How many descriptors this process may have open; 0 when that cannot be told.
[[nodiscard]] std::size_t descriptor_limit() noexcept;

/// How many descriptors this process can still open; 0 when not even that can be told.
[[nodiscard]] std::size_t free_descriptors() noexcept;

/// kBusy unless so many are free beyond the reserved ones.
[[nodiscard]] Status need_descriptors(std::size_t count);

/// Raises this process's limit of open files as far as it may, up to wanted. For daemons: other
/// processes' limits are their own. False when it stays below.
bool raise_descriptor_limit(std::size_t wanted) noexcept;

}  // namespace kvferry::ipc
