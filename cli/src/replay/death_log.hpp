// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "replay/counters.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::cli {

/// What was found in a part of a run.
struct HitCounts {
  std::uint64_t requests = 0;
  std::uint64_t block_references = 0;
  std::uint64_t hits_device = 0;
  std::uint64_t hits_host = 0;

  /// Of the device and of host memory.
  [[nodiscard]] double hit_rate() const noexcept { return rate_of(hits_device + hits_host); }
  [[nodiscard]] double host_hit_rate() const noexcept { return rate_of(hits_host); }

 private:
  [[nodiscard]] double rate_of(std::uint64_t hits) const noexcept {
    return block_references == 0
               ? 0.0
               : static_cast<double>(hits) / static_cast<double>(block_references);
  }
};

/// A process died in a run that went on.
struct RunDeath {
  std::string process;         ///< "manager", "mover/0".
  std::uint64_t requests = 0;  ///< Done by then.
  double seconds = 0;          ///< Since the first request was taken.
  HitCounts before;            ///< Since the death before it, or the begin of the run.
  HitCounts after;             ///< Until the next one, or the end of the run.
};

/// Parts a run by the deaths in it. Deaths before the first request are not of the run.
class DeathLog {
 public:
  /// counters: those of the run, now.
  void add(std::string process, double seconds, const ReplayCounters& counters);
  /// All of them, the run having ended with these.
  [[nodiscard]] std::vector<RunDeath> ended(const ReplayCounters& counters) const;

 private:
  struct Mark {
    std::string process;
    double seconds = 0;
    HitCounts counts;  ///< Since the begin.
  };
  std::vector<Mark> marks_;
};

[[nodiscard]] nlohmann::json to_json(const std::vector<RunDeath>& deaths);

}  // namespace kvferry::cli
