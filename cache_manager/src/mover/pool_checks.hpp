// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/pool_mapping.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "mover/copy_plan.hpp"
#include "mover/load_check.hpp"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace kvferry::cache_manager {

/// Checksums of what jobs move to and from the pool. Of a store they are computed when it has been
/// answered, by a thread that runs when nothing else wants its processor, unless somebody waits for
/// them; where the answer is to
/// have them, before, by the threads that check loads. Of a load, whose items name them, they are
/// computed while it is copied, and its answer waits for both. An item whose contents are others
/// ends as kCorrupt. Of a load by layers nothing is to be told to compute before: see LoadCheck.
/// @threading any; calls back from its threads, and from within finish().
class PoolChecks {
 public:
  using Done = std::function<void(ipc::MoverJobDone)>;
  /// Of a store that was answered, and where in the pool each of them is of; both empty for one
  /// whose pool is gone.
  using Summed = std::function<void(ipc::MoverSums, std::vector<ipc::KeptSum>)>;

  /// done: of a load's answer, and of jobs that are not checked, as lanes give them. summed: once
  /// for each of sums_queued(), in that order. decided: some LoadCheck was.
  PoolChecks(Done done, Summed summed, std::function<void()> decided);
  PoolChecks(const PoolChecks&) = delete;
  PoolChecks& operator=(const PoolChecks&) = delete;
  /// What waits for a check ends unanswered.
  ~PoolChecks();
  /// Calls nothing back from its threads from now on; what is not decided by then is damaged.
  void stop();

  /// Of a job that is about to begin. Nothing to do for one that neither wants nor names sums. Null
  /// but for a load by layers that names some. kInvalidArgument: another one of that name is under
  /// way.
  [[nodiscard]] ipc::Result<std::shared_ptr<const LoadCheck>> begin(
      const ipc::MoverJob& job,
      const std::shared_ptr<ipc::PoolMapping>& pool,
      const BlockParts& parts);
  /// The job has been copied, or has failed.
  void finish(ipc::MoverJobDone done);
  /// No answer waits for a check.
  [[nodiscard]] bool idle();
  /// So many stores have been answered whose sums are, or were, to be computed then. They are also
  /// when their manager is gone, for the next one, as long as somebody has their pool.
  [[nodiscard]] std::uint64_t sums_queued() const noexcept { return sums_queued_; }
  /// Whether somebody waits for the sums of stores that have been answered: they are computed at
  /// ordinary priority then. @default no @threading one thread, that of stop()
  void sum_at_once(bool at_once);

 private:
  struct Part {
    std::uint64_t offset = 0;
    std::uint64_t size_bytes = 0;
    std::uint64_t expected = 0;  ///< 0: not to be checked.
    std::uint64_t sum = 0;
    std::size_t item = 0;
    bool is_shard = false;
  };
  /// Of a part that is checked: what one thread sums.
  struct Piece {
    std::uint64_t offset = 0;
    std::uint64_t size_bytes = 0;
    std::uint64_t sum = 0;
  };
  struct Work {
    ipc::JobId job;
    std::shared_ptr<ipc::PoolMapping> pool;
    /// Of a store that was answered, instead: it keeps no pool that its user has let go.
    std::weak_ptr<ipc::PoolMapping> answered_pool;
    std::vector<Part> parts;
    std::size_t items = 0;
    std::vector<Piece> pieces;  ///< Of a check: of all parts, in their order.
    std::size_t next = 0;       ///< Of the pieces.
    std::size_t left = 0;       ///< Of the pieces that are to be summed.
    bool is_check = false;
    bool sums_first = false;  ///< A store's answer waits for them.
    bool is_dropped = false;  ///< Nobody wants to know: the job failed.
    ipc::Urgency urgency;
    bool is_checked = false;
    std::vector<std::uint8_t> results;      ///< Of its items, once it is checked; kCorrupt or 0.
    std::shared_ptr<LoadCheck> gate;        ///< By layers.
    std::optional<ipc::MoverJobDone> held;  ///< Copied before it was checked.
  };
  using WorkRef = std::shared_ptr<Work>;
  /// Of a list that grows at its head.
  struct Arrived {
    WorkRef work;
    std::unique_ptr<Arrived> before;
  };

  /// Names sums that it is to be checked against.
  [[nodiscard]] static bool names_sums(const ipc::MoverJob& job) noexcept;
  [[nodiscard]] static WorkRef work_of(const ipc::MoverJob& job,
                                       const std::shared_ptr<ipc::PoolMapping>& pool,
                                       const BlockParts& parts,
                                       bool is_check);
  void queue_check(const WorkRef& work);  ///< @pre mutex_ is held
  /// Of a job that failed: sums no more. True: nobody sums now. @pre mutex_ is held
  [[nodiscard]] bool drop_check(const WorkRef& work);
  void run_checks();
  /// Of a store that is answered. Waits for nobody.
  void queue_sums(WorkRef work);
  void give_to_sum(WorkRef work);
  /// Those that have come, the first one first; waits for one. Empty: the end, or another thread's
  /// turn.
  [[nodiscard]] std::deque<WorkRef> take_arrived(std::uint32_t turn);
  void start_sums(bool at_once);
  void run_sums(bool at_once, std::uint32_t turn);
  /// False: the end, or another thread's turn.
  [[nodiscard]] bool sum_parts(Work& work, std::uint32_t turn, bool& has_pool);
  /// Of which a thread may sum something now; checks_.end(): of none. @pre mutex_ is held
  [[nodiscard]] std::deque<WorkRef>::iterator next_check();
  /// The next pieces of a check. @pre mutex_ is held, and it is in checks_.
  void take_pieces(std::unique_lock<std::mutex>& lock, WorkRef work);
  /// Nobody else sums those. @pre mutex_ is held
  void take_up_to(Work& work, std::size_t end);
  static void cut(Work& work);
  static void join(Work& work);
  void end_check(const WorkRef& work, bool is_dropped);
  [[nodiscard]] static ipc::MoverSums sums_of(const Work& work);
  void end_sums(const Work& work, bool has_pool);
  [[nodiscard]] static std::vector<std::uint8_t> results_of(const Work& work);
  static void merge(ipc::MoverJobDone& done, const Work& work);

  const Done done_;
  const Summed summed_;
  const std::function<void()> decided_;
  std::mutex mutex_;  ///< Guards the next seven; held for no sum, and never by the thread of sums.
  std::condition_variable changed_;
  std::map<ipc::JobId, WorkRef> under_way_;  ///< Of jobs that lanes have.
  std::deque<WorkRef> checks_;
  std::size_t beside_ = 0;         ///< Threads that sum what is copied meanwhile.
  std::size_t beside_pieces_ = 0;  ///< Of those in checks_, that nobody sums yet.
  std::size_t waiting_ = 0;        ///< Checks that have not ended, for which answers wait.
  bool stopping_ = false;
  /// No lock: the thread of sums may be kept from running at any instruction, and nobody else is to
  /// be. Owns the list.
  std::atomic<Arrived*> arrived_ = nullptr;
  std::atomic<std::uint32_t> arrivals_ = 0;  ///< Changes when something has come, and at the end.
  std::atomic<std::uint64_t> sums_queued_ = 0;
  std::atomic<std::size_t> parts_to_sum_ = 0;
  std::atomic<bool> sums_stop_ = false;
  std::atomic<std::uint32_t> sums_turn_ = 0;  ///< Of the thread that sums; earlier ones end.
  bool sums_at_once_ = false;
  std::vector<std::unique_ptr<ipc::OwnThread>> threads_;
  std::deque<std::unique_ptr<ipc::OwnThread>> sum_threads_;  ///< The last one's turn it is.
};

}  // namespace kvferry::cache_manager
