// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/lease/arena.hpp"

#include <algorithm>

namespace kvferry::ipc {

Result<std::vector<pid_t>> Arena::mapped_elsewhere() const {
  std::vector<pid_t> holders;
  const auto look = [&holders](DeviceMemory& memory) -> Status {
    KVFERRY_ASSIGN(const std::vector<pid_t> found, memory.mapped_elsewhere());
    holders.insert(holders.end(), found.begin(), found.end());
    return ok();
  };
  for (const auto& memory : borrowed_) KVFERRY_TRY(look(*memory));
  for (const auto& memory : segments_) KVFERRY_TRY(look(*memory));
  std::sort(holders.begin(), holders.end());
  holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
  return holders;
}

std::vector<std::unique_ptr<MemoryTrace>> Arena::traces() const {
  std::vector<std::unique_ptr<MemoryTrace>> traces;
  if (is_borrowed()) return traces;
  for (const auto& segment : segments_) {
    traces.push_back(segment->trace());
    if (!traces.back()) return {};
  }
  return traces;
}

}  // namespace kvferry::ipc
