// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/report.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "run/report_file.hpp"
#include "table.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <functional>

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

double gb_per_s(std::uint64_t bytes, double seconds) {
  return seconds > 0 ? static_cast<double>(bytes) / 1e9 / seconds : 0.0;
}

std::string share_of(std::uint64_t part, std::uint64_t whole) {
  if (whole == 0) return "";
  return fmt::format("{:.1f} %", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

Json times(const std::vector<double>& values) {
  return Json{{"p50", percentile(values, 0.50)},
              {"p99", percentile(values, 0.99)},
              {"max", percentile(values, 1.0)}};
}

std::string times_text(const std::vector<double>& values) {
  return fmt::format("p50 {:.1f} ms, p99 {:.1f} ms, max {:.1f} ms", percentile(values, 0.50),
                     percentile(values, 0.99), percentile(values, 1.0));
}

Json to_json(const ClearMemory& clear) {
  Json devices = Json::array();
  for (const DeviceClear& device : clear.devices) {
    devices.push_back(Json{{"device", device.device},
                           {"arena_bytes", device.arena_bytes},
                           {"free_before", device.reported_before},
                           {"free_after", device.reported_after},
                           {"seen_free_before", device.seen_before},
                           {"seen_free_after", device.seen_after}});
  }
  return Json{{"devices", std::move(devices)},
              {"quarantined", clear.quarantined},
              {"disturbed", clear.disturbed}};
}

Json clears_to_json(const std::vector<ClearMemory>& clears) {
  Json list = Json::array();
  for (const ClearMemory& clear : clears) list.push_back(to_json(clear));
  return list;
}

void add_write_rows(const ReplayCounters& c,
                    const std::function<void(std::string, std::uint64_t, std::string)>& row) {
  row("blocks written back", c.written_back, "before they were evicted");
  row("blocks evicted unstored", c.evicted_unstored, "their room was needed at once");
  row("waits for room", c.room_waits, "requests that waited for what was written back");
  row("stores dropped, queue", c.gate.dropped_queue, "blocks; too many were on their way");
  row("stores dropped, room", c.gate.dropped_room,
      "blocks; host memory had no room, or just before");
}

void add_sample_rows(const std::vector<RunSample>& samples,
                     const std::function<void(std::string, std::string, std::string)>& row) {
  if (const auto pair = quarter_and_end(samples, /*with_pool=*/false)) {
    row("anonymous memory", "",
        describe_memory(*pair) + ", at a quarter of the run and at its end");
  }
  if (const auto pair = quarter_and_end(samples, /*with_pool=*/true)) {
    row("blocks per extent", fmt::format("{:.2f}", pair->end->pool->blocks_per_extent()),
        fmt::format("in host memory, of all placed by the end; {:.2f} at a quarter of the run",
                    pair->quarter->pool->blocks_per_extent()));
  }
}

}  // namespace

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
  return values[std::clamp<std::size_t>(rank, 1, values.size()) - 1];
}

Json to_json(const ReplayReport& report) {
  const ReplayCounters& c = report.counters;
  Json json{{"requests", c.requests},
            {"requests_given", report.requests_given},
            {"block_references", c.block_references},
            {"hits_device", c.hits_device},
            {"hits_host", c.hits_host},
            {"hit_rate", c.hit_rate()},
            {"bytes_to_host", c.bytes_to_host},
            {"bytes_to_device", c.bytes_to_device},
            {"gb_per_s_to_host", gb_per_s(c.bytes_to_host, report.duration_s)},
            {"gb_per_s_to_device", gb_per_s(c.bytes_to_device, report.duration_s)},
            {"loads", c.loads},
            {"stores", c.stores},
            {"already_stored", c.already_stored},
            {"host_full", c.host_full},
            {"failed_jobs", c.failed_jobs},
            {"recomputed", c.recomputed},
            {"evicted_before_load", c.evicted_before_load},
            {"blocks_verified", c.blocks_verified},
            {"blocks_corrupt", c.blocks_corrupt},
            {"blocks_survived", c.blocks_survived},
            {"retracted", c.retracted},
            {"rejected", c.rejected},
            {"aborted", c.aborted},
            {"pauses", c.pauses},
            {"flushes", c.flushes},
            {"skipped_lines", report.skipped_lines},
            {"clears", c.clears},
            {"reinits", c.reinits},
            {"failed_cycles", c.failed_cycles},
            {"quarantined", c.quarantined},
            {"offload_down_s", c.offload_down_s},
            {"write_policy", report.write_policy},
            {"written_back", c.written_back},
            {"evicted_unstored", c.evicted_unstored},
            {"room_waits", c.room_waits},
            {"stores_dropped_queue", c.gate.dropped_queue},
            {"stores_dropped_room", c.gate.dropped_room},
            {"prefetch_stop", report.prefetch},
            {"prefetch",
             {{"requests", c.prefetch.requests},
              {"asked", c.prefetch.asked},
              {"arrived", c.prefetch.arrived},
              {"used", c.prefetch_used},
              {"failed", c.prefetch.failed},
              {"cancelled", c.prefetch.cancelled},
              {"waits", c.prefetch_waits},
              {"leases", c.leases}}},
            {"recompute", report.recompute},
            {"load_choice",
             {{"requests", c.choice.requests},
              {"refused", c.choice.refused},
              {"shortened", c.choice.shortened},
              {"probes", c.choice.probes},
              {"blocks_computed", c.choice.blocks},
              {"load_bytes_per_s", c.load_bytes_per_s},
              {"compute_tokens_per_s", c.compute_tokens_per_s}}},
            {"clear_ms", times(c.clear_ms)},
            {"reinit_ms", times(c.reinit_ms)},
            {"clear_memory", clears_to_json(report.clear_memory)},
            {"samples", to_json(report.samples)},
            {"deaths", to_json(report.deaths)},
            {"leaked_device_bytes", report.leaked_device_bytes},
            {"leaked_host_bytes", report.leaked_host_bytes},
            {"leftover_names", report.leftover_names.size()},
            {"leftover_paths", report.leftover_names},
            {"restarts", report.restarts},
            {"duration_s", report.duration_s},
            {"device", report.device},
            {"geometry", report.geometry},
            {"ranks", report.ranks},
            {"gpu_blocks", report.gpu_blocks},
            {"unit_blocks", report.unit_blocks},
            {"namespace", report.name_space},
            {"host_memory_bytes", report.host_memory_bytes},
            {"workload", report.workload},
            {"cache_owner", report.cache_owner},
            {"arena_memory", report.arena_memory},
            {"handles", report.handles},
            {"arena", report.arena},
            {"verify", report.verify},
            {"failures", failures_of(report)}};
  json["error"] = report.error ? Json(*report.error) : Json();
  return json;
}

ipc::Status write_report(const ReplayReport& report, const std::filesystem::path& file) {
  return write_report_file(to_json(report).dump(2) + "\n", file);
}

std::vector<std::string> failures_of(const ReplayReport& report) {
  const ReplayCounters& c = report.counters;
  std::vector<std::string> failures;
  if (report.error) failures.push_back(*report.error);
  if (c.blocks_corrupt > 0) {
    failures.push_back(
        fmt::format("{} of {} verified blocks were corrupt", c.blocks_corrupt, c.blocks_verified));
  }
  if (const auto short_clears = summarize_clears(report.clear_memory).short_clears;
      short_clears > 0) {
    failures.push_back(fmt::format(
        "{} of {} clears gave back less device memory than the arena took, seen from outside",
        short_clears, c.clears));
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
  if (!report.error && c.loads == 0 && c.choice.refused == 0) {
    failures.emplace_back(
        "nothing was ever loaded back from host memory, so the run shows nothing: play more "
        "--requests, or give less --gpu-blocks or more --host-memory");
  }
  return failures;
}

std::string summarize(const ReplayReport& report) {
  const ReplayCounters& c = report.counters;
  Table table({{""}, {"", Align::kRight}, {""}});
  const auto row = [&table](std::string name, std::string value, std::string note = {}) {
    table.add({std::move(name), std::move(value), std::move(note)});
  };
  const auto count = [](std::uint64_t value) { return with_separators(value); };
  row("requests served", count(c.requests),
      fmt::format("in {:.1f} s ({:.0f} per second)", report.duration_s,
                  report.duration_s > 0 ? static_cast<double>(c.requests) / report.duration_s : 0));
  row("block references", count(c.block_references), "prefix blocks that requests asked for");
  row("  found on the device", count(c.hits_device), share_of(c.hits_device, c.block_references));
  row("  loaded from host memory", count(c.hits_host), share_of(c.hits_host, c.block_references));
  row("hit rate", fmt::format("{:.1f} %", 100.0 * c.hit_rate()), "nothing to compute for these");
  if (report.unit_blocks > 1) {
    row("blocks of a store unit", count(report.unit_blocks),
        "in host memory; all counts here are of single blocks");
  }
  row("moved to host memory", ipc::format_size(c.bytes_to_host),
      fmt::format("{:.2f} GB/s on average, {} blocks", gb_per_s(c.bytes_to_host, report.duration_s),
                  count(c.stores)));
  row("moved to the device", ipc::format_size(c.bytes_to_device),
      fmt::format("{:.2f} GB/s on average, {} blocks",
                  gb_per_s(c.bytes_to_device, report.duration_s), count(c.loads)));
  row("blocks verified", count(c.blocks_verified),
      report.verify == "off" ? "--verify off" : "byte for byte, on every rank");
  row("blocks corrupt", count(c.blocks_corrupt));
  if (c.clears + c.reinits > 0) {
    row("clears", count(c.clears), times_text(c.clear_ms));
    const ClearMemorySummary memory = summarize_clears(report.clear_memory);
    row("  device memory given back", ipc::format_size(memory.given_back),
        fmt::format("seen from outside; free memory that ranks report differs by {} at most",
                    ipc::format_size(memory.largest_difference)));
    row("re-inits", count(c.reinits), times_text(c.reinit_ms));
  }
  const auto optional_row = [&](std::string name, std::uint64_t value, std::string note) {
    if (value > 0) row(std::move(name), count(value), std::move(note));
  };
  optional_row("clears tried again", c.failed_cycles, "a process died meanwhile, or was busy");
  optional_row("clears with quarantine", c.quarantined, "memory waited for a peer");
  optional_row("blocks found after a death", c.blocks_survived,
               "on the device since before a worker was replaced");
  optional_row("requests put back", c.retracted, "their device blocks were gone or taken back");
  optional_row("requests aborted", c.aborted, "by a pause");
  optional_row("requests left out", c.rejected, "longer than the device");
  optional_row("trace lines skipped", report.skipped_lines, "malformed");
  optional_row("failed copy jobs", c.failed_jobs, "blocks computed again or not stored");
  optional_row("blocks gone before their load", c.evicted_before_load,
               "evicted since they were seen, or not in their store unit: misses");
  optional_row("blocks not stored", c.host_full, "host memory was full");
  add_write_rows(c, optional_row);
  if (report.prefetch != "off") {
    row("prefetched blocks", count(c.prefetch.arrived),
        fmt::format("of {} asked for, {} used; {} failed, {} cancelled", count(c.prefetch.asked),
                    count(c.prefetch_used), count(c.prefetch.failed), count(c.prefetch.cancelled)));
    row("  for requests", count(c.prefetch.requests),
        fmt::format("{} waited for them; for {} blocks were kept in host memory",
                    count(c.prefetch_waits), count(c.leases)));
  }
  if (report.recompute != "never") {
    row("loads chosen against", count(c.choice.refused),
        fmt::format("of {} requests; {} shortened, {} made as probes, {} places computed instead",
                    count(c.choice.requests), count(c.choice.shortened), count(c.choice.probes),
                    count(c.choice.blocks)));
    row("  by rates of", fmt::format("{:.2f} GB/s", c.load_bytes_per_s / 1e9),
        fmt::format("for loads, {:.0f} tokens a second for computing, measured last",
                    c.compute_tokens_per_s));
  }
  if (c.offload_down_s >= 0.1) {
    row("without offload", fmt::format("{:.1f} s", c.offload_down_s),
        "no mover was ready: blocks were computed, not moved");
  }
  add_sample_rows(report.samples, row);
  optional_row("processes replaced", report.restarts, "after a death");
  for (const RunDeath& death : report.deaths) {
    row("  " + death.process, count(death.requests),
        fmt::format("requests before it died; {:.1f} % of blocks found before, {:.1f} % after; "
                    "in host memory {:.1f} and {:.1f} %",
                    100 * death.before.hit_rate(), 100 * death.after.hit_rate(),
                    100 * death.before.host_hit_rate(), 100 * death.after.host_hit_rate()));
  }
  row("device memory leaked", ipc::format_size(report.leaked_device_bytes),
      "seen from outside, after all processes ended");
  row("host memory leaked", ipc::format_size(report.leaked_host_bytes));
  row("names left behind", count(report.leftover_names.size()), "sockets, locks, shared memory");
  return table.render("  ");
}

}  // namespace kvferry::cli
