// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/process.hpp"

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvferry::cli {

/// One child that is to run for as long as the run does.
struct ChildSpec {
  std::string name;                           ///< "manager", "mover/0": what people see.
  std::vector<std::string> arguments;         ///< Of this very program.
  std::vector<std::string> environment = {};  ///< ChildStart::environment.
  bool ends_last = false;                     ///< Told to end when those without it have ended.
};

/// Starts children, names each death at once, replaces the dead, and ends them all. When this
/// process dies in whatever way, the children end by themselves: each holds a pipe of ours.
/// @threading the loop's thread.
class Supervisor {
 public:
  struct Hooks {
    std::function<void(const std::string& line)> say;  ///< For the terminal, at once.
    /// A child cannot run or keeps dying: the run is over. The error holds the end of its log.
    std::function<void(const ipc::Error&)> on_hopeless;
    std::function<void(pid_t)> on_started;
    /// Of a child that nobody asked to end, by its name, before it is reaped.
    std::function<void(const std::string& name)> on_death;
  };

  /// Throws Exception when the pipe or the program's path cannot be had.
  Supervisor(ipc::EventLoop& loop, std::filesystem::path log_dir, Hooks hooks);
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;
  /// Kills and reaps what still runs.
  ~Supervisor();

  [[nodiscard]] ipc::Status start(ChildSpec spec);
  /// SIGKILL to a child, which is replaced like any that dies; that is nobody's news then.
  /// kNotFound when none of the name runs.
  [[nodiscard]] ipc::Status kill(std::string_view name);
  /// SIGTERM to all (those that end last when the others have ended or half the grace time has
  /// passed), SIGKILL after the grace time. Runs the loop; on return every child is reaped.
  void stop(ipc::Duration grace);
  /// For a stop() that runs or comes: all are told to end at once, and none gets more time than
  /// this.
  void hurry(ipc::Deadline last) noexcept {
    hurried_ = true;
    last_ = last.earlier(last_);
  }

  /// Name and process of each child that runs now.
  [[nodiscard]] std::vector<std::pair<std::string, pid_t>> running() const;
  [[nodiscard]] std::uint64_t restarts() const noexcept { return restarts_; }
  [[nodiscard]] std::uint64_t deaths() const noexcept { return deaths_; }
  /// The run ended by on_hopeless: what it was told has the log that matters.
  [[nodiscard]] bool hopeless() const noexcept { return hopeless_; }
  /// Some child was killed at the end or died by itself shortly before: no successor took its names
  /// over.
  [[nodiscard]] bool ended_unreplaced() const noexcept { return ended_unreplaced_; }
  /// Name and the end of the log of every child.
  [[nodiscard]] std::string logs(std::size_t lines_each) const;

 private:
  struct Child {
    ChildSpec spec;
    ipc::ProcessRef process;  ///< Invalid between death and restart.
    std::deque<ipc::TimePoint> deaths;
    std::uint64_t lives = 0;  ///< Times it was started.
    bool killed = false;      ///< By kill(), and not replaced yet.
  };

  [[nodiscard]] ipc::Status spawn(Child& child);
  void on_death(Child& child);
  void replace_later(Child& child);
  void tell(const Child& child, const std::string& line) const;
  void give_up(const Child& child, const std::string& what);
  [[nodiscard]] std::filesystem::path log_of(const Child& child) const;
  [[nodiscard]] bool any_running(bool ends_last) const;
  void signal_all(int number, bool ends_last);

  ipc::EventLoop& loop_;
  std::filesystem::path program_;
  std::filesystem::path log_dir_;
  Hooks hooks_;
  ipc::UniqueFd children_end_;  ///< Read end, given to children.
  ipc::UniqueFd our_end_;       ///< Never written: its closing is the message.
  std::vector<std::unique_ptr<Child>> children_;
  std::vector<ipc::TimerId> timers_;
  std::uint64_t restarts_ = 0;
  std::uint64_t deaths_ = 0;
  // wait-none: no stop() runs, and the first one sets it to its grace
  ipc::Deadline last_ = ipc::Deadline::at(ipc::TimePoint::max());  ///< Of a stop() that runs.
  bool hurried_ = false;
  bool hopeless_ = false;
  bool stopping_ = false;
  bool ended_unreplaced_ = false;
};

}  // namespace kvferry::cli
