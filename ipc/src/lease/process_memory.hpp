// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace kvferry::ipc::lease {

/// Resident memory of a process: an upper bound of what it has pinned, which decides how long the
/// kernel takes to end it. 0 when it cannot be read.
[[nodiscard]] std::uint64_t resident_bytes(pid_t pid);

}  // namespace kvferry::ipc::lease
