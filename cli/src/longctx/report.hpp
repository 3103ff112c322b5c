// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "longctx/bound.hpp"
#include "longctx/engine.hpp"
#include "longctx/longctx.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

/// What the runs came to.
struct LongctxReport {
  LongctxConfig config;
  LongctxSizes sizes;
  std::string device;
  LinkRates link;
  /// Copies and compute share processors: no rate of the link bounds the wait.
  bool is_simulated = false;
  std::optional<LongctxFigures> no_swap;  ///< On an arena that holds all sequences.
  std::optional<LongctxFigures> look_ahead;
  std::optional<LongctxFigures> without;
  std::vector<std::string> errors;
  std::uint64_t leaked_device_bytes = 0;
  std::uint64_t leaked_host_bytes = 0;
  std::vector<std::string> leftover_names;

  /// Of all runs, each sequence's: nothing when there are no two to compare.
  [[nodiscard]] std::optional<bool> outputs_equal() const;
};

/// docs/operations.md.
[[nodiscard]] nlohmann::json to_json(const LongctxReport& report);
/// For people: a row for each run, and what the bound is.
[[nodiscard]] std::string table_of(const LongctxReport& report);
/// Why the run failed; empty when it did not.
[[nodiscard]] std::vector<std::string> failures_of(const LongctxReport& report);

}  // namespace kvferry::cli
