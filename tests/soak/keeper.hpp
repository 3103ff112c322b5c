// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "soak/fleet.hpp"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace kvferry::soak {

/// What happens to one member at one moment of a cycle.
struct Blow {
  std::size_t member = 0;
  ipc::Duration delay{};    ///< After the beginning of the cycle.
  ipc::Duration stopped{};  ///< 0: SIGKILL. Else SIGSTOP, and SIGCONT after so long.
  [[nodiscard]] bool is_kill() const noexcept { return stopped == ipc::Duration::zero(); }
};

/// A member that died although nobody killed it.
struct UnexpectedDeath {
  std::string what;
  std::string log;
};

/// Strikes members at planned moments and starts the next life of whoever died, at once, on a
/// thread of its own. @threading all calls from one other thread.
class Keeper {
 public:
  explicit Keeper(Fleet& fleet);
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;
  ~Keeper();

  /// Called on the keeper's thread right before a SIGKILL; and, from that death on, every other
  /// millisecond until it says so.
  struct Watch {
    std::function<void(const Member&)> before_kill;
    std::function<bool(const Member&)> is_over;
  };
  void watch(Watch watch) { watch_ = std::move(watch); }

  /// Begins a cycle's blows. @pre the last ones are over.
  void begin(std::vector<Blow> blows);
  /// Waits until all blows are over and everybody lives. False at the deadline.
  [[nodiscard]] bool wait_over(ipc::Deadline deadline);
  /// Runs it on the keeper's thread, where the members do not change meanwhile, and waits for it.
  void call(const std::function<void()>& function);
  /// Lets go of the processes: deaths are no longer noticed. The fleet is the caller's again.
  void stop();

  [[nodiscard]] std::uint64_t kills() const;
  [[nodiscard]] std::uint64_t stops() const;
  /// Movers that their owner ended because they were stopped for too long.
  [[nodiscard]] std::uint64_t ended_by_owner() const;
  [[nodiscard]] std::vector<UnexpectedDeath> unexpected() const;

 private:
  struct Fate {
    bool killed = false;   ///< By us, not yet reaped.
    bool stalled = false;  ///< Stopped for longer than a clear waits, in this cycle.
  };
  void watch_member(std::size_t index);
  void strike(const Blow& blow);
  void on_death(std::size_t index);
  void look_whether_over(std::size_t index);
  void finish_one();

  Fleet& fleet_;
  Watch watch_;
  ipc::EventLoop loop_;
  std::vector<Fate> fates_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t pending_ = 0;  ///< Blows, and members that are dead.
  std::uint64_t kills_ = 0;
  std::uint64_t stops_ = 0;
  std::uint64_t ended_by_owner_ = 0;
  std::vector<UnexpectedDeath> unexpected_;
  std::thread thread_;
};

}  // namespace kvferry::soak
