// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "operator_calls.hpp"
#include "rl/memory_watch.hpp"
#include "rl/record.hpp"
#include "rl/update_kind.hpp"
#include "rl/weights_files.hpp"
#include "weights_sender.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// What an iteration does to the engine between its rollouts: pause, release and resume when asked
/// for, update, clear and re-init when asked for, look, continue, look again. Everything is asked
/// of the manager as an operator would, and nothing here waits on the loop's thread.
/// @threading the loop's thread.
class Cycle {
 public:
  struct Options {
    std::string engine;
    ipc::PauseMode mode = ipc::PauseMode::kRetract;
    UpdateKind update = UpdateKind::kDisk;
    bool empty_cache = true;
    bool clear = false;
    bool release = false;  ///< Not with frozen requests.
  };
  /// ok: the record has everything but its requests. Else what went wrong, and in which step.
  using Done = std::function<void(const ipc::Status&)>;

  /// calls and memory outlive this.
  Cycle(ipc::EventLoop& loop, OperatorCalls& calls, MemoryWatch& memory, Options options);
  Cycle(const Cycle&) = delete;
  Cycle& operator=(const Cycle&) = delete;
  ~Cycle();

  /// weights: what it updates to. done is called once from the loop. @lifetime record and weights
  /// outlive that. @pre none is under way.
  void start(const WeightsVersion& weights, IterationRecord& record, Done done);
  /// The step under way, in words.
  [[nodiscard]] std::string_view step() const noexcept { return step_; }

  /// Continues that emptied every rank, so far.
  [[nodiscard]] std::uint64_t emptied_continues() const noexcept { return emptied_continues_; }
  /// UpdateWeightsReply::transport of the latest update; empty: rank 0 handed nothing on.
  [[nodiscard]] const std::string& transport() const noexcept { return transport_; }
  /// Clears that left memory with a peer.
  [[nodiscard]] std::uint64_t quarantined() const noexcept { return quarantined_; }
  /// As seen at the end of the latest iteration.
  [[nodiscard]] const std::vector<ipc::WorkerMemory>& workers() const noexcept { return workers_; }

 private:
  /// One command: `then` gets its reply when it went through.
  template <typename Reply, typename Request, typename Then>
  void ask(ipc::MessageKind kind,
           std::string_view step,
           const Request& request,
           ipc::Duration more,
           Then then);
  void pause_engine();
  void release_memory();
  void resume_memory();
  void update_weights();
  void ask_for_update();
  /// The engine may not be idle yet: asks again for a while.
  void on_refused(const ipc::Error& why, void (Cycle::*again)());
  void on_updated(const ipc::UpdateWeightsReply& reply);
  void clear_cache();
  void on_cleared(const ipc::Result<ipc::Envelope>& answer);
  void reinit_cache();
  void look_before();
  void continue_engine();
  void on_continued(const ipc::ContinueReply& reply);
  void look_after();
  void fail(const ipc::Error& why);
  void finish(const ipc::Status& status);
  [[nodiscard]] double ms_since_asked() const;

  ipc::EventLoop& loop_;
  OperatorCalls& calls_;
  WeightsSender sender_;
  MemoryWatch& memory_;
  const Options options_;
  const WeightsVersion* weights_ = nullptr;
  ipc::WeightsSource source_;  ///< Of the update under way.
  IterationRecord* record_ = nullptr;
  Done done_;
  std::string_view step_ = "nothing";
  ipc::TimePoint asked_at_{};
  ipc::TimePoint idle_by_{};  ///< A refusal as busy or not idle is not final before.
  ipc::TimerId timer_ = 0;
  std::string transport_;
  std::uint64_t emptied_continues_ = 0;
  std::uint64_t quarantined_ = 0;
  std::vector<ipc::WorkerMemory> workers_;
};

}  // namespace kvferry::cli
