// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "simulate/simulation.hpp"

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

namespace kvferry::cli {

struct SimulationReport {
  std::string workload;
  std::uint64_t requests = 0;
  std::uint64_t skipped_lines = 0;
  std::uint64_t references = 0;
  std::uint32_t distinct = 0;
  double unlimited_hit_rate = 0;
  std::vector<SimulatedCache> results;  ///< All capacities of a policy, then the next policy's.
};

/// {"workload", "requests", "references", "distinct", "unlimited_hit_rate", "results": [{"policy",
/// "capacity", "hit_rate", "hits", "references", "evictions", "ns_per_block", "gain"}]}; gain only
/// where lru and optimal were simulated, too.
[[nodiscard]] nlohmann::json to_json(const SimulationReport& report);
/// Hit rates, a row for each capacity and a column for each policy, under what was played and
/// skipped.
[[nodiscard]] std::string table_of(const SimulationReport& report);
/// Hit rate over capacity, a curve for each policy: an SVG drawing.
[[nodiscard]] std::string draw_simulation(const SimulationReport& report);

}  // namespace kvferry::cli
