// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "os/host_memory.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace kvferry::ipc {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// The number after "key" in a file of "key number ..." lines.
std::optional<std::uint64_t> read_field(const std::filesystem::path& file, std::string_view key) {
  std::ifstream stream(file);
  std::string word;
  while (stream >> word) {
    std::uint64_t value = 0;
    if (word == key) {
      if (stream >> value) return value;
      return std::nullopt;
    }
    stream.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

// Nothing for "max" and for a missing file.
std::optional<std::uint64_t> read_number(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::uint64_t value = 0;
  if (stream >> value) return value;
  return std::nullopt;
}

std::uint64_t cgroup_headroom(const std::filesystem::path& group) {
  const auto limit = read_number(group / "memory.max");
  const auto used = read_number(group / "memory.current");
  if (!limit || !used) return kUnlimited;
  // Page cache of files is given up before anything else.
  const std::uint64_t reclaimable = read_field(group / "memory.stat", "inactive_file").value_or(0);
  const std::uint64_t held = *used - std::min(*used, reclaimable);
  return *limit - std::min(*limit, held);
}

std::uint64_t cgroup_available() {
  std::ifstream stream("/proc/self/cgroup");
  std::string line;
  while (std::getline(stream, line)) {
    constexpr std::string_view kUnified = "0::/";
    if (!line.starts_with(kUnified)) continue;
    const std::filesystem::path root = "/sys/fs/cgroup";
    std::filesystem::path group = line.substr(kUnified.size());
    std::uint64_t least = cgroup_headroom(root);
    while (!group.empty()) {
      least = std::min(least, cgroup_headroom(root / group));
      group = group.parent_path();
    }
    return least;
  }
  return kUnlimited;
}

}  // namespace

std::uint64_t free_huge_page_bytes() {
  constexpr std::uint64_t kPageBytes = 2ULL << 20;
  const std::filesystem::path pages = "/sys/kernel/mm/hugepages/hugepages-2048kB";
  const std::uint64_t free = read_number(pages / "free_hugepages").value_or(0);
  const std::uint64_t promised = read_number(pages / "resv_hugepages").value_or(0);
  return (free - std::min(free, promised)) * kPageBytes;
}

std::uint64_t available_host_bytes() {
  constexpr std::uint64_t kBytesPerKib = 1024;
  const auto available_kib = read_field("/proc/meminfo", "MemAvailable:");
  return std::min(available_kib ? *available_kib * kBytesPerKib : kUnlimited, cgroup_available());
}

}  // namespace kvferry::ipc
