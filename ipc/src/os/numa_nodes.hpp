// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

namespace kvferry::ipc {

/// Of the PCI devices below a directory like /sys/bus/pci/devices.
[[nodiscard]] std::vector<int> gpu_numa_nodes_of(const std::filesystem::path& pci_devices);
/// Pages of the range that do not exist yet come from these nodes in turn, or from others when
/// those are full. A failure is logged, once: the memory is as good, only further away.
void bind_to_nodes(void* data, std::uint64_t size_bytes, const std::vector<int>& nodes);
/// The same, and pages that exist go there, but for those that another process has mapped or that
/// are pinned. Takes the kernel about a microsecond for each that is elsewhere.
void move_to_nodes(void* data, std::uint64_t size_bytes, const std::vector<int>& nodes);
/// Of a PCI device ("0000:3b:00.0") below a directory like /sys/bus/pci/devices; empty where it
/// does not tell.
[[nodiscard]] std::vector<int> numa_nodes_of(const std::filesystem::path& pci_devices,
                                             std::string_view bus_id);
/// Of a PCI device of this machine; empty where that has one node.
[[nodiscard]] std::vector<int> near_numa_nodes(std::string_view bus_id);

}  // namespace kvferry::ipc
