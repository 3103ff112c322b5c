// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "operator_link.hpp"
#include "options.hpp"
#include "print.hpp"
#include "rank_options.hpp"
#include "status_text.hpp"
#include "table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStatusTime{5'000};

bool is_quarantined(const ipc::RankOutcome& rank) {
  return rank.outcome.kind == ipc::ClearKind::kQuarantined;
}

std::vector<std::string> clear_row(const ipc::RankOutcome& rank) {
  std::vector<std::string> row = {rank.engine, std::to_string(rank.rank.value)};
  const ipc::RankClearReply& outcome = rank.outcome;
  if (rank.error) {
    row.emplace_back("failed");
  } else if (rank.again && !is_quarantined(rank)) {
    row.insert(row.end(), {"already cleared", "-", "-"});
    row.push_back(ipc::format_size(outcome.free_after));
  } else {
    row.emplace_back(to_string(outcome.kind));
    row.push_back(fmt::format("{:.1f}", to_ms(outcome.took)));
    row.push_back(ipc::format_size(outcome.free_before));
    row.push_back(ipc::format_size(outcome.free_after));
  }
  return row;
}

void print_clear(const ipc::ClearReply& reply) {
  Table table({{"engine"},
               {"rank", Align::kRight},
               {"outcome"},
               {"ms", Align::kRight},
               {"device free before", Align::kRight},
               {"after", Align::kRight}});
  for (const ipc::RankOutcome& rank : reply.ranks) table.add(clear_row(rank));
  if (!table.empty()) (void)write_out(table.render());
  const bool failed = std::any_of(reply.ranks.begin(), reply.ranks.end(),
                                  [](const auto& rank) { return rank.error.has_value(); });
  const bool again = std::all_of(reply.ranks.begin(), reply.ranks.end(),
                                 [](const auto& rank) { return rank.again; });
  print_out("{}; {} blocks dropped from host memory\n",
            failed                ? "not cleared on all ranks"
            : reply.ranks.empty() ? "no engine is there"
            : again               ? "already cleared"
                                  : fmt::format("cleared in {:.1f} ms", to_ms(reply.took)),
            with_separators(reply.host_blocks_dropped));
}

/// Names the ranks that failed, and why, on stderr; true when any did.
bool report_failures(const ipc::ClearReply& reply) {
  bool any = false;
  for (const ipc::RankOutcome& rank : reply.ranks) {
    if (!rank.error) continue;
    any = true;
    print_err("kvferry clear: {}/{}: {}\n", rank.engine, rank.rank.value, rank.error->to_string());
  }
  return any;
}

/// Names what is held, by whom, on stderr; true when anything is.
bool report_quarantine(const ipc::ClearReply& reply) {
  bool any = false;
  for (const ipc::RankOutcome& rank : reply.ranks) {
    if (!is_quarantined(rank)) continue;
    any = true;
    print_err("kvferry clear: {}/{}: {} quarantined: {}\n", rank.engine, rank.rank.value,
              ipc::format_size(rank.outcome.quarantined_bytes), rank.outcome.detail);
  }
  return any;
}

}  // namespace

int status_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  bool json = false;
  auto app = make_app("status",
                      "Shows what the manager of an instance sees: host memory, engines, ranks and "
                      "their processes.",
                      "example:\n  kvferry status --instance chat", common);
  app->add_flag("--json", json, "Print the manager's whole answer as JSON");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry status", common.log_level);
  const auto reply =
      ask<ipc::StatusReply>(common, ipc::MessageKind::kStatus, ipc::Empty{}, kStatusTime);
  if (!reply) return failure("status", reply.error());
  if (json) {
    print_out("{}\n", reply->json);
    return kExitDone;
  }
  const auto text = describe_status(reply->json);
  if (!text) return failure("status", text.error());
  print_out("{}", *text);
  return kExitDone;
}

int clear_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  ipc::ClearRequest request;
  auto app = make_app("clear",
                      "Gives the device memory of the KV cache back to the driver, on all ranks, "
                      "whoever allocated it. Running requests are put back; nothing is computed "
                      "until 'kvferry reinit'.",
                      "example: free the GPUs for a weights update, keep what lies in host memory\n"
                      "  kvferry clear --instance chat --host keep",
                      common);
  app->add_option("--engine", request.engine, "Only this engine [all]")->type_name("NAME");
  add_choice<ipc::HostPolicy>(*app, "--host", request.host,
                              {{"drop", ipc::HostPolicy::kDrop}, {"keep", ipc::HostPolicy::kKeep}},
                              "What happens to the blocks in host memory");
  add_milliseconds(*app, "--deadline", request.deadline, "How long to wait for its outcome");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry clear", common.log_level);
  const auto answer =
      ask_outcome<ipc::ClearReply>(common, ipc::MessageKind::kClear, request, request.deadline);
  if (!answer) {
    const int code = failure("clear", answer.error());
    return answer.error().code == ipc::ErrorCode::kQuarantined ? kExitQuarantined : code;
  }
  print_clear(answer->reply);
  const bool quarantined = report_quarantine(answer->reply);
  if (report_failures(answer->reply)) return kExitFailed;
  if (answer->error && !quarantined) return failure("clear", *answer->error);
  return quarantined ? kExitQuarantined : kExitDone;
}

int reinit_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  ipc::ReinitRequest request;
  auto app = make_app("reinit",
                      "Allocates the KV cache again after 'kvferry clear', on all ranks, and waits "
                      "until both processes of every rank have it mapped.",
                      "example: come back with fewer blocks\n"
                      "  kvferry reinit --instance chat --gpu-blocks 2048",
                      common);
  app->add_option("--engine", request.engine, "Which engine [the only one]")->type_name("NAME");
  add_gpu_blocks(*app, request.gpu_blocks, "Blocks on each device [as before]");
  add_milliseconds(*app, "--deadline", request.deadline, "How long it may take");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry reinit", common.log_level);
  const auto reply =
      ask<ipc::ReinitReply>(common, ipc::MessageKind::kReinit, request, request.deadline);
  if (!reply) return failure("reinit", reply.error());
  print_out("ready again in {:.1f} ms (generation {})\n", to_ms(reply->took), reply->generation);
  return kExitDone;
}

}  // namespace kvferry::cli
