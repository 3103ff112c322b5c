// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/wire/control.hpp"

#include <memory>
#include <mutex>
#include <optional>

namespace kvferry::worker {

/// Tries to reach a manager until it succeeds: at once when its socket appears, and backing off
/// between attempts for what no appearance tells. Works on a thread of
/// its own, which exists only while there is no manager: a manager that is stopped in the middle of
/// its greeting must not hold up an engine's poll().
/// @threading one thread. @lifetime the destructor ends the attempt within its time-out.
class Reconnector {
 public:
  /// Starts at once. after: wait this long before the first attempt (a refusal must not be repeated
  /// in a tight loop).
  Reconnector(ipc::ControlLink::Options options, ipc::Duration after);
  Reconnector(const Reconnector&) = delete;
  Reconnector& operator=(const Reconnector&) = delete;
  ~Reconnector();

  /// Readable once take() has something.
  [[nodiscard]] int fd() const noexcept { return connected_.fd(); }
  /// The link, once; null until then.
  [[nodiscard]] std::unique_ptr<ipc::ControlLink> take();

 private:
  void run(ipc::Duration wait);

  ipc::ControlLink::Options options_;
  ipc::EventFd connected_;
  ipc::EventFd cancelled_;
  std::mutex mutex_;  ///< Guards link_.
  std::unique_ptr<ipc::ControlLink> link_;
  std::optional<ipc::OwnThread> thread_;
};

}  // namespace kvferry::worker
