// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "operator_link.hpp"
#include "options.hpp"
#include "print.hpp"
#include "table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

/// release and resume: an engine's device memory, by tag.
namespace kvferry::cli {
namespace {

ipc::Result<ipc::MemoryTags> parse_tags(std::string_view text) {
  ipc::MemoryTags tags;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    const std::string_view word = text.substr(at, comma - at);
    const auto* const tag = std::find_if(ipc::kMemoryTags.begin(), ipc::kMemoryTags.end(),
                                         [&](auto known) { return to_string(known) == word; });
    if (tag == ipc::kMemoryTags.end()) {
      return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of {}", word,
                           to_string(ipc::MemoryTags::all()));
    }
    tags.add(*tag);
    at = comma + 1;
  }
  return tags;
}

void add_tags(CLI::App& app, ipc::MemoryTags& tags, const std::string& help) {
  add_parsed<ipc::MemoryTags>(app, "--tags", tags, parse_tags, help)->type_name("TAG,...");
}

/// Names the ranks that failed, and why, on stderr.
void report_failures(std::string_view command, const std::vector<ipc::RankReleased>& ranks) {
  for (const ipc::RankReleased& rank : ranks) {
    if (rank.error) {
      print_err("kvferry {}: rank {}: {}\n", command, rank.rank.value, rank.error->to_string());
    }
  }
}

/// A rank's line of a release.
struct ReleasedRow {
  std::string weights = "-";
  std::string scratch = "-";
  std::string cache = "-";
  std::uint64_t free_before = 0;
  std::uint64_t free_after = 0;
};

std::vector<ReleasedRow> rows_of(const ipc::ReleaseReply& reply) {
  std::vector<ReleasedRow> rows(std::max(reply.ranks.size(), reply.cleared.size()));
  for (std::size_t i = 0; i < reply.ranks.size(); ++i) {
    const ipc::RankReleaseReply& given = reply.ranks[i].outcome;
    const bool failed = reply.ranks[i].error.has_value();
    rows[i].weights = failed ? "failed" : ipc::format_size(given.weights_bytes);
    rows[i].scratch = failed ? "failed" : ipc::format_size(given.scratch_bytes);
    rows[i].free_before = given.free_before;
    rows[i].free_after = given.memory.free_on_device;
  }
  for (std::size_t i = 0; i < reply.cleared.size(); ++i) {
    const ipc::RankOutcome& cleared = reply.cleared[i];
    rows[i].cache = cleared.error   ? "failed"
                    : cleared.again ? "already cleared"
                                    : std::string(to_string(cleared.outcome.kind));
    if (rows[i].free_before == 0) rows[i].free_before = cleared.outcome.free_before;
    rows[i].free_after = std::max(rows[i].free_after, cleared.outcome.free_after);
  }
  return rows;
}

void print_release(const ipc::ReleaseReply& reply) {
  Table table({{"rank", Align::kRight},
               {"weights", Align::kRight},
               {"scratch", Align::kRight},
               {"cache"},
               {"device free before", Align::kRight},
               {"after", Align::kRight}});
  const std::vector<ReleasedRow> rows = rows_of(reply);
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const ReleasedRow& row = rows[rank];
    table.add({std::to_string(rank), row.weights, row.scratch, row.cache,
               ipc::format_size(row.free_before), ipc::format_size(row.free_after)});
  }
  if (!table.empty()) (void)write_out(table.render());
}

/// Names what is held, by whom, on stderr; true when anything is.
bool report_quarantine(const ipc::ReleaseReply& reply) {
  bool any = false;
  for (const ipc::RankOutcome& rank : reply.cleared) {
    if (rank.outcome.kind != ipc::ClearKind::kQuarantined) continue;
    any = true;
    print_err("kvferry release: {}/{}: {} quarantined: {}\n", rank.engine, rank.rank.value,
              ipc::format_size(rank.outcome.quarantined_bytes), rank.outcome.detail);
  }
  return any;
}

void print_resume(const ipc::ResumeReply& reply) {
  Table table({{"rank", Align::kRight}, {"weights", Align::kRight}, {"scratch", Align::kRight}});
  for (const ipc::RankReleased& rank : reply.ranks) {
    table.add({std::to_string(rank.rank.value),
               rank.error ? "failed" : ipc::format_size(rank.outcome.weights_bytes),
               rank.error ? "failed" : ipc::format_size(rank.outcome.scratch_bytes)});
  }
  if (!table.empty()) (void)write_out(table.render());
}

/// What keeps requests from running now, and what lets them.
std::string describe_hold(const ipc::ResumeReply& reply) {
  if (!reply.released.empty()) {
    return fmt::format("requests are held: {} is still released", to_string(reply.released));
  }
  if (reply.weights_lost) {
    return "requests are held: the weights were released without a backup; 'kvferry "
           "update-weights', then 'kvferry continue'";
  }
  if (reply.paused) {
    return fmt::format("paused ({}) as before: 'kvferry continue' lets requests run",
                       to_string(*reply.paused));
  }
  return "requests run again";
}

}  // namespace

int release_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  ipc::ReleaseRequest request;
  auto app = make_app(
      "release",
      "Gives device memory of an idle engine back to the driver, and holds its requests until "
      "'kvferry resume': kv_cache, the cache, as 'kvferry clear' does; weights, with a copy in "
      "host memory; scratch, what steps compute with beside the two.",
      "example: the GPUs for the trainer, and back\n"
      "  kvferry pause --mode retract && kvferry release\n"
      "  kvferry resume && kvferry continue",
      common);
  add_tags(*app, request.tags, "What to release: kv_cache, weights, scratch [all]");
  add_choice<ipc::WeightsBackup>(
      *app, "--weights-backup", request.backup,
      {{"host", ipc::WeightsBackup::kHost}, {"none", ipc::WeightsBackup::kNone}},
      "Where the weights stay; with none they have to be updated after the resume");
  add_choice<ipc::HostPolicy>(*app, "--host", request.host,
                              {{"drop", ipc::HostPolicy::kDrop}, {"keep", ipc::HostPolicy::kKeep}},
                              "What happens to the cache's blocks in host memory");
  add_seconds(*app, "--timeout", request.timeout, "How long to wait until the engine is idle");
  app->add_option("--engine", request.engine, "Which engine [the only one]")->type_name("NAME");
  add_milliseconds(*app, "--deadline", request.deadline, "How long it may take once it is idle");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry release", common.log_level);
  const auto outcome = ask_outcome<ipc::ReleaseReply>(common, ipc::MessageKind::kReleaseMemory,
                                                      request, request.timeout + request.deadline);
  bool quarantined = false;
  return end_command(
      "release", outcome,
      [&quarantined](const ipc::ReleaseReply& reply) {
        print_release(reply);
        quarantined = report_quarantine(reply);
      },
      [](const ipc::ReleaseReply& reply) { report_failures("release", reply.ranks); },
      [&quarantined](const ipc::ReleaseReply& reply) {
        print_out("released in {:.1f} ms: {}; {} blocks dropped from host memory\n",
                  to_ms(reply.took), to_string(reply.released),
                  with_separators(reply.host_blocks_dropped));
        return quarantined ? kExitQuarantined : kExitDone;
      });
}

int resume_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  ipc::ResumeRequest request;
  auto app = make_app(
      "resume",
      "Takes device memory that 'kvferry release' gave up again, on all ranks: weights bit for bit "
      "as they were, the cache empty. An engine that was not paused before the release runs again "
      "when nothing is released any more. What there is no memory for stays released, and can be "
      "resumed later.",
      "example: the weights first, for an update; the cache when the trainer has let go of the "
      "GPU\n"
      "  kvferry resume --tags weights && kvferry update-weights --file new.safetensors\n"
      "  kvferry resume --tags kv_cache,scratch",
      common);
  add_tags(*app, request.tags, "What to take back [all that is released]");
  app->add_option("--engine", request.engine, "Which engine [the only one]")->type_name("NAME");
  add_milliseconds(*app, "--deadline", request.deadline, "How long it may take");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry resume", common.log_level);
  const auto outcome = ask_outcome<ipc::ResumeReply>(common, ipc::MessageKind::kResumeMemory,
                                                     request, request.deadline);
  return end_command(
      "resume", outcome, print_resume,
      [](const ipc::ResumeReply& reply) { report_failures("resume", reply.ranks); },
      [](const ipc::ResumeReply& reply) {
        print_out("resumed {} in {:.1f} ms; {}\n", to_string(reply.resumed), to_ms(reply.took),
                  describe_hold(reply));
        return kExitDone;
      });
}

}  // namespace kvferry::cli
