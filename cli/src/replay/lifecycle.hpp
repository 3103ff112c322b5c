// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "operator_calls.hpp"
#include "replay/clear_memory.hpp"
#include "replay/counters.hpp"

#include <cstdint>
#include <functional>
#include <string>

namespace kvferry::cli {

/// Clears and re-inits the caches beside the running traffic, over a link of its own: nothing here
/// waits on the engine's thread.
/// @threading the loop's thread.
class LifecycleDriver {
 public:
  struct Options {
    std::string runtime_dir;
    std::string instance;
    std::string engine;
    ipc::HostPolicy host = ipc::HostPolicy::kKeep;
  };
  struct Hooks {
    std::function<bool()> is_ready;  ///< The engine sees a usable cache.
    /// The cache could not be brought back: the run is over.
    std::function<void(const ipc::Error&)> on_hopeless;
  };

  LifecycleDriver(ipc::EventLoop& loop,
                  Options options,
                  ReplayCounters& counters,
                  ClearMemoryLog& memory,
                  Hooks hooks);
  LifecycleDriver(const LifecycleDriver&) = delete;
  LifecycleDriver& operator=(const LifecycleDriver&) = delete;
  ~LifecycleDriver();

  /// One clear, then one re-init; behind the one that runs, if any.
  void start_cycle();
  [[nodiscard]] bool is_idle() const noexcept { return phase_ == Phase::kIdle; }

 private:
  enum class Phase : std::uint8_t { kIdle, kClearing, kReiniting, kRecovering };

  template <typename Request> void ask(ipc::MessageKind kind, const Request& request);
  void send_clear();
  void send_reinit();
  void on_reply(const ipc::Envelope& reply);
  /// Something went wrong on the way: sees to it that the cache comes back.
  void recover(const ipc::Error& why);
  void recover_later();
  void finish();

  ipc::EventLoop& loop_;
  const Options options_;
  ReplayCounters& counters_;
  ClearMemoryLog& memory_;
  Hooks hooks_;
  OperatorCalls calls_;
  Phase phase_ = Phase::kIdle;
  std::uint64_t owed_ = 0;  ///< Cycles asked for while one ran.
  ipc::TimePoint asked_at_{};
  ipc::TimePoint recovering_since_{};
  ipc::TimerId timer_ = 0;
};

}  // namespace kvferry::cli
