// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace kvferry::cache_manager {

/// How many jobs each engine has under way: what clients have submitted, and parts of loads that
/// wait for blocks. @threading one thread.
class UnfinishedJobs {
 public:
  void add(std::uint32_t engine, bool is_part) {
    Count& count = counts_[engine];
    ++(is_part ? count.parts : count.of_clients);
  }
  /// @pre it was added
  void remove(std::uint32_t engine, bool is_part) {
    const auto at = counts_.find(engine);
    --(is_part ? at->second.parts : at->second.of_clients);
    if (at->second.parts + at->second.of_clients == 0) counts_.erase(at);
  }
  [[nodiscard]] std::size_t all(std::uint32_t engine) const {
    const auto at = counts_.find(engine);
    return at == counts_.end() ? 0 : at->second.parts + at->second.of_clients;
  }
  [[nodiscard]] std::size_t of_clients(std::uint32_t engine) const {
    const auto at = counts_.find(engine);
    return at == counts_.end() ? 0 : at->second.of_clients;
  }

 private:
  struct Count {
    std::size_t of_clients = 0;
    std::size_t parts = 0;
  };
  std::map<std::uint32_t, Count> counts_;  ///< By engine; never of nothing.
};

}  // namespace kvferry::cache_manager
