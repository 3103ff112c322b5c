// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "transitions/job_walks.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::ipc {

/// The rules that steps of jobs are held to: whoever says that something has ended is compared with
/// what the processes that did it recorded, so that no block is read, shown or given on while a
/// copier that may still write lives. And each step is a move of the relation (job_walks.hpp).
/// @lifetime the trace and taken outlive it.
class JobRules {
 public:
  struct Ports {
    std::function<void(std::string_view rule, std::string what)> breach;
    std::function<bool(std::size_t writer)> is_dead;  ///< Proven, up to here.
    /// Whether a process may touch the epoch that the record names.
    std::function<bool(std::size_t writer, const TransitionRecord& record)> may_use;
  };

  /// taken, if given, gets the moves.
  JobRules(const TransitionTrace& trace, std::set<const relation::Move*>* taken, Ports ports);

  void take(const TransitionRecord& record);
  /// A process says that it has no work of its own left on an epoch.
  void drained(const TransitionRecord& record);

 private:
  using JobNumber = std::uint64_t;
  using HandOver = std::uint64_t;
  using ByMover = std::pair<std::uint64_t, HandOver>;  ///< Incarnation of the mover.

  /// A job as the process that copies it tells it.
  struct Moved {
    std::set<std::uint64_t> copying;  ///< Parts.
    std::set<HandOver> asked;         ///< Not known to have ended.
    std::set<HandOver> ever_asked;
    std::set<HandOver> abandoned;
    bool answered = false;
    std::uint64_t failed = 0;
  };
  /// A job as the manager tells it.
  struct Managed {
    bool known = false;  ///< From its first record on.
    std::size_t manager = 0;
    std::uint64_t client = 0;  ///< Incarnation.
    std::set<std::uint64_t> open;
    std::map<std::uint64_t, std::uint64_t> sent;  ///< Blocks, by mover.
    std::uint64_t most_failed = 0;
  };
  struct Launch {
    std::size_t worker = 0;
    Epoch epoch;
  };

  void mover_step(const TransitionRecord& record);
  void staging_step(const TransitionRecord& record);
  void manager_step(const TransitionRecord& record);
  void admit(const TransitionRecord& record) const;
  void answer(const TransitionRecord& record);
  void launch(const TransitionRecord& record);
  void worker_died(pid_t pid);
  void sees_end(const TransitionRecord& record, Managed& job);
  void commit(const TransitionRecord& record, const Managed& job) const;
  void end(const TransitionRecord& record, const Managed& job);
  void engine_done(const TransitionRecord& record);

  /// What still touches the blocks of a job at this mover, or on its behalf; empty: nothing.
  [[nodiscard]] std::string touches(std::uint64_t mover, JobNumber job) const;
  void check_untouched(std::string_view rule, std::uint64_t mover, JobNumber job);
  [[nodiscard]] bool runs(const Launch& launch) const;
  [[nodiscard]] bool lost_some(std::size_t writer) const;

  const TransitionTrace& trace_;
  Ports ports_;
  std::map<std::uint64_t, std::size_t> writer_of_;              ///< By incarnation.
  std::map<std::pair<std::uint64_t, JobNumber>, Moved> moved_;  ///< By mover's incarnation.
  std::map<ByMover, Launch> launched_;                          ///< Not known to have ended.
  std::map<JobNumber, Managed> managed_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, JobNumber> of_client_;
  std::set<std::size_t> dead_workers_;  ///< As their movers saw.
  /// Workers, and the movers of whom each has said that it does nothing more for them.
  std::set<std::pair<std::size_t, std::uint64_t>> quiesced_;
  JobWalks walks_;
};

}  // namespace kvferry::ipc
