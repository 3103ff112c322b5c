// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/report.hpp"

#include "bench/bench.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

Json median_of(const Samples& samples) { return samples.empty() ? Json() : Json(samples.median()); }

template <typename T> Json optional_of(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

void add_spread(Json& json, const std::string& name, const std::optional<Spread>& spread) {
  json[name + "_low"] = spread ? Json(spread->low) : Json();
  json[name + "_high"] = spread ? Json(spread->high) : Json();
}

void add_rounds(Json& json, const BenchFigure& figure) {
  const auto& rounds = figure.round_us;
  const auto put = [&json, &rounds](const char* name, auto value) {
    json[name] = rounds ? Json(value(*rounds)) : Json();
  };
  put("itl_p50_us", [](const RoundTimes& times) { return times.median; });
  put("itl_p99_us", [](const RoundTimes& times) { return times.p99; });
  put("itl_p50_us_beside", [](const RoundTimes& times) { return times.median_beside; });
  put("itl_p99_us_beside", [](const RoundTimes& times) { return times.p99_beside; });
  put("itl_p50_ratio", [](const RoundTimes& times) { return times.median_beside / times.median; });
  put("itl_p99_ratio", [](const RoundTimes& times) { return times.p99_beside / times.p99; });
  const bool beside_copy = figure.round_us && figure.round_us->p99_beside_copy > 0;
  json["itl_p99_beyond_copy"] =
      beside_copy ? Json(figure.round_us->p99_beside / figure.round_us->p99_beside_copy) : Json();
  add_spread(json, "itl_p99_ratio", figure.p99_spread);
  add_spread(json, "itl_p99_beyond_copy", figure.p99_beyond_copy_spread);
  json["copy_gbps"] = median_of(figure.copy_gbps);
  json["slowdown_beyond_copy"] = median_of(figure.slowdown_beyond_copy);
  const bool known = !figure.slowdown.empty();
  json["slowdown_least"] = known ? Json(figure.slowdown.least()) : Json();
  json["slowdown_most"] = known ? Json(figure.slowdown.most()) : Json();
}

Json to_json(const BenchFigure& figure) {
  const BenchPoint& point = figure.point;
  Json json{{"bench", figure.bench},
            {"strategy", figure.strategy},
            {"path", to_string(figure.path)},
            {"direction", to_string(point.way)},
            {"geometry", point.geometry.empty() ? Json() : Json(point.geometry)},
            {"chunk_bytes", point.chunk_bytes},
            {"regions", point.regions},
            {"block_bytes", point.block_bytes},
            {"blocks", point.blocks},
            {"locality", to_string(point.locality)},
            {"pool_bytes", optional_of(figure.pool_bytes)},
            {"gbps", median_of(figure.gbps)},
            {"share", optional_of(figure.share)},
            {"us", median_of(figure.us)},
            {"per_second", optional_of(figure.per_second)},
            {"cpu_ms_per_gib", optional_of(figure.cpu_ms_per_gib)},
            // Of the compute beside it: of the benchmark "interference".
            {"load", figure.load.empty() ? Json() : Json(figure.load)},
            {"slowdown", median_of(figure.slowdown)},
            // Of the death of what copies: of the benchmark "ablation".
            {"recovery_us", optional_of(figure.recovery_us)},
            {"arena_kept", optional_of(figure.arena_kept)},
            // Of the benchmark "idle".
            {"core_share", median_of(figure.core_share)}};
  add_rounds(json, figure);
  json["gbps_least"] = figure.gbps.empty() ? Json() : Json(figure.gbps.least());
  json["gbps_most"] = figure.gbps.empty() ? Json() : Json(figure.gbps.most());
  json["us_p99"] = figure.us.empty() ? Json() : Json(figure.us.quantile(0.99));
  return json;
}

/// What one table shows: all strategies side by side, a column for each kind of job.
bool belongs_together(const BenchFigure& a, const BenchFigure& b) {
  // Of a pool bare figures are of no cache.
  if (a.pool_bytes && a.path != b.path) return false;
  return a.bench == b.bench && a.point.geometry == b.point.geometry &&
         a.point.chunk_bytes == b.point.chunk_bytes && a.point.regions == b.point.regions &&
         a.point.way == b.point.way && a.load == b.load;
}

std::string job_of(const BenchPoint& point, bool with_locality) {
  std::string text = fmt::format("{} block{}", point.blocks, point.blocks == 1 ? "" : "s");
  if (with_locality) text += fmt::format(", {}", to_string(point.locality));
  return text;
}

std::string cell_of(const BenchFigure& figure) {
  if (!figure.us.empty()) {
    const std::string rate = figure.per_second ? fmt::format(", {:.0f}/s", *figure.per_second) : "";
    return fmt::format("{0:.{2}f} / {1:.{2}f}{3}", figure.us.median(), figure.us.quantile(0.99),
                       figure.us.median() < 10 ? 1 : 0, rate);
  }
  if (figure.gbps.empty()) return "";
  const std::string share = figure.share ? fmt::format(" {:5.1f} %", 100 * *figure.share) : "";
  return fmt::format("{:.2f}{}", figure.gbps.median(), share);
}

std::string heading_of(const BenchFigure& figure) {
  const BenchPoint& point = figure.point;
  const std::string unit = figure.us.empty()   ? "GB/s and share of the limit"
                           : figure.per_second ? "us in the call, median / p99, and jobs a second"
                                               : "us, median / p99";
  if (figure.pool_bytes && figure.path == BenchPath::kBare) {
    return fmt::format("pool, {}, in one process: {} in pieces of {}\n", unit,
                       ipc::format_size(*figure.pool_bytes), ipc::format_size(point.chunk_bytes));
  }
  if (figure.pool_bytes) {
    return fmt::format("pool, {}, of a young instance from its manager's start: {}, swaps of {}\n",
                       unit, ipc::format_size(*figure.pool_bytes),
                       ipc::format_size(point.blocks * point.block_bytes));
  }
  const bool has_way = figure.bench == "transfer" || figure.bench == "latency";
  return fmt::format("{}{}, {}: {}{} regions, {} of each, blocks of {}\n", figure.bench,
                     has_way ? fmt::format(" {}", to_string(point.way)) : "", unit,
                     point.geometry.empty() ? "" : point.geometry + ", ", point.regions,
                     ipc::format_size(point.chunk_bytes), ipc::format_size(point.block_bytes));
}

bool has_localities(const std::vector<const BenchFigure*>& figures) {
  return std::any_of(figures.begin(), figures.end(), [&figures](const BenchFigure* figure) {
    return figure->point.locality != figures.front()->point.locality;
  });
}

std::string table_of(const std::vector<const BenchFigure*>& figures) {
  const bool with_locality = has_localities(figures);
  std::vector<std::string> jobs;
  std::vector<std::string> rows;
  const auto place = [](std::vector<std::string>& list, const std::string& name) {
    const auto found = std::find(list.begin(), list.end(), name);
    if (found != list.end()) return static_cast<std::size_t>(found - list.begin());
    list.push_back(name);
    return list.size() - 1;
  };
  std::vector<std::vector<std::string>> cells;
  std::vector<std::string> cpu;  ///< Of a row's last kind of job.
  for (const BenchFigure* figure : figures) {
    const std::size_t row =
        place(rows, fmt::format("{} {}", to_string(figure->path), figure->strategy));
    const std::size_t column = place(jobs, job_of(figure->point, with_locality));
    if (cells.size() <= row) cells.resize(row + 1);
    if (cpu.size() <= row) cpu.resize(row + 1);
    if (figure->cpu_ms_per_gib) cpu[row] = fmt::format("{:.1f}", *figure->cpu_ms_per_gib);
    if (cells[row].size() <= column) cells[row].resize(column + 1);
    cells[row][column] = cell_of(*figure);
  }
  std::vector<Table::Column> columns{{""}};
  for (const std::string& job : jobs) columns.push_back({job, Align::kRight});
  const bool with_cpu =
      std::any_of(cpu.begin(), cpu.end(), [](const std::string& text) { return !text.empty(); });
  if (with_cpu) columns.push_back({"CPU ms/GiB", Align::kRight});
  Table table(std::move(columns));
  for (std::size_t row = 0; row < rows.size(); ++row) {
    cells[row].resize(jobs.size());
    cells[row].insert(cells[row].begin(), rows[row]);
    if (with_cpu) cells[row].push_back(cpu[row]);
    table.add(std::move(cells[row]));
  }
  return heading_of(*figures.front()) + table.render("  ");
}

std::string with_spread(double value, const std::optional<Spread>& spread) {
  const std::string text = fmt::format("{:.3f}", value);
  return spread ? fmt::format("{} ({:.3f} to {:.3f})", text, spread->low, spread->high) : text;
}

/// Of one load: a row for each way of copying beside it.
std::string interference_table_of(const std::vector<const BenchFigure*>& figures) {
  const BenchFigure& first = *figures.front();
  const bool tokens = first.load == "decode";
  const bool with_locality = has_localities(figures);
  const bool with_jobs = with_locality || std::any_of(figures.begin(), figures.end(), [&](auto* f) {
                           return f->point.blocks != first.point.blocks;
                         });
  Table table({{""},
               {"GB/s", Align::kRight},
               {"of the limit", Align::kRight},
               {"of one copy's", Align::kRight},
               {"slowdown", Align::kRight},
               {tokens ? "token us" : "round us", Align::kRight},
               {"beside", Align::kRight},
               {"p99 us", Align::kRight},
               {"beside", Align::kRight},
               {"p99 ratio", Align::kRight},
               {"beyond one copy: slowdown", Align::kRight},
               {"p99", Align::kRight}});
  for (const BenchFigure* figure : figures) {
    const RoundTimes times = figure->round_us.value_or(RoundTimes{});
    const std::string job = with_jobs && figure->strategy != kOneCopy
                                ? fmt::format(", {}", job_of(figure->point, with_locality))
                                : "";
    table.add(
        {fmt::format("{} {}{}", to_string(figure->path), figure->strategy, job),
         fmt::format("{:.2f}", figure->gbps.median()),
         figure->share ? fmt::format("{:.1f} %", 100 * *figure->share) : "",
         figure->copy_gbps.empty()
             ? ""
             : fmt::format("{:.1f} %", 100 * figure->gbps.median() / figure->copy_gbps.median()),
         fmt::format("{:.3f} ({:.3f} to {:.3f})", figure->slowdown.median(),
                     figure->slowdown.quantile(0.25), figure->slowdown.quantile(0.75)),
         fmt::format("{:.0f}", times.median), fmt::format("{:.0f}", times.median_beside),
         fmt::format("{:.0f}", times.p99), fmt::format("{:.0f}", times.p99_beside),
         with_spread(times.p99_beside / times.p99, figure->p99_spread),
         figure->slowdown_beyond_copy.empty()
             ? ""
             : fmt::format("{:.3f}", figure->slowdown_beyond_copy.median()),
         times.p99_beside_copy > 0
             ? with_spread(times.p99_beside / times.p99_beside_copy, figure->p99_beyond_copy_spread)
             : ""});
  }
  const std::string jobs =
      with_jobs ? "" : fmt::format(", jobs of {}", job_of(first.point, /*with_locality=*/false));
  return fmt::format(
             "interference {} beside {}, medians (slowdown: and quartiles) of {} pairs, p99 of all "
             "rounds (and 95 % of draws of pairs): {}{} regions, {} of each{}\n",
             to_string(first.point.way), first.load, first.slowdown.size(),
             first.point.geometry.empty() ? "" : first.point.geometry + ", ", first.point.regions,
             ipc::format_size(first.point.chunk_bytes), jobs) +
         table.render("  ");
}

std::string idle_table_of(const std::vector<const BenchFigure*>& figures) {
  Table table({{""}, {"% of a core", Align::kRight}, {"most", Align::kRight}});
  for (const BenchFigure* figure : figures) {
    table.add({figure->strategy, fmt::format("{:.3f}", 100 * figure->core_share.median()),
               fmt::format("{:.3f}", 100 * figure->core_share.most())});
  }
  const BenchPoint& point = figures.front()->point;
  return fmt::format(
             "idle, processor time of each process after traffic, median of its windows: {}{} "
             "regions, {} of each\n",
             point.geometry.empty() ? "" : point.geometry + ", ", point.regions,
             ipc::format_size(point.chunk_bytes)) +
         table.render("  ");
}

/// Of one way: a row for each job by each way of copying, those of a mover beside the worker's own.
std::string ablation_table_of(const std::vector<const BenchFigure*>& figures) {
  const BenchFigure& first = *figures.front();
  Table table({{""},
               {"a job of", Align::kRight},
               {"GB/s", Align::kRight},
               {"of the limit", Align::kRight},
               {"us, median / p99", Align::kRight},
               {"CPU ms/GiB", Align::kRight},
               {"killed: back after ms", Align::kRight},
               {"device blocks"}});
  const auto text_of = [](const std::optional<double>& value, double scale) {
    return value ? fmt::format("{:.1f}", scale * *value) : std::string();
  };
  for (const BenchFigure* figure : figures) {
    const std::string us = figure->us.empty() ? ""
                                              : fmt::format("{:.0f} / {:.0f}", figure->us.median(),
                                                            figure->us.quantile(0.99));
    table.add({fmt::format("{} {}", to_string(figure->path), figure->strategy),
               job_of(figure->point, /*with_locality=*/false),
               fmt::format("{:.2f}", figure->gbps.median()),
               figure->share ? fmt::format("{:.1f} %", 100 * *figure->share) : "", us,
               text_of(figure->cpu_ms_per_gib, 1), text_of(figure->recovery_us, 1e-3),
               !figure->arena_kept   ? ""
               : *figure->arena_kept ? "kept"
                                     : "lost"});
  }
  return fmt::format(
             "ablation {}, with a mover and without: {}{} regions, {} of each, blocks of {}\n",
             to_string(first.point.way),
             first.point.geometry.empty() ? "" : first.point.geometry + ", ", first.point.regions,
             ipc::format_size(first.point.chunk_bytes), ipc::format_size(first.point.block_bytes)) +
         table.render("  ");
}

std::string limit_of(const BenchReport& report) {
  const LinkLimit& limit = report.limit;
  if (limit.both.empty()) return "";
  return fmt::format("{}; the link: d2h {:.2f}, h2d {:.2f}, both ways {:.2f} GB/s\n\n",
                     report.device, limit.to_host.median(), limit.to_device.median(),
                     limit.both.median());
}

}  // namespace

Json to_json(const BenchReport& report) {
  Json results = Json::array();
  for (const BenchFigure& figure : report.figures) results.push_back(to_json(figure));
  return Json{{"device", report.device},
              {"ranks", report.ranks},
              {"arena", report.arena},
              {"limit",
               {{"d2h", median_of(report.limit.to_host)},
                {"h2d", median_of(report.limit.to_device)},
                {"both", median_of(report.limit.both)}}},
              {"results", std::move(results)},
              {"errors", report.errors},
              {"leaked_device_bytes", report.leaked_device_bytes},
              {"leaked_host_bytes", report.leaked_host_bytes},
              {"leftover_names", report.leftover_names}};
}

std::string tables_of(const BenchReport& report) {
  std::vector<std::vector<const BenchFigure*>> groups;
  for (const BenchFigure& figure : report.figures) {
    const auto found = std::find_if(groups.begin(), groups.end(), [&figure](const auto& group) {
      return belongs_together(*group.front(), figure);
    });
    if (found != groups.end()) {
      found->push_back(&figure);
    } else {
      groups.push_back({&figure});
    }
  }
  std::string text = limit_of(report);
  for (const auto& group : groups) {
    const BenchFigure& first = *group.front();
    const bool ablation = first.bench == to_string(BenchKind::kAblation);
    const bool idle = first.bench == to_string(BenchKind::kIdle);
    text += ablation             ? ablation_table_of(group)
            : idle               ? idle_table_of(group)
            : first.load.empty() ? table_of(group)
                                 : interference_table_of(group);
    text += "\n";
  }
  return text;
}

std::vector<std::string> failures_of(const BenchReport& report) {
  std::vector<std::string> failures = report.errors;
  if (report.leaked_device_bytes > 0 || report.leaked_host_bytes > 0) {
    failures.push_back(fmt::format("leaked {} of device memory and {} of host memory",
                                   ipc::format_size(report.leaked_device_bytes),
                                   ipc::format_size(report.leaked_host_bytes)));
  }
  if (!report.leftover_names.empty()) {
    failures.push_back(fmt::format("left behind: {}", fmt::join(report.leftover_names, ", ")));
  }
  return failures;
}

}  // namespace kvferry::cli
