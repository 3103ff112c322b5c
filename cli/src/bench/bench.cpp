// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/bench.hpp"

#include "bench/ablation_bench.hpp"
#include "bench/cache_bench.hpp"
#include "bench/context.hpp"
#include "bench/hand_over_bench.hpp"
#include "bench/idle_bench.hpp"
#include "bench/interference_bench.hpp"
#include "bench/layers_bench.hpp"
#include "bench/plot.hpp"
#include "bench/pool_bench.hpp"
#include "bench/pool_swaps.hpp"
#include "bench/report.hpp"
#include "bench/restart_bench.hpp"
#include "bench/shape.hpp"
#include "bench/transfer_bench.hpp"
#include "bench/urgent_bench.hpp"
#include "command.hpp"
#include "must.hpp"
#include "options.hpp"
#include "print.hpp"
#include "run/report_file.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

std::vector<BenchShape> shapes_of(const BenchConfig& config, const RunDir& dir) {
  std::vector<BenchShape> shapes;
  for (const std::string& name : config.geometries) {
    shapes.push_back(must(make_model_shape(name, config.ranks)));
  }
  if (!shapes.empty()) return shapes;
  for (const std::uint64_t chunk : config.chunk_sizes) {
    for (const std::uint32_t regions : config.regions) {
      shapes.push_back(must(make_even_shape(chunk, regions, config.ranks, dir.path())));
    }
  }
  return shapes;
}

/// The report holds what was measured, whatever ended the run.
BenchReport measure(const BenchConfig& config, const RunDir& dir, ipc::SignalFd& signals) {
  BenchContext context(config, dir, signals);
  try {
    const std::vector<BenchShape> shapes = shapes_of(config, dir);
    const auto for_each_shape = [&](auto bench) {
      for (const BenchShape& shape : shapes) bench(context, shape);
    };
    const auto wants = [&context](BenchKind kind) { return context.wants(kind); };
    if (wants(BenchKind::kTransfer) || wants(BenchKind::kLatency)) for_each_shape(bench_transfers);
    if (wants(BenchKind::kInterference)) for_each_shape(bench_interference);
    if (wants(BenchKind::kLayers)) for_each_shape(bench_layers);
    if (wants(BenchKind::kUrgent)) for_each_shape(bench_urgent);
    if (wants(BenchKind::kAblation)) for_each_shape(bench_ablation);
    if (wants(BenchKind::kSubmit)) for_each_shape(bench_submit);
    if (wants(BenchKind::kLookup)) bench_lookup(context);
    if (wants(BenchKind::kClear)) for_each_shape(bench_clear);
    if (wants(BenchKind::kPool)) {
      bench_pool(context, shapes.front());  // of no cache: a device is opened for any
      for_each_shape(bench_pool_swaps);
    }
    if (wants(BenchKind::kIdle)) for_each_shape(bench_idle);
    if (wants(BenchKind::kRestart)) bench_restart(context);
    if (wants(BenchKind::kHandOver)) for_each_shape(bench_hand_over);
  } catch (const ipc::Exception& error) {
    context.report.errors.push_back(error.error().to_string());
  }
  return std::move(context.report);
}

}  // namespace

std::string_view to_string(BenchKind kind) noexcept {
  switch (kind) {
    case BenchKind::kTransfer: return "transfer";
    case BenchKind::kLatency: return "latency";
    case BenchKind::kInterference: return "interference";
    case BenchKind::kLayers: return "layers";
    case BenchKind::kSubmit: return "submit";
    case BenchKind::kLookup: return "lookup";
    case BenchKind::kClear: return "clear";
    case BenchKind::kPool: return "pool";
    case BenchKind::kAblation: return "ablation";
    case BenchKind::kIdle: return "idle";
    case BenchKind::kUrgent: return "urgent";
    case BenchKind::kRestart: return "restart";
    case BenchKind::kHandOver: return "handover";
  }
  return "invalid";
}

int run_bench(const BenchConfig& config) {
  try {
    ipc::SignalFd signals;  // before anything that would be left behind, or starts threads
    auto dir = RunDir::create(config.runtime_base, "bench");
    if (!dir) return failure("bench", dir.error());
    const BenchReport report = measure(config, *dir, signals);
    (void)write_out(config.json ? to_json(report).dump(2) + "\n" : tables_of(report));
    if (!config.log_dir.empty()) print_err("logs of the processes: {}\n", config.log_dir);
    int code = kExitDone;
    if (!config.plot_file.empty()) {
      if (const auto drawn = write_report_file(draw_bench(report), config.plot_file); !drawn) {
        code = failure("bench", drawn.error());
      }
    }
    for (const std::string& reason : failures_of(report)) {
      print_err("kvferry bench: FAILED: {}\n", reason);
      code = kExitFailed;
    }
    return code;
  } catch (const ipc::Exception& error) {
    return failure("bench", error.error());
  }
}

}  // namespace kvferry::cli
