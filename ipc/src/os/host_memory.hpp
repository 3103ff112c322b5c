// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvferry::ipc {

/// Bytes that this process can still take without the kernel ending somebody: the system's
/// available memory, or what the tightest memory cgroup above this process leaves, whichever is
/// less. The largest value when neither can be read.
[[nodiscard]] std::uint64_t available_host_bytes();
/// In huge pages of 2 MiB that the machine has reserved and nobody has taken.
[[nodiscard]] std::uint64_t free_huge_page_bytes();

}  // namespace kvferry::ipc
