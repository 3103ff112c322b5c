// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/generation_channel.hpp"
#include "operator_calls.hpp"
#include "rl/cycle.hpp"
#include "rl/memory_watch.hpp"
#include "rl/prompts.hpp"
#include "rl/record.hpp"
#include "rl/report.hpp"
#include "rl/rollouts.hpp"
#include "rl/verifier.hpp"
#include "rl/weights_files.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

/// The loop of RL users on an engine that runs: rollouts, and when half of them are answered a
/// Cycle, so many times. Requests that a cycle stopped go on beside the next iteration's rollouts,
/// and end before its cycle.
/// @threading the loop's thread.
class LoopDriver {
 public:
  struct Options {
    std::string runtime_dir;
    std::string instance;
    std::uint32_t ranks = 1;
    std::uint32_t iterations = 1;
    std::vector<std::string> lenders;  ///< Names of those that have to lend before it begins.
    Cycle::Options cycle;
    ipc::Duration start_limit{};  ///< From start() until all processes work together.
    ipc::Duration patience{};     ///< When no request ends.
  };
  struct Hooks {
    std::function<void(const std::string& line)> say;
    /// Every process is there: the first request goes out.
    std::function<void()> on_started;
    /// It and all of its requests have ended.
    std::function<void(const IterationRecord&)> on_iteration;
    /// Everything is done and answered, or it cannot go on.
    std::function<void(const ipc::Status&)> on_end;
  };

  /// Prompts and weights outlive this. The workers have been started with the first weights.
  /// Throws Exception when the instance's directory cannot be had.
  LoopDriver(ipc::EventLoop& loop,
             Options options,
             const PromptSet& prompts,
             const std::vector<WeightsVersion>& weights,
             Hooks hooks);
  LoopDriver(const LoopDriver&) = delete;
  LoopDriver& operator=(const LoopDriver&) = delete;
  ~LoopDriver();

  /// Looks for the processes; everything else follows from the loop.
  void start();
  /// What it does now, in words.
  [[nodiscard]] std::string doing() const;
  /// Adds what it knows.
  void fill(RlReport& report) const;

 private:
  enum class Phase : std::uint8_t { kStarting, kRollouts, kCycle, kDraining, kEnded };

  void look_for_processes();
  void look_again();
  void on_status(const ipc::Result<ipc::Envelope>& answer);
  void begin_iteration();
  void on_answer(std::uint32_t iteration, std::size_t prompt, const ipc::GenerateReply& reply);
  /// Goes on when enough requests have been answered.
  void check();
  /// version: of the weights that it updated to.
  void on_cycle_done(const ipc::Status& status, std::uint32_t version);
  void expect_progress(ipc::Duration limit);
  void end(const ipc::Status& status);
  [[nodiscard]] std::uint32_t current() const {
    return static_cast<std::uint32_t>(iterations_.size());
  }
  [[nodiscard]] const WeightsVersion& weights_of(std::uint32_t version) const {
    return weights_[version];
  }

  ipc::EventLoop& loop_;
  const Options options_;
  const PromptSet& prompts_;
  const std::vector<WeightsVersion>& weights_;
  Hooks hooks_;
  ipc::RuntimeDir dir_;
  OperatorCalls calls_;
  worker::GenerationChannel channel_;
  MemoryWatch memory_;
  Verifier verifier_;
  Rollouts rollouts_;
  Cycle cycle_;
  Phase phase_ = Phase::kStarting;
  // While starting. What the manager missed stands until it answers anew: a limit that ends
  // between the two still names it.
  std::vector<std::string> missing_here_;
  std::vector<std::string> missing_there_{"an answer of the manager"};
  std::deque<IterationRecord> iterations_;  ///< A cycle writes into the last one.
  std::size_t asked_ = 0;                   ///< Requests of the iteration that runs.
  ipc::TimePoint began_at_{};
  ipc::TimerId look_timer_ = 0;
  ipc::TimerId stall_timer_ = 0;
};

}  // namespace kvferry::cli
