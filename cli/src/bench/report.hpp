// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/figure.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::cli {

struct BenchReport {
  std::string device;  ///< Its name, and what it is called here.
  std::uint32_t ranks = 1;
  std::string arena;
  LinkLimit limit;
  std::vector<BenchFigure> figures;
  std::vector<std::string> errors;
  std::uint64_t leaked_device_bytes = 0;
  std::uint64_t leaked_host_bytes = 0;
  std::vector<std::string> leftover_names;
};

/// {"device", "limit": {"d2h", "h2d", "both"}, "results": [...]}: docs/operations.md.
[[nodiscard]] nlohmann::json to_json(const BenchReport& report);
/// Tables for people: one for each benchmark, cache and way, with a row for each strategy.
[[nodiscard]] std::string tables_of(const BenchReport& report);
/// Why the run failed; empty when it did not.
[[nodiscard]] std::vector<std::string> failures_of(const BenchReport& report);

}  // namespace kvferry::cli
