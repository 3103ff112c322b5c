// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "longctx/longctx.hpp"
#include "options.hpp"
#include "rank_options.hpp"
#include "run_options.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace kvferry::cli {
namespace {

constexpr const char* kLongctxDescription =
    "Decodes sequences whose KV does not fit the device together: they take turns on it, and are "
    "swapped out to host memory and in again whole. One that the device does not hold by itself "
    "computes every token in windows: its blocks take turns. This process is the engine, beside a "
    "manager and a worker and a mover of each rank. While some sequences compute, those of the "
    "next turn are loaded. It runs three times: on an arena that holds all of them (no swap), with "
    "look-ahead, and without; outputs depend on every byte of the KV and have to be equal. It "
    "tells what waiting for copies costs, beside the wait that compute cannot hide: the bound. It "
    "fails (exit code 1) when outputs differ, a sequence is lost, or anything leaked.";

constexpr const char* kLongctxExample =
    "examples:\n"
    "  kvferry longctx --device host                      no GPU needed\n"
    "  kvferry longctx --context 131072 --sequences 16 --gpu-blocks 32768 --slice 64\n"
    "  kvferry longctx --context 65536 --sequences 1 --gpu-blocks 2048     larger than the device\n"
    "  kvferry longctx --no-check --json                  all sequences never fit the device";

constexpr std::uint32_t kMostContext = 1U << 27;
constexpr std::uint32_t kMostSequences = 4096;
constexpr std::uint32_t kMostSteps = 1U << 20;

struct LongctxOptions {
  CommonOptions common;
  LongctxConfig config;
  std::optional<std::uint32_t> context;
  std::uint32_t ranks = 1;
  std::string device = "auto";
  std::string geometry;
  std::uint32_t gpu_blocks = 0;
  bool no_check = false;
};

void add_longctx_workload(CLI::App& app, LongctxOptions& options) {
  LongctxConfig& config = options.config;
  app.add_option("--context", options.context,
                 "Tokens of each sequence before it decodes [32768; simulated devices: 1024]")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostContext));
  app.add_option("--sequences", config.sequences, "Sequences")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostSequences))
      ->default_str(std::to_string(config.sequences));
  app.add_option("--steps", config.steps, "Tokens that each sequence decodes")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostSteps))
      ->default_str(std::to_string(config.steps));
  app.add_option("--slice", config.slice, "Tokens that a sequence decodes in its turn")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostSteps))
      ->default_str(std::to_string(config.slice));
  add_number(app, "--active", config.active, 0.01, 1,
             "Share of the device blocks that the sequences of one turn take; at least one "
             "sequence has it")
      ->type_name("SHARE")
      ->default_str("0.5");
  add_seed(app, config.seed, "Of the tokens");
}

void add_longctx_system(CLI::App& app, LongctxOptions& options) {
  LongctxConfig& config = options.config;
  add_ranks(app, options.ranks);
  add_device_choice(app, options.device);
  add_geometry(app, options.geometry);
  add_gpu_blocks(app, options.gpu_blocks,
                 "Blocks on each device [a quarter of what all sequences need]");
  add_size(app, "--host-memory", config.host_memory,
           "Host memory for what is swapped out [what all sequences need]");
  add_arena_options(app, config.arena);
  app.add_flag("--no-check", options.no_check,
               "Leave out the run on an arena that holds all sequences");
  app.add_flag("--json", config.json, "Tell as JSON, on standard output");
  add_log_dir(app, "--log-dir", config.log_dir);
  add_milliseconds(app, "--stall-timeout", config.patience,
                   "Fail when nothing goes on for so long");
}

}  // namespace

int longctx_command(const Arguments& arguments) {
  LongctxOptions options;
  LongctxConfig& config = options.config;
  options.common.instance = "longctx";
  options.common.log_level = ipc::LogLevel::kWarn;
  config.sequences = 16;
  config.steps = 64;
  config.slice = 16;
  auto app = make_app("longctx", kLongctxDescription, kLongctxExample, options.common);
  add_longctx_workload(*app, options);
  add_longctx_system(*app, options);
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("longctx", options.common.log_level);

  config.runtime_base = options.common.runtime_dir;
  config.instance = options.common.instance;
  // The processes' logs are kept to be shown when something goes wrong.
  config.log_level = std::min(options.common.log_level, ipc::LogLevel::kInfo);
  config.check = !options.no_check;
  auto devices = choose_devices(options.device);
  if (!devices) return usage_error(*app, devices.error());
  config.devices = std::move(*devices);
  const bool cuda = config.devices.kind == ipc::DeviceKind::kCuda;
  config.context = options.context.value_or(cuda ? 32'768 : 1024);
  config.geometry_name =
      options.geometry.empty() ? default_geometry(config.devices.kind) : options.geometry;
  auto geometry = find_geometry(config.geometry_name, options.ranks);
  if (!geometry) return usage_error(*app, geometry.error());
  config.geometry = std::move(*geometry);
  if (options.gpu_blocks > 0) config.gpu_blocks = options.gpu_blocks;
  // What no machine could do is told before anything starts.
  if (const auto sizes = decide_sizes(config, 0, 0); !sizes) {
    return usage_error(*app, sizes.error());
  }
  return run_longctx(config);
}

}  // namespace kvferry::cli
