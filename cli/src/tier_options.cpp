// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "tier_options.hpp"

#include "must.hpp"

#include <array>

namespace kvferry::cli {
namespace {

ipc::Result<std::string> parse_prefetch(std::string_view text) {
  if (text == "off") return std::string(text);
  KVFERRY_TRY(worker::parse_prefetch_stop(text));
  return std::string(text);
}

constexpr std::array kTierNames = {"--write-policy", "--write-uses",        "--write-back-wait",
                                   "--store-queue",  "--recompute",         "--prefill-rate",
                                   "--prefetch",     "--prefetch-requests", "--prefetch-timeout"};

}  // namespace

ipc::Status check_tier_used(const CLI::App& app, bool serves) {
  if (serves) return ipc::ok();
  for (const char* name : kTierNames) {
    if (app.count(name) == 0) continue;
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} is for the scheduler of reference workers, which does not run without "
                         "--serve: add --serve, or leave {} out",
                         name, name);
  }
  return ipc::ok();
}

worker::TierOptions TierChoice::made() const {
  worker::TierOptions options;
  options.write = write;
  options.write_back_wait = write_back_wait;
  options.store_queue = store_queue;
  options.recompute = recompute;
  options.prefetch_requests = prefetch_requests;
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
      ->default_str("0");
  add_parsed<worker::RecomputeMode>(app, "--recompute", choice.recompute.mode,
                                    worker::parse_recompute_mode,
                                    "Whether prefixes in host memory are computed again: where "
                                    "that is faster, never, or always")
      ->type_name("auto|never|always")
      ->default_str("never");
  app.add_option("--prefill-rate", choice.recompute.tokens_per_second,
                 "With --recompute auto: tokens that are computed in a second [as measured]")
      ->type_name("TOKENS")
      ->check(CLI::Range(1.0, 1e12));
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

}  // namespace kvferry::cli
