// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/shape.hpp"
#include "calibrate/report.hpp"
#include "command.hpp"
#include "kvferry/cache_manager/calibration_file.hpp"
#include "kvferry/cache_manager/strategy_choice.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/cache_file.hpp"
#include "must.hpp"
#include "options.hpp"
#include "print.hpp"
#include "rank_options.hpp"
#include "run/run_dir.hpp"
#include "run_options.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

constexpr int kTurnLookMs = 20;
constexpr ipc::Duration kTurnPatience = std::chrono::seconds(10);
constexpr std::uint64_t kSimulatedBytes = 1ULL << 30;
/// Of the arena whose strategies are chosen from: its size decides nothing.
constexpr std::uint32_t kArenaBlocks = 64;

constexpr const char* kCalibrateDescription =
    "Measures what copies between device and host cost for the blocks of a geometry, as movers do "
    "once before they choose by it, and shows what they choose: for jobs that are alone in their "
    "direction, and among others. Takes less than a second for each geometry, at most 64 MiB of "
    "the device's memory and as much pinned host memory, and touches nobody's blocks. What was "
    "measured before is shown as it is kept, unless --fresh is given or device, driver, CUDA, "
    "kvferry or geometry are others.";

constexpr const char* kCalibrateExample =
    "examples:\n"
    "  kvferry calibrate                                  a few chunk sizes, every GPU\n"
    "  kvferry calibrate --geometry llama-3-8b --ranks 4  a rank's share of a model's cache\n"
    "  kvferry calibrate --device cuda:0 --fresh --json\n\n"
    "* of staged only the mover's part, slots by DMA, is measured: choices add what gathers in "
    "the\n"
    "  worker cost on an idle device; a mover learns from its jobs what they cost now.";

struct CalibrateOptions {
  CommonOptions common;
  std::string device = "auto";
  std::uint32_t ranks = 1;
  std::vector<std::string> geometries;
  std::vector<std::uint64_t> chunk_sizes = {4ULL << 10, 16ULL << 10, 32ULL << 10, 64ULL << 10};
  std::uint32_t regions = 64;
  ipc::ArenaOrder order = ipc::ArenaOrder::kLayerFirst;
  std::string cache_dir;
  bool fresh = false;
  bool json = false;
};

void add_calibrate_options(CLI::App& app, CalibrateOptions& options) {
  add_device_choice(app, options.device);
  auto* chunks = add_list<std::uint64_t>(app, "--chunk-size", options.chunk_sizes, ipc::parse_size,
                                         "Bytes of one block in one region "
                                         "[4KiB,16KiB,32KiB,64KiB]")
                     ->type_name("SIZE[,...]");
  auto* regions =
      app.add_option("--regions", options.regions, "Regions of a block: K and V of each layer, say")
          ->type_name("N")
          ->check(CLI::Range(1U, ipc::kMaxRegionsPerGroup))
          ->default_str(std::to_string(options.regions));
  add_names(app, "--geometry", options.geometries,
            "Caches of models in place of equal chunks: presets or .toml files")
      ->type_name("NAME|FILE.toml[,...]")
      ->excludes(chunks)
      ->excludes(regions);
  add_ranks(app, options.ranks);
  add_choice<ipc::ArenaOrder>(app, "--arena", options.order,
                              {{"layer-first", ipc::ArenaOrder::kLayerFirst},
                               {"layer-first-many", ipc::ArenaOrder::kLayerFirstMany}},
                              "How regions lie; in a block-first arena there is nothing to choose");
  add_cache_dir(app, options.cache_dir);
  app.add_flag("--fresh", options.fresh, "Measure also what is kept");
  app.add_flag("--json", options.json, "Tell as JSON, on standard output");
}

std::vector<ipc::DeviceSpec> devices_of(const DeviceChoice& choice) {
  if (choice.kind == ipc::DeviceKind::kCuda) {
    return cuda_devices(choice, static_cast<std::uint32_t>(choice.cuda_ordinals.size()));
  }
  ipc::DeviceSpec simulated;
  simulated.host_name = fmt::format("calibrate-{}", ::getpid());
  simulated.host_capacity_bytes = kSimulatedBytes;
  return {simulated};
}

std::vector<BenchShape> shapes_of(const CalibrateOptions& options, const RunDir& dir) {
  std::vector<BenchShape> shapes;
  for (const std::string& name : options.geometries) {
    shapes.push_back(must(make_model_shape(name, options.ranks)));
  }
  if (!shapes.empty()) return shapes;
  for (const std::uint64_t chunk : options.chunk_sizes) {
    shapes.push_back(must(make_even_shape(chunk, options.regions, options.ranks, dir.path())));
  }
  return shapes;
}

/// Movers of this machine measure one at a time, and so does this.
std::optional<ipc::CacheLock> wait_turn(const std::filesystem::path& cache_dir) {
  const ipc::Deadline deadline = ipc::Deadline::after(kTurnPatience);
  while (!cache_dir.empty() && !deadline.expired()) {
    auto turn = ipc::CacheLock::try_take(cache_dir);
    if (!turn) return std::nullopt;  // saving says why
    if (*turn) return std::move(*turn);
    // wait: another process that measures; kTurnLookMs = 20 ms, together kTurnPatience = 10 s;
    // nothing
    ::poll(nullptr, 0, kTurnLookMs);
  }
  return std::nullopt;
}

CalibratedGeometry calibrate(ipc::Device& device,
                             const ipc::Geometry& geometry,
                             const CalibrateOptions& options,
                             const std::filesystem::path& cache_dir) {
  CalibratedGeometry found;
  found.geometry = geometry.name;
  ArenaChoice choice;
  choice.order = options.order;
  const ipc::ArenaLayout layout = must(ipc::plan_arena(
      geometry, make_arena_options(choice, geometry, kArenaBlocks, device.spec().kind)));
  found.possible = cache_manager::possible_strategies(layout);
  found.slots = cache_manager::slots_of_direction(layout.staging);
  found.rule = cache_manager::strategy_by_rule(layout);
  const auto key = must(cache_manager::calibration_key(device, geometry, options.order));
  if (!cache_dir.empty()) found.file = cache_manager::calibration_file(cache_dir, key);
  if (!options.fresh && !found.file.empty()) {
    auto kept = cache_manager::load_calibration(found.file, key);
    if (kept) {
      found.calibration = std::move(kept).value();
      return found;
    }
    if (kept.error().code != ipc::ErrorCode::kNotFound) {
      print_err("kvferry calibrate: measuring anew: {}\n", kept.error().to_string());
    }
  }
  const auto turn = wait_turn(cache_dir);
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  cache_manager::CalibrationSteps steps;
  if (device.spec().kind != ipc::DeviceKind::kHost) {
    steps.most_spread = cache_manager::kMostCalibrationSpread;
  }
  found.calibration =
      must(cache_manager::measure_calibration(device, geometry, options.order, steps));
  found.seconds = std::chrono::duration<double>(ipc::MonotonicClock::now() - start).count();
  if (found.file.empty()) return found;
  if (const auto saved = cache_manager::save_calibration(found.file, found.calibration); !saved) {
    print_err("kvferry calibrate: not kept: {}\n", saved.error().to_string());
    found.file.clear();
  }
  return found;
}

}  // namespace

int calibrate_command(const Arguments& arguments) {
  CalibrateOptions options;
  options.common.log_level = ipc::LogLevel::kWarn;
  auto app = make_app("calibrate", kCalibrateDescription, kCalibrateExample, options.common);
  add_calibrate_options(*app, options);
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("calibrate", options.common.log_level);
  const auto choice = choose_devices(options.device);
  if (!choice) return usage_error(*app, choice.error());
  for (const std::string& name : options.geometries) {
    if (const auto geometry = find_geometry(name, options.ranks); !geometry) {
      return usage_error(*app, geometry.error());
    }
  }
  std::filesystem::path cache_dir = options.cache_dir;
  if (cache_dir.empty()) cache_dir = ipc::default_cache_dir();
  try {
    const RunDir dir = must(RunDir::create(options.common.runtime_dir, "calibrate"));
    const std::vector<BenchShape> shapes = shapes_of(options, dir);
    nlohmann::json all = nlohmann::json::array();
    for (const ipc::DeviceSpec& spec : devices_of(*choice)) {
      const auto device = ipc::open_device(spec);
      for (const BenchShape& shape : shapes) {
        const CalibratedGeometry found = calibrate(*device, shape.geometry, options, cache_dir);
        if (options.json) {
          all.push_back(to_json(found));
        } else {
          print_out("{}", table_of(found));
        }
      }
    }
    if (options.json) {
      print_out("{}\n", nlohmann::json{{"calibrations", std::move(all)}}.dump(2));
    } else {
      print_out("* the mover's part alone: 'kvferry calibrate --help'\n");
    }
    return kExitDone;
  } catch (const ipc::Exception& error) {
    return failure("calibrate", error.error());
  }
}

}  // namespace kvferry::cli
