// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "options.hpp"
#include "print.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <ctime>
#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

using Nanoseconds = std::chrono::nanoseconds;

constexpr std::size_t kDefaultLast = 40;
constexpr std::size_t kMostLast = 100'000'000;

Nanoseconds clock_now(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return std::chrono::seconds(now.tv_sec) + Nanoseconds(now.tv_nsec);
}

/// Records carry the monotonic clock; logs, the time of day.
class TimeOfDay {
 public:
  [[nodiscard]] std::string text(Nanoseconds monotonic) const {
    const Nanoseconds since_epoch = monotonic + offset_;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_epoch);
    const auto micros =
        std::chrono::duration_cast<std::chrono::microseconds>(since_epoch - seconds);
    return fmt::format("{:%H:%M:%S}.{:06}", fmt::localtime(std::time_t{seconds.count()}),
                       micros.count());
  }

 private:
  Nanoseconds offset_ = clock_now(CLOCK_REALTIME) - clock_now(CLOCK_MONOTONIC);
};

nlohmann::json to_json(const ipc::TransitionTrace& trace, const ipc::TransitionRecord& record) {
  const ipc::TransitionWriter& who = trace.writers[record.writer].who;
  return {{"monotonic_ns", record.time.count()},
          {"process", who.role},
          {"engine", who.engine},
          {"rank", who.rank.value},
          {"pid", who.pid},
          {"transition", ipc::to_string(record.transition)},
          {"session", fmt::format("{:016x}", record.session)},
          {"epoch", record.epoch.value},
          {"lease", record.lease.value},
          {"job", record.job.value},
          {"peer", fmt::format("{:016x}", record.peer)},
          {"detail", record.detail}};
}

void print_last(const ipc::TransitionTrace& trace, std::size_t last, bool json) {
  const TimeOfDay time_of_day;
  const std::size_t first = trace.records.size() > last ? trace.records.size() - last : 0;
  if (first > 0 && !json) {
    print_out("({} earlier transitions; --last shows more)\n", first);
  }
  for (std::size_t i = first; i < trace.records.size(); ++i) {
    const ipc::TransitionRecord& record = trace.records[i];
    if (json) {
      print_out("{}\n", to_json(trace, record).dump());
    } else {
      print_out("{}  {}\n", time_of_day.text(record.time), ipc::describe(trace, record));
    }
  }
}

/// True when the rules allow all of it.
bool print_check(const ipc::TransitionTrace& trace) {
  const auto breaches = ipc::check_transitions(trace);
  for (const ipc::TransitionBreach& breach : breaches) {
    print_out("BREACH {}: {}: {}\n", breach.rule,
              ipc::describe(trace, trace.records[breach.record]), breach.what);
  }
  std::uint64_t lost = 0;
  for (const auto& writer : trace.writers) lost += writer.lost + writer.lost_jobs;
  print_out("{} transitions of {} processes checked, {} older ones overwritten: {}\n",
            trace.records.size(), trace.writers.size(), lost,
            breaches.empty() ? "all allowed" : fmt::format("{} breaches", breaches.size()));
  return breaches.empty();
}

}  // namespace

int trace_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kWarn;
  std::size_t last = kDefaultLast;
  bool json = false;
  bool check = false;
  auto app =
      make_app("trace",
               "Shows what the processes of an instance did last, in the unlink handshake and with "
               "copy jobs, in one order: also of processes that were killed. Needs no manager.",
               "example: what happened before a clear ended in quarantine\n"
               "  kvferry trace --instance chat --last 100\n"
               "example: hold all that is recorded to the rules of docs/handshake.md\n"
               "  kvferry trace --instance chat --check",
               common);
  app->add_option("--last", last, "How many transitions to show")
      ->type_name("N")
      ->check(CLI::Range(std::size_t{1}, kMostLast))
      ->capture_default_str();
  app->add_flag("--json", json, "Print a JSON object per transition");
  app->add_flag("--check", check,
                "Check instead of showing; exit code 1 when something was not allowed");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry trace", common.log_level);
  const auto dir = ipc::RuntimeDir::find(common.runtime_dir, common.instance);
  if (!dir) return failure("trace", dir.error());
  const auto trace = ipc::read_transitions(*dir);
  if (!trace) return failure("trace", trace.error());
  if (check) return print_check(*trace) ? kExitDone : kExitFailed;
  print_last(*trace, last, json);
  return kExitDone;
}

}  // namespace kvferry::cli
