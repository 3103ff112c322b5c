// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "options.hpp"
#include "rank_options.hpp"
#include "replay/replay.hpp"
#include "replay/workload.hpp"
#include "run_options.hpp"

#include <charconv>
#include <cstdint>
#include <string>

namespace kvferry::cli {
namespace {

using ipc::Result;

constexpr const char* kDescription =
    "Plays requests through a manager and one mover and one worker per rank, all real processes: "
    "computes blocks, stores them in host memory, loads them back when a prefix returns, and "
    "checks "
    "what came back byte by byte. At the end it looks from outside whether any memory or name was "
    "left behind. It fails (exit code 1) when a block was corrupt, when anything leaked, or when "
    "nothing was ever loaded back.\n\n"
    "Without --trace it makes up requests that follow published facts of the conversation trace of "
    "the Mooncake project (FAST'25): 12,031 requests of one hour, 512-token blocks, mean input "
    "12,035 tokens, mean output 343, 36.6 % of all blocks reusable, the next turn of a session "
    "after 125 s (median).";

constexpr const char* kExample =
    "examples:\n"
    "  kvferry replay --device host                      no GPU needed\n"
    "  kvferry replay --ranks 2 --clear-every 200        with clears under traffic\n"
    "  kvferry replay --trace conversation_trace.jsonl --verify full --report report.json\n\n"
    "A trace holds one JSON object a line: {\"timestamp\": ms, \"input_length\": tokens,\n"
    "\"output_length\": tokens, \"hash_ids\": [one id per 512-token prefix block]}, and other "
    "fields if\n"
    "it likes. Where timestamps are in seconds, --speed 0.001 is the trace's own pace.";

struct ReplayOptions {
  CommonOptions common;
  ReplayConfig config;
  WorkloadOptions workload;
  std::uint32_t ranks = 1;
  std::string device = "auto";
  std::string geometry;
  std::uint32_t gpu_blocks = 0;
};

Result<double> parse_speed(std::string_view text) {
  if (text == "max") return 0.0;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc{} && end == text.data() + text.size() && value >= 0.001 && value <= 1e6) {
    return value;
  }
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is neither max nor a factor from 0.001 to 1000000",
                       text);
}

void add_system_options(CLI::App& app, ReplayOptions& options) {
  add_ranks(app, options.ranks);
  add_device_choice(app, options.device);
  add_geometry(app, options.geometry);
  add_gpu_blocks(app, options.gpu_blocks, "Blocks on each device [about 1 % of the distinct ones]");
  add_size(app, "--host-memory", options.config.host_memory,
           "Host memory for blocks [a fifth of the distinct ones, at least 10,000]");
  add_eviction_policy(app, options.config.eviction_policy);
  add_namespace_quotas(app, options.config.namespace_quotas);
  add_arena_options(app, options.config.arena);
  add_arena_memory(app, options.config.arena_memory);
  add_parsed<cache_manager::CopyStrategy>(app, "--copy-strategy", options.config.strategy,
                                          cache_manager::parse_copy_strategy,
                                          "How movers copy: auto, direct, staged, strided, batch, "
                                          "memcpy, kernel or agent")
      ->type_name("NAME")
      ->default_str("auto");
}

void add_play_options(CLI::App& app, ReplayOptions& options) {
  ReplayConfig& config = options.config;
  add_parsed<double>(app, "--speed", config.speed, parse_speed,
                     "Times the trace's own pace, or max: as fast as it goes")
      ->type_name("max|X")
      ->default_str("max");
  app.add_option("--clear-every", config.clear_every,
                 "Clear and re-initialise the caches every so many requests, under traffic")
      ->type_name("REQUESTS")
      ->check(CLI::Range(std::uint64_t{1}, kMaxRequests));
  add_choice<ipc::HostPolicy>(app, "--clear-host", config.clear_host,
                              {{"keep", ipc::HostPolicy::kKeep}, {"drop", ipc::HostPolicy::kDrop}},
                              "What a clear does with the blocks in host memory");
  app.add_option("--decode-steps", config.decode_steps,
                 "How often each request's blocks are read, like decoding does")
      ->type_name("N")
      ->check(CLI::Range(0U, 1U << 20))
      ->default_str(std::to_string(config.decode_steps));
  app.add_option("--in-flight", config.in_flight, "Requests worked on at a time")
      ->type_name("N")
      ->check(CLI::Range(1U, 1024U))
      ->default_str(std::to_string(config.in_flight));
  add_choice<VerifyPolicy>(app, "--verify", config.verify,
                           {{"off", VerifyPolicy::kOff},
                            {"sample", VerifyPolicy::kSample},
                            {"full", VerifyPolicy::kFull}},
                           "Check loaded and re-used blocks: none, one in 8, or all");
  add_output_file(app, "--report", config.report_file, "Write all figures as JSON")
      ->type_name("FILE.json");
  add_log_dir(app, "--keep-logs", config.log_dir);
  add_milliseconds(app, "--stall-timeout", config.stall_timeout,
                   "Fail when nothing goes on, or no block can be moved although nobody died, for "
                   "so long");
}

}  // namespace

int replay_command(const Arguments& arguments) {
  ReplayOptions options;
  options.common.instance = "replay";
  options.common.log_level = ipc::LogLevel::kWarn;
  auto app = make_app("replay", kDescription, kExample, options.common);
  add_workload_options(*app, options.workload);
  add_system_options(*app, options);
  add_play_options(*app, options);
  add_write_options(*app, options.config.tier);
  add_prefetch_options(*app, options.config.tier);
  add_unit_blocks(*app, options.config.tier);
  add_namespace(*app, options.config.tier);
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("replay", options.common.log_level);

  ReplayConfig& config = options.config;
  config.runtime_base = options.common.runtime_dir;
  config.instance = options.common.instance;
  // The processes' logs are kept to be shown when something goes wrong.
  config.log_level = std::min(options.common.log_level, ipc::LogLevel::kInfo);
  auto devices = choose_devices(options.device);
  if (!devices) return usage_error(*app, devices.error());
  config.devices = std::move(*devices);
  if (const auto fits = check_arena_memory(config.arena_memory, config.arena.cache_owner); !fits) {
    return usage_error(*app, fits.error());
  }
  if (const auto used = check_workload_uses(*app, arguments, options.workload); !used) {
    return usage_error(*app, used.error());
  }
  if (const auto used = check_tier_uses(*app, arguments, config.tier); !used) {
    return usage_error(*app, used.error());
  }
  if (const auto fits = check_unit_blocks(config.tier); !fits) {
    return usage_error(*app, fits.error());
  }
  if (const auto quotas = parse_namespace_quotas(config.namespace_quotas); !quotas) {
    return usage_error(*app, quotas.error());
  }
  config.geometry_name =
      options.geometry.empty() ? default_geometry(config.devices.kind) : options.geometry;
  auto geometry = find_geometry(config.geometry_name, options.ranks);
  if (!geometry) return usage_error(*app, geometry.error());
  config.geometry = std::move(*geometry);
  if (options.gpu_blocks > 0) config.gpu_blocks = options.gpu_blocks;
  const ipc::ArenaOptions arena =
      make_arena_options(config.arena, config.geometry, options.gpu_blocks, config.devices.kind);
  if (const auto fits = check_strategy(config.strategy, config.geometry, arena); !fits) {
    return usage_error(*app, fits.error());
  }
  config.workload_text = describe(options.workload);
  const auto trace = get_trace(options.workload);
  if (!trace) return failure("replay", trace.error());
  if (const auto pace = check_pace(trace->requests, config.speed); !pace) {
    return failure("replay", pace.error());
  }
  return run_replay(config, *trace);
}

}  // namespace kvferry::cli
