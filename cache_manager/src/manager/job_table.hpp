// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "manager/finished_jobs.hpp"
#include "manager/hazard_tracker.hpp"
#include "manager/host_pool.hpp"
#include "manager/job_queue.hpp"
#include "manager/link_shares.hpp"
#include "manager/mover_watch.hpp"
#include "manager/send_window.hpp"
#include "manager/sequence_store.hpp"
#include "manager/unfinished_jobs.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

enum class JobKind : std::uint8_t { kStore = 1, kLoad, kSwapOut, kSwapIn };

struct JobItem {
  ipc::GroupId group;
  ipc::BlockId block;
  HostBlockRef host;        ///< Null: it is not sent; result says why.
  std::uint64_t token = 0;  ///< Stores: the reservation.
  std::uint32_t part = 0;   ///< Of the host block.
  std::uint32_t sequence_index = 0;
  std::uint8_t result = 0;  ///< 0 or the first ErrorCode, over all ranks.
  /// Loads: what it is checked against, of what the ranks share and of each rank's bytes; empty: it
  /// is not checked.
  std::vector<std::uint64_t> sums;
};
/// The rank's mover has a part of it.
[[nodiscard]] bool has_part(const JobItem& item,
                            const SlabShape& shape,
                            bool to_host,
                            std::uint32_t rank) noexcept;

/// Ids from here on are no client's: parts of a load that waits for blocks (WaitingLoads).
inline constexpr std::uint64_t kFirstPartId = std::uint64_t{1} << 63U;

/// What a client asked for, and how far it is.
struct Job {
  ipc::JobId id;  ///< Ours, unique in this manager's life and the one before.
  ipc::IncarnationId client;
  ipc::JobId client_job;
  std::uint32_t engine = 0;
  JobKind kind = JobKind::kStore;
  std::uint64_t generation = 0;
  ipc::Urgency urgency;  ///< Priority 0: stores; loads are above them.
  bool brief = false;    ///< MoverJob::brief.
  std::optional<ipc::LayerTicket> layers;
  std::uint64_t sequence = 0;
  std::uint64_t sequence_life = 0;
  std::vector<JobItem> items;
  std::string message;  ///< First error's text.
  std::uint64_t bytes = 0;
  bool orphaned = false;  ///< The client is gone: nobody is answered.

  [[nodiscard]] SequenceKey sequence_key() const noexcept { return {engine, client, sequence}; }
  [[nodiscard]] bool to_host() const noexcept {
    return kind == JobKind::kStore || kind == JobKind::kSwapOut;
  }
  /// Of a store: it got no room when it was offered, so that it is not copied. No failure.
  [[nodiscard]] bool left_out(const JobItem& item) const noexcept {
    return to_host() && item.host == nullptr;
  }
};

/// Who moves a rank's share. The worker is the one whose staging agent the mover may use.
struct RankTarget {
  ipc::IncarnationId mover;
  ipc::IncarnationId worker;
  ipc::SessionId session;
  ipc::Epoch epoch;
};

struct JobCounters {
  std::uint64_t queued = 0;
  std::uint64_t running = 0;
  std::uint64_t done = 0;  ///< All items ok, or left out.
  std::uint64_t failed = 0;
  std::uint64_t cancelled = 0;
  std::uint64_t stale = 0;  ///< Refused for their generation, or answers nobody waits for.
  /// Of one direction, by what movers answered: one answer for each rank of a job.
  struct Way {
    std::uint64_t bytes = 0;
    std::uint64_t answers = 0;
    std::chrono::microseconds queued{};  ///< From the submit until its copies began.
    std::chrono::microseconds copied{};  ///< From then until they had ended.
  };
  Way to_host;
  Way to_device;
};

/// Client jobs from submission to their one answer. A job waits until its places are free, is sent
/// to the mover of every rank, and ends when each of them has answered or is proven untouchable
/// (dead, and its worker's staging agent quiet): only then are its places given on.
///
/// Nothing waits for ever. A job that could not be sent in time ends as kTimeout at once. One that
/// was sent and whose mover gets no further is cancelled there, and ends as kTimeout when the mover
/// has given it up; a mover that does not even do that is stuck, unless its worker is stopped. A
/// job that a mover keeps although it answers others is treated so after kPatience deadlines.
/// @threading one thread; ports may not call back into the table.
class JobTable {
 public:
  static constexpr int kPatience = 8;

  struct Limits {
    std::uint32_t max_jobs_per_engine = 1024;
    std::chrono::milliseconds queue_deadline{60'000};  ///< Submission until it is sent.
    std::chrono::milliseconds job_deadline{30'000};    ///< A mover's last answer until its next.
    bool wants_sums = false;                           ///< Of stores,
    bool sums_first = false;                           ///< before they are answered.
  };

  struct Ports {
    /// The ranks' movers when the engine runs this generation and offload is ready, else the error
    /// that queued jobs end with.
    std::function<ipc::Result<std::vector<RankTarget>>(std::uint32_t engine,
                                                       std::uint64_t generation)>
        targets;
    std::function<ipc::Status(const ipc::IncarnationId& mover, const ipc::MoverJob&)> send;
    std::function<void(const ipc::IncarnationId& mover, ipc::JobId)> cancel;
    /// The job is over and nothing touches its blocks; called once per job.
    std::function<void(Job&)> finished;
    /// Whether the worker is known to stand still, so that a mover has to wait for it.
    std::function<bool(const ipc::IncarnationId& worker)> is_stopped;
    std::function<ipc::TimePoint()> now = [] { return ipc::MonotonicClock::now(); };
    ipc::TransitionLog transitions = {};
  };

  JobTable(HostPool& pool, Ports ports, const Limits& limits);
  JobTable(const JobTable&) = delete;
  JobTable& operator=(const JobTable&) = delete;
  ~JobTable() = default;

  /// kAlreadyExists when the client has or had a job of that id.
  [[nodiscard]] ipc::Status check_id(const ipc::IncarnationId& client, ipc::JobId client_job) const;
  /// kBusy when the engine has too many of its clients' own, with the loads that wait for blocks:
  /// each of those is one, and its parts are none.
  [[nodiscard]] ipc::Status check_room(std::uint32_t engine, std::size_t waiting = 0) const;
  /// Takes the job; items without a host block end with the result that they came with.
  /// @pre check_id() and check_room() were ok.
  void submit(Job job);
  /// False when there is no such job (any more).
  bool cancel(const ipc::IncarnationId& client, ipc::JobId client_job);
  /// Of a job that is not over and goes layer by layer.
  [[nodiscard]] std::optional<ipc::LayerTicket> layers_of(const ipc::IncarnationId& client,
                                                          ipc::JobId client_job) const;
  /// Of all those of a client, each with its engine.
  [[nodiscard]] std::vector<std::pair<std::uint32_t, ipc::LayerTicket>> layers_of(
      const ipc::IncarnationId& client) const;
  /// Ends what has not been sent yet.
  void fail_queued(std::uint32_t engine, const ipc::Error& error);
  /// Nobody is answered any more; queued jobs end, running ones are cancelled.
  void orphan(const ipc::IncarnationId& client);
  /// A job that was never taken, and that its client is told the end of: none of that id comes any
  /// more.
  void note_over(const ipc::IncarnationId& client, ipc::JobId job) {
    over_before_[client].add(job);
  }
  /// The client is dead: its ids will not be used again.
  void forget_client(const ipc::IncarnationId& client) { over_before_.erase(client); }
  [[nodiscard]] bool has_orphans(std::uint32_t engine) const;

  /// A mover's answer. kProtocol for one of the wrong shape, whose items fail; answers to unknown
  /// jobs are counted as stale.
  [[nodiscard]] ipc::Status mover_done(const ipc::IncarnationId& mover,
                                       std::uint32_t engine,
                                       const ipc::MoverJobDone& done);
  /// The workers whose staging agents a mover with unanswered jobs may still be using.
  [[nodiscard]] std::vector<ipc::IncarnationId> workers_used_by(
      const ipc::IncarnationId& mover) const;
  /// Proven: neither that mover nor that worker on its behalf touches a block any more.
  void mover_untouchable(const ipc::IncarnationId& mover, const ipc::IncarnationId& worker);

  /// A living mover connects anew, which it does only when it has ended every job: what it has not
  /// answered it never will. To be called before anything is sent to it again.
  void mover_rejoined(const ipc::IncarnationId& mover);

  /// Sends what may be sent: after any change of what targets() says.
  void pump(std::uint32_t engine);
  [[nodiscard]] std::optional<ipc::TimePoint> next_deadline() const;
  /// Ends or cancels what is overdue. Gives the movers that are stuck, each once: their jobs end
  /// when they are proven untouchable.
  [[nodiscard]] std::vector<ipc::IncarnationId> expire();
  /// The mover is dead: no deadline counts for it any more.
  void mover_died(const ipc::IncarnationId& mover) { watch_.forget(mover); }

  [[nodiscard]] JobCounters counters(std::uint32_t engine) const;
  void count_stale(std::uint32_t engine) { ++counters_[engine].stale; }
  void count_refused(std::uint32_t engine) { ++counters_[engine].failed; }
  void forget_engine(std::uint32_t engine);
  /// What a rank's copies go over, and its engine's share where others' do, too.
  void set_share(std::uint32_t engine, ipc::Rank rank, const LinkShares::Member& member);
  /// The rank has no mover any more: its link is none of its engine's.
  void drop_share(std::uint32_t engine, ipc::Rank rank);
  [[nodiscard]] std::size_t unfinished() const noexcept { return entries_.size(); }
  [[nodiscard]] std::size_t unfinished(std::uint32_t engine) const {
    return unfinished_.all(engine);
  }
  /// Of those, what clients have submitted: no parts.
  [[nodiscard]] std::size_t unfinished_of_clients(std::uint32_t engine) const {
    return unfinished_.of_clients(engine);
  }
  [[nodiscard]] bool is_unfinished(ipc::JobId job) const { return entries_.contains(job); }
  void cancel_all();

 private:
  enum class State : std::uint8_t { kWaiting, kRunnable, kRunning };
  struct Part {
    RankTarget target;
    std::vector<std::uint32_t> items;  ///< Into Job::items.
    bool open = false;
  };
  struct Entry {
    Job job;
    State state = State::kWaiting;
    std::vector<Part> parts;
    ipc::TimePoint submitted{};
    ipc::TimePoint sent{};
    LinkShares::Lane lane;      ///< When it runs; as are bytes.
    std::uint64_t bytes = 0;    ///< Of one rank, nearly.
    ipc::TimePoint deadline{};  ///< In deadlines_: to be sent, then to be answered.
    bool gives_up = false;      ///< Cancelled because it took too long.
    bool over = false;          ///< In over_.
  };
  using Queue = std::pair<std::uint32_t, bool>;  ///< Engine, to the host.
  using ClientKey = std::pair<ipc::IncarnationId, ipc::JobId>;

  static void fail_items(Job& job,
                         const std::vector<std::uint32_t>& items,
                         ipc::ErrorCode code,
                         const std::string& message);
  static MoverLane lane_of(const Entry& entry, const Part& part) {
    return {part.target.mover, entry.job.to_host()};
  }
  void make_runnable(Entry& entry);
  void start(Entry& entry, const std::vector<RankTarget>& targets);
  /// What the rank's mover has to do of it.
  void add_items(const Job& job, std::uint32_t rank, Part& part, ipc::MoverJob& message) const;
  void close_part(Entry& entry, Part& part);
  void count(const Entry& entry, const ipc::MoverJobDone& done);
  void fail_parts(const std::function<bool(const RankTarget&)>& over, const std::string& why);
  void end_unsent(Entry& entry, const ipc::Error& error);
  [[nodiscard]] ipc::Status send_part(const Entry& entry,
                                      const Part& part,
                                      const ipc::MoverJob& message) const;
  void finish(Entry& entry);
  void send_all();
  void send_runnable(std::uint32_t engine);
  void send_over(const LinkShares::Lane& lane);
  void settle();
  void set_deadline(Entry& entry, ipc::TimePoint when);
  [[nodiscard]] ipc::Error not_started(const Entry& entry) const;
  void ask_to_cancel(const Entry& entry) const;
  /// Ends deadlines that only a stopped worker has let pass.
  [[nodiscard]] bool spare(const ipc::IncarnationId& mover, ipc::TimePoint now);
  void expire_lane(const MoverLane& lane, ipc::TimePoint now);

  HostPool& pool_;
  Ports ports_;
  Limits limits_;
  MoverWatch watch_;
  HazardTracker hazards_;
  std::map<ipc::JobId, Entry> entries_;
  std::map<ClientKey, ipc::JobId> by_client_;
  std::map<ipc::IncarnationId, FinishedJobs> over_before_;
  std::map<Queue, JobQueue> runnable_;  ///< Never empty ones.
  /// A mover gets no more jobs at once; the others wait here. Loads and stores do not wait for each
  /// other.
  std::map<Queue, SendWindow> windows_;
  LinkShares shares_;
  std::vector<LinkShares::Offer> offers_;  ///< Of send_over(), kept for its memory.
  std::set<LinkShares::Lane> held_back_;   ///< Something waits there for room, or for its turn.
  UnfinishedJobs unfinished_;
  std::set<std::pair<ipc::TimePoint, ipc::JobId>> deadlines_;
  std::map<std::uint32_t, JobCounters> counters_;
  std::deque<ipc::JobId> over_;  ///< Finished, to be settled.
  std::uint64_t next_id_;
};

}  // namespace kvferry::cache_manager
