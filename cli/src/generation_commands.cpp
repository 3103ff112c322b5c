// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "operator_link.hpp"
#include "options.hpp"
#include "print.hpp"
#include "rank_options.hpp"
#include "table.hpp"
#include "weights_sender.hpp"

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

/// pause, continue and flush: what an RL loop does to an engine that lives on.
namespace kvferry::cli {
namespace {

void print_memory(const std::vector<ipc::RankMemory>& ranks) {
  if (ranks.empty()) return;
  Table table({{"rank", Align::kRight},
               {"reserved before", Align::kRight},
               {"after", Align::kRight},
               {"used", Align::kRight},
               {"free on device", Align::kRight}});
  for (const ipc::RankMemory& rank : ranks) {
    const std::string number = std::to_string(rank.rank.value);
    if (rank.error) {
      table.add({number, "failed"});
      continue;
    }
    if (rank.absent) {
      table.add({number, "no worker"});
      continue;
    }
    table.add({number, ipc::format_size(rank.memory.reserved_before),
               ipc::format_size(rank.memory.reserved_after),
               ipc::format_size(rank.memory.used_after),
               ipc::format_size(rank.memory.free_on_device)});
  }
  (void)write_out(table.render());
}

/// Names the ranks that failed, and why, on stderr.
void report_failures(std::string_view command, const std::vector<ipc::RankMemory>& ranks) {
  for (const ipc::RankMemory& rank : ranks) {
    if (rank.error) {
      print_err("kvferry {}: rank {}: {}\n", command, rank.rank.value, rank.error->to_string());
    }
  }
}

std::string describe(const ipc::PauseReply& reply) {
  if (reply.schedulers == 0) return "no scheduler is connected; one that comes is held";
  return fmt::format("{} running, {} frozen, {} waiting, {} transfers in flight",
                     reply.load.running, reply.load.frozen, reply.load.waiting,
                     reply.load.transfers);
}

/// The manager takes this much beyond the deadline, for the ranks to change.
constexpr std::chrono::seconds kCommitTime{15};

CLI::Option* add_engine(CLI::App& app, std::string& engine) {
  return app.add_option("--engine", engine, "Which engine [the only one]")->type_name("NAME");
}

}  // namespace

int pause_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  ipc::PauseRequest request;
  auto app =
      make_app("pause",
               "Stops an engine's requests until 'kvferry continue', and returns when they "
               "have stopped: abort ends them, retract takes their blocks and puts them back "
               "into the queue, in_place keeps their blocks with what is in them.",
               "example: before a weights update that keeps running sequences\n"
               "  kvferry pause --instance chat --mode in_place",
               common);
  add_choice<ipc::PauseMode>(*app, "--mode", request.mode,
                             {{"abort", ipc::PauseMode::kAbort},
                              {"retract", ipc::PauseMode::kRetract},
                              {"in_place", ipc::PauseMode::kInPlace}},
                             "What happens to the requests that run");
  add_engine(*app, request.engine);
  add_milliseconds(*app, "--deadline", request.deadline, "How long it may take");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry pause", common.log_level);
  const auto reply =
      ask<ipc::PauseReply>(common, ipc::MessageKind::kPause, request, request.deadline);
  if (!reply) return failure("pause", reply.error());
  print_out("paused ({}) in {:.1f} ms: {}\n", to_string(request.mode), to_ms(reply->took),
            describe(*reply));
  return kExitDone;
}

int continue_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  ipc::ContinueRequest request;
  bool keep = false;
  auto app = make_app("continue",
                      "Lets an engine's requests run again after 'kvferry pause'. Before that, the "
                      "memory that the workers' allocators cache goes back to the driver.",
                      "example:\n  kvferry continue --instance chat", common);
  app->add_flag("--no-empty-cache", keep, "Leave what the workers' allocators cache with them");
  add_engine(*app, request.engine);
  add_milliseconds(*app, "--deadline", request.deadline, "How long it may take");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry continue", common.log_level);
  request.empty_cache = !keep;
  const auto outcome = ask_outcome<ipc::ContinueReply>(common, ipc::MessageKind::kContinue, request,
                                                       request.deadline);
  return end_command(
      "continue", outcome, [](const ipc::ContinueReply& reply) { print_memory(reply.ranks); },
      [](const ipc::ContinueReply& reply) { report_failures("continue", reply.ranks); },
      [](const ipc::ContinueReply& reply) {
        print_out("running again after {:.1f} ms\n", to_ms(reply.took));
        return kExitDone;
      });
}

int flush_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  ipc::FlushRequest request;
  bool keep = false;
  auto app = make_app("flush",
                      "Forgets what an idle engine's cache holds, on the device and in host "
                      "memory. The device memory of the cache stays; what the workers' allocators "
                      "cache beside it goes back to the driver. An engine that is not idle is left "
                      "as it is, and what keeps it busy is told.",
                      "example: retracted requests hold no block, so this works while paused\n"
                      "  kvferry pause --mode retract && kvferry flush",
                      common);
  app->add_flag("--no-empty-cache", keep, "Leave what the workers' allocators cache with them");
  add_seconds(*app, "--timeout", request.timeout, "How long to wait until the engine is idle");
  add_choice<ipc::HostPolicy>(*app, "--host", request.host,
                              {{"drop", ipc::HostPolicy::kDrop}, {"keep", ipc::HostPolicy::kKeep}},
                              "What happens to the blocks in host memory");
  add_engine(*app, request.engine);
  add_milliseconds(*app, "--deadline", request.deadline, "How long it may take once it is idle");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry flush", common.log_level);
  request.empty_cache = !keep;
  const auto outcome = ask_outcome<ipc::FlushReply>(common, ipc::MessageKind::kFlush, request,
                                                    request.timeout + request.deadline);
  return end_command(
      "flush", outcome, [](const ipc::FlushReply& reply) { print_memory(reply.ranks); },
      [](const ipc::FlushReply& reply) { report_failures("flush", reply.ranks); },
      [](const ipc::FlushReply& reply) {
        print_out("flushed in {:.1f} ms; {} blocks dropped from host memory\n", to_ms(reply.took),
                  with_separators(reply.host_blocks_dropped));
        return kExitDone;
      });
}

namespace {

/// Sends the weights first when they are not read where they are. One connection for both: what it
/// has sent is forgotten when it ends.
ipc::Result<Outcome<ipc::UpdateWeightsReply>> ask_for_update(const CommonOptions& common,
                                                             ipc::UpdateWeightsRequest& request) {
  if (request.source.from != ipc::WeightsFrom::kTensors) {
    return ask_outcome<ipc::UpdateWeightsReply>(common, ipc::MessageKind::kUpdateWeights, request,
                                                request.timeout + request.deadline + kCommitTime);
  }
  ipc::EventLoop loop;
  OperatorCalls calls(loop, common.runtime_dir, common.instance);
  WeightsSender sender(calls);
  std::optional<ipc::Result<ipc::Envelope>> answer;
  const auto ask_now = [&](const ipc::Result<ipc::WeightsSource>& sent) {
    if (!sent) {
      answer.emplace(sent.error());
      return;
    }
    request.source = *sent;
    const auto asked = calls.ask(
        ipc::MessageKind::kUpdateWeights, ipc::encode(request),
        request.timeout + request.deadline + kCommitTime + kCommitTime,
        [&answer](ipc::Result<ipc::Envelope> reply) { answer.emplace(std::move(reply)); });
    if (!asked) answer.emplace(asked.error());
  };
  sender.send(request.source.location, request.engine, ask_now);
  // Every question to the manager has a limit of its own.
  while (!answer) loop.run_once(ipc::Deadline::after(std::chrono::seconds(1)));
  if (!*answer) return answer->error();
  Outcome<ipc::UpdateWeightsReply> outcome;
  outcome.error = std::move((*answer)->error);
  if (outcome.error && (*answer)->body.empty()) return std::move(*outcome.error);
  KVFERRY_ASSIGN(outcome.reply,
                 ipc::decode<ipc::UpdateWeightsReply>((*answer)->body, "UpdateWeightsReply"));
  return outcome;
}

/// A file, or who lends them: one of both, as the source needs it.
ipc::Status locate_source(ipc::WeightsSource& source, const std::string& lender) {
  const bool lent = source.from == ipc::WeightsFrom::kIpc;
  if (lent ? lender.empty() || !source.location.empty()
           : source.location.empty() || !lender.empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "--from {} needs {}, and no {}", to_string(source.from),
                         lent ? "--source" : "--file", lent ? "--file" : "--source");
  }
  if (lent) {
    source.location = lender;
    return ipc::ok();
  }
  std::error_code error;
  const auto file = std::filesystem::absolute(source.location, error);
  if (!error) source.location = file.string();
  return ipc::ok();
}

}  // namespace

int update_weights_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  ipc::UpdateWeightsRequest request;
  bool keep = false;
  auto app = make_app(
      "update-weights",
      "Gives the workers of an engine new weights. Every rank reads and checks its part before any "
      "rank changes; then all change at once. The engine has to be paused or idle. Nothing that "
      "was "
      "computed with other weights is found any more, flushed or not; it is found again when its "
      "weights come back under the name that --weights-id gave them.",
      "example: new weights under running requests, which keep their blocks\n"
      "  kvferry pause --mode in_place\n"
      "  kvferry update-weights --from disk --file model.safetensors --no-flush-cache\n"
      "  kvferry continue",
      common);
  add_choice<ipc::WeightsFrom>(
      *app, "--from", request.source.from,
      {{"disk", ipc::WeightsFrom::kDisk},
       {"tensor", ipc::WeightsFrom::kTensors},
       {"distributed", ipc::WeightsFrom::kDistributed},
       {"ipc", ipc::WeightsFrom::kIpc}},
      "Where they come from: every rank reads a file, this command sends it to every rank, rank 0 "
      "reads it for all, or another process lends them in device memory");
  std::string lender;
  app->add_option("--file", request.source.location,
                  "A safetensors file; with --from disk, one that every worker can read, with "
                  "--from distributed, that of rank 0")
      ->type_name("FILE");
  app->add_option("--source", lender,
                  "With --from ipc, the name that 'kvferry export-weights' or a WeightsExporter "
                  "has; {rank} stands for the rank's number")
      ->type_name("NAME");
  app->add_flag("--no-flush-cache", keep, "Leave device blocks to the requests that hold them");
  app->add_flag("--empty-cache", request.empty_cache,
                "Also give what the workers' allocators cache back to the driver");
  add_weights_id(*app, request.weights);
  add_seconds(*app, "--timeout", request.timeout,
              "How long to wait until the engine is idle, where it has to be");
  add_engine(*app, request.engine);
  add_milliseconds(*app, "--deadline", request.deadline,
                   "How long reading may take, once it is idle; under a pause without a flush, "
                   "also how long copies may");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  if (const auto fits = locate_source(request.source, lender); !fits) {
    return usage_error(*app, fits.error());
  }
  ipc::init_logging("kvferry update-weights", common.log_level);
  request.flush_cache = !keep;
  const auto outcome = ask_for_update(common, request);
  if (!outcome) return failure("update-weights", outcome.error());
  const ipc::UpdateWeightsReply& reply = outcome->reply;
  for (const ipc::RankUpdate& update : reply.updates) {
    if (update.error) {
      print_err("kvferry update-weights: rank {}: {}\n", update.rank.value,
                update.error->to_string());
    }
  }
  if (outcome->error) {
    report_failures("update-weights", reply.ranks);
    return failure("update-weights", *outcome->error);
  }
  print_memory(reply.ranks);
  std::uint64_t bytes = 0;
  for (const ipc::RankUpdate& update : reply.updates) bytes += update.bytes;
  print_out("weights {} on {} ranks, {}{}, in {:.1f} ms\n", reply.weights.hex(),
            reply.updates.size(), ipc::format_size(bytes),
            reply.transport.empty() ? "" : fmt::format(" handed on by {}", reply.transport),
            to_ms(reply.took));
  return kExitDone;
}

}  // namespace kvferry::cli
