// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "os/numa_nodes.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/pool_filler.hpp"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>
#include <climits>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace kvferry::ipc {
namespace {

constexpr int kMostNodes = 1024;
constexpr std::string_view kNvidia = "0x10de";
/// Display controllers, of which VGA and 3D controllers are the kinds of GPUs.
constexpr std::string_view kDisplayClass = "0x03";

std::string first_word(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::string word;
  stream >> word;
  return word;
}

std::optional<int> to_node(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool is_node(int node) {
  return node >= 0 && node < kMostNodes &&
         std::filesystem::exists(fmt::format("/sys/devices/system/node/node{}", node));
}

void set_policy(void* data,
                std::uint64_t size_bytes,
                const std::vector<int>& nodes,
                unsigned flags) {
  if (nodes.empty()) return;
  constexpr int kWordBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, kMostNodes / kWordBits> mask{};
  for (const int node : nodes) {
    mask.at(static_cast<std::size_t>(node / kWordBits)) |= 1UL << (node % kWordBits);
  }
  const int policy = nodes.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
  if (::syscall(SYS_mbind, data, size_bytes, policy, mask.data(), kMostNodes + 1UL, flags) == 0) {
    return;
  }
  static std::atomic<bool> was_told = false;
  if (!was_told.exchange(true)) {
    log_warn("memory of the host pool cannot be placed on a NUMA node: {}",
             KVFERRY_ERRNO("mbind").message);
  }
}

bool has_several_nodes() {
  constexpr int kSecondNode = 1;
  return is_node(kSecondNode);
}

}  // namespace

std::vector<int> numa_nodes_of(const std::filesystem::path& pci_devices, std::string_view bus_id) {
  const auto node = to_node(first_word(pci_devices / bus_id / "numa_node"));
  if (!node || *node < 0 || *node >= kMostNodes) return {};  // -1: it does not tell
  return {*node};
}

std::vector<int> near_numa_nodes(std::string_view bus_id) {
  if (!has_several_nodes()) return {};
  return numa_nodes_of("/sys/bus/pci/devices", bus_id);
}

std::vector<int> gpu_numa_nodes_of(const std::filesystem::path& pci_devices) {
  std::set<int> nodes;
  std::error_code error;
  for (const auto& device : std::filesystem::directory_iterator(pci_devices, error)) {
    if (first_word(device.path() / "vendor") != kNvidia) continue;
    if (!first_word(device.path() / "class").starts_with(kDisplayClass)) continue;
    const auto its = numa_nodes_of(pci_devices, device.path().filename().string());
    nodes.insert(its.begin(), its.end());
  }
  return {nodes.begin(), nodes.end()};
}

std::vector<int> gpu_numa_nodes() {
  if (!has_several_nodes()) return {};
  return gpu_numa_nodes_of("/sys/bus/pci/devices");
}

Result<std::vector<int>> parse_numa_nodes(std::string_view text) {
  std::set<int> nodes;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    const std::string_view word = text.substr(0, comma);
    const auto node = to_node(word);
    if (!node || !is_node(*node)) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "NUMA node '{}' is none of this machine: see /sys/devices/system/node",
                           word);
    }
    nodes.insert(*node);
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return std::vector<int>(nodes.begin(), nodes.end());
}

void bind_to_nodes(void* data, std::uint64_t size_bytes, const std::vector<int>& nodes) {
  set_policy(data, size_bytes, nodes, 0);
}

void move_to_nodes(void* data, std::uint64_t size_bytes, const std::vector<int>& nodes) {
  if (nodes.empty()) return;
  // Only what this process has mapped is moved. Where this fails, so does what is done with them.
  static_cast<void>(::madvise(data, size_bytes, MADV_POPULATE_WRITE));
  set_policy(data, size_bytes, nodes, MPOL_MF_MOVE);
}

}  // namespace kvferry::ipc
