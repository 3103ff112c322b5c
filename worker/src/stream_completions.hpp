// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace kvferry::worker {

/// A stream whose work is answered for: calls back on an event loop when work has been observed
/// complete, or when the device has failed.
/// @threading the loop's thread. @lifetime loop and device outlive it.
class StreamCompletions {
 public:
  using Done = std::function<void(ipc::Status)>;
  using Failed = std::function<void(const ipc::Error&)>;

  /// on_device_failed: after every pending call has been told; the device is beyond use.
  StreamCompletions(ipc::EventLoop& loop,
                    std::unique_ptr<ipc::Stream> stream,
                    std::string name,
                    Failed on_device_failed);
  StreamCompletions(const StreamCompletions&) = delete;
  StreamCompletions& operator=(const StreamCompletions&) = delete;
  ~StreamCompletions();

  /// Calls done, from the loop, once everything enqueued before has ended; in the order of the
  /// calls. The device is asked to tell once for all calls of a round of the loop: that costs some
  /// 35 us, and as much of a processor. When nothing else is pending, the stream is looked at for
  /// as long as watch before.
  void when_done(Done done, ipc::Duration watch = ipc::Duration::zero());
  [[nodiscard]] ipc::Stream& stream() noexcept { return *stream_; }
  [[nodiscard]] std::size_t pending() const noexcept { return pending_; }

 private:
  struct Slot {
    ipc::EventFd signalled;
    Done done;
    ipc::TimePoint since;
    ipc::Duration watch{};
    bool busy = false;
    bool signal_comes = false;  ///< Its own; else it ends with a later one.
  };

  Slot& take_slot();
  void ask();
  [[nodiscard]] bool ends_within(ipc::Duration watch);
  void finish(Slot& slot, const ipc::Status& status);
  void finish_through(const Slot& last);
  void finish_signalled();
  void finish_all(const ipc::Status& status);
  void arm_watchdog();
  void on_watchdog();

  ipc::EventLoop& loop_;
  const std::string name_;
  Failed on_device_failed_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::deque<Slot*> order_;  ///< Busy slots, oldest first: the stream signals them in this order.
  /// After the slots: what is left in it when it ends may still signal them.
  std::unique_ptr<ipc::Stream> stream_;
  std::size_t pending_ = 0;
  bool asks_ = false;                                           ///< At the end of this round.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< Shared with posted calls only.
  ipc::TimerId watchdog_ = 0;
  bool watchdog_armed_ = false;
  bool hang_reported_ = false;
};

}  // namespace kvferry::worker
