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

  /// on_device_failed: after every pending call has been told; the device is beyond use. words: 4
  /// bytes or more, which the stream writes, so that its work can be looked at; null: it is not.
  StreamCompletions(ipc::EventLoop& loop,
                    std::unique_ptr<ipc::Stream> stream,
                    std::string name,
                    Failed on_device_failed,
                    std::unique_ptr<ipc::PinnedBuffer> words = nullptr);
  StreamCompletions(const StreamCompletions&) = delete;
  StreamCompletions& operator=(const StreamCompletions&) = delete;
  ~StreamCompletions();

  /// Calls done, from the loop, once everything enqueued before has ended; in the order of the
  /// calls. The device is asked to tell once for all calls of a round of the loop: that costs some
  /// 35 us, and as much of a processor. So before that the oldest pending work is looked at, for as
  /// long as watch.
  void when_done(Done done, ipc::Duration watch = ipc::Duration::zero());
  /// Asks for all calls so far: before work is enqueued that may wait for long, as what is asked
  /// for behind that comes after it.
  void ask_now();
  [[nodiscard]] ipc::Stream& stream() noexcept { return *stream_; }
  [[nodiscard]] std::size_t pending() const noexcept { return pending_; }

 private:
  struct Slot {
    ipc::EventFd signalled;
    Done done;
    ipc::TimePoint since;
    ipc::Duration watch{};
    std::uint32_t mark = 0;  ///< What the word is when it has ended.
    bool busy = false;
    bool signal_comes = false;  ///< Its own; else it ends with a later one.
    bool ended = false;         ///< It was seen to; the slot is free once its signal is in.
  };

  Slot& take_slot();
  void ask();
  void mark(Slot& slot);
  [[nodiscard]] bool has_ended(const Slot& slot) const noexcept;
  void finish_seen();
  /// Less often while looks see nothing: compute leaves the stream no room then.
  void look(const Slot& oldest, ipc::Duration watch);
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
  std::unique_ptr<ipc::PinnedBuffer> words_;
  ipc::StreamWord word_;
  std::uint32_t marked_ = 0;
  bool is_marked_ = true;  ///< False when the stream did not take a mark: it is not looked at then.
  std::uint32_t looks_left_out_ = 0;  ///< After the last one that saw nothing; doubles.
  std::uint32_t looks_to_leave_out_ = 0;
  std::size_t pending_ = 0;
  bool asks_ = false;                                           ///< At the end of this round.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< Shared with posted calls only.
  ipc::TimerId watchdog_ = 0;
  bool watchdog_armed_ = false;
  bool hang_reported_ = false;
};

}  // namespace kvferry::worker
