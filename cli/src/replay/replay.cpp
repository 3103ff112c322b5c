// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/replay.hpp"

#include "command.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "must.hpp"
#include "print.hpp"
#include "replay/lifecycle.hpp"
#include "replay/progress.hpp"
#include "replay/report.hpp"
#include "replay/sampler.hpp"
#include "replay/sizing.hpp"
#include "run/children.hpp"
#include "run/leak_check.hpp"
#include "run/processes.hpp"
#include "run/run_dir.hpp"
#include "table.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <optional>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

std::string_view to_text(VerifyPolicy policy) {
  switch (policy) {
    case VerifyPolicy::kOff: return "off";
    case VerifyPolicy::kSample: return "sample";
    case VerifyPolicy::kFull: return "full";
  }
  return "off";
}

/// The name under which a replay's workers, movers and engine find each other.
constexpr std::string_view kReplayEngine = "replay";
constexpr ipc::Duration kLastSample = 2s;

/// An option is wrong, which only what was found out since shows.
class BadOption : public ipc::Exception {
 public:
  using Exception::Exception;
};

/// One replay from the first child to the last: set up, played, taken down.
class ReplayRun {
 public:
  ReplayRun(const ReplayConfig& config, const Trace& trace, RunDir& dir, ipc::SignalFd& signals)
      : config_(config), trace_(trace), dir_(dir), signals_(signals) {}

  /// Throws BadOption or another Exception when it cannot be set up. The report is complete on
  /// return.
  ReplayReport run();

 private:
  void decide_sizes(const TraceFacts& facts);
  void print_header(const TraceFacts& facts) const;
  [[nodiscard]] std::filesystem::path log_dir() const {
    return config_.log_dir.empty() ? dir_.logs() : std::filesystem::path(config_.log_dir);
  }
  void start_engine();
  void play();
  void take_down();
  void end(std::optional<std::string> error);
  void on_signal();
  void tick();
  [[nodiscard]] double seconds_played() const {
    return std::chrono::duration<double>(ipc::MonotonicClock::now() - started_at_).count();
  }

  const ReplayConfig& config_;
  const Trace& trace_;
  RunDir& dir_;
  ReplayReport report_;
  ReplayCounters counters_;
  DeathLog deaths_;
  ipc::SignalFd& signals_;
  ipc::EventLoop loop_;
  InstancePlan plan_;
  std::optional<DeviceProbe> device_probe_;
  std::optional<ClearMemoryLog> clear_memory_;
  std::optional<Progress> progress_;
  std::optional<RunProcesses> processes_;
  std::optional<LifecycleDriver> lifecycle_;
  std::optional<Engine> engine_;
  std::optional<Sampler> sampler_;
  bool ended_ = false;
  ipc::TimePoint started_at_ = ipc::MonotonicClock::now();
  ipc::TimerId tick_timer_ = 0;
};

void ReplayRun::decide_sizes(const TraceFacts& facts) {
  const bool cuda = config_.devices.kind == ipc::DeviceKind::kCuda;
  SizingLimits limits;
  limits.host_available = available_host_bytes();
  limits.host_bytes = limits.host_available / 2;
  limits.devices_in_host_memory = !cuda;
  plan_.devices = cuda_devices(config_.devices, config_.geometry.ranks);
  if (cuda) {
    device_probe_.emplace(plan_.devices);
    // Contexts, staging and scratch of two processes take their part.
    limits.device_bytes = device_probe_->smallest_free_bytes() * 3 / 5 /
                          config_.devices.ranks_on_each(config_.geometry.ranks);
  }
  const Sizing sizing =
      must(choose_sizes(config_.geometry, facts, config_.gpu_blocks, config_.host_memory, limits));
  plan_.instance = config_.instance;
  plan_.engine = kReplayEngine;
  plan_.log_level = config_.log_level;
  plan_.geometry_name = config_.geometry_name;
  plan_.gpu_blocks = sizing.gpu_blocks;
  plan_.host_bytes = sizing.host_bytes;
  plan_.eviction_policy = config_.eviction_policy;
  plan_.namespace_quotas = config_.namespace_quotas;
  // As a manager says it of its own pool, before anything starts.
  const auto fits = must(parse_namespace_quotas(plan_.namespace_quotas)).check(plan_.host_bytes);
  if (!fits) throw BadOption(fits.error());
  plan_.choice = config_.arena;
  plan_.arena_memory = config_.arena_memory;
  plan_.strategy = config_.strategy;
  plan_.arena =
      make_arena_options(config_.arena, config_.geometry, plan_.gpu_blocks, config_.devices.kind);
  if (!cuda) {
    plan_.devices =
        must(host_devices(fmt::format("replay-{}", dir_.token()), config_.geometry, plan_.arena));
    device_probe_.emplace(plan_.devices);
  }
  clear_memory_.emplace(*device_probe_, plan_.devices,
                        must(ipc::plan_arena(config_.geometry, plan_.arena)).total_bytes());
  report_.requests_given = trace_.requests.size();
  report_.skipped_lines = trace_.skipped_lines;
  report_.device = describe_devices(plan_.devices);
  report_.geometry = config_.geometry_name;
  report_.ranks = config_.geometry.ranks;
  report_.gpu_blocks = plan_.gpu_blocks;
  report_.unit_blocks = config_.tier.unit_blocks;
  report_.name_space = config_.tier.name_space;
  report_.host_memory_bytes = plan_.host_bytes;
  report_.workload = config_.workload_text;
  report_.cache_owner = ipc::to_string(config_.arena.cache_owner);
  report_.handles = ipc::to_string(config_.arena.handles);
  report_.arena_memory = worker::to_string(config_.arena_memory);
  report_.arena = ipc::to_string(config_.arena.order);
  report_.verify = to_text(config_.verify);
  report_.write_policy = worker::to_string(config_.tier.write.mode);
  report_.prefetch = config_.tier.prefetch;
  report_.recompute = worker::to_string(config_.tier.recompute.mode);
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
  table.add(
      {"device blocks",
       fmt::format("{} ({} on each rank)", with_separators(plan_.gpu_blocks),
                   ipc::format_size(plan_.gpu_blocks * device_bytes_per_block(config_.geometry)))});
  const std::uint32_t unit = config_.tier.unit_blocks;
  table.add(
      {"host memory", fmt::format("{} (about {} blocks{})", ipc::format_size(plan_.host_bytes),
                                  with_separators(plan_.host_bytes / host_block),
                                  unit > 1 ? fmt::format(" in units of up to {}", unit) : "")});
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
  options.tier = config_.tier.made();
  options.patience = config_.stall_timeout;
  options.start_limit = start_limit(config_.stall_timeout, plan_.host_bytes);
  Engine::Hooks hooks;
  hooks.say = [this](const std::string& line) { progress_->say(line); };
  hooks.on_request_done = [this](std::uint64_t finished) {
    if (config_.clear_every > 0 && finished % config_.clear_every == 0) lifecycle_->start_cycle();
    sampler_->on_request_done(finished);
  };
  hooks.on_started = [this] {
    started_at_ = ipc::MonotonicClock::now();
    report_.started = true;
    processes_->observe();
    sampler_->start();
  };
  hooks.deaths = [this] { return processes_->deaths(); };
  hooks.on_end = [this](const ipc::Status& status) {
    end(status ? std::nullopt : std::optional(status.error().to_string()));
  };
  engine_.emplace(loop_, std::move(options), trace_.requests, counters_, std::move(hooks));
  sampler_.emplace(loop_, dir_.path().string(), config_.instance,
                   Sampler::Hooks{[this] { return processes_->running(); },
                                  [this] { return engine_->manager_serves(); },
                                  [this] { return counters_.requests; }});
}

void ReplayRun::end(std::optional<std::string> error) {
  if (error && !report_.error) report_.error = std::move(error);
  ended_ = true;
}

void ReplayRun::on_signal() {
  const int number = signals_.take();
  if (number == 0) return;
  processes_->interrupt();
  end(fmt::format("interrupted by signal {} after {} of {} requests", number, counters_.requests,
                  trace_.requests.size()));
}

void ReplayRun::tick() {
  progress_->update();
  if (stderr_reader_gone() && !ended_) end("nobody reads what it says on stderr any more");
  tick_timer_ = loop_.after(progress_->period(), [this] { tick(); });
}

void ReplayRun::play() {
  loop_.watch(signals_.fd(), [this] { on_signal(); });
  loop_.run_once(ipc::Deadline::after(0s));  // one that came while all was prepared
  if (ended_) return;
  tick_timer_ = loop_.after(progress_->period(), [this] { tick(); });
  if (const auto status = processes_->start(instance_children(plan_, dir_.path())); !status) {
    end(status.error().to_string());
  }
  processes_->observe();
  start_engine();
  engine_->start();
  while (!ended_) loop_.run_once(ipc::Deadline::after(1s));
  // A cycle that still runs is part of the run: the cache comes back before all ends.
  const ipc::Deadline last_cycle = ipc::Deadline::after(30s);
  while (!report_.error && !lifecycle_->is_idle() && !last_cycle.expired()) {
    loop_.run_once(last_cycle);
  }
  report_.duration_s = seconds_played();
  if (report_.started && !report_.error) sampler_->finish(ipc::Deadline::after(kLastSample));
}

void ReplayRun::take_down() {
  loop_.cancel(tick_timer_);
  if (!report_.error) progress_->update();
  progress_->finish();
  processes_->observe();
  lifecycle_.reset();
  if (sampler_) report_.samples = sampler_->samples();
  sampler_.reset();
  engine_.reset();
  const Leavings left =
      processes_->end(*device_probe_, plan_.host_bytes, report_.error.has_value());
  processes_.reset();
  report_.counters = counters_;
  report_.clear_memory = clear_memory_->clears();
  report_.restarts = left.restarts;
  report_.deaths = deaths_.ended(counters_);
  report_.leaked_device_bytes = left.device_bytes;
  report_.leaked_host_bytes = left.host_bytes;
  report_.leftover_names = left.names;
  if (left.error && !report_.error) {
    report_.error = "device memory could not be looked at: " + left.error->to_string();
  }
}

ReplayReport ReplayRun::run() {
  const TraceFacts facts = count_trace(trace_.requests);
  decide_sizes(facts);
  print_header(facts);
  progress_.emplace(trace_.requests.size(), counters_);
  RunProcesses::Hooks hooks;
  hooks.say = [this](const std::string& line) { progress_->say(line); };
  hooks.on_hopeless = [this](const ipc::Error& error) { end(error.message); };
  hooks.on_change = [this] { clear_memory_->note_process_change(); };
  hooks.on_death = [this](const std::string& process) {
    if (report_.started && !ended_) deaths_.add(process, seconds_played(), counters_);
  };
  processes_.emplace(loop_, dir_, config_.instance, log_dir(), std::move(hooks));
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
  } catch (const BadOption& error) {
    print_err("kvferry replay: {}\n", error.error().message);
    return kExitUsage;
  } catch (const ipc::Exception& error) {
    return failure("replay", error.error());
  }
}

}  // namespace kvferry::cli
