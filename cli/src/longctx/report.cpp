// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "longctx/report.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "table.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

constexpr const char* kBound =
    "bound: for each turn the larger of bytes loaded and bytes stored for it, each over the link's "
    "rate, less the compute of the turn before, not below nothing; then summed. It takes for "
    "granted that turns go as they went, that a sequence is whole on the device in its turn, that "
    "the link gives what one large copy got, and that the ways do not slow each other.\n";
constexpr const char* kWindowsBound =
    "in windows: a turn's sequence is larger than the device; what is loaded in its turn counts "
    "likewise, less the turn's own compute, of which the rest hides what is loaded for the next "
    "one. A token needs at least the blocks that the device does not hold.\n";
constexpr const char* kNothingToCompare =
    "no run without swaps: the device never holds one sequence. Compared are the other two, which "
    "both compute in windows.\n";
constexpr const char* kNoBound =
    "bound: none is known of simulated devices, whose copies and compute share the processors: "
    "neither hides the other, and what a small copy costs is not its bytes.\n";

double share_of(double part, double whole) { return whole > 0 ? part / whole : 0; }

Json or_null(std::optional<double> value) { return value ? Json(*value) : Json(); }

/// Nothing where none is known.
std::optional<double> bound_of(const LongctxFigures& run, const LongctxReport& report) {
  if (report.is_simulated) return std::nullopt;
  return least_wait(run.turns, report.link);
}

/// Nothing where there is nothing to divide by.
std::optional<double> over_bound(const LongctxFigures& run, const LongctxReport& report) {
  const auto bound = bound_of(run, report);
  if (!bound || *bound <= 0) return std::nullopt;
  return run.waiting_s() / *bound;
}

Json json_of(const LongctxFigures& run, const LongctxReport& report) {
  return {{"tokens_per_s", run.tokens_per_s()},
          {"decode_s", run.decode_s()},
          {"turns", run.turns.size()},
          {"waiting_s", run.waiting_s()},
          {"waiting_share", share_of(run.waiting_s(), run.decode_s())},
          {"bound_s", or_null(bound_of(run, report))},
          {"waiting_over_bound", or_null(over_bound(run, report))},
          {"bytes_to_device", run.loaded_bytes()},
          {"bytes_in_turns", run.streamed_bytes()},
          {"bytes_to_host", run.stored_bytes()},
          {"loading_s", run.loading_s},
          {"prefill_s", run.prefill_s},
          {"prefill_bytes_to_host", run.prefill_stored_bytes},
          {"failed_jobs", run.failed_jobs}};
}

void add_row(Table& table,
             const char* name,
             const LongctxFigures& run,
             const LongctxReport& report) {
  const auto bound = bound_of(run, report);
  const auto ratio = over_bound(run, report);
  table.add(
      {name, fmt::format("{:.1f}", run.tokens_per_s()),
       report.no_swap ? fmt::format("{:.0f} %", 100 * share_of(run.tokens_per_s(),
                                                               report.no_swap->tokens_per_s()))
                      : "",
       fmt::format("{:.3f}", run.waiting_s()),
       fmt::format("{:.1f} %", 100 * share_of(run.waiting_s(), run.decode_s())),
       bound ? fmt::format("{:.3f}", *bound) : "-", ratio ? fmt::format("{:.2f}", *ratio) : "-",
       ipc::format_size(run.loaded_bytes()), ipc::format_size(run.stored_bytes())});
}

}  // namespace

std::optional<bool> LongctxReport::outputs_equal() const {
  std::vector<const LongctxFigures*> runs;
  for (const auto* run : {&no_swap, &look_ahead, &without}) {
    if (run->has_value()) runs.push_back(&run->value());
  }
  if (runs.size() < 2) return std::nullopt;
  for (const LongctxFigures* run : runs) {
    if (run->checksums != runs.front()->checksums) return false;
  }
  return true;
}

Json to_json(const LongctxReport& report) {
  Json out = report.look_ahead ? json_of(*report.look_ahead, report) : Json::object();
  out["context"] = report.config.context;
  out["sequences"] = report.config.sequences;
  out["steps"] = report.config.steps;
  out["slice"] = report.config.slice;
  out["active"] = report.config.active;
  out["geometry"] = report.config.geometry_name;
  out["ranks"] = report.config.geometry.ranks;
  out["device"] = report.device;
  out["gpu_blocks"] = report.sizes.gpu_blocks;
  out["sequence_blocks"] = report.sizes.sequence_blocks;
  out["block_bytes"] = report.sizes.block_bytes;
  out["host_memory_bytes"] = report.sizes.host_bytes;
  out["in_windows"] = report.sizes.in_windows();
  out["oversubscription"] = report.sizes.oversubscription();
  out["link_gbps"] = {{"d2h", report.link.to_host / 1e9}, {"h2d", report.link.to_device / 1e9}};
  out["tokens_per_s_no_swap"] = report.no_swap ? Json(report.no_swap->tokens_per_s()) : Json();
  out["no_swap"] = report.no_swap
                       ? Json(report.sizes.has_large_arena() ? "large arena" : "one after another")
                       : Json();
  out["without_lookahead"] = report.without ? json_of(*report.without, report) : Json();
  const auto equal = report.outputs_equal();
  out["outputs_equal"] = equal ? Json(*equal) : Json();
  out["errors"] = report.errors;
  out["leaked_device_bytes"] = report.leaked_device_bytes;
  out["leaked_host_bytes"] = report.leaked_host_bytes;
  out["leftover_names"] = report.leftover_names;
  return out;
}

std::string table_of(const LongctxReport& report) {
  const LongctxConfig& config = report.config;
  std::string text = fmt::format(
      "{} sequences of {} tokens on {} blocks of {} ({}): {:.1f} times what the device holds{}\n"
      "{} decode steps each, {} in a turn; link {:.1f} GB/s to the host, {:.1f} GB/s to the "
      "device\n\n",
      config.sequences, with_separators(config.context + config.steps),
      with_separators(report.sizes.gpu_blocks), config.geometry_name, report.device,
      report.sizes.oversubscription(),
      report.sizes.in_windows() ? "" : fmt::format(", {:.0f} % of it active", 100 * config.active),
      config.steps, config.slice, report.link.to_host / 1e9, report.link.to_device / 1e9);
  if (report.sizes.in_windows()) {
    text += fmt::format(
        "each has {} blocks, more than the device: it computes alone, every token in windows\n\n",
        with_separators(report.sizes.sequence_blocks));
  }
  using enum Align;
  Table table({{"run", kLeft},
               {"tokens/s", kRight},
               {"of no-swap", kRight},
               {"waiting s", kRight},
               {"share", kRight},
               {"bound s", kRight},
               {"over bound", kRight},
               {"loaded", kRight},
               {"stored", kRight}});
  if (report.no_swap) {
    const bool large = report.sizes.has_large_arena();
    add_row(table, large ? "no swap, large arena" : "no swap, one after another", *report.no_swap,
            report);
  }
  if (report.look_ahead) add_row(table, "look-ahead", *report.look_ahead, report);
  if (report.without) add_row(table, "without look-ahead", *report.without, report);
  text += table.render("  ");
  const auto equal = report.outputs_equal();
  text += fmt::format("\noutputs of all runs, bit for bit: {}\n",
                      equal ? (*equal ? "equal" : "DIFFERENT") : "not compared");
  if (config.check && report.sizes.reference_blocks == 0) text += kNothingToCompare;
  text += report.is_simulated ? kNoBound : kBound;
  if (report.sizes.in_windows() && !report.is_simulated) text += kWindowsBound;
  return text;
}

std::vector<std::string> failures_of(const LongctxReport& report) {
  std::vector<std::string> failures = report.errors;
  if (report.outputs_equal() == false) {
    failures.emplace_back(
        "outputs differ between the runs: what was loaded is not what was stored");
  }
  if (report.leaked_device_bytes > 0) {
    failures.push_back(fmt::format("{} of device memory are still taken",
                                   ipc::format_size(report.leaked_device_bytes)));
  }
  if (report.leaked_host_bytes > 0) {
    failures.push_back(fmt::format("{} of host memory are still held",
                                   ipc::format_size(report.leaked_host_bytes)));
  }
  for (const std::string& name : report.leftover_names) failures.push_back("left behind: " + name);
  return failures;
}

}  // namespace kvferry::cli
