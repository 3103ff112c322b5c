// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/process_memory.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <fstream>

namespace kvferry::ipc::lease {

std::uint64_t resident_bytes(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/statm", pid));
  std::uint64_t total_pages = 0;
  std::uint64_t resident_pages = 0;
  if (!(file >> total_pages >> resident_pages)) return 0;
  const long page = ::sysconf(_SC_PAGESIZE);
  return resident_pages * static_cast<std::uint64_t>(page > 0 ? page : 4096);
}

}  // namespace kvferry::ipc::lease
