// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "rank/rank_self.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

namespace kvferry::ipc {

/// A rank's connection to whichever manager of its instance lives: connects and registers, notices
/// the manager's end, tries again until it is told to stop or refused for good.
/// @threading the loop's thread. @lifetime the destructor closes it.
class ManagerConnection {
 public:
  struct Hooks {
    /// Asked before each attempt; may be null.
    std::function<bool()> may_connect;
    /// Connected and accepted, before any message.
    std::function<void(const RegistryWelcome&, PoolMemory)> on_connected;
    std::function<void()> on_lost;
    std::function<void(Envelope)> on_message;
    /// No retry can mend it. Nothing is tried any more.
    std::function<void(const Error&)> on_refused;
  };

  /// The rank, its device and dir outlive it.
  ManagerConnection(EventLoop& loop, RankSelf self, const RuntimeDir& dir, Hooks hooks);
  ManagerConnection(const ManagerConnection&) = delete;
  ManagerConnection& operator=(const ManagerConnection&) = delete;
  ~ManagerConnection();

  /// Tries at once, and from then on again and again.
  void start() { try_connect(); }
  /// No further attempt; a connection that stands is kept.
  void give_up() noexcept { given_up_ = true; }

  /// Says bye and tries no more.
  void close();

  [[nodiscard]] bool is_connected() const noexcept { return link_ != nullptr; }
  /// kNoManager while there is none.
  [[nodiscard]] Status send(const Envelope& envelope);

 private:
  void schedule_connect();
  void try_connect();
  [[nodiscard]] Result<std::unique_ptr<ControlLink>> connect_and_register();
  void on_connect_failed(const Error& error);
  void drain();

  EventLoop& loop_;
  const RankSelf self_;
  const RuntimeDir& dir_;
  Hooks hooks_;
  std::unique_ptr<ControlLink> link_;
  TimerId timer_ = 0;
  std::chrono::milliseconds retry_;
  bool waiting_logged_ = false;
  std::optional<TimePoint> occupied_since_;  ///< The manager says that the rank has another one.
  bool given_up_ = false;
};

}  // namespace kvferry::ipc
