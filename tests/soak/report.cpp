// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/report.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

namespace kvferry::soak {
namespace {

// docs/handshake.md, docs/reliability.md. With 4 MiB pinned, its share is nothing.
constexpr double kClearMs = 8'000;        ///< A whole clear: revoke 5 s, kill 2 s, settle 1 s.
constexpr double kReinitMs = 7'000;       ///< A death proven (2 s), a hello (5 s).
constexpr double kUndisturbedMs = 5'000;  ///< Nobody died or stalled: revoke.
constexpr double kCycleP99Ms = 300;       ///< Clear and re-init together, nobody disturbed.
constexpr double kBackMs = 1'000;         ///< An owner's memory after its SIGKILL.
/// Below it a run says little about slopes, and heaps are still warming up.
constexpr std::uint64_t kLongRun = 2'000;
/// A short run is part of the checks, which may share the machine: what that may add to any time.
constexpr double kSharedMs = 4'000;
constexpr double kMiB = 1 << 20;

std::string text_of(const Quantiles& times) {
  if (times.count == 0) return "none";
  return fmt::format("{:.1f} / {:.1f} / {:.0f} ms of {}", times.p50, times.p99, times.max,
                     times.count);
}

Figure count_figure(std::string name, std::uint64_t count) {
  return {std::move(name), std::to_string(count), "0", count == 0};
}

using Series = std::vector<Point>;

/// A number over cycles of each process's longest life.
std::map<std::string, Series> longest_lives(const Seen& seen,
                                            std::uint64_t Sample::Process::*number) {
  std::map<std::string, std::map<std::uint64_t, Series>> lives;
  for (const Sample& sample : seen.samples) {
    for (std::size_t i = 0; i < seen.names.size(); ++i) {
      const Sample::Process& process = sample.processes.at(i);
      lives[seen.names[i]][process.life].push_back(
          {static_cast<double>(sample.cycle), static_cast<double>(process.*number)});
    }
  }
  std::map<std::string, Series> longest;
  for (auto& [name, of_name] : lives) {
    longest[name] =
        std::max_element(of_name.begin(), of_name.end(), [](const auto& a, const auto& b) {
          return a.second.size() < b.second.size();
        })->second;
  }
  return longest;
}

void judge_times(const SoakOptions& options, const Seen& seen, std::vector<Figure>& figures) {
  const bool is_short = options.cycles < kLongRun;
  const double shared_ms = is_short ? kSharedMs : 0;
  const auto times = [&seen](bool struck, double Cycle::*member) {
    std::vector<double> values;
    for (const Cycle& cycle : seen.cycles) {
      if (cycle.struck == struck) values.push_back(cycle.*member);
    }
    return quantiles_of(std::move(values));
  };
  // What somebody was stopped for is not the handshake's time, and is given on top.
  const auto late = [&seen, shared_ms](bool struck, double Cycle::*member, double limit) {
    return std::count_if(seen.cycles.begin(), seen.cycles.end(), [&](const Cycle& cycle) {
      return cycle.struck == struck && cycle.*member > limit + shared_ms + cycle.stopped_ms;
    });
  };
  const auto add = [&](const char* name, bool struck, double Cycle::*member, double limit) {
    figures.push_back(
        {name, text_of(times(struck, member)),
         fmt::format("max {:.0f} ms{}", limit + shared_ms, struck ? " + stopped" : ""),
         late(struck, member, limit) == 0});
  };
  add("clear, p50 / p99 / max", false, &Cycle::clear_ms, kUndisturbedMs);
  add("re-init", false, &Cycle::reinit_ms, kUndisturbedMs);
  std::vector<double> both;
  for (const Cycle& cycle : seen.cycles) {
    if (!cycle.struck) both.push_back(cycle.clear_ms + cycle.reinit_ms);
  }
  const Quantiles cycles = quantiles_of(std::move(both));
  figures.push_back({"clear and re-init", text_of(cycles),
                     is_short ? "" : fmt::format("p99 {:.0f} ms", kCycleP99Ms),
                     is_short || cycles.p99 <= kCycleP99Ms});
  add("clear, with a kill or stop", true, &Cycle::clear_ms, kClearMs);
  add("re-init, with a kill or stop", true, &Cycle::reinit_ms, kReinitMs);
  add("until data moved again", true, &Cycle::whole_ms, kClearMs + kReinitMs);
  const Quantiles back = quantiles_of(seen.back_ms);
  if (back.count > 0) {
    figures.push_back({"memory back after an owner's kill", text_of(back),
                       fmt::format("max {:.0f} ms", kBackMs + shared_ms),
                       back.max <= kBackMs + shared_ms});
  }
}

/// What each process has allocated and not freed, to the byte; only for memory that moves while one
/// looks the interval is not a point.
void judge_heaps(const SoakOptions& options, const Seen& seen, std::vector<Figure>& figures) {
  for (const auto& [name, series] : longest_lives(seen, &Sample::Process::heap_bytes)) {
    const bool counted =
        std::all_of(series.begin(), series.end(), [](const Point& point) { return point.y > 0; });
    if (options.around.heap_library.empty() || !counted) {
      figures.push_back(
          {"live heap, " + name, "not counted", "", options.around.heap_library.empty()});
      continue;
    }
    // Queues and caches fill in the first hundreds of cycles; a life between two kills has no
    // others.
    const bool is_long = series.back().x - series.front().x >= static_cast<double>(kLongRun);
    // At most 18 B per cycle: less than the smallest block.
    const double over_span = options.cycles < kLongRun ? kMiB : is_long ? kMiB / 32 : kMiB / 8;
    const SlopeVerdict verdict = judge_slope(series, {.per_x = 8, .over_span = over_span});
    // A process that was struck again and again in a short run has no life to judge.
    if (verdict.fit.points == 0 && options.cycles < kLongRun) continue;
    figures.push_back(
        {"live heap, " + name,
         fmt::format("{:+.1f} B/cycle [{:+.1f}, {:+.1f}], {:.0f} cycles at {:.2f} MiB",
                     verdict.fit.slope, verdict.fit.low, verdict.fit.high, verdict.fit.span,
                     series.back().y / kMiB),
         fmt::format("upper end < {:.0f}", verdict.limit), verdict.good});
  }
}

void judge_memory(const SoakOptions& options, const Seen& seen, std::vector<Figure>& figures) {
  SlopeLimit limit;
  // Heaps fill up for some 1,500 cycles: a short run sees little else, and a life between two kills
  // sees it in part.
  limit.over_span = options.cycles < kLongRun ? 1.5 * kMiB : kMiB / 4;
  for (const auto& [name, series] : longest_lives(seen, &Sample::Process::private_bytes)) {
    const SlopeVerdict verdict = judge_slope(series, limit);
    // Of the engine a short run judges the live heap alone, which is exact.
    const bool is_counted = !options.around.heap_library.empty();
    if (name == "engine" && options.cycles < kLongRun && is_counted) continue;
    // A process that was struck again and again in a short run has no life to judge.
    if (verdict.fit.points == 0 && options.cycles < kLongRun) continue;
    figures.push_back(
        {"private memory, " + name,
         fmt::format("{:+.1f} B/cycle [{:+.1f}, {:+.1f}], {:.0f} cycles at {:.1f} MiB",
                     verdict.fit.slope, verdict.fit.low, verdict.fit.high, verdict.fit.span,
                     series.empty() ? 0 : series.back().y / kMiB),
         fmt::format("upper end < {:.0f}", verdict.limit), verdict.good});
  }
  Series driver;
  for (const Sample& sample : seen.samples) {
    if (sample.driver_used == 0) continue;
    driver.push_back({static_cast<double>(sample.cycle), static_cast<double>(sample.driver_used)});
  }
  if (driver.empty()) return;
  // The driver rounds to pages of 2 MiB.
  const SlopeVerdict verdict = judge_slope(driver, {.per_x = 32, .over_span = 4 * kMiB});
  figures.push_back({"device memory, seen at the driver",
                     fmt::format("{:+.1f} B/cycle [{:+.1f}, {:+.1f}]", verdict.fit.slope,
                                 verdict.fit.low, verdict.fit.high),
                     fmt::format("upper end < {:.0f}", verdict.limit), verdict.good});
}

// What was asked for and did not happen proves nothing.
void judge_surroundings(const SoakOptions& options,
                        const Seen& seen,
                        std::vector<Figure>& figures) {
  const auto add = [&figures](std::string name, std::uint64_t times) {
    figures.push_back({std::move(name), fmt::format("{} times", times), "> 0", times > 0});
  };
  for (std::size_t i = 0; i < test::kOddNames.size(); ++i) {
    if (options.around.odd.find(test::kOddNames.at(i)) == std::string::npos) continue;
    add(fmt::format("odd surroundings: {}", test::kOddNames.at(i)), seen.around.odd.at(i));
  }
  if (options.around.reuse_pids)
    add("pid of a dead one given to its successor", seen.around.pids_reused);
  if (options.around.fork_share > 0) add("children forked by the engine", seen.around.forks);
}

}  // namespace

std::vector<Figure> judge(const SoakOptions& options, const Seen& seen) {
  std::vector<Figure> figures;
  const auto struck = std::count_if(seen.cycles.begin(), seen.cycles.end(),
                                    [](const Cycle& cycle) { return cycle.struck; });
  const bool complete =
      seen.cycles.size() == options.cycles || options.at_most != ipc::Duration::zero();
  figures.push_back({"cycles (with a kill or stop)",
                     fmt::format("{} ({}), {:.0f} s", seen.cycles.size(), struck, seen.seconds),
                     std::to_string(options.cycles), complete && !seen.cycles.empty()});
  figures.push_back({"SIGKILLs, SIGSTOPs",
                     fmt::format("{}, {}; {} movers ended by their owner", seen.kills, seen.stops,
                                 seen.ended_by_owner),
                     "", true});
  figures.push_back({"blocks out / in and verified",
                     fmt::format("{} / {}, {} of them over a clear", seen.traffic.blocks_out,
                                 seen.traffic.blocks_verified, seen.traffic.over_clears),
                     "> 0", seen.traffic.blocks_out > 0 && seen.traffic.over_clears > 0});
  figures.push_back(count_figure("blocks corrupt", seen.traffic.blocks_corrupt));
  figures.push_back(
      count_figure("blocks lost while their manager lived", seen.traffic.blocks_lost));
  judge_times(options, seen, figures);
  const std::uint64_t looks = seen.samples.size() * seen.names.size();
  figures.push_back({"descriptors, names, memory objects",
                     fmt::format("{} changes in {} looks at processes", seen.changes.size(), looks),
                     "0", seen.changes.empty() && seen.samples.size() > 1});
  if (seen.first && seen.first->device_used > 0) {
    figures.push_back({"device memory when ready",
                       fmt::format("{} B, each time", seen.first->device_used), "equal", true});
  }
  std::uint64_t rings = 0;
  for (const Sample& sample : seen.samples) rings = std::max(rings, sample.rings);
  // Those of ended processes that are kept, and those of all that run, twice: replaced and not
  // swept.
  const std::uint64_t most_rings = 32 + 2 * (3 + 2 * options.fleet.devices.size());
  figures.push_back({"files of transitions, most", std::to_string(rings),
                     fmt::format("{}", most_rings), rings <= most_rings});
  judge_memory(options, seen, figures);
  judge_heaps(options, seen, figures);
  figures.push_back(
      {"transitions checked",
       fmt::format("{} in {} checks, {} breaches, {} not seen", seen.trace.transitions,
                   seen.trace.checks, seen.trace.breaches.size(), seen.trace.unseen),
       "0 breaches", seen.trace.breaches.empty() && seen.trace.transitions > 0});
  judge_surroundings(options, seen, figures);
  figures.push_back(count_figure("processes that died by themselves", seen.deaths.size()));
  figures.push_back(count_figure("device memory in the end, B", seen.used_in_the_end));
  figures.push_back(count_figure("names in the end", seen.left_names.size()));
  figures.push_back(count_figure("other failures", seen.wrong.size() + seen.traffic.wrong.size()));
  return figures;
}

std::vector<std::string> complaints(const Seen& seen) {
  std::vector<std::string> lines;
  const auto add = [&lines](const std::vector<std::string>& more) {
    lines.insert(lines.end(), more.begin(), more.end());
  };
  add(seen.changes);
  add(seen.traffic.wrong);
  add(seen.trace.breaches);
  for (const UnexpectedDeath& death : seen.deaths) lines.push_back(death.what + "\n" + death.log);
  for (const std::string& name : seen.left_names) lines.push_back("left behind: " + name);
  add(seen.wrong);
  return lines;
}

nlohmann::json to_json(const SoakOptions& options,
                       const Seen& seen,
                       const std::vector<Figure>& figures) {
  nlohmann::json report;
  report["cycles"] = seen.cycles.size();
  report["seed"] = options.seed;
  report["owner"] = options.fleet.owner;
  report["handles"] = options.fleet.handles;
  report["copy_strategy"] = options.fleet.copy_strategy;
  report["devices"] = options.fleet.devices;
  report["seconds"] = seen.seconds;
  for (const Figure& figure : figures) {
    report["figures"].push_back({{"name", figure.name},
                                 {"seen", figure.seen},
                                 {"limit", figure.limit},
                                 {"good", figure.good}});
  }
  report["complaints"] = complaints(seen);
  for (const Cycle& cycle : seen.cycles) {
    report["cycle_ms"].push_back(
        {cycle.clear_ms, cycle.reinit_ms, cycle.whole_ms, cycle.struck, cycle.stopped_ms});
  }
  for (const Sample& sample : seen.samples) {
    nlohmann::json processes;
    for (std::size_t i = 0; i < seen.names.size(); ++i) {
      const Sample::Process& process = sample.processes.at(i);
      processes[seen.names[i]] = {{"life", process.life},
                                  {"descriptors", process.descriptors},
                                  {"private", process.private_bytes},
                                  {"resident", process.resident_bytes},
                                  {"heap", process.heap_bytes}};
    }
    report["samples"].push_back({{"cycle", sample.cycle},
                                 {"processes", processes},
                                 {"driver_used", sample.driver_used},
                                 {"rings", sample.rings}});
  }
  return report;
}

}  // namespace kvferry::soak
