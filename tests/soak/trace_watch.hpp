// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/runtime_dir.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::soak {

struct TraceCounts {
  std::uint64_t checks = 0;
  std::uint64_t transitions = 0;  ///< Checked, each counted once.
  std::uint64_t unseen = 0;       ///< Overwritten, or removed, before anybody looked.
  std::vector<std::string> breaches;
};

/// Does what `kvferry trace --check` does, again and again, and keeps count of what it has seen:
/// rings hold 4,096 transitions.
class TraceWatch {
 public:
  explicit TraceWatch(ipc::RuntimeDir dir) : dir_(std::move(dir)) {}
  void check();
  [[nodiscard]] const TraceCounts& counts() const noexcept { return counts_; }

 private:
  ipc::RuntimeDir dir_;
  TraceCounts counts_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint64_t> last_;  ///< By pid and life.
};

}  // namespace kvferry::soak
