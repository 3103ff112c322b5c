// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/report.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/rank/emptied_cache.hpp"
#include "rl/weights_files.hpp"
#include "table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

/// Iterations until everything that lives as long as the engine has been allocated.
constexpr std::size_t kWarmUpIterations = 3;

Json ms_to_json(const std::optional<double>& ms) { return ms ? Json(*ms) : Json(); }

Json rank_to_json(const RankReserve& rank) {
  return Json{{"reserved_before", rank.reserved_before},
              {"used_before", rank.used_before},
              {"reserved_after", rank.reserved_after},
              {"used_after", rank.used_after},
              {"free_on_device", rank.free_on_device}};
}

Json iteration_to_json(const IterationRecord& iteration, const RlSettings& settings) {
  Json json = rank_to_json(iteration.total());
  json["free_on_device_least"] = iteration.least_free();
  json["ranks"] = Json::array();
  for (const RankReserve& rank : iteration.ranks) json["ranks"].push_back(rank_to_json(rank));
  json["iteration"] = iteration.number;
  json["mode"] = to_string(settings.mode);
  json["weights_version"] = iteration.version;
  json["weights_id"] = iteration.weights.hex();
  json["seconds"] = iteration.seconds;
  json["pause_ms"] = iteration.pause_ms;
  json["release_ms"] = ms_to_json(iteration.release_ms);
  json["resume_ms"] = ms_to_json(iteration.resume_ms);
  json["free_while_released"] = iteration.free_while_released;
  json["update_ms"] = ms_to_json(iteration.update_ms);
  json["clear_ms"] = ms_to_json(iteration.clear_ms);
  json["reinit_ms"] = ms_to_json(iteration.reinit_ms);
  json["continue_ms"] = iteration.continue_ms;
  json["finished"] = iteration.answers.finished;
  json["aborted"] = iteration.answers.aborted;
  json["retracted"] = iteration.answers.retracted;
  json["mixed_weights"] = iteration.answers.mixed;
  json["verified"] = iteration.answers.verified;
  json["corrupt"] = iteration.answers.corrupt;
  json["done"] = iteration.finished;
  return json;
}

Json settings_to_json(const RlSettings& settings) {
  return Json{{"iterations", settings.iterations},
              {"mode", to_string(settings.mode)},
              {"update", to_string(settings.update)},
              {"empty_cache", settings.empty_cache},
              {"clear", settings.clear},
              {"release", settings.release},
              {"requests_per_iteration", settings.requests_per_iteration},
              {"weights_bytes", settings.weights_bytes},
              {"weights_versions", kWeightsVersions},
              {"seed", settings.seed},
              {"device", settings.device},
              {"geometry", settings.geometry},
              {"ranks", settings.ranks},
              {"gpu_blocks", settings.gpu_blocks},
              {"host_memory_bytes", settings.host_memory_bytes},
              {"lenders", settings.lenders},
              {"lent_bytes", settings.lent_bytes}};
}

Json empties_to_json(const std::vector<ipc::WorkerMemory>& workers) {
  Json list = Json::array();
  for (std::size_t rank = 0; rank < workers.size(); ++rank) {
    Json json{{"rank", rank}};
    for (std::size_t i = 0; i < workers[rank].empties.size() && i < ipc::kEmptyReasons; ++i) {
      json[std::string(to_string(static_cast<ipc::EmptyReason>(i + 1)))] = workers[rank].empties[i];
    }
    list.push_back(std::move(json));
  }
  return list;
}

Json graphs_to_json(const std::vector<ipc::WorkerMemory>& workers) {
  Json list = Json::array();
  for (std::size_t rank = 0; rank < workers.size(); ++rank) {
    list.push_back({{"rank", rank},
                    {"recordings", workers[rank].graph_recordings},
                    {"launches", workers[rank].graph_launches}});
  }
  return list;
}

/// With emptying, what a rank keeps at a continue is what its segments with used blocks need: the
/// same every time.
std::vector<std::string> growth_of(const RlReport& report) {
  std::vector<std::string> failures;
  if (!report.settings.empty_cache || report.iterations.size() <= kWarmUpIterations) {
    return failures;
  }
  const IterationRecord& base = report.iterations[kWarmUpIterations];
  if (!base.finished) return failures;
  for (std::size_t rank = 0; rank < base.ranks.size(); ++rank) {
    const std::uint64_t expected = base.ranks[rank].reserved_after;
    const auto other = std::find_if(report.iterations.begin() + kWarmUpIterations,
                                    report.iterations.end(), [&](const auto& iteration) {
                                      return iteration.finished &&
                                             iteration.ranks[rank].reserved_after != expected;
                                    });
    if (other == report.iterations.end()) continue;
    failures.push_back(fmt::format(
        "rank {} kept {} ({} bytes) at the continue of iteration {} and {} ({} bytes) at that of "
        "iteration {}: emptied, it has to be the same",
        rank, ipc::format_size(expected), expected, base.number,
        ipc::format_size(other->ranks[rank].reserved_after), other->ranks[rank].reserved_after,
        other->number));
  }
  return failures;
}

/// Allocators are emptied for the reasons that there are, and as often as was asked.
std::vector<std::string> miscounted_empties(const RlReport& report) {
  std::vector<std::string> failures;
  if (report.restarts > 0) return failures;  // Who was replaced began to count anew.
  constexpr std::size_t kContinue = static_cast<std::size_t>(ipc::EmptyReason::kContinue) - 1;
  for (std::size_t rank = 0; rank < report.workers.size(); ++rank) {
    const std::vector<std::uint64_t>& empties = report.workers[rank].empties;
    const std::uint64_t counted = kContinue < empties.size() ? empties[kContinue] : 0;
    if (counted == report.emptied_continues) continue;
    failures.push_back(
        fmt::format("rank {} was emptied {} times because a pause ended, {} times were asked for",
                    rank, counted, report.emptied_continues));
  }
  return failures;
}

void append(std::vector<std::string>& all, std::vector<std::string> more) {
  all.insert(all.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

bool all_done(const RlReport& report) {
  return report.errors.empty() && report.iterations.size() == report.settings.iterations;
}

}  // namespace

std::string describe(const RlSettings& settings) {
  return fmt::format("{}, {}, {}{}{}, {} rank{} of {} on {}", to_string(settings.mode),
                     settings.update == UpdateKind::kNone
                         ? "no updates"
                         : fmt::format("update from {}", to_string(settings.update)),
                     settings.empty_cache ? "emptied at every continue" : "never emptied",
                     settings.clear ? ", cleared every time" : "",
                     settings.release ? ", released every time" : "", settings.ranks,
                     settings.ranks == 1 ? "" : "s", settings.geometry, settings.device);
}

std::uint64_t high_water_bytes(const RlReport& report) {
  std::uint64_t highest = 0;
  for (const IterationRecord& iteration : report.iterations) {
    const RankReserve total = iteration.total();
    highest = std::max({highest, total.reserved_before, total.reserved_after});
  }
  return highest;
}

Json to_json(const RlReport& report) {
  Json iterations = Json::array();
  for (const IterationRecord& iteration : report.iterations) {
    iterations.push_back(iteration_to_json(iteration, report.settings));
  }
  return Json{{"iterations", std::move(iterations)},
              {"settings", settings_to_json(report.settings)},
              {"requests",
               {{"submitted", report.submitted},
                {"finished", report.answers.finished},
                {"aborted", report.answers.aborted},
                {"retracted", report.answers.retracted},
                {"mixed_weights", report.answers.mixed},
                {"unanswered", report.unanswered},
                {"cached_tokens", report.answers.cached_tokens},
                {"compared_prompts", report.compared_prompts},
                {"equal_prompts", report.equal_prompts}}},
              {"verified", report.answers.verified},
              {"corrupt", report.answers.corrupt},
              {"high_water_bytes", high_water_bytes(report)},
              {"empties", empties_to_json(report.workers)},
              {"graphs", graphs_to_json(report.workers)},
              {"quarantined", report.quarantined},
              {"transport", report.transport},
              {"restarts", report.restarts},
              {"leaked_device_bytes", report.leaked_device_bytes},
              {"leaked_host_bytes", report.leaked_host_bytes},
              {"leftover_names", report.leftover_names.size()},
              {"leftover_paths", report.leftover_names},
              {"duration_s", report.duration_s},
              {"errors", report.errors},
              {"failures", failures_of(report)}};
}

std::vector<std::string> failures_of(const RlReport& report) {
  std::vector<std::string> failures = report.errors;
  if (report.answers.corrupt > 0) {
    failures.push_back(fmt::format("{} of {} answers were corrupt", report.answers.corrupt,
                                   report.answers.finished));
  }
  append(failures, growth_of(report));
  append(failures, miscounted_empties(report));
  if (all_done(report) && report.settings.iterations > 2 * kWeightsVersions &&
      report.answers.verified == 0) {
    failures.emplace_back(
        "no answer was ever given twice under the same weights, so the run shows nothing: give "
        "more --iterations or --requests-per-iteration");
  }
  if (report.settings.update != UpdateKind::kNone && report.compared_prompts > 0 &&
      report.equal_prompts == report.compared_prompts) {
    failures.push_back(
        fmt::format("the updates changed nothing: all {} prompts that were answered under several "
                    "weights got the same answer",
                    report.compared_prompts));
  }
  if (report.leaked_device_bytes > 0) {
    failures.push_back(fmt::format("{} of device memory did not come back",
                                   ipc::format_size(report.leaked_device_bytes)));
  }
  if (report.leaked_host_bytes > 0) {
    failures.push_back(fmt::format("{} of host memory did not come back",
                                   ipc::format_size(report.leaked_host_bytes)));
  }
  if (!report.leftover_names.empty()) {
    failures.push_back(
        fmt::format("names were left behind: {}", fmt::join(report.leftover_names, ", ")));
  }
  return failures;
}

std::string summarize(const RlReport& report) {
  Table table({{""}, {"", Align::kRight}, {""}});
  const auto row = [&table](std::string name, std::string value, std::string note = {}) {
    table.add({std::move(name), std::move(value), std::move(note)});
  };
  const auto count = [](std::uint64_t value) { return with_separators(value); };
  const auto done = std::count_if(report.iterations.begin(), report.iterations.end(),
                                  [](const auto& iteration) { return iteration.finished; });
  row("iterations", count(static_cast<std::uint64_t>(done)),
      fmt::format("of {} in {:.1f} s; {}", report.settings.iterations, report.duration_s,
                  describe(report.settings)));
  row("requests finished", count(report.answers.finished));
  row("  retracted", count(report.answers.retracted), "got their blocks once more");
  row("  aborted", count(report.answers.aborted), "by a pause");
  row("  under changing weights", count(report.answers.mixed), "not compared");
  row("answers verified", count(report.answers.verified),
      "equal to the first one to the same prompt under the same weights");
  row("answers corrupt", count(report.answers.corrupt));
  if (!report.iterations.empty()) {
    const RankReserve last = report.iterations.back().total();
    row("reserved at the last continue", ipc::format_size(last.reserved_after),
        fmt::format("{} used, all ranks together", ipc::format_size(last.used_after)));
  }
  row("  most at any time", ipc::format_size(high_water_bytes(report)));
  if (!report.transport.empty()) {
    row("weights handed on by", report.transport, "from rank 0 to the others");
  }
  if (report.quarantined > 0) {
    row("clears with quarantine", count(report.quarantined), "memory waited for a peer");
  }
  if (report.restarts > 0) row("processes replaced", count(report.restarts), "after a death");
  row("device memory leaked", ipc::format_size(report.leaked_device_bytes),
      "seen from outside, after all processes ended");
  row("host memory leaked", ipc::format_size(report.leaked_host_bytes));
  row("names left behind", count(report.leftover_names.size()), "sockets, locks, shared memory");
  return table.render("  ");
}

}  // namespace kvferry::cli
