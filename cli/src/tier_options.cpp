// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "tier_options.hpp"

#include "key_file.hpp"
#include "kvferry/cache_manager/namespace_quota.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "must.hpp"

#include <array>
#include <cstdint>
#include <vector>

namespace kvferry::cli {
namespace {

ipc::Result<std::string> parse_prefetch(std::string_view text) {
  if (text == "off") return std::string(text);
  KVFERRY_TRY(worker::parse_prefetch_stop(text));
  return std::string(text);
}

/// By the manager's own rule for names, before anything starts.
ipc::Result<std::string> parse_namespace(std::string_view text) {
  cache_manager::NamespaceQuotas quotas;
  quotas.named.try_emplace(std::string(text));
  constexpr std::uint64_t kAnyPool = 1ULL << 40U;  // Its quota is all of it.
  KVFERRY_TRY(quotas.check(kAnyPool));
  return std::string(text);
}

constexpr std::array kTierNames = {"--write-policy", "--write-uses",        "--write-back-wait",
                                   "--store-queue",  "--recompute",         "--prefill-rate",
                                   "--prefetch",     "--prefetch-requests", "--prefetch-timeout",
                                   "--unit-blocks",  "--namespace",         "--namespace-key-file"};

constexpr std::uint32_t kMostStoreQueue = 1U << 31;

}  // namespace

ipc::Status check_no_tier_uses(const CLI::App& app, const Arguments& arguments) {
  std::vector<OptionUse> uses;
  uses.reserve(kTierNames.size());
  for (const char* name : kTierNames) {
    uses.push_back({name, false, "the scheduler of reference workers, that is with --serve"});
  }
  return check_uses(app, arguments, uses);
}

ipc::Status check_tier_uses(const CLI::App& app,
                            const Arguments& arguments,
                            const TierChoice& choice) {
  const bool is_timed = choice.prefetch == "wait" || choice.prefetch == "timeout";
  return check_uses(
      app, arguments,
      {{"--write-uses", choice.write.mode == worker::WriteMode::kSelective,
        fmt::format("--write-policy selective, not {}", to_string(choice.write.mode))},
       {"--prefetch-requests", choice.prefetch != "off",
        "--prefetch best-effort, wait or timeout, not off"},
       {"--prefetch-timeout", is_timed,
        fmt::format("--prefetch wait or timeout, not {}", choice.prefetch)},
       {"--prefill-rate", choice.recompute.mode == worker::RecomputeMode::kAuto,
        fmt::format("--recompute auto, not {}", to_string(choice.recompute.mode))}});
}

worker::TierOptions TierChoice::made() const {
  worker::TierOptions options;
  options.write = write;
  options.write_back_wait = write_back_wait;
  options.store_queue = store_queue;
  options.recompute = recompute;
  options.prefetch_requests = prefetch_requests;
  options.unit_blocks = unit_blocks;
  options.name_space = name_space;
  options.name_space_key = name_space_key;
  if (prefetch == "off") return options;
  worker::PrefetchOptions& made = options.prefetch.emplace();
  made.stop = must(worker::parse_prefetch_stop(prefetch));
  if (prefetch_timeout.count() > 0) made.timeout = made.wait_limit = prefetch_timeout;
  return options;
}

void add_write_options(CLI::App& app, TierChoice& choice) {
  add_parsed<worker::WriteMode>(app, "--write-policy", choice.write.mode, worker::parse_write_mode,
                                "When blocks are stored in host memory: when they are filled, once "
                                "they are used again, or before they are evicted")
      ->type_name("write-through|selective|write-back")
      ->default_str("write-through");
  app.add_option("--write-uses", choice.write.uses,
                 "With --write-policy selective: uses of a block until it is stored, the one that "
                 "filled it included")
      ->type_name("N")
      ->check(CLI::Range(1U, 1U << 20))
      ->default_str(std::to_string(choice.write.uses));
  add_milliseconds(app, "--write-back-wait", choice.write_back_wait,
                   "With --write-policy write-back: how long a request waits for its room while "
                   "that is stored; then it is lost");
  app.add_option("--store-queue", choice.store_queue,
                 "Blocks that may be on their way to host memory at a time, beyond which they are "
                 "not stored; 0: as many as the device holds")
      ->type_name("BLOCKS")
      ->check(CLI::Range(0U, kMostStoreQueue))
      ->default_str("0");
  add_parsed<worker::RecomputeMode>(app, "--recompute", choice.recompute.mode,
                                    worker::parse_recompute_mode,
                                    "Whether prefixes in host memory are computed again: where "
                                    "that is faster, never, or always")
      ->type_name("auto|never|always")
      ->default_str("never");
  add_number(app, "--prefill-rate", choice.recompute.tokens_per_second, 1, 1e12,
             "With --recompute auto: tokens that are computed in a second [as measured]")
      ->type_name("TOKENS");
}

void add_prefetch_options(CLI::App& app, TierChoice& choice) {
  add_parsed<std::string>(app, "--prefetch", choice.prefetch, parse_prefetch,
                          "Load prefixes of requests that wait, and what these do when it is their "
                          "turn: start with what has come, wait for all, or wait for a time")
      ->type_name("off|best-effort|wait|timeout")
      ->default_str(choice.prefetch);
  app.add_option("--prefetch-requests", choice.prefetch_requests,
                 "First requests of the queue that are prefetched for")
      ->type_name("N")
      ->check(CLI::Range(1U, 1024U))
      ->default_str(std::to_string(choice.prefetch_requests));
  add_milliseconds(app, "--prefetch-timeout", choice.prefetch_timeout,
                   "From when a prefetch began until its request starts without the rest")
      ->default_str("10s with wait; with timeout 20ms, and 0.5ms for each block");
}

void add_unit_blocks(CLI::App& app, TierChoice& choice) {
  app.add_option("--unit-blocks", choice.unit_blocks,
                 "Blocks of one prefix that are stored, found and evicted as one in host memory")
      ->type_name("N")
      ->check(CLI::Range(1U, ipc::kMostUnitBlocks))
      ->default_str(std::to_string(choice.unit_blocks));
}

void add_namespace(CLI::App& app, TierChoice& choice) {
  CLI::Option* name =
      add_parsed<std::string>(app, "--namespace", choice.name_space, parse_namespace,
                              "Whose blocks are stored and found in host memory: the engines of "
                              "one namespace share them, others have none of them")
          ->type_name("NAME")
          ->default_str(choice.name_space);
  add_parsed<std::optional<ipc::Digest>>(
      app, "--namespace-key-file", choice.name_space_key,
      [](std::string_view text) -> ipc::Result<std::optional<ipc::Digest>> {
        KVFERRY_ASSIGN(const ipc::Digest key, read_key_file(text));
        return std::optional(key);
      },
      "The secret of the namespace, without which nobody finds its blocks: a file with 32 random "
      "hexadecimal digits, which only this user may read [no secret]")
      ->type_name("FILE")
      ->needs(name);
}

ipc::Status check_unit_blocks(const TierChoice& choice) {
  if (choice.unit_blocks == 1) return ipc::ok();
  if (choice.write.mode == worker::WriteMode::kWriteBack) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "--unit-blocks {} with --write-policy write-back: blocks are evicted one "
                         "by one, when others of their unit may be gone; choose write-through or "
                         "selective, or --unit-blocks 1",
                         choice.unit_blocks);
  }
  if (choice.store_queue > 0 && choice.store_queue < choice.unit_blocks) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "--unit-blocks {} with --store-queue {}: no whole unit would ever be "
                         "stored; give a queue of at least {}, or 0",
                         choice.unit_blocks, choice.store_queue, choice.unit_blocks);
  }
  return ipc::ok();
}

}  // namespace kvferry::cli
