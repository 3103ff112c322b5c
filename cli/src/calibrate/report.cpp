// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "calibrate/report.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "table.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <optional>
#include <string_view>
#include <utility>

namespace kvferry::cli {
namespace {

using cache_manager::Calibration;
using cache_manager::CopyStrategy;
using cache_manager::GroupCurves;
using cache_manager::HandOverCost;
using cache_manager::JobShape;
using Json = nlohmann::json;

constexpr std::array kWays = {std::pair(ipc::CopyDirection::kDeviceToHost, "d2h"),
                              std::pair(ipc::CopyDirection::kHostToDevice, "h2d")};

double curve_gbps(std::uint64_t bytes, double us) { return static_cast<double>(bytes) / us / 1e3; }

std::string choice_of(const CalibratedGeometry& calibrated,
                      ipc::CopyDirection direction,
                      std::size_t group,
                      std::uint32_t blocks,
                      bool alone) {
  std::vector<std::uint32_t> counts(group + 1, 0);
  counts[group] = blocks;
  const JobShape job{direction, counts, alone, calibrated.slots, false, calibrated.rule};
  const auto choice = cache_manager::choose_calibrated(calibrated.calibration, calibrated.possible,
                                                       job, HandOverCost{});
  return std::string(choice ? cache_manager::to_string(*choice) : "unknown");
}

/// Calls each(way's name, direction, group, its curves, index of the job's size).
template <typename Each> void for_each_job(const Calibration& calibration, Each each) {
  for (const auto& [direction, way] : kWays) {
    const std::vector<GroupCurves>& groups = calibration.of(direction);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (std::size_t i = 0; i < groups[g].blocks.size(); ++i) {
        each(way, direction, g, groups[g], i);
      }
    }
  }
}

}  // namespace

Json to_json(const CalibratedGeometry& calibrated) {
  Json results = Json::array();
  for_each_job(calibrated.calibration, [&](std::string_view way, ipc::CopyDirection direction,
                                           std::size_t g, const GroupCurves& curves,
                                           std::size_t i) {
    const std::uint32_t blocks = curves.blocks[i];
    const std::uint64_t bytes = blocks * curves.block_bytes;
    Json strategies = Json::object();
    for (const cache_manager::StrategyCurve& curve : curves.strategies) {
      strategies[std::string(cache_manager::to_string(curve.strategy))] = {
          {"us", curve.us[i]},
          {"gbps", curve_gbps(bytes, curve.us[i])},
          {"share", curves.large_us[i] / curve.us[i]}};
    }
    results.push_back(
        {{"direction", way},
         {"group", g},
         {"chunk_bytes", curves.block_bytes / curves.regions},
         {"regions", curves.regions},
         {"block_bytes", curves.block_bytes},
         {"blocks", blocks},
         {"large", {{"us", curves.large_us[i]}, {"gbps", curve_gbps(bytes, curves.large_us[i])}}},
         {"strategies", std::move(strategies)},
         {"choice",
          {{"alone", choice_of(calibrated, direction, g, blocks, true)},
           {"among", choice_of(calibrated, direction, g, blocks, false)}}}});
  });
  const auto& key = calibrated.calibration.key;
  Json possible = Json::array();
  for (const CopyStrategy strategy : calibrated.possible) {
    possible.push_back(cache_manager::to_string(strategy));
  }
  return {{"device",
           {{"name", key.device.name},
            {"uuid", key.device.uuid},
            {"link", key.device.link},
            {"driver", key.device.driver},
            {"runtime", key.device.runtime}}},
          {"geometry", calibrated.geometry},
          {"arena", ipc::to_string(key.order)},
          {"possible", std::move(possible)},
          {"measured_seconds", calibrated.seconds > 0 ? Json(calibrated.seconds) : Json(nullptr)},
          {"file", calibrated.file.empty() ? Json(nullptr) : Json(calibrated.file.native())},
          {"results", std::move(results)}};
}

std::string table_of(const CalibratedGeometry& calibrated) {
  std::vector<Table::Column> columns = {{"", Align::kLeft},
                                        {"chunk", Align::kRight},
                                        {"blocks", Align::kRight},
                                        {"job", Align::kRight},
                                        {"one copy", Align::kRight}};
  for (const CopyStrategy strategy : cache_manager::kMeasuredStrategies) {
    const std::string_view name = cache_manager::to_string(strategy);
    columns.push_back(
        {fmt::format("{}{}", name, strategy == CopyStrategy::kStaged ? "*" : ""), Align::kRight});
  }
  columns.push_back({"alone", Align::kLeft});
  columns.push_back({"among others", Align::kLeft});
  Table table(std::move(columns));
  for_each_job(calibrated.calibration, [&](std::string_view way, ipc::CopyDirection direction,
                                           std::size_t g, const GroupCurves& curves,
                                           std::size_t i) {
    const std::uint32_t blocks = curves.blocks[i];
    const std::uint64_t bytes = blocks * curves.block_bytes;
    std::vector<std::string> row = {std::string(way),
                                    ipc::format_size(curves.block_bytes / curves.regions),
                                    std::to_string(blocks), ipc::format_size(bytes),
                                    fmt::format("{:.1f}", curve_gbps(bytes, curves.large_us[i]))};
    for (const cache_manager::StrategyCurve& curve : curves.strategies) {
      row.push_back(fmt::format("{:.1f} {:3.0f} %", curve_gbps(bytes, curve.us[i]),
                                100 * curves.large_us[i] / curve.us[i]));
    }
    row.push_back(choice_of(calibrated, direction, g, blocks, true));
    row.push_back(choice_of(calibrated, direction, g, blocks, false));
    table.add(std::move(row));
  });
  const auto& key = calibrated.calibration.key;
  const std::string taken = calibrated.seconds > 0
                                ? fmt::format("measured in {:.2f} s", calibrated.seconds)
                                : std::string("measured before");
  return fmt::format(
      "{} on {} ({}; driver {}), {} arena: GB/s, share of one copy of as many bytes\n{}  {}, "
      "{}\n\n",
      calibrated.geometry, key.device.name, key.device.link, key.device.driver,
      ipc::to_string(key.order), table.render("  "), taken,
      calibrated.file.empty() ? "not kept" : "kept in " + calibrated.file.native());
}

}  // namespace kvferry::cli
