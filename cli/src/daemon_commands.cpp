// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/cache_manager/manager.hpp"
#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/worker/worker.hpp"
#include "options.hpp"
#include "parent_watch.hpp"
#include "rank_options.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>

namespace kvferry::cli {
namespace {

constexpr std::uint64_t kDefaultHostMemory = 1ULL << 30;

/// Neither time nor another attempt changes it: the options, the build, the machine.
bool is_final(ipc::ErrorCode code) {
  switch (code) {
    case ipc::ErrorCode::kInvalidArgument:
    case ipc::ErrorCode::kGeometryMismatch:
    case ipc::ErrorCode::kRoleConflict:
    case ipc::ErrorCode::kVersionMismatch:
    case ipc::ErrorCode::kPermission:
    case ipc::ErrorCode::kNoHostMemory:
    case ipc::ErrorCode::kNoDeviceMemory: return true;
    default: return false;
  }
}

/// Runs a daemon until it is told to end; a set-up that fails is logged.
template <typename Run>
int run_daemon(const std::string& name, ipc::LogLevel level, int parent_fd, const Run& run) {
  ipc::init_logging(name, level);
  if (parent_fd >= 0) end_with_parent(parent_fd);
  try {
    run();
    return kExitDone;
  } catch (const ipc::Exception& error) {
    ipc::log_error("cannot run: {}", error.what());
    return is_final(error.error().code) ? kExitCannotRun : kExitFailed;
  }
}

}  // namespace

int manager_command(const Arguments& arguments) {
  CommonOptions common;
  cache_manager::ManagerConfig config;
  std::optional<std::uint64_t> host_memory = kDefaultHostMemory;
  int parent_fd = -1;
  auto app = make_app(
      "manager",
      "Runs the manager: it owns the host memory that blocks are stored in, the index that finds "
      "them by prefix, and it supervises movers and workers. One per host and instance; it uses "
      "no GPU.",
      "example: 64 GiB of host memory for the instance 'chat'\n"
      "  kvferry manager --instance chat --host-memory 64GiB",
      common);
  add_size(*app, "--host-memory", host_memory, "Host memory for blocks, all engines together");
  add_milliseconds(*app, "--queue-deadline", config.queue_deadline,
                   "A copy job that could not be started for so long ends as timeout");
  add_milliseconds(*app, "--job-deadline", config.job_deadline,
                   "A mover that answers nothing for so long has its copy jobs cancelled; one that "
                   "does not even give them up in as long again is ended");
  app->add_option("--max-jobs", config.max_jobs_per_engine,
                  "Unfinished jobs of one engine beyond which it is told to retry")
      ->type_name("N")
      ->check(CLI::Range(1U, 1U << 20))
      ->default_str(std::to_string(config.max_jobs_per_engine));
  app->add_option("--parent-fd", parent_fd)->group("");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  config.instance = common.instance;
  config.runtime_dir = common.runtime_dir;
  config.pool_bytes = *host_memory;
  return run_daemon("manager", common.log_level, parent_fd,
                    [&] { cache_manager::run_manager(config); });
}

int mover_command(const Arguments& arguments) {
  RankOptions options;
  cache_manager::MoverConfig config;
  auto app = make_app(
      "mover",
      "Runs the mover of one rank: the process that copies KV blocks between the device and the "
      "manager's host memory. It must be started with the same engine, geometry, arena and owner "
      "as the rank's worker; a difference is refused when they meet.",
      "example: rank 0 of 2, on the first GPU\n"
      "  kvferry mover --instance chat --engine chat --rank 0 --ranks 2 \\\n"
      "      --geometry llama-3-8b --gpu-blocks 4096 --device cuda:0",
      options.common);
  add_rank_options(*app, options);
  add_parsed<cache_manager::CopyStrategy>(*app, "--copy-strategy", config.strategy,
                                          cache_manager::parse_copy_strategy,
                                          "How blocks are copied: auto, direct, staged, strided, "
                                          "batch or memcpy")
      ->type_name("NAME")
      ->default_str("auto");
  using cache_manager::CalibrationMode;
  add_choice<CalibrationMode>(*app, "--calibration", config.calibration,
                              {{"gpus", CalibrationMode::kGpus},
                               {"on", CalibrationMode::kOn},
                               {"off", CalibrationMode::kOff}},
                              "Whether to measure once what copies cost, in the background, for "
                              "--copy-strategy auto; gpus: not on simulated devices");
  add_cache_dir(*app, config.cache_dir);
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  auto rank = make_rank_config(options);
  if (!rank) return usage_error(*app, rank.error());
  config.rank = std::move(rank).value();
  if (const auto fits = check_strategy(config.strategy, config.rank.geometry, config.rank.arena);
      !fits) {
    return usage_error(*app, fits.error());
  }
  return run_daemon(fmt::format("mover/{}", options.rank), options.common.log_level,
                    options.parent_fd, [&] { cache_manager::run_mover(config); });
}

int worker_command(const Arguments& arguments) {
  RankOptions options;
  auto app = make_app(
      "worker",
      "Runs the reference worker of one rank: it holds the KV arena on the device and computes on "
      "it. Engines of your own link the worker library instead.",
      "example: rank 0 of 2, on the first GPU\n"
      "  kvferry worker --instance chat --engine chat --rank 0 --ranks 2 \\\n"
      "      --geometry llama-3-8b --gpu-blocks 4096 --device cuda:0",
      options.common);
  add_rank_options(*app, options);
  worker::WorkerConfig config;
  add_arena_memory(*app, config.arena_memory);
  app->add_option("--weights", config.weights,
                  "Weights to load: a safetensors file, of which each rank takes its rows [none]")
      ->type_name("FILE");
  std::optional<ipc::Digest> weights_id;
  add_weights_id(*app, weights_id);
  add_choice<ipc::ComponentStrategy>(*app, "--weights-strategy", config.weights_strategy,
                                     {{"resident", ipc::ComponentStrategy::kResident},
                                      {"offloaded", ipc::ComponentStrategy::kOffloaded},
                                      {"layerwise", ipc::ComponentStrategy::kLayerwise}},
                                     "Where the weights' tensors are once they are packed for the "
                                     "model: on the device, or in host "
                                     "memory between two updates, as a whole or layer by layer");
  add_choice<bool>(*app, "--weights-broadcast", config.weights_broadcast,
                   {{"auto", true}, {"messages", false}},
                   "How updates from rank 0's file come to the other ranks: by broadcast between "
                   "devices where each rank has one of its own, else in messages; or in messages "
                   "alone");
  add_seconds(*app, "--idle-trim", config.idle_trim,
              "Without a step for so long, what the allocator caches goes back to the driver; "
              "0: never");
  app->add_flag("--serve", config.serve,
                "Take requests: rank 0 also runs the scheduler of an engine of reference workers "
                "[the engine has a scheduler of its own]");
  std::optional<worker::ComputeLoadKind> load;
  std::string load_times;
  add_parsed<std::optional<worker::ComputeLoadKind>>(
      *app, "--load", load,
      [](std::string_view text) -> ipc::Result<std::optional<worker::ComputeLoadKind>> {
        KVFERRY_ASSIGN(const auto kind, worker::parse_compute_load(text));
        return std::optional(kind);
      },
      "What the device computes all the time, for kvferry bench interference")
      ->group("");
  app->add_option("--load-times", load_times, "Where the ends of its rounds go")->group("");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  if (load) config.load = worker::ComputeLoadConfig{*load, load_times};
  if (const auto fits = check_arena_memory(config.arena_memory, options.arena.cache_owner); !fits) {
    return usage_error(*app, fits.error());
  }
  auto rank = make_rank_config(options);
  if (!rank) return usage_error(*app, rank.error());
  config.rank = std::move(rank).value();
  if (weights_id) config.weights_id = *weights_id;
  // All ranks are on this machine: what NCCL opens is nobody else's to reach.
  // NOLINTNEXTLINE(concurrency-mt-unsafe): there is no other thread yet
  (void)::setenv("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/0);
  return run_daemon(fmt::format("worker/{}", options.rank), options.common.log_level,
                    options.parent_fd, [&] { worker::run_worker(config); });
}

}  // namespace kvferry::cli
