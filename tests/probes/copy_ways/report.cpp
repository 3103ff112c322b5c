// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/report.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

namespace kvferry::probes {
namespace {

/// Figures in terms of those of one large copy.
struct Comparison {
  double share = 0;
  // Of a decode beside it: times of tokens over those with no copies, and that over one large
  // copy's.
  double slowdown = 0;
  double slowdown_p99 = 0;
  double beyond_large = 0;
  double beyond_large_p99 = 0;
};

double slowdown_of(const Figures& figures) {
  return figures.tokens_beside->median_us / figures.tokens_alone->median_us;
}

double slowdown_p99_of(const Figures& figures) {
  return figures.tokens_beside->p99_us / figures.tokens_alone->p99_us;
}

std::optional<Comparison> compare(const std::optional<Figures>& figures,
                                  const std::optional<Figures>& large) {
  if (!figures || !large) {
    return std::nullopt;
  }
  Comparison comparison{.share = figures->gbps / large->gbps};
  if (figures->tokens_beside && large->tokens_beside) {
    comparison.slowdown = slowdown_of(*figures);
    comparison.slowdown_p99 = slowdown_p99_of(*figures);
    comparison.beyond_large = comparison.slowdown / slowdown_of(*large);
    comparison.beyond_large_p99 = comparison.slowdown_p99 / slowdown_p99_of(*large);
  }
  return comparison;
}

const char* name_of(Direction direction) { return direction == Direction::kToHost ? "d2h" : "h2d"; }

std::string rates_text(const Figures& figures, const std::optional<Comparison>& comparison) {
  return fmt::format("{:7.2f} {:>7} {:8.1f}", figures.gbps,
                     comparison ? fmt::format("{:.1f}%", 100 * comparison->share) : "-",
                     figures.processor_ms_per_gib);
}

std::string lanes_text(const Figures& figures) {
  std::string text;
  for (const double gbps : figures.lane_gbps) {
    text += fmt::format("{}{:.1f}", text.empty() ? "  " : " + ", gbps);
  }
  return figures.lane_gbps.size() > 1 ? text : "";
}

nlohmann::json json_of(const TokenTimes& tokens) {
  return {{"median_us", tokens.median_us}, {"p99_us", tokens.p99_us}, {"count", tokens.count}};
}

nlohmann::json json_of(const std::optional<Figures>& figures, const std::optional<Figures>& large) {
  if (!figures) {
    return nullptr;
  }
  nlohmann::json json{
      {"gbps", figures->gbps},
      {"lane_gbps", figures->lane_gbps},
      {"processor_ms_per_gib", figures->processor_ms_per_gib},
  };
  const std::optional<Comparison> comparison = compare(figures, large);
  json["share"] = comparison ? nlohmann::json(comparison->share) : nlohmann::json();
  if (figures->tokens_beside) {
    json["tokens_alone"] = json_of(*figures->tokens_alone);
    json["tokens_beside"] = json_of(*figures->tokens_beside);
    json["slowdown"] = slowdown_of(*figures);
    json["slowdown_p99"] = slowdown_p99_of(*figures);
    if (comparison) {
      json["slowdown_beyond_large_copy"] = comparison->beyond_large;
      json["slowdown_p99_beyond_large_copy"] = comparison->beyond_large_p99;
    }
  }
  return json;
}

}  // namespace

void Report::begin(const Section& section) {
  sections_.push_back({section, {}});
  fmt::print(table_, "\n{}, {} KiB x {}, arena of {} GiB\n", name_of(section.direction),
             section.chunk_bytes >> 10U, kRegions, section.arena_bytes >> 30U);
  fmt::print(table_, "{:<21}|{:^25}|{:^58}\n", "", "with nothing beside it", "beside a decode");
  fmt::print(table_, "{:<21}| {:>7} {:>7} {:>8} | {:>7} {:>7} {:>8} {:>8} {:>6} {:>7} {:>6}  {}\n",
             "way", "GB/s", "share", "ms/GiB", "GB/s", "share", "ms/GiB", "slowdown", "p99",
             "beyond", "p99", "lanes");
}

void Report::add(WayResult result) {
  std::vector<WayResult>& results = sections_.back().results;
  results.push_back(std::move(result));
  print(results.back(), results.front());
}

void Report::print(const WayResult& result, const WayResult& large_copy) const {
  std::string row = fmt::format("{:<21}| ", result.name);
  if (!result.failure.empty()) {
    row += "FAILED: " + result.failure;
  } else {
    const std::optional<Comparison> idle =
        compare(result.nothing_beside, large_copy.nothing_beside);
    const std::optional<Comparison> beside =
        compare(result.beside_decode, large_copy.beside_decode);
    row += rates_text(*result.nothing_beside, idle) + " | " +
           rates_text(*result.beside_decode, beside);
    row += fmt::format(" {:8.3f} {:6.3f}", slowdown_of(*result.beside_decode),
                       slowdown_p99_of(*result.beside_decode));
    row += beside ? fmt::format(" {:7.3f} {:6.3f}", beside->beyond_large, beside->beyond_large_p99)
                  : fmt::format(" {:>7} {:>6}", "-", "-");
    row += lanes_text(*result.beside_decode);
  }
  fmt::print(table_, "{}\n", row);
  std::fflush(table_);
}

bool Report::has_failures() const {
  return std::any_of(sections_.begin(), sections_.end(), [](const SectionResults& section) {
    return std::any_of(section.results.begin(), section.results.end(),
                       [](const WayResult& result) { return !result.failure.empty(); });
  });
}

nlohmann::json Report::json() const {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [section, results] : sections_) {
    for (const WayResult& result : results) {
      const WayResult& large = results.front();
      list.push_back({
          {"arena_bytes", section.arena_bytes},
          {"direction", name_of(section.direction)},
          {"chunk_bytes", section.chunk_bytes},
          {"regions", kRegions},
          {"way", result.name},
          {"failure", result.failure.empty() ? nlohmann::json() : nlohmann::json(result.failure)},
          {"nothing_beside", json_of(result.nothing_beside, large.nothing_beside)},
          {"beside_decode", json_of(result.beside_decode, large.beside_decode)},
      });
    }
  }
  return list;
}

}  // namespace kvferry::probes
