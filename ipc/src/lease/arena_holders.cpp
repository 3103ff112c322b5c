// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/lease/arena.hpp"

#include <algorithm>

namespace kvferry::ipc {

Result<std::vector<pid_t>> Arena::mapped_elsewhere() const {
  std::vector<pid_t> holders;
  for (const auto& segment : segments_) {
    KVFERRY_ASSIGN(const std::vector<pid_t> found, segment->mapped_elsewhere());
    holders.insert(holders.end(), found.begin(), found.end());
  }
  std::sort(holders.begin(), holders.end());
  holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
  return holders;
}

}  // namespace kvferry::ipc
