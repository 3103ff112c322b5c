// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/replay.hpp"

#include "command.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "print.hpp"
#include "replay/children.hpp"
#include "replay/leak_check.hpp"
#include "replay/lifecycle.hpp"
#include "replay/progress.hpp"
#include "replay/report.hpp"
#include "replay/run_dir.hpp"
#include "replay/supervisor.hpp"
#include "table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kStopGrace = 3s;
/// Unmapping host memory in small pages takes a mover about 60 ms per GiB, freeing it the last one
/// about 50 ms more (docs/performance.md).
constexpr ipc::Duration kStopPerGib = 200ms;
constexpr ipc::Duration kDeviceSettle = 5s;
constexpr ipc::Duration kLookAgain = 50ms;
/// From the first signal: all of it within five seconds, whatever was going on.
constexpr ipc::Duration kInterruptedGrace = 3s;
constexpr ipc::Duration kInterruptedSettle = 4s;
constexpr ipc::Duration kObservePeriod = 1s;
/// However impatient with what happens later: a busy machine takes its time to start processes.
constexpr ipc::Duration kLeastStartLimit = 60s;
/// Host memory is really allocated, and pinned for GPUs, before anything starts.
constexpr ipc::Duration kStartPerGib = 1s;
constexpr std::size_t kLogTail = 10;

std::string_view to_text(VerifyPolicy policy) {
  switch (policy) {
    case VerifyPolicy::kOff: return "off";
    case VerifyPolicy::kSample: return "sample";
    case VerifyPolicy::kFull: return "full";
  }
  return "off";
}

/// One replay from the first child to the last: set up, played, taken down.
class ReplayRun {
 public:
  ReplayRun(const ReplayConfig& config, const Trace& trace, RunDir& dir, ipc::SignalFd& signals)
      : config_(config), trace_(trace), dir_(dir), signals_(signals) {}

  /// Throws Exception when it cannot be set up. The report is complete on return.
  ReplayReport run();

 private:
  void decide_sizes(const TraceFacts& facts);
  void print_header(const TraceFacts& facts) const;
  [[nodiscard]] std::filesystem::path log_dir() const {
    return config_.log_dir.empty() ? dir_.logs() : std::filesystem::path(config_.log_dir);
  }
  [[nodiscard]] ipc::Status start_children();
  void start_engine();
  void play();
  void take_down();
  [[nodiscard]] ipc::Result<std::uint64_t> settled_device_bytes();
  void end(std::optional<std::string> error);
  void on_signal();
  void tick();
  void observe_children();

  const ReplayConfig& config_;
  const Trace& trace_;
  RunDir& dir_;
  ReplayReport report_;
  ReplayCounters counters_;
  ipc::SignalFd& signals_;
  ipc::EventLoop loop_;
  ReplayPlan plan_;
  std::optional<DeviceProbe> device_probe_;
  std::optional<ClearMemoryLog> clear_memory_;
  HostMemoryProbe host_probe_;
  std::vector<pid_t> children_;
  std::optional<Progress> progress_;
  std::optional<Supervisor> supervisor_;
  std::optional<LifecycleDriver> lifecycle_;
  std::optional<Engine> engine_;
  bool ended_ = false;
  std::optional<ipc::TimePoint> interrupted_at_;
  ipc::TimePoint started_at_ = ipc::MonotonicClock::now();
  ipc::TimerId tick_timer_ = 0;
  ipc::TimerId observe_timer_ = 0;
};

void ReplayRun::decide_sizes(const TraceFacts& facts) {
  const auto must = [](auto result) {
    if (!result) throw ipc::Exception(result.error());
    return std::move(result).value();
  };
  const bool cuda = config_.device_kind == ipc::DeviceKind::kCuda;
  SizingLimits limits;
  limits.host_available = available_host_bytes();
  limits.host_bytes = limits.host_available / 2;
  limits.devices_in_host_memory = !cuda;
  if (cuda) {
    for (std::uint32_t r = 0; r < config_.geometry.ranks; ++r) {
      ipc::DeviceSpec spec;
      spec.kind = ipc::DeviceKind::kCuda;
      spec.ordinal = config_.cuda_ordinals[r % config_.cuda_ordinals.size()];
      plan_.devices.push_back(spec);
    }
    device_probe_.emplace(plan_.devices);
    const std::uint64_t gpus = config_.cuda_ordinals.size();
    const std::uint64_t ranks_each = (config_.geometry.ranks + gpus - 1) / gpus;
    // Contexts, staging and scratch of two processes take their part.
    limits.device_bytes = device_probe_->smallest_free_bytes() * 3 / 5 / ranks_each;
  }
  plan_.sizing =
      must(choose_sizes(config_.geometry, facts, config_.gpu_blocks, config_.host_memory, limits));
  plan_.arena = make_arena_options(config_.arena, config_.geometry, plan_.sizing.gpu_blocks,
                                   config_.device_kind);
  if (!cuda) {
    for (std::uint32_t r = 0; r < config_.geometry.ranks; ++r) {
      plan_.devices.push_back(must(host_device_for(fmt::format("replay-{}-{}", dir_.token(), r),
                                                   config_.geometry, plan_.arena)));
    }
    device_probe_.emplace(plan_.devices);
  }
  clear_memory_.emplace(*device_probe_, plan_.devices,
                        must(ipc::plan_arena(config_.geometry, plan_.arena)).total_bytes());
  report_.requests_given = trace_.requests.size();
  report_.skipped_lines = trace_.skipped_lines;
  report_.device = cuda ? plan_.devices.front().to_string() : "host";
  report_.geometry = config_.geometry_name;
  report_.ranks = config_.geometry.ranks;
  report_.gpu_blocks = plan_.sizing.gpu_blocks;
  report_.host_memory_bytes = plan_.sizing.host_bytes;
  report_.workload = config_.workload_text;
  report_.cache_owner = ipc::to_string(config_.arena.cache_owner);
  report_.handles = ipc::to_string(config_.arena.handles);
  report_.arena_memory = worker::to_string(config_.arena_memory);
  report_.arena = ipc::to_string(config_.arena.order);
  report_.verify = to_text(config_.verify);
  if (!cuda) return;
  std::vector<std::string> names;
  for (const ipc::DeviceSpec& device : plan_.devices) names.push_back(device.to_string());
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  report_.device = fmt::format("{}", fmt::join(names, ","));
}

void ReplayRun::print_header(const TraceFacts& facts) const {
  const std::uint64_t host_block = host_bytes_per_block(config_.geometry);
  Table table({{""}, {""}});
  table.add(
      {"workload",
       fmt::format("{} requests ({}), {} block references, {} distinct blocks ({})",
                   with_separators(trace_.requests.size()), config_.workload_text,
                   with_separators(facts.block_references), with_separators(facts.distinct_blocks),
                   ipc::format_size(facts.distinct_blocks * host_block))});
  table.add({"model", fmt::format("{}, {} rank{} on {}", config_.geometry_name,
                                  config_.geometry.ranks, config_.geometry.ranks == 1 ? "" : "s",
                                  report_.device == "host" ? "simulated devices in host memory"
                                                           : report_.device)});
  table.add({"device blocks",
             fmt::format("{} ({} on each rank)", with_separators(plan_.sizing.gpu_blocks),
                         ipc::format_size(plan_.sizing.gpu_blocks *
                                          device_bytes_per_block(config_.geometry)))});
  table.add(
      {"host memory", fmt::format("{} (about {} blocks)", ipc::format_size(plan_.sizing.host_bytes),
                                  with_separators(plan_.sizing.host_bytes / host_block))});
  table.add(
      {"processes",
       fmt::format("1 manager, {0} mover{1}, {0} worker{1}; arena {2}, made by "
                   "the {3}, {4} handles",
                   config_.geometry.ranks, config_.geometry.ranks == 1 ? "" : "s", report_.arena,
                   config_.arena_memory == worker::ArenaMemory::kEngine ? "worker's engine"
                                                                        : report_.cache_owner,
                   report_.handles)});
  table.add({"look at it", fmt::format("kvferry status --runtime-dir {} --instance {}",
                                       dir_.path().string(), config_.instance)});
  print_err("kvferry replay\n{}", table.render("  "));
}

ipc::Status ReplayRun::start_children() {
  for (ChildSpec& child : replay_children(config_, plan_, dir_.path())) {
    KVFERRY_TRY(supervisor_->start(std::move(child)));
  }
  return ipc::ok();
}

void ReplayRun::start_engine() {
  LifecycleDriver::Options cycles;
  cycles.runtime_dir = dir_.path().string();
  cycles.instance = config_.instance;
  cycles.engine = kReplayEngine;
  cycles.host = config_.clear_host;
  lifecycle_.emplace(
      loop_, cycles, counters_, *clear_memory_,
      LifecycleDriver::Hooks{[this] { return engine_->is_ready(); },
                             [this](const ipc::Error& error) { end(error.message); }});
  EngineOptions options;
  options.runtime_dir = dir_.path().string();
  options.instance = config_.instance;
  options.engine = kReplayEngine;
  options.geometry = config_.geometry;
  options.order = config_.arena.order;
  options.cache_owner = config_.arena.cache_owner;
  options.in_flight = config_.in_flight;
  options.decode_steps = config_.decode_steps;
  options.speed = config_.speed;
  options.verify = config_.verify;
  options.patience = config_.stall_timeout;
  options.start_limit = std::max<ipc::Duration>(config_.stall_timeout, kLeastStartLimit) +
                        kStartPerGib * static_cast<int>(plan_.sizing.host_bytes >> 30U);
  Engine::Hooks hooks;
  hooks.say = [this](const std::string& line) { progress_->say(line); };
  hooks.on_request_done = [this](std::uint64_t finished) {
    if (config_.clear_every > 0 && finished % config_.clear_every == 0) lifecycle_->start_cycle();
  };
  hooks.on_started = [this] {
    started_at_ = ipc::MonotonicClock::now();
    report_.started = true;
    observe_children();
  };
  hooks.deaths = [this] { return supervisor_->deaths(); };
  hooks.on_end = [this](const ipc::Status& status) {
    end(status ? std::nullopt : std::optional(status.error().to_string()));
  };
  engine_.emplace(loop_, std::move(options), trace_.requests, counters_, std::move(hooks));
}

void ReplayRun::end(std::optional<std::string> error) {
  if (error && !report_.error) report_.error = std::move(error);
  ended_ = true;
}

void ReplayRun::on_signal() {
  const int number = signals_.take();
  if (number == 0) return;
  if (!interrupted_at_) interrupted_at_ = ipc::MonotonicClock::now();
  if (supervisor_) supervisor_->hurry(ipc::Deadline::at(*interrupted_at_ + kInterruptedGrace));
  end(fmt::format("interrupted by signal {} after {} of {} requests", number, counters_.requests,
                  trace_.requests.size()));
}

void ReplayRun::tick() {
  progress_->update();
  if (stderr_reader_gone() && !ended_) end("nobody reads what it says on stderr any more");
  tick_timer_ = loop_.after(progress_->period(), [this] { tick(); });
}

void ReplayRun::observe_children() {
  loop_.cancel(observe_timer_);
  for (const pid_t pid : children_) host_probe_.observe(pid);
  observe_timer_ = loop_.after(kObservePeriod, [this] { observe_children(); });
}

void ReplayRun::play() {
  loop_.watch(signals_.fd(), [this] { on_signal(); });
  loop_.run_once(ipc::Deadline::after(0s));  // one that came while all was prepared
  if (ended_) return;
  tick_timer_ = loop_.after(progress_->period(), [this] { tick(); });
  if (const auto status = start_children(); !status) end(status.error().to_string());
  observe_children();
  start_engine();
  engine_->start();
  while (!ended_) loop_.run_once(ipc::Deadline::after(1s));
  // A cycle that still runs is part of the run: the cache comes back before all ends.
  const ipc::Deadline last_cycle = ipc::Deadline::after(30s);
  while (!report_.error && !lifecycle_->is_idle() && !last_cycle.expired()) {
    loop_.run_once(last_cycle);
  }
  report_.duration_s =
      std::chrono::duration<double>(ipc::MonotonicClock::now() - started_at_).count();
}

ipc::Result<std::uint64_t> ReplayRun::settled_device_bytes() {
  const ipc::Deadline deadline = ipc::Deadline::after(kDeviceSettle);
  while (true) {
    KVFERRY_ASSIGN(const std::uint64_t taken, device_probe_->taken_bytes());
    const bool in_a_hurry =
        interrupted_at_ && ipc::MonotonicClock::now() > *interrupted_at_ + kInterruptedSettle;
    if (taken == 0 || in_a_hurry || deadline.expired()) return taken;
    loop_.run_once(ipc::Deadline::after(kLookAgain).earlier(deadline));
  }
}

void ReplayRun::take_down() {
  loop_.cancel(tick_timer_);
  if (!report_.error) progress_->update();
  progress_->finish();
  observe_children();
  loop_.cancel(observe_timer_);
  lifecycle_.reset();
  engine_.reset();
  supervisor_->stop(kStopGrace + kStopPerGib * static_cast<int>(plan_.sizing.host_bytes >> 30U));
  if (report_.error && !interrupted_at_ && !supervisor_->hopeless()) {
    (void)write_err(supervisor_->logs(kLogTail));
  }
  report_.restarts = supervisor_->restarts();
  if (supervisor_->ended_unreplaced()) dir_.remove_stale_names(config_.instance);
  supervisor_.reset();
  report_.counters = counters_;
  report_.clear_memory = clear_memory_->clears();
  const auto leaked = settled_device_bytes();
  if (leaked) {
    report_.leaked_device_bytes = *leaked;
  } else if (!report_.error) {
    report_.error = "device memory could not be looked at: " + leaked.error().to_string();
  }
  report_.leaked_host_bytes = host_probe_.leaked_bytes();
  report_.leftover_names = dir_.leftovers(config_.instance);
}

ReplayReport ReplayRun::run() {
  const TraceFacts facts = count_trace(trace_.requests);
  decide_sizes(facts);
  print_header(facts);
  progress_.emplace(trace_.requests.size(), counters_);
  Supervisor::Hooks hooks;
  hooks.say = [this](const std::string& line) { progress_->say(line); };
  hooks.on_hopeless = [this](const ipc::Error& error) { end(error.message); };
  hooks.on_started = [this](pid_t pid) {
    children_.push_back(pid);
    clear_memory_->note_process_change();
  };
  hooks.on_death = [this] {
    clear_memory_->note_process_change();
    observe_children();
  };
  supervisor_.emplace(loop_, log_dir(), std::move(hooks));
  play();
  take_down();
  return report_;
}

}  // namespace

int run_replay(const ReplayConfig& config, const Trace& trace) {
  try {
    ipc::SignalFd signals;  // before anything that would be left behind, or starts threads
    auto dir = RunDir::create(config.runtime_base);
    if (!dir) return failure("replay", dir.error());
    const ReplayReport report = ReplayRun(config, trace, *dir, signals).run();
    if (report.started) (void)write_out(summarize(report));
    if (!config.log_dir.empty()) print_err("logs of the processes: {}\n", config.log_dir);
    int code = kExitDone;
    if (!config.report_file.empty()) {
      if (const auto written = write_report(report, config.report_file); !written) {
        code = failure("replay", written.error());
      }
    }
    for (const std::string& reason : failures_of(report)) {
      print_err("kvferry replay: FAILED: {}\n", reason);
      code = kExitFailed;
    }
    return code;
  } catch (const ipc::Exception& error) {
    return failure("replay", error.error());
  }
}

}  // namespace kvferry::cli
