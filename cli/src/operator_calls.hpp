// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <functional>
#include <memory>
#include <string>

namespace kvferry::cli {

/// An operator's commands for a program that has other things to do meanwhile: asks the manager of
/// an instance for one at a time and gets the answer from the loop. Connects when it has to.
/// @threading the loop's thread.
class OperatorCalls {
 public:
  /// The whole answer: its error, when it has one, is the command's.
  using Done = std::function<void(ipc::Result<ipc::Envelope>)>;

  OperatorCalls(ipc::EventLoop& loop, std::string runtime_dir, std::string instance);
  OperatorCalls(const OperatorCalls&) = delete;
  OperatorCalls& operator=(const OperatorCalls&) = delete;
  ~OperatorCalls();

  /// done is called once from the loop unless this object ends before: with the answer, with
  /// kPeerDied when the manager died, with kTimeout after `limit`. An error here (kNoManager and
  /// others of a connection) means that nothing was sent and done is not called.
  /// @pre no other command is under way.
  [[nodiscard]] ipc::Status ask(ipc::MessageKind kind,
                                ipc::Bytes body,
                                ipc::Duration limit,
                                Done done);
  [[nodiscard]] bool is_idle() const noexcept { return done_ == nullptr; }

 private:
  [[nodiscard]] ipc::Status connect();
  void drop_link();
  void on_readable();
  void finish(ipc::Result<ipc::Envelope> answer);

  ipc::EventLoop& loop_;
  const std::string runtime_dir_;
  const std::string instance_;
  std::unique_ptr<ipc::ControlLink> link_;
  ipc::RequestId request_;
  Done done_;  ///< Of the command under way.
  ipc::TimerId timer_ = 0;
};

}  // namespace kvferry::cli
