// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/utsname.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

namespace kvferry::test {

/// Whether this kernel has MADV_COLLAPSE for shared memory (Linux 6.1) and may use it.
inline bool makes_huge_pages() {
  utsname kernel{};
  EXPECT_EQ(::uname(&kernel), 0);
  int major = 0;
  int minor = 0;
  if (std::sscanf(kernel.release, "%d.%d", &major, &minor) != 2) return false;
  if (std::pair(major, minor) < std::pair(6, 1)) return false;
  if (::prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) != 0) return false;
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return !text.empty() && text.find("[deny]") == std::string::npos;
}

/// Of the mapping that holds an address, by the kernel's own account.
inline std::uint64_t mapped_as_huge_bytes(const void* address) {
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long long first = 0;
    unsigned long long end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &first, &end) == 2) {
      const auto at = reinterpret_cast<std::uintptr_t>(address);
      inside = at >= first && at < end;
    }
    unsigned long long kib = 0;
    if (inside && std::sscanf(line.c_str(), "ShmemPmdMapped: %llu kB", &kib) == 1) {
      return kib << 10U;
    }
  }
  return 0;
}

}  // namespace kvferry::test
