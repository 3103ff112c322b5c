// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/loop_driver.hpp"

#include "rl/lenders.hpp"
#include "rl/readiness.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kProcessLook = 50ms;
constexpr ipc::Duration kStatusWait = 5s;

ipc::RuntimeDir open_dir(const std::string& runtime_dir, const std::string& instance) {
  auto dir = ipc::RuntimeDir::open(runtime_dir, instance);
  if (!dir) throw ipc::Exception(dir.error());
  return std::move(*dir);
}

}  // namespace

LoopDriver::LoopDriver(ipc::EventLoop& loop,
                       Options options,
                       const PromptSet& prompts,
                       const std::vector<WeightsVersion>& weights,
                       Hooks hooks)
    : loop_(loop),
      options_(std::move(options)),
      prompts_(prompts),
      weights_(weights),
      hooks_(std::move(hooks)),
      dir_(open_dir(options_.runtime_dir, options_.instance)),
      calls_(loop, options_.runtime_dir, options_.instance),
      channel_(loop, dir_, options_.cycle.engine, "rl-loop", [] {}),
      memory_(loop, dir_, options_.cycle.engine, options_.ranks, [] {}),
      verifier_(prompts.all(), hooks_.say),
      rollouts_(
          loop,
          channel_,
          prompts.all(),
          {[this](std::uint32_t iteration, std::size_t prompt, const ipc::GenerateReply& reply) {
             on_answer(iteration, prompt, reply);
           },
           [this](const ipc::Error& error) { end(error); }}),
      cycle_(loop, calls_, memory_, options_.cycle) {}

LoopDriver::~LoopDriver() {
  loop_.cancel(look_timer_);
  loop_.cancel(stall_timer_);
}

void LoopDriver::start() {
  expect_progress(options_.start_limit);
  look_for_processes();
}

void LoopDriver::look_again() {
  look_timer_ = loop_.after(kProcessLook, [this] { look_for_processes(); });
}

void LoopDriver::look_for_processes() {
  if (phase_ != Phase::kStarting) return;
  missing_here_.clear();
  for (const std::uint32_t rank : memory_.missing()) {
    missing_here_.push_back(fmt::format("the worker of rank {}", rank));
  }
  if (!channel_.is_up()) {
    missing_here_.emplace_back("a scheduler that takes requests (with the worker of rank 0)");
  }
  for (const std::string& name : missing_lenders(dir_, options_.lenders)) {
    missing_here_.push_back("the lender " + name);
  }
  if (!missing_here_.empty()) return look_again();
  const auto sent =
      calls_.ask(ipc::MessageKind::kStatus, ipc::encode(ipc::Empty{}), kStatusWait,
                 [this](const ipc::Result<ipc::Envelope>& answer) { on_status(answer); });
  if (sent) return;
  missing_there_ = {"the manager"};
  look_again();
}

void LoopDriver::on_status(const ipc::Result<ipc::Envelope>& answer) {
  if (phase_ != Phase::kStarting) return;
  const auto status = answer ? ipc::decode<ipc::StatusReply>(answer->body, "StatusReply")
                             : ipc::Result<ipc::StatusReply>(answer.error());
  missing_there_ =
      status ? missing_from(status->json, options_.cycle.engine, options_.ranks, weights_of(0).id)
             : std::vector<std::string>{"the manager"};
  if (!missing_there_.empty()) return look_again();
  hooks_.on_started();
  begin_iteration();
}

void LoopDriver::begin_iteration() {
  phase_ = Phase::kRollouts;
  began_at_ = ipc::MonotonicClock::now();
  IterationRecord record;
  record.number = current() + 1;
  record.version = iterations_.empty() ? 0 : iterations_.back().version;
  record.weights = weights_of(record.version).id;
  iterations_.push_back(std::move(record));
  const std::vector<std::size_t> drawn = prompts_.of_iteration(current());
  asked_ = drawn.size();
  expect_progress(options_.patience);
  rollouts_.submit(current(), drawn);
}

void LoopDriver::on_answer(std::uint32_t iteration,
                           std::size_t prompt,
                           const ipc::GenerateReply& reply) {
  if (phase_ == Phase::kEnded) return;
  IterationRecord& record = iterations_[iteration - 1];
  verifier_.take(prompt, reply, record.answers);
  if (record.finished && rollouts_.outstanding(iteration) == 0) hooks_.on_iteration(record);
  if (phase_ != Phase::kCycle) expect_progress(options_.patience);
  check();
}

void LoopDriver::check() {
  if (phase_ == Phase::kDraining) {
    if (rollouts_.outstanding_until(current()) == 0) end(ipc::ok());
    return;
  }
  if (phase_ != Phase::kRollouts || rollouts_.outstanding(current()) > asked_ / 2 ||
      rollouts_.outstanding_until(current() - 1) > 0) {
    return;
  }
  phase_ = Phase::kCycle;
  loop_.cancel(stall_timer_);  // Each command has a deadline of its own.
  IterationRecord& record = iterations_.back();
  const bool updates = options_.cycle.update != UpdateKind::kNone;
  const std::uint32_t next = updates ? record.number % kWeightsVersions : record.version;
  cycle_.start(weights_of(next), record,
               [this, next](const ipc::Status& status) { on_cycle_done(status, next); });
}

void LoopDriver::on_cycle_done(const ipc::Status& status, std::uint32_t version) {
  if (phase_ == Phase::kEnded) return;
  if (!status) {
    ipc::Error error = status.error();
    error.message = fmt::format("iteration {}: {}", current(), error.message);
    return end(error);
  }
  IterationRecord& record = iterations_.back();
  record.version = version;
  record.weights = weights_of(version).id;
  record.seconds = std::chrono::duration<double>(ipc::MonotonicClock::now() - began_at_).count();
  record.finished = true;
  if (rollouts_.outstanding(record.number) == 0) hooks_.on_iteration(record);
  if (record.number < options_.iterations) return begin_iteration();
  phase_ = Phase::kDraining;
  expect_progress(options_.patience);
  check();
}

void LoopDriver::expect_progress(ipc::Duration limit) {
  loop_.cancel(stall_timer_);
  stall_timer_ = loop_.after(limit, [this, limit] {
    end(KVFERRY_ERROR(kTimeout, "nothing went on for {:.1f} s: {}",
                      std::chrono::duration<double>(limit).count(), doing()));
  });
}

std::string LoopDriver::doing() const {
  switch (phase_) {
    case Phase::kStarting:
      return fmt::format("waiting for {}",
                         fmt::join(missing_here_.empty() ? missing_there_ : missing_here_, ", "));
    case Phase::kRollouts: {
      const std::size_t earlier = rollouts_.outstanding_until(current() - 1);
      return fmt::format("iteration {} of {}: {} of {} requests answered{}", current(),
                         options_.iterations, asked_ - rollouts_.outstanding(current()), asked_,
                         earlier > 0 ? fmt::format(", {} of the one before go on", earlier) : "");
    }
    case Phase::kCycle:
      return fmt::format("iteration {} of {}: {}", current(), options_.iterations, cycle_.step());
    case Phase::kDraining:
      return fmt::format("waiting for the last {} requests",
                         rollouts_.outstanding_until(current()));
    case Phase::kEnded: return "ended";
  }
  return "ended";
}

void LoopDriver::end(const ipc::Status& status) {
  if (phase_ == Phase::kEnded) return;
  phase_ = Phase::kEnded;
  loop_.cancel(look_timer_);
  loop_.cancel(stall_timer_);
  hooks_.on_end(status);
}

void LoopDriver::fill(RlReport& report) const {
  report.iterations.assign(iterations_.begin(), iterations_.end());
  report.answers = verifier_.counts();
  report.compared_prompts = verifier_.compared_prompts();
  report.equal_prompts = verifier_.equal_prompts();
  report.submitted = rollouts_.submitted();
  report.unanswered = rollouts_.outstanding_until(current());
  report.workers = cycle_.workers();
  report.emptied_continues = cycle_.emptied_continues();
  report.quarantined = cycle_.quarantined();
  report.transport = cycle_.transport();
}

}  // namespace kvferry::cli
