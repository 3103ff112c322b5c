// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/bench.hpp"
#include "bench/own_strategies.hpp"
#include "command.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "options.hpp"
#include "rank_options.hpp"
#include "run_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

constexpr std::uint32_t kMostBlocks = 65'536;
constexpr std::uint32_t kMostRepeats = 10'000;
constexpr std::uint64_t kMostEntries = 100'000'000;

constexpr const char* kBenchDescription =
    "Measures how fast blocks move between device and host, through a whole instance: this process "
    "is the engine, beside a manager and a worker and a mover of each rank. Beside each figure it "
    "measures, in the same run, the link (one large copy of pinned memory) and the ways in which "
    "others copy scattered chunks, by bare calls in one process. Figures are medians of --repeats "
    "runs; on simulated devices the link is memcpy.\n\n"
    "transfer: GB/s with as many jobs under way as the link needs, and the processor time of all "
    "processes together. latency: one job at a time, from its submit until the engine has seen its "
    "completion. interference: what copies cost a worker that computes all the time, in pairs of "
    "phases without copies and with them, beside one large copy of another process and others' "
    "ways. layers: loads that are computed on while they come, and stores that follow the compute, "
    "layer by layer, beside the same one after the other. urgent: a load of one block that goes "
    "before loads under way. submit: an engine's time in the call for "
    "a job of one block, and jobs a second. "
    "lookup: which blocks of a prefix of 1,000 are there. clear: clear and re-init of an idle "
    "arena, "
    "beside the bare calls for its memory. pool: making, registering and giving back host memory "
    "in this process; and through a young "
    "instance, from its manager's start until the first GiB was swapped out, and the longest swap "
    "while the rest is filled and registered. "
    "ablation: what a mover of its own costs and buys: the same jobs through an instance and by a "
    "worker that does its own copies, and what the death of what copies takes along; beside "
    "interference, also what such copies cost that worker's compute. idle: processor time of each "
    "process that has moved blocks and has nothing to do. restart: how soon the successor of a "
    "manager that was killed answers, and finds its blocks, of 1 KiB or those of --geometry. "
    "handover: two engines on one manager; "
    "what the first one stores, the second one loads, block by block meanwhile, or when all of it "
    "is "
    "stored: from the first block's store until the second engine has all.";

constexpr const char* kBenchExample =
    "examples:\n"
    "  kvferry bench                                     both, with a few chunk sizes\n"
    "  kvferry bench transfer --device host              no GPU needed\n"
    "  kvferry bench ablation --device host              with a mover, and without\n"
    "  kvferry bench interference --load decode,gemm --chunk-size 32KiB --blocks 16\n"
    "  kvferry bench interference --load decode --plot beside.svg\n"
    "  kvferry bench handover --device host --blocks 64  a prefill's blocks for a decode\n"
    "  kvferry bench transfer --geometry llama-3-8b,deepseek-v3 --blocks 1,16,256\n"
    "  kvferry bench transfer --chunk-size 16KiB,64KiB --strategy staged,batch --json";

struct BenchOptions {
  CommonOptions common;
  BenchConfig config;
  std::string device = "auto";
  std::optional<std::uint64_t> bytes;
  std::optional<std::uint64_t> pool_bytes;
  bool no_bare = false;
};

template <typename T, std::size_t Count>
ipc::Result<T> parse_word(const std::array<T, Count>& values, std::string_view text) {
  std::string words;
  for (const T value : values) {
    if (to_string(value) == text) return value;
    words += fmt::format("{}{}", words.empty() ? "" : ", ", to_string(value));
  }
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of {}", text, words);
}

ipc::Result<BenchKind> parse_kind(std::string_view text) { return parse_word(kBenchKinds, text); }
ipc::Result<Way> parse_way(std::string_view text) {
  return parse_word(std::array{Way::kToHost, Way::kToDevice, Way::kBoth}, text);
}
ipc::Result<Locality> parse_locality(std::string_view text) {
  return parse_word(std::array{Locality::kSequential, Locality::kRandom}, text);
}

ipc::Result<std::uint32_t> parse_regions(std::string_view text) {
  KVFERRY_ASSIGN(const std::uint64_t regions, parse_count(text, ipc::kMaxRegionsPerGroup));
  return static_cast<std::uint32_t>(regions);
}
ipc::Result<std::uint32_t> parse_blocks(std::string_view text) {
  KVFERRY_ASSIGN(const std::uint64_t blocks, parse_count(text, kMostBlocks));
  return static_cast<std::uint32_t>(blocks);
}

void add_what(CLI::App& app, BenchOptions& options) {
  BenchConfig& config = options.config;
  add_list<BenchKind>(
      app, "BENCH", config.kinds, parse_kind,
      "Any of transfer, latency, interference, layers, submit, lookup, clear, pool, "
      "ablation, idle, urgent, restart, handover [transfer, latency]")
      ->allow_extra_args();
  auto* chunks =
      add_list<std::uint64_t>(app, "--chunk-size", config.chunk_sizes, ipc::parse_size,
                              "Bytes of one block in one region [16KiB,32KiB,64KiB; interference, "
                              "ablation and handover: 32KiB; submit, clear, idle: 16KiB]")
          ->type_name("SIZE[,...]");
  auto* regions = add_list<std::uint32_t>(app, "--regions", config.regions, parse_regions,
                                          "Regions of a block: K and V of each layer, "
                                          "say [64; simulated devices: 16]")
                      ->type_name("N[,...]");
  add_names(app, "--geometry", config.geometries,
            "Caches of models in place of equal chunks: presets or .toml files")
      ->type_name("NAME|FILE.toml[,...]")
      ->excludes(chunks)
      ->excludes(regions);
  add_list<std::uint32_t>(app, "--blocks", config.blocks, parse_blocks,
                          "Blocks of one job [1,16,64]")
      ->type_name("N[,...]");
  add_list<Way>(app, "--direction", config.ways, parse_way, "d2h, h2d, both [all of them]")
      ->type_name("WAY[,...]");
  add_list<Locality>(app, "--locality", config.localities, parse_locality,
                     "Device blocks of a job: sequential or random (ablation: one of them; "
                     "restart: order in which "
                     "blocks were stored) [random]")
      ->type_name("NAME[,...]");
  add_list<cache_manager::CopyStrategy>(app, "--strategy", config.strategies,
                                        cache_manager::parse_copy_strategy,
                                        "How movers copy, as their --copy-strategy [auto, and all "
                                        "that the arena can do]")
      ->type_name("NAME[,...]");
  add_list<worker::ComputeLoadKind>(
      app, "--load", config.loads, worker::parse_compute_load,
      "What a worker computes, for interference: decode (a recorded graph of 128 kernels that "
      "stream weights; a round is a token), gemm (bfloat16, 8192 x 8192), skinny (64 rows), hbm (a "
      "reader of device memory) [all of them; simulated devices: decode,hbm]")
      ->type_name("NAME[,...]");
  app.add_option("--pairs", config.pairs, "Pairs of phases of interference, 0.2 s each")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostRepeats))
      ->default_str(std::to_string(config.pairs));
  app.add_flag("--no-bare", options.no_bare, "Leave out the bare copies in one process");
}

void add_how(CLI::App& app, BenchOptions& options) {
  BenchConfig& config = options.config;
  app.add_option("--repeats", config.repeats, "Runs of each measurement")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostRepeats))
      ->default_str(std::to_string(config.repeats));
  add_size(app, "--bytes", options.bytes,
           "To be moved each way in each run [1GiB; simulated devices: 64MiB]");
  app.add_option("--entries", config.entries, "Blocks in the index, for lookup and restart")
      ->type_name("N")
      ->check(CLI::Range(std::uint64_t{1'000}, kMostEntries))
      ->default_str(std::to_string(config.entries));
  add_size(app, "--pool-size", options.pool_bytes,
           "Of the arena for clear, and of the host memory for pool [4GiB; simulated devices: "
           "64MiB]");
  app.add_option("--samples", config.samples,
                 "Jobs of a latency, hand-overs, lookups, and 40 submits for each")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostRepeats))
      ->default_str(std::to_string(config.samples));
  add_ranks(app, config.ranks);
  add_device_choice(app, options.device);
  add_arena_options(app, config.arena);
  app.add_flag("--json", config.json, "Tell as JSON, on standard output");
  add_output_file(app, "--plot", config.plot_file, "Draw transfers and interference as SVG")
      ->type_name("FILE.svg");
  add_log_dir(app, "--log-dir", config.log_dir);
  add_milliseconds(app, "--stall-timeout", config.patience, "Fail when a copy takes longer");
}

/// What an arena of any shape can do.
ipc::Status check_strategies(const BenchConfig& config) {
  const std::string any = config.geometries.empty() ? "tiny" : config.geometries.front();
  KVFERRY_ASSIGN(const ipc::Geometry geometry, find_geometry(any, config.ranks));
  const ipc::ArenaOptions arena =
      make_arena_options(config.arena, geometry, 0, config.devices.kind);
  for (const cache_manager::CopyStrategy strategy : config.strategies) {
    KVFERRY_TRY(check_strategy(strategy, geometry, arena));
  }
  return ipc::ok();
}

/// It is of one rank, and of the strategies that a worker has, too.
ipc::Status check_ablation(const BenchConfig& config) {
  using cache_manager::CopyStrategy;
  if (std::find(config.kinds.begin(), config.kinds.end(), BenchKind::kAblation) ==
      config.kinds.end()) {
    return ipc::ok();
  }
  if (config.ranks != 1) {
    return KVFERRY_ERROR(kInvalidArgument, "ablation compares the ways of one rank, --ranks is {}",
                         config.ranks);
  }
  if (config.localities.size() > 1) {
    std::vector<std::string_view> names;
    for (const Locality locality : config.localities) names.push_back(to_string(locality));
    return KVFERRY_ERROR(kInvalidArgument,
                         "ablation measures jobs of one locality, --locality is {}: name one, and "
                         "run it again for the other",
                         fmt::join(names, ","));
  }
  const bool any =
      std::any_of(config.strategies.begin(), config.strategies.end(), [](CopyStrategy strategy) {
        return std::any_of(kOwnStrategies.begin(), kOwnStrategies.end(),
                           [strategy](OwnStrategy own) { return mover_strategy(own) == strategy; });
      });
  if (any || config.strategies.empty()) return ipc::ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "ablation compares direct, staged, strided, batch and memcpy; --strategy "
                       "names none of them");
}

template <typename T> void set_default(std::vector<T>& list, std::vector<T> value) {
  if (list.empty()) list = std::move(value);
}

}  // namespace

int bench_command(const Arguments& arguments) {
  BenchOptions options;
  options.common.instance = "bench";
  options.common.log_level = ipc::LogLevel::kWarn;
  auto app = make_app("bench", kBenchDescription, kBenchExample, options.common);
  add_what(*app, options);
  add_how(*app, options);
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("bench", options.common.log_level);

  BenchConfig& config = options.config;
  config.runtime_base = options.common.runtime_dir;
  config.instance = options.common.instance;
  // The processes' logs are kept to be shown when something goes wrong.
  config.log_level = std::min(options.common.log_level, ipc::LogLevel::kInfo);
  auto devices = choose_devices(options.device);
  if (!devices) return usage_error(*app, devices.error());
  config.devices = std::move(*devices);
  const bool cuda = config.devices.kind == ipc::DeviceKind::kCuda;
  config.bare = !options.no_bare;
  config.bytes = options.bytes.value_or(cuda ? 1ULL << 30 : 64ULL << 20);
  config.pool_bytes = options.pool_bytes.value_or(cuda ? 4ULL << 30 : 64ULL << 20);
  set_default(config.kinds, {BenchKind::kTransfer, BenchKind::kLatency});
  const auto has = [&config](BenchKind kind) {
    return std::find(config.kinds.begin(), config.kinds.end(), kind) != config.kinds.end();
  };
  const auto only = [&config](std::initializer_list<BenchKind> kinds) {
    return std::all_of(config.kinds.begin(), config.kinds.end(), [kinds](BenchKind kind) {
      return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
    });
  };
  if (only({BenchKind::kInterference, BenchKind::kAblation, BenchKind::kHandOver})) {
    // Each takes a while.
    set_default<std::uint64_t>(config.chunk_sizes, {32ULL << 10});
    if (has(BenchKind::kInterference)) set_default(config.blocks, {16U});
  } else if (only({BenchKind::kSubmit, BenchKind::kLookup, BenchKind::kClear, BenchKind::kPool,
                   BenchKind::kIdle, BenchKind::kRestart})) {
    // The size of a chunk is not what they measure.
    set_default<std::uint64_t>(config.chunk_sizes, {16ULL << 10});
  }
  set_default<std::uint64_t>(config.chunk_sizes, {16ULL << 10, 32ULL << 10, 64ULL << 10});
  set_default(config.regions, {cuda ? 64U : 16U});
  set_default(config.blocks, {1U, 16U, 64U});
  set_default(config.ways, {Way::kToHost, Way::kToDevice, Way::kBoth});
  set_default(config.localities, {Locality::kRandom});
  using worker::ComputeLoadKind;
  set_default(config.loads,
              cuda ? std::vector(worker::kComputeLoads.begin(), worker::kComputeLoads.end())
                   : std::vector{ComputeLoadKind::kDecode, ComputeLoadKind::kHbm});
  if (!config.plot_file.empty() && !has(BenchKind::kTransfer) && !has(BenchKind::kInterference)) {
    return usage_error(*app, KVFERRY_ERROR(kInvalidArgument,
                                           "--plot draws transfers and interference, and neither "
                                           "is to be measured: name one, too"));
  }
  for (const std::string& name : config.geometries) {
    if (const auto geometry = find_geometry(name, config.ranks); !geometry) {
      return usage_error(*app, geometry.error());
    }
  }
  if (const auto possible = check_strategies(config); !possible) {
    return usage_error(*app, possible.error());
  }
  if (const auto possible = check_ablation(config); !possible) {
    return usage_error(*app, possible.error());
  }
  return run_bench(config);
}

}  // namespace kvferry::cli
