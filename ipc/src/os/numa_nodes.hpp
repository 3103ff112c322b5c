// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace kvferry::ipc {

/// Of the PCI devices below a directory like /sys/bus/pci/devices.
[[nodiscard]] std::vector<int> gpu_numa_nodes_of(const std::filesystem::path& pci_devices);
/// Pages of the range that do not exist yet come from these nodes in turn, or from others when
/// those are full. A failure is logged, once: the memory is as good, only further away.
void bind_to_nodes(void* data, std::uint64_t size_bytes, const std::vector<int>& nodes);

}  // namespace kvferry::ipc
