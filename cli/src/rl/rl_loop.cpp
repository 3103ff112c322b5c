// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/rl_loop.hpp"

#include "command.hpp"
#include "options.hpp"
#include "print.hpp"
#include "rl/live_table.hpp"
#include "rl/loop_driver.hpp"
#include "rl/plot.hpp"
#include "rl/report.hpp"
#include "rl/set_up.hpp"
#include "run/processes.hpp"
#include "run/report_file.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <optional>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

/// One loop from the first child to the last: set up, run, taken down.
class RlRun {
 public:
  /// Throws Exception when it cannot be set up.
  RlRun(const RlConfig& config, RunDir& dir, ipc::SignalFd& signals)
      : config_(config),
        dir_(dir),
        signals_(signals),
        set_up_(set_up_rl_loop(config, dir)),
        table_(config.iterations) {}

  /// The report is complete on return.
  RlReport run();

 private:
  void start();
  void start_driver();
  void take_down();
  void end(std::optional<std::string> error);
  void on_signal();
  void tick();
  /// What takes its time to be there at the start, and to be gone at the end.
  [[nodiscard]] std::uint64_t bytes_to_prepare() const noexcept {
    return set_up_.plan.host_bytes + set_up_.settings.lent_bytes;
  }

  const RlConfig& config_;
  RunDir& dir_;
  ipc::SignalFd& signals_;
  RlSetUp set_up_;
  RlReport report_;
  ipc::EventLoop loop_;
  LiveTable table_;
  std::optional<RunProcesses> processes_;
  std::optional<LoopDriver> driver_;
  bool ended_ = false;
  ipc::TimePoint started_at_ = ipc::MonotonicClock::now();
  ipc::TimerId tick_timer_ = 0;
};

void RlRun::end(std::optional<std::string> error) {
  if (ended_) return;
  ended_ = true;
  if (error) report_.errors.push_back(std::move(*error));
}

void RlRun::on_signal() {
  const int number = signals_.take();
  if (number == 0) return;
  if (processes_) processes_->interrupt();
  end(fmt::format("interrupted by signal {}{}", number,
                  driver_ ? fmt::format("; {}", driver_->doing()) : ""));
}

void RlRun::tick() {
  if (driver_) table_.update(driver_->doing());
  if (stderr_reader_gone()) end("nobody reads what it says on stderr any more");
  tick_timer_ = loop_.after(table_.period(), [this] { tick(); });
}

void RlRun::start_driver() {
  LoopDriver::Options options;
  options.runtime_dir = dir_.path().string();
  options.instance = config_.instance;
  options.ranks = config_.geometry.ranks;
  options.iterations = config_.iterations;
  for (const LenderPlan& lender : set_up_.plan.lenders) options.lenders.push_back(lender.name);
  options.cycle = {set_up_.plan.engine, config_.mode,  config_.update,
                   config_.empty_cache, config_.clear, config_.release};
  options.patience = config_.stall_timeout;
  options.start_limit = start_limit(config_.stall_timeout, bytes_to_prepare());
  LoopDriver::Hooks hooks;
  hooks.say = [this](const std::string& line) { table_.say(line); };
  hooks.on_started = [this] {
    started_at_ = ipc::MonotonicClock::now();
    report_.started = true;
    processes_->observe();
  };
  hooks.on_iteration = [this](const IterationRecord& iteration) { table_.add(iteration); };
  hooks.on_end = [this](const ipc::Status& status) {
    if (status) return end(std::nullopt);
    const std::uint64_t deaths = processes_->deaths();
    end(status.error().to_string() +
        (deaths > 0 ? fmt::format(" ({} processes have died)", deaths) : ""));
  };
  driver_.emplace(loop_, std::move(options), set_up_.prompts, set_up_.weights, std::move(hooks));
  driver_->start();
}

void RlRun::start() {
  loop_.watch(signals_.fd(), [this] { on_signal(); });
  loop_.run_once(ipc::Deadline::after(0s));  // one that came while all was prepared
  if (ended_) return;
  tick_timer_ = loop_.after(table_.period(), [this] { tick(); });
  if (const auto started = processes_->start(instance_children(set_up_.plan, dir_.path()));
      !started) {
    return end(started.error().to_string());
  }
  processes_->observe();
  start_driver();
}

void RlRun::take_down() {
  loop_.cancel(tick_timer_);
  table_.finish();
  if (report_.started) {
    report_.duration_s =
        std::chrono::duration<double>(ipc::MonotonicClock::now() - started_at_).count();
  }
  if (driver_) driver_->fill(report_);
  processes_->observe();
  driver_.reset();
  const Leavings left =
      processes_->end(set_up_.devices, bytes_to_prepare(), !report_.errors.empty());
  processes_.reset();
  report_.restarts = left.restarts;
  report_.leaked_device_bytes = left.device_bytes;
  report_.leaked_host_bytes = left.host_bytes;
  report_.leftover_names = left.names;
  if (left.error) {
    report_.errors.push_back("device memory could not be looked at: " + left.error->to_string());
  }
}

RlReport RlRun::run() {
  report_.settings = set_up_.settings;
  print_err("{}", rl_heading(config_, set_up_, dir_));
  RunProcesses::Hooks hooks;
  hooks.say = [this](const std::string& line) { table_.say(line); };
  hooks.on_hopeless = [this](const ipc::Error& error) { end(error.message); };
  hooks.on_change = [] {};
  processes_.emplace(loop_, dir_, config_.instance,
                     config_.log_dir.empty() ? dir_.logs() : std::filesystem::path(config_.log_dir),
                     std::move(hooks));
  start();
  while (!ended_) loop_.run_once(ipc::Deadline::after(1s));
  take_down();
  return std::move(report_);
}

int write_files(const RlConfig& config, const RlReport& report) {
  int code = kExitDone;
  const auto write = [&code](const std::string& text, const std::string& file) {
    if (file.empty()) return;
    if (const auto written = write_report_file(text, file); !written) {
      code = failure("rl-loop", written.error());
    }
  };
  write(to_json(report).dump(2) + "\n", config.report_file);
  write(draw_plot(report), config.plot_file);
  return code;
}

}  // namespace

int run_rl_loop(const RlConfig& config) {
  try {
    ipc::SignalFd signals;  // before anything that would be left behind, or starts threads
    auto dir = RunDir::create(config.runtime_base, "rl");
    if (!dir) return failure("rl-loop", dir.error());
    const RlReport report = RlRun(config, *dir, signals).run();
    if (report.started) (void)write_out(summarize(report));
    if (!config.log_dir.empty()) print_err("logs of the processes: {}\n", config.log_dir);
    int code = write_files(config, report);
    for (const std::string& reason : failures_of(report)) {
      print_err("kvferry rl-loop: FAILED: {}\n", reason);
      code = kExitFailed;
    }
    return code;
  } catch (const ipc::Exception& error) {
    return failure("rl-loop", error.error());
  }
}

}  // namespace kvferry::cli
