// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/generation_messages.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

namespace kvferry::worker {

/// An engine's line to the reference worker of one rank. Finds the worker again when it was
/// replaced.
/// @threading the loop's thread.
class StepChannel {
 public:
  using Done = std::function<void(ipc::Result<ipc::StepReply>)>;
  using DecodeDone = std::function<void(ipc::Result<ipc::DecodeReply>)>;
  using MemoryDone = std::function<void(ipc::Result<ipc::WorkerMemory>)>;
  struct Hooks {
    std::function<void()> on_up;
    /// The worker is proven dead; all its steps have ended with kPeerDied before.
    std::function<void()> on_lost;
  };

  /// name: what the worker calls this side in its log.
  StepChannel(ipc::EventLoop& loop,
              ipc::RuntimeDir dir,
              std::string engine,
              ipc::Rank rank,
              std::string name,
              Hooks hooks);
  StepChannel(const StepChannel&) = delete;
  StepChannel& operator=(const StepChannel&) = delete;
  ~StepChannel();

  /// No sooner than the last worker's death is proven: until then it may write to its blocks.
  [[nodiscard]] bool is_up() const noexcept { return link_ != nullptr; }
  /// done is called exactly once from the loop, unless this object ends before. An error here means
  /// that nothing was sent and done is not called. So for the others.
  [[nodiscard]] ipc::Status send(const ipc::Step& step, Done done);
  [[nodiscard]] ipc::Status send(const ipc::Decode& pass, DecodeDone done);
  [[nodiscard]] ipc::Status ask_memory(MemoryDone done);

 private:
  using Answered = std::function<void(ipc::Result<ipc::Envelope>)>;
  [[nodiscard]] ipc::Status ask(ipc::MessageKind kind, ipc::Bytes body, Answered answered);
  void connect();
  void connect_later();
  void on_readable();
  void drop_unknown(const ipc::Error& error);
  void on_lost();
  void on_death();

  ipc::EventLoop& loop_;
  const ipc::RuntimeDir dir_;
  const std::string engine_;
  const ipc::Rank rank_;
  const std::string name_;
  Hooks hooks_;
  std::unique_ptr<ipc::ControlLink> link_;
  std::unique_ptr<ipc::ControlLink> departed_;  ///< Ended, its worker's death not yet proven.
  std::unordered_map<std::uint64_t, Answered> pending_;
  ipc::TimerId timer_ = 0;
};

}  // namespace kvferry::worker
