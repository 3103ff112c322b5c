// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "daemon.hpp"
#include "kvferry/cache_manager/manager.hpp"
#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/pool_filler.hpp"
#include "kvferry/worker/worker.hpp"
#include "options.hpp"
#include "rank_options.hpp"
#include "run_options.hpp"
#include "tier_options.hpp"

#include <fmt/format.h>

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

constexpr std::uint64_t kDefaultHostMemory = 1ULL << 30;

ipc::Status parse_shares(const std::vector<std::string>& texts,
                         cache_manager::ManagerConfig& config) {
  for (const std::string& text : texts) {
    const std::size_t equals = text.find('=');
    std::uint32_t share = 0;
    if (equals != std::string::npos && equals > 0) {
      const char* const end = text.data() + text.size();
      const auto [last, error] = std::from_chars(text.data() + equals + 1, end, share);
      if (last != end || error != std::errc{}) share = 0;
    }
    if (share < 1 || share > cache_manager::ManagerConfig::kMaxShare) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "--share {}: give the name of an engine and its share, 1 to {}, as in "
                           "--share chat=3",
                           text, cache_manager::ManagerConfig::kMaxShare);
    }
    const std::string engine = text.substr(0, equals);
    if (!config.shares.emplace(engine, share).second) {
      return KVFERRY_ERROR(kInvalidArgument, "--share {}: engine {} has a share of {} already",
                           text, engine, config.shares.at(engine));
    }
  }
  return ipc::ok();
}

void add_numa_nodes(CLI::App& app, std::string& nodes, const char* what) {
  app.add_option("--numa-nodes", nodes, what)->type_name("auto|any|N,...")->default_str("auto");
}

/// Nothing for auto.
ipc::Result<std::optional<std::vector<int>>> parse_placing(std::string_view text) {
  if (text == "auto") return std::optional<std::vector<int>>();
  if (text == "any") return std::optional(std::vector<int>());
  KVFERRY_ASSIGN(auto nodes, ipc::parse_numa_nodes(text));
  return std::optional(std::move(nodes));
}

struct QuotaTexts {
  std::vector<std::string> named;
  std::string others;
  std::string watermarks;
};

void add_quotas(CLI::App& app, QuotaTexts& texts) {
  add_namespace_quotas(app, texts.named);
  app.add_option("--default-namespace-quota", texts.others,
                 "Likewise of each namespace that is not named [no share and no limit, all "
                 "together]")
      ->type_name("SOFT:HARD");
  app.add_option("--evict-ahead", texts.watermarks,
                 "Once less than LOW percent of that memory are free for blocks that are being "
                 "stored, blocks are evicted beside other work until HIGH percent are, so that "
                 "stores need not wait for that [they evict what they need themselves]")
      ->type_name("LOW:HIGH");
}

ipc::Status parse_quotas(const QuotaTexts& texts, cache_manager::ManagerConfig& config) {
  KVFERRY_ASSIGN(config.quotas, parse_namespace_quotas(texts.named));
  if (!texts.others.empty()) {
    auto parsed = cache_manager::parse_namespace_quota(texts.others);
    if (!parsed) {
      return KVFERRY_ERROR(kInvalidArgument, "--default-namespace-quota: {}",
                           parsed.error().message);
    }
    config.quotas.others = *parsed;
  }
  if (!texts.watermarks.empty()) {
    KVFERRY_ASSIGN(config.watermarks, cache_manager::parse_watermarks(texts.watermarks));
  }
  // Before anything is set up; the manager looks again at what its pool really has.
  return config.quotas.check(config.pool_bytes);
}

void add_kv_events(CLI::App& app, cache_manager::ManagerConfig& config) {
  const auto check = [](const std::string& text) {
    const ipc::Status good = ipc::check_kv_endpoint(text, /*listens=*/true);
    return good ? std::string() : good.error().message;
  };
  CLI::Option* events =
      app.add_option("--kv-events", config.kv_events,
                     "Where to tell cache-aware routers what host memory stores and removes: "
                     "ipc:///PATH or tcp://ADDRESS:PORT [nowhere]")
          ->type_name("ENDPOINT")
          ->check(check);
  app.add_option("--kv-events-snapshot", config.kv_events_snapshot,
                 "Where those ask who missed some of that, or come late [nowhere]")
      ->type_name("ENDPOINT")
      ->check(check)
      ->needs(events);
  add_choice<ipc::KvEventEncoding>(
      app, "--kv-events-encoding", config.kv_events_encoding,
      {{"maps", ipc::KvEventEncoding::kMaps}, {"arrays", ipc::KvEventEncoding::kArrays}},
      "How events are written: with the names of their fields, as "
      "vLLM does, or by position, as it did until the middle of 2026");
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
  add_choice<bool>(
      *app, "--checksums", config.checksums, {{"on", true}, {"off", false}},
      "Whether movers compute checksums of what they have stored, when their processors "
      "have nothing else to do; blocks without them are lost with this manager");
  using cache_manager::VerifyLoads;
  add_choice<VerifyLoads>(
      *app, "--verify-loads", config.verify_loads,
      {{"off", VerifyLoads::kOff},
       {"sampled", VerifyLoads::kSampled},
       {"always", VerifyLoads::kAlways}},
      "Which loads are checked against them: none, one block in 16, or all; "
      "what an earlier manager stored is, once, in any case. Where all are, "
      "stores are answered once they have their checksums, and a block that has "
      "none is not there; else one that has none yet is not checked");
  app->add_flag(
      "--keep-pool", config.keeps_pool,
      "Leaves that memory, and what is in it, to the next manager of the instance also at "
      "an orderly end, and not only when this one is killed: movers keep it (see their "
      "--keep-pool-for)");
  std::string huge_pages = "auto";
  std::string numa_nodes = "auto";
  app->add_option("--huge-pages", huge_pages,
                  "Whether that memory may be of huge pages: auto takes reserved ones, where the "
                  "machine has enough, or has the kernel make them of ordinary ones; off")
      ->type_name("auto|off")
      ->check(CLI::IsMember({"auto", "off"}))
      ->default_str("auto");
  add_numa_nodes(*app, numa_nodes,
                 "Where that memory is to be: numbers of NUMA nodes, any, or auto for those that "
                 "the GPUs are on");
  add_eviction_policy(*app, config.eviction_policy);
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
  add_kv_events(*app, config);
  std::vector<std::string> shares;
  app->add_option("--share", shares,
                  "What an engine gets of a GPU's link, each way, when others copy over it as "
                  "well: N times as much as one that is not named")
      ->type_name("ENGINE=N,...")
      ->delimiter(',');
  QuotaTexts quotas;
  add_quotas(*app, quotas);
  app->add_option("--parent-fd", parent_fd)->group("");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  if (auto status = parse_shares(shares, config); !status) return usage_error(*app, status.error());
  if (!config.kv_events.empty() && config.kv_events == config.kv_events_snapshot) {
    return usage_error(*app, KVFERRY_ERROR(kInvalidArgument,
                                           "--kv-events and --kv-events-snapshot are both {}: give "
                                           "each an endpoint of its own",
                                           config.kv_events));
  }
  config.instance = common.instance;
  config.runtime_dir = common.runtime_dir;
  config.pool_bytes = *host_memory;
  if (auto status = parse_quotas(quotas, config); !status) {
    return usage_error(*app, status.error());
  }
  config.huge_pages = huge_pages == "auto";
  auto nodes = parse_placing(numa_nodes);
  if (!nodes) return usage_error(*app, nodes.error());
  config.numa_nodes = *nodes ? std::move(**nodes) : ipc::gpu_numa_nodes();
  return run_daemon("manager", common.log_level, parent_fd,
                    [&] { cache_manager::run_manager(config); });
}

int mover_command(const Arguments& arguments) {
  RankOptions options;
  cache_manager::MoverConfig config;
  std::string numa_nodes = "auto";
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
                                          "batch, memcpy, kernel or agent")
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
  std::optional<std::uint64_t> agent_swaps;
  add_size(*app, "--agent-swaps", agent_swaps,
           "Jobs of at most so many bytes, alone on their way, are copied by the worker itself, to "
           "which this lends the host pool; with --copy-strategy auto [none]");
  app->add_option(
         "--gathered-percent", config.gathered_percent,
         "Of the bytes that are copied while the worker computes: so many of a hundred are "
         "gathered, which fills the link and slows compute down by 4 to 5 %, the rest goes "
         "in rows; with --copy-strategy auto")
      ->type_name("N")
      ->check(CLI::Range(0U, 100U))
      ->capture_default_str();
  add_seconds(*app, "--keep-pool-for", config.keep_pool,
              "How long it keeps the host memory of a manager that was killed, and what is in it, "
              "for the next one; 0: not at all");
  add_numa_nodes(*app, numa_nodes,
                 "Where the rank's share of that memory is moved to before it is registered with "
                 "the device: numbers of NUMA nodes, any to leave it where the manager has it, or "
                 "auto for the node of the rank's GPU");
  std::optional<std::uint64_t> store_rate;
  std::optional<std::uint64_t> load_rate;
  add_size(*app, "--store-rate", store_rate,
           "Bytes to host memory in a second, at most [as many as go over the link]");
  add_size(*app, "--load-rate", load_rate,
           "Likewise to the device, of loads that are fetched ahead (of priority 0 and 1); others "
           "do not wait for it [no limit]");
  using cache_manager::UrgentLoads;
  add_choice<UrgentLoads>(
      *app, "--urgent-loads", config.urgent_loads,
      {{"auto", UrgentLoads::kAuto}, {"always", UrgentLoads::kAlways}},
      "When loads that are waited for are cut so that one of higher priority, or due earlier, "
      "waits "
      "for 8 MiB of them at most, as it always does for what is fetched ahead: auto, for 5 s after "
      "one that had to wait; always, at 5 to 10 % of the link");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  config.agent_swap_bytes = agent_swaps.value_or(0);
  auto nodes = parse_placing(numa_nodes);
  if (!nodes) return usage_error(*app, nodes.error());
  config.numa_nodes = std::move(nodes).value();
  auto rank = make_rank_config(options);
  if (!rank) return usage_error(*app, rank.error());
  config.rank = std::move(rank).value();
  config.rank.store_rate = store_rate.value_or(0);
  config.rank.load_rate = load_rate.value_or(0);
  if (const auto fits = check_strategy(config.strategy, config.rank.geometry, config.rank.arena);
      !fits) {
    return usage_error(*app, fits.error());
  }
  if (app->count("--gathered-percent") > 0 &&
      config.strategy != cache_manager::CopyStrategy::kAuto) {
    return usage_error(*app, KVFERRY_ERROR(kInvalidArgument,
                                           "--gathered-percent is for --copy-strategy auto, not "
                                           "{}: leave one of them out",
                                           cache_manager::to_string(config.strategy)));
  }
  if (agent_swaps && config.strategy != cache_manager::CopyStrategy::kAuto) {
    return usage_error(*app, KVFERRY_ERROR(kInvalidArgument,
                                           "--agent-swaps is for --copy-strategy auto, not {}: "
                                           "leave one of them out",
                                           cache_manager::to_string(config.strategy)));
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
  const CLI::Range copy_ctas(1U, 1024U);
  app->add_option("--gather-ctas", config.copies.gather,
                  "Thread blocks of a kernel that gathers what is stored, at most: each may keep a "
                  "multiprocessor from compute for a moment")
      ->type_name("N")
      ->check(copy_ctas)
      ->default_str(std::to_string(config.copies.gather));
  app->add_option("--scatter-ctas", config.copies.scatter,
                  "Likewise of one that scatters what was loaded")
      ->type_name("N")
      ->check(copy_ctas)
      ->default_str(std::to_string(config.copies.scatter));
  app->add_option("--ahead-ctas", config.copies.ahead,
                  "Likewise of one that scatters what was fetched ahead")
      ->type_name("N")
      ->check(copy_ctas)
      ->default_str(std::to_string(config.copies.ahead));
  add_seconds(*app, "--idle-trim", config.idle_trim,
              "Without a step for so long, what the allocator caches goes back to the driver; "
              "0: never");
  app->add_flag("--serve", config.serve,
                "Take requests: rank 0 also runs the scheduler of an engine of reference workers "
                "[the engine has a scheduler of its own]");
  TierChoice tier;
  add_write_options(*app, tier);
  add_prefetch_options(*app, tier);
  add_unit_blocks(*app, tier);
  add_namespace(*app, tier);
  LoadOptions load;
  add_load_options(*app, load);
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  config.load = load.config();
  config.tier = tier.made();
  ipc::init_logging(fmt::format("worker/{}", options.rank), options.common.log_level);
  if (const auto used = config.serve ? check_tier_uses(*app, arguments, tier)
                                     : check_no_tier_uses(*app, arguments);
      !used) {
    return usage_error(*app, used.error());
  }
  if (const auto fits = check_unit_blocks(tier); !fits) return usage_error(*app, fits.error());
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
