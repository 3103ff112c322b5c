// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "simulate/report.hpp"

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "table.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <optional>
#include <utility>

namespace kvferry::cli {
namespace {

const SimulatedCache* find(const SimulationReport& report,
                           std::string_view policy,
                           std::size_t capacity) {
  const auto at =
      std::find_if(report.results.begin(), report.results.end(), [&](const SimulatedCache& result) {
        return result.policy == policy && result.capacity == capacity;
      });
  return at == report.results.end() ? nullptr : &*at;
}

std::optional<double> gain_of(const SimulationReport& report, const SimulatedCache& result) {
  const SimulatedCache* lru = find(report, "lru", result.capacity);
  const SimulatedCache* optimal = find(report, kOptimalPolicy, result.capacity);
  if (lru == nullptr || optimal == nullptr) return std::nullopt;
  return gain(result, *lru, *optimal);
}

template <typename Value> void add_once(std::vector<Value>& values, const Value& value) {
  if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
}

}  // namespace

nlohmann::json to_json(const SimulationReport& report) {
  nlohmann::json results = nlohmann::json::array();
  for (const SimulatedCache& result : report.results) {
    const double blocks = static_cast<double>(std::max<std::uint64_t>(1, result.references));
    nlohmann::json one{{"policy", result.policy},
                       {"capacity", result.capacity},
                       {"hit_rate", result.hit_rate()},
                       {"hits", result.hits},
                       {"references", result.references},
                       {"evictions", result.evictions},
                       {"evictions_at_need", result.evictions_at_need},
                       {"ns_per_block", result.seconds * 1e9 / blocks}};
    if (const auto gained = gain_of(report, result)) one["gain"] = *gained;
    results.push_back(std::move(one));
  }
  return {
      {"workload", report.workload},           {"requests", report.requests},
      {"skipped_lines", report.skipped_lines}, {"references", report.references},
      {"distinct", report.distinct},           {"unlimited_hit_rate", report.unlimited_hit_rate},
      {"results", std::move(results)}};
}

std::string table_of(const SimulationReport& report) {
  std::vector<std::string> policies;
  std::vector<std::size_t> capacities;
  for (const SimulatedCache& result : report.results) {
    add_once(policies, result.policy);
    add_once(capacities, result.capacity);
  }
  const std::string ours(cache_manager::kDefaultEvictionPolicy);
  const bool shows_gain = !capacities.empty() &&
                          find(report, ours, capacities.front()) != nullptr &&
                          gain_of(report, *find(report, ours, capacities.front())).has_value();
  std::vector<Table::Column> columns = {{"capacity", Align::kRight}};
  for (const std::string& policy : policies) columns.push_back({policy, Align::kRight});
  if (shows_gain) columns.push_back({"gain", Align::kRight});
  Table table(std::move(columns));
  for (const std::size_t capacity : capacities) {
    std::vector<std::string> cells = {with_separators(capacity)};
    for (const std::string& policy : policies) {
      const SimulatedCache* result = find(report, policy, capacity);
      cells.push_back(result == nullptr ? "" : fmt::format("{:.4f}", result->hit_rate()));
    }
    if (shows_gain) {
      cells.push_back(
          fmt::format("{:.0f} %", 100 * *gain_of(report, *find(report, ours, capacity))));
    }
    table.add(std::move(cells));
  }
  std::string skipped;
  if (report.skipped_lines > 0) {
    skipped = fmt::format(" ({} malformed lines skipped)", with_separators(report.skipped_lines));
  }
  std::string text = fmt::format(
      "{}: {} requests{}, {} blocks, {} distinct; hit rate with unlimited capacity {:.4f}\n\n{}",
      report.workload, with_separators(report.requests), skipped,
      with_separators(report.references), with_separators(report.distinct),
      report.unlimited_hit_rate, table.render());
  if (shows_gain) {
    text += fmt::format("\ngain: how much of the way from lru to optimal {} goes\n", ours);
  }
  return text;
}

}  // namespace kvferry::cli
