// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "environment/odd.hpp"

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::soak {

/// What a run has around it that most machines do not show, or not often.
struct Surroundings {
  std::string odd;           ///< Of environment/odd.hpp, separated by commas.
  std::string odd_library;   ///< What does it.
  std::string heap_library;  ///< What counts each process's live heap; empty: nothing does.
  bool reuse_pids = false;   ///< A process that is replaced gets the number of the dead one.
  double fork_share = 0;     ///< Of cycles in which the engine forks a child.
};

/// What of it has been done.
struct SurroundingsDone {
  std::array<std::uint64_t, test::kOddNames.size()> odd{};
  std::uint64_t pids_reused = 0;
  std::uint64_t forks = 0;
};

/// Starts this program anew, with everything that is asked for around it and around all that it
/// starts, and with an allocator of its own that keeps little, unless that has been done. Throws
/// Exception.
void enter(const Surroundings& wanted, char** argv);
/// How often, up to now, in all processes.
[[nodiscard]] std::array<std::uint64_t, test::kOddNames.size()> read_odd_counts();
/// What a process has allocated and not freed; 0 where nothing counts it.
[[nodiscard]] std::uint64_t read_live_heap(pid_t pid);
/// The counts of all processes are read for the last time.
void forget_live_heaps();

/// Makes the kernel give the next process this number, if it is free. False where that is not
/// allowed: it takes CAP_CHECKPOINT_RESTORE in the pid namespace.
bool ask_for_pid(pid_t pid);

/// Children that this process forks, copies of an engine with everything that it has open. Each
/// does what children do that end in an orderly way, after a while, and nothing else.
class Children {
 public:
  Children() = default;
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;
  ~Children() { wait_all(); }
  /// Forks one that lives that long. ends: what its destructors do.
  template <typename Ends> void fork_one(int lives_ms, Ends ends) {
    reap();
    const pid_t child = fork_now();
    if (child == 0) {
      ends();
      stay_and_exit(lives_ms);
    }
    if (child > 0) living_.push_back(child);
  }
  /// Also reaps: none is left.
  void wait_all();
  [[nodiscard]] std::uint64_t forked() const noexcept { return forked_; }
  [[nodiscard]] std::uint64_t failed() const noexcept { return failed_; }

 private:
  pid_t fork_now();
  [[noreturn]] static void stay_and_exit(int lives_ms);
  void reap();
  void note_end(int status);

  std::vector<pid_t> living_;
  std::uint64_t forked_ = 0;
  std::uint64_t failed_ = 0;  ///< Ended otherwise than with 0.
};

}  // namespace kvferry::soak
