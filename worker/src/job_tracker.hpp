// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/worker/client.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvferry::worker {

/// A device block of an engine, on all ranks.
struct DeviceBlock {
  GroupId group;
  BlockId block;
  [[nodiscard]] std::uint64_t key() const noexcept {
    return (static_cast<std::uint64_t>(group.value) << 32U) | block.value;
  }
};

/// The unfinished jobs of a client, the device blocks that they touch, who waits for those, and
/// completions not yet taken. Knows nothing of sockets.
/// A job whose manager was lost becomes an orphan: movers may still run it, so it stays unfinished
/// until settle_orphans() is told that they do not.
/// @threading one thread.
class JobTracker {
 public:
  using Released = std::function<void()>;

  /// transitions: where the end of a job is recorded, before the engine can see it.
  explicit JobTracker(ipc::TransitionLog transitions = {}) : transitions_(std::move(transitions)) {}

  /// Never used twice, whatever becomes of the job.
  [[nodiscard]] JobId next_id() noexcept { return JobId{++last_id_}; }
  void add(JobId job, const ipc::SessionId& manager, std::span<const DeviceBlock> blocks);
  [[nodiscard]] bool is_unfinished(JobId job) const { return jobs_.contains(job.value); }
  [[nodiscard]] std::size_t unfinished() const noexcept { return jobs_.size(); }

  /// Ends a job with the manager's results. False for an unknown job (late, or twice). Results that
  /// do not fit the job count as kProtocol for every item: it has ended, but how is not known.
  bool finish(JobId job,
              std::vector<std::uint8_t> results,
              std::string message,
              std::uint64_t bytes);
  /// Ends a job with one error for every item.
  bool finish_all_items(JobId job, ErrorCode code, std::string message);

  /// The manager is lost: its unfinished jobs become orphans. arenas: what the job's blocks belong
  /// to, as last known.
  void orphan_all(const std::vector<ArenaId>& arenas);
  [[nodiscard]] bool has_orphans() const noexcept { return orphans_ > 0; }
  /// Ends, with kPeerDied, the orphans that are proven idle: a manager other than theirs reports
  /// offload_ready (movers greet a new manager only after they ended their old jobs), or every
  /// rank's arena is another one than theirs. Returns how many.
  std::size_t settle_orphans(const ipc::SessionId& manager,
                             bool offload_ready,
                             const std::vector<ArenaId>& arenas);

  /// Ends the orphans of a manager that is back and has greeted us: it does so only once no job of
  /// an earlier connection of this engine still copies.
  std::size_t settle_greeted(const ipc::SessionId& manager);

  /// True when no unfinished job touches the blocks; else released is among take_released() once
  /// the jobs that touch them now have ended. Later jobs on the same blocks do not delay it.
  [[nodiscard]] bool release_when_done(std::span<const DeviceBlock> blocks, Released released);
  [[nodiscard]] std::vector<Released> take_released();

  /// Completions in the order of arrival, at most max.
  [[nodiscard]] std::vector<Completion> take(std::size_t max);
  /// The completion of one job, out of order; nothing when it is unfinished or was taken.
  [[nodiscard]] std::optional<Completion> take_job(JobId job);
  [[nodiscard]] bool has_completion(JobId job) const;
  [[nodiscard]] std::size_t untaken() const noexcept { return completions_.size(); }
  /// Something waits for take() or take_released().
  [[nodiscard]] bool has_news() const noexcept {
    return !completions_.empty() || !released_.empty();
  }

 private:
  struct Job {
    ipc::SessionId manager;
    std::vector<std::uint64_t> blocks;  ///< One per item.
    std::vector<std::uint64_t> waiters;
    bool orphan = false;
    std::vector<ArenaId> arenas;  ///< Orphans only.
  };
  struct Waiter {
    std::size_t jobs_left = 0;
    Released released;
  };

  void end(JobId job, Completion completion);
  std::size_t end_orphans(std::vector<std::uint64_t> idle);
  [[nodiscard]] static bool all_replaced(const std::vector<ArenaId>& before,
                                         const std::vector<ArenaId>& now);

  ipc::TransitionLog transitions_;
  std::uint64_t last_id_ = 0;
  std::unordered_map<std::uint64_t, Job> jobs_;
  std::unordered_map<std::uint64_t, std::vector<std::uint64_t>> jobs_of_block_;
  std::unordered_map<std::uint64_t, Waiter> waiters_;
  std::uint64_t last_waiter_ = 0;
  std::size_t orphans_ = 0;
  std::deque<Completion> completions_;
  std::vector<Released> released_;
};

}  // namespace kvferry::worker
