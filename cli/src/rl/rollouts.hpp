// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/worker/generation_channel.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

namespace kvferry::cli {

/// Asks an engine's scheduler to answer prompts, for one iteration after the other, and keeps count
/// of what is still to come. A scheduler that takes no more at the moment is asked again.
/// @threading the loop's thread.
class Rollouts {
 public:
  struct Hooks {
    std::function<void(std::uint32_t iteration, std::size_t prompt, const ipc::GenerateReply&)>
        on_answer;
    /// A request will not be answered: the run is over.
    std::function<void(const ipc::Error&)> on_failed;
  };

  /// channel and prompts outlive this.
  Rollouts(ipc::EventLoop& loop,
           worker::GenerationChannel& channel,
           const std::vector<ipc::Generate>& prompts,
           Hooks hooks);
  Rollouts(const Rollouts&) = delete;
  Rollouts& operator=(const Rollouts&) = delete;
  ~Rollouts();

  /// Asks for these prompts, behind all that were asked for before.
  void submit(std::uint32_t iteration, const std::vector<std::size_t>& prompts);

  /// Requests of this iteration, or of those up to it, without an answer.
  [[nodiscard]] std::size_t outstanding(std::uint32_t iteration) const;
  [[nodiscard]] std::size_t outstanding_until(std::uint32_t iteration) const;
  [[nodiscard]] std::uint64_t submitted() const noexcept { return submitted_; }

 private:
  struct Request {
    std::uint32_t iteration = 0;
    std::size_t prompt = 0;
  };
  void send_queued();
  void on_done(const Request& request, const ipc::Result<ipc::GenerateReply>& reply);
  void try_again();

  ipc::EventLoop& loop_;
  worker::GenerationChannel& channel_;
  const std::vector<ipc::Generate>& prompts_;
  Hooks hooks_;
  std::deque<Request> queue_;                         ///< Not taken by the scheduler yet.
  std::map<std::uint32_t, std::size_t> outstanding_;  ///< By iteration, those queued included.
  std::uint64_t submitted_ = 0;
  ipc::TimerId timer_ = 0;
  bool waits_ = false;  ///< For the timer: the scheduler was busy.
};

}  // namespace kvferry::cli
