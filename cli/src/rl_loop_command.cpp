// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "options.hpp"
#include "rank_options.hpp"
#include "rl/rl_loop.hpp"
#include "run_options.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>

namespace kvferry::cli {
namespace {

constexpr std::uint32_t kMostIterations = 1'000'000;
constexpr std::uint32_t kMostRequests = 4'096;

constexpr const char* kRlDescription =
    "Runs the loop of reinforcement learning on a whole instance of its own: a manager, and a "
    "worker and a mover of each rank, with --update ipc also processes that lend the weights. "
    "Again and again it asks for answers to prompts, pauses the "
    "engine when half of them are there, gives every rank other weights, and continues, which "
    "gives memory that the workers' allocators cache back to the driver. Three versions of the "
    "weights take turns, so that each comes back and finds its blocks again; every answer has to "
    "be the one that was first given to the same prompt under the same weights. It fails (exit "
    "code 1) when an answer was corrupt, when a step or a request failed, when anything leaked, "
    "or when memory that is kept at the continues grows.";

constexpr const char* kRlExample =
    "examples:\n"
    "  kvferry rl-loop --device host --iterations 20           no GPU needed\n"
    "  kvferry rl-loop --ranks 2 --mode in_place --clear       frozen requests, and a clear each "
    "time\n"
    "  kvferry rl-loop --ranks 2 --update ipc                  weights from device to device\n"
    "  kvferry rl-loop --no-empty-cache --report r.json --plot memory.svg\n"
    "                                                          what it is like without emptying";

std::string is_variable(const std::string& text) {
  const auto sign = text.find('=');
  if (sign != std::string::npos && sign > 0) return {};
  return fmt::format("'{}' is not of the form NAME=VALUE", text);
}

struct RlOptions {
  CommonOptions common;
  RlConfig config;
  std::uint32_t ranks = 1;
  std::string device = "auto";
  std::string geometry;
  std::uint32_t gpu_blocks = 0;
  std::optional<std::uint64_t> weights_size;
  bool keep_cache = false;
};

void add_loop_options(CLI::App& app, RlOptions& options) {
  RlConfig& config = options.config;
  app.add_option("--iterations", config.iterations, "How often")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostIterations))
      ->default_str(std::to_string(config.iterations));
  add_choice<ipc::PauseMode>(app, "--mode", config.mode,
                             {{"abort", ipc::PauseMode::kAbort},
                              {"retract", ipc::PauseMode::kRetract},
                              {"in_place", ipc::PauseMode::kInPlace}},
                             "What a pause does to the requests that run");
  add_choice<UpdateKind>(app, "--update", config.update,
                         {{to_string(UpdateKind::kDisk), UpdateKind::kDisk},
                          {to_string(UpdateKind::kTensor), UpdateKind::kTensor},
                          {to_string(UpdateKind::kDistributed), UpdateKind::kDistributed},
                          {to_string(UpdateKind::kIpc), UpdateKind::kIpc},
                          {to_string(UpdateKind::kNone), UpdateKind::kNone}},
                         "How new weights get to the ranks; ipc: from the device memory of other "
                         "processes, one for each version of the weights and device of a rank");
  app.add_flag("--no-empty-cache", options.keep_cache,
               "Leave what the workers' allocators cache with them");
  app.add_flag("--clear", config.clear, "Also clear and re-init the cache in every iteration");
  app.add_flag("--release", config.release,
               "Also release and resume all device memory in every iteration; not with in_place, "
               "whose requests hold blocks");
  app.add_option("--requests-per-iteration", config.requests_per_iteration,
                 "Prompts to be answered in each")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostRequests))
      ->default_str(std::to_string(config.requests_per_iteration));
  options.weights_size = config.weights_bytes;
  add_size(app, "--weights-size", options.weights_size, "About so many bytes of weights in all");
  add_seed(app, config.seed, "Prompts and weights repeat exactly from it");
  add_milliseconds(app, "--stall-timeout", config.stall_timeout,
                   "Fail when no request ends for so long");
}

void add_instance_options(CLI::App& app, RlOptions& options) {
  RlConfig& config = options.config;
  add_ranks(app, options.ranks);
  app.add_option("--worker-environment", config.worker_environment,
                 "Variables in the environment of the workers; {rank} stands for the number of a "
                 "worker's rank")
      ->type_name("NAME=VALUE[,...]")
      ->delimiter(',')
      ->check(is_variable);
  add_choice<bool>(app, "--weights-broadcast", config.weights_broadcast,
                   {{"auto", true}, {"messages", false}},
                   "With --update distributed: as the workers' option");
  add_device_choice(app, options.device);
  add_geometry(app, options.geometry);
  add_gpu_blocks(app, options.gpu_blocks, "Blocks on each device [for half of the requests]");
  add_size(app, "--host-memory", config.host_memory,
           "Host memory for blocks [for all prompts under all weights]");
  add_arena_options(app, config.arena);
  add_arena_memory(app, config.arena_memory);
  add_output_file(app, "--report", config.report_file, "Write all figures as JSON")
      ->type_name("FILE.json");
  add_output_file(app, "--plot", config.plot_file, "Draw reserved and used memory as SVG")
      ->type_name("FILE.svg");
  add_log_dir(app, "--log-dir", config.log_dir);
}

}  // namespace

int rl_loop_command(const Arguments& arguments) {
  RlOptions options;
  options.common.instance = "rl";
  options.common.log_level = ipc::LogLevel::kWarn;
  auto app = make_app("rl-loop", kRlDescription, kRlExample, options.common);
  add_loop_options(*app, options);
  add_instance_options(*app, options);
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("rl-loop", options.common.log_level);

  RlConfig& config = options.config;
  config.runtime_base = options.common.runtime_dir;
  config.instance = options.common.instance;
  // The processes' logs are kept to be shown when something goes wrong.
  config.log_level = std::min(options.common.log_level, ipc::LogLevel::kInfo);
  config.empty_cache = !options.keep_cache;
  config.weights_bytes = *options.weights_size;
  auto devices = choose_devices(options.device);
  if (!devices) return usage_error(*app, devices.error());
  config.devices = std::move(*devices);
  if (const auto fits = check_arena_memory(config.arena_memory, config.arena.cache_owner); !fits) {
    return usage_error(*app, fits.error());
  }
  if (config.release && config.mode == ipc::PauseMode::kInPlace) {
    return usage_error(*app, KVFERRY_ERROR(kInvalidArgument,
                                           "--release with --mode in_place: frozen requests hold "
                                           "blocks; choose abort or retract"));
  }
  config.geometry_name =
      options.geometry.empty() ? default_geometry(config.devices.kind) : options.geometry;
  auto geometry = find_geometry(config.geometry_name, options.ranks);
  if (!geometry) return usage_error(*app, geometry.error());
  config.geometry = std::move(*geometry);
  if (options.gpu_blocks > 0) config.gpu_blocks = options.gpu_blocks;
  return run_rl_loop(config);
}

}  // namespace kvferry::cli
