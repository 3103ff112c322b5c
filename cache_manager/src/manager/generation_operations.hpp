// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "manager/clear_operations.hpp"
#include "manager/context.hpp"
#include "manager/reinit_operations.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvferry::cache_manager {

/// The pauses, continues, flushes, updates, releases and resumes that run: each asks the engine's
/// schedulers and workers in a few rounds, waits in each for every answer (or its death, or the
/// deadline), and answers once.
/// @threading the loop's thread.
class GenerationOperations {
 public:
  /// clears, reinits: for the cache's memory, in a release and a resume.
  GenerationOperations(ManagerContext& context, ClearOperations& clears, ReinitOperations& reinits)
      : context_(context), clears_(clears), reinits_(reinits) {}
  GenerationOperations(const GenerationOperations&) = delete;
  GenerationOperations& operator=(const GenerationOperations&) = delete;
  ~GenerationOperations() = default;

  // The engine runs no other operation.
  void pause(const ipc::Peer& peer,
             const ipc::Envelope& request,
             const ipc::PauseRequest& message,
             EngineRecord& engine);
  void resume(const ipc::Peer& peer,
              const ipc::Envelope& request,
              const ipc::ContinueRequest& message,
              EngineRecord& engine);
  void flush(const ipc::Peer& peer,
             const ipc::Envelope& request,
             const ipc::FlushRequest& message,
             EngineRecord& engine);

  void update_weights(const ipc::Peer& peer,
                      const ipc::Envelope& request,
                      const ipc::UpdateWeightsRequest& message,
                      EngineRecord& engine);

  /// The engine has passed check_release().
  void release(const ipc::Peer& peer,
               const ipc::Envelope& request,
               const ipc::ReleaseRequest& message,
               EngineRecord& engine);
  /// Something of it is released.
  void take_back(const ipc::Peer& peer,
                 const ipc::Envelope& request,
                 const ipc::ResumeRequest& message,
                 EngineRecord& engine);
  /// Whether every rank has whom a release of these tags needs.
  [[nodiscard]] static ipc::Status check_release(const EngineRecord& engine, ipc::MemoryTags tags);

  /// A scheduler has come, with a pause in force or none: it is told what holds for its engine.
  void on_scheduler(const ClientRecord& client,
                    std::optional<ipc::PauseMode> paused,
                    bool by_release);
  /// A flush may be waiting for jobs that have ended.
  void on_jobs_changed();
  /// Who asked for an operation may have gone: its process has died, or closed its connection.
  void on_peer_gone(const ipc::IncarnationId& peer);
  /// Answers the operation that runs on the engine; schedulers that it holds for a while run again.
  /// Weights that are being committed are not left half-way: that goes on.
  void cancel(EngineRecord& engine, const ipc::Error& why);
  /// The manager ends: answers all of them.
  void cancel_all(const ipc::Error& why);

 private:
  struct Operation {
    ipc::Peer peer;
    ipc::Envelope request;
    EngineRecord* engine = nullptr;
    ipc::TimePoint start;
    ipc::TimePoint give_up;
    /// Of what waits for an idle engine: how long it may take from then on.
    std::optional<ipc::Duration> once_idle;
    std::size_t pending = 0;     ///< Answers of the round that runs.
    std::function<void()> next;  ///< After that round.
    std::function<void()> reply;
    std::optional<ipc::Error> error;                    ///< The first one.
    std::optional<std::set<ipc::IncarnationId>> asked;  ///< Schedulers of the first round.
    std::vector<ipc::IncarnationId> open;               ///< Schedulers that have not answered.
    std::uint32_t schedulers = 0;
    bool waits_for_jobs = false;
    ipc::SchedulerLoad load;
    std::vector<ipc::RankMemory> ranks;
    std::uint64_t host_blocks_dropped = 0;
    /// Of an update of weights: what the ranks are told, and what they came to.
    ipc::RankWeights weights;
    std::vector<ipc::RankUpdate> updates;
    std::vector<ipc::IncarnationId> workers;  ///< Those that prepare.
    std::string transport;                    ///< UpdateWeightsReply::transport.
    std::vector<std::optional<ipc::BroadcastPort>> ports;
    bool prepares = false;
    bool called_off = false;  ///< The ranks know that the broadcast has failed.
    /// Of a release or a resume.
    ipc::MemoryTags tags;
    std::vector<ipc::RankReleased> memory;
    std::vector<ipc::RankOutcome> cleared;
    ipc::TimerId timer = 0;
    /// From the commit, or what a release and a resume do on the ranks, to the end: not to be taken
    /// for not done.
    bool commits = false;
    bool answered = false;
  };
  using OperationRef = std::shared_ptr<Operation>;  // Shared by the answers that are outstanding.

  [[nodiscard]] OperationRef begin(const ipc::Peer& peer,
                                   const ipc::Envelope& request,
                                   EngineRecord& engine,
                                   EngineOperation kind,
                                   ipc::Duration deadline);
  void ask_schedulers(const OperationRef& operation,
                      const ipc::Schedule& order,
                      std::function<void()> next);
  void on_schedule_answer(const OperationRef& operation,
                          const ipc::IncarnationId& scheduler,
                          const ipc::Result<ipc::Envelope>& answer);
  using RankAnswered =
      std::function<void(std::uint32_t rank, const ipc::Result<ipc::Envelope>& answer)>;
  template <typename Body>
  void ask_workers(const OperationRef& operation,
                   ipc::MessageKind kind,
                   const Body& body,
                   RankAnswered answered,
                   std::function<void()> next);
  template <typename Body>
  void ask_rank(const OperationRef& operation,
                std::uint32_t rank,
                ipc::MessageKind kind,
                const Body& body,
                const RankAnswered& answered);
  void empty_workers(const OperationRef& operation,
                     ipc::EmptyReason reason,
                     std::function<void()> next);
  /// The same of those that are not among the ones named.
  void empty_other_workers(const OperationRef& operation,
                           const std::set<ipc::IncarnationId>& emptied,
                           ipc::EmptyReason reason,
                           std::function<void()> next);
  static void end_round(const OperationRef& operation);
  void wait_for_jobs(const OperationRef& operation);
  void hold_idle(const OperationRef& operation,
                 std::chrono::milliseconds timeout,
                 std::function<void()> then);
  void idle_times_out(const OperationRef& operation);
  void flush_held(const OperationRef& operation, const ipc::FlushRequest& message);
  /// The end of a pause: the last round.
  void let_run(const OperationRef& operation);
  /// The last round: schedulers that were held for a while do again what they are to do.
  void run_again(const OperationRef& operation);
  /// It has failed while they were held.
  void give_up(const OperationRef& operation);
  // weights_update.cpp
  void prepare_weights(const OperationRef& operation, bool empty_cache);
  void prepare_ranks(const OperationRef& operation, bool empty_cache);
  // memory_release.cpp
  void release_held(const OperationRef& operation, const ipc::ReleaseRequest& message);
  void release_ranks(const OperationRef& operation, const ipc::ReleaseRequest& message);
  void release_cache(const OperationRef& operation, const ipc::ReleaseRequest& message);
  template <typename Order>
  void ask_for_memory(const OperationRef& operation,
                      ipc::MessageKind kind,
                      const Order& order,
                      std::function<void()> next);
  void end_release(const OperationRef& operation);
  void take_cache_back(const OperationRef& operation, std::chrono::milliseconds deadline);
  void end_resume(const OperationRef& operation);
  // weights_distribution.cpp
  void distribute_weights(const OperationRef& operation, std::function<void()> next);
  void read_for_ranks(const OperationRef& operation,
                      const ipc::RankWeightsRead& wanted,
                      const std::function<void()>& next);
  void hand_to_ranks(const OperationRef& operation,
                     const ipc::WeightsPart& part,
                     std::function<void()> next);
  // weights_broadcast.cpp
  /// Rank 0's file reaches the others in the best way that there is.
  void hand_weights_on(const OperationRef& operation, std::function<void()> next);
  void look_for_ports(const OperationRef& operation, std::function<void()> next);
  void open_broadcast(const OperationRef& operation, std::function<void()> next);
  /// on_failed: called for each rank that fails, before the others have answered.
  void ask_for_weights(const OperationRef& operation,
                       const std::function<void()>& on_failed,
                       std::function<void()> next);
  void hold_for_commit(const OperationRef& operation, bool empty_cache);
  [[nodiscard]] static std::vector<ipc::IncarnationId> workers_of(const EngineRecord& engine);
  void abandon_weights(const Operation& operation);
  void commit_weights(const OperationRef& operation, bool empty_cache);
  /// Schedulers that are held for a while, or may be, do again what they are to do.
  void order_back(const EngineRecord& engine);
  /// What a scheduler does under a pause, or under none.
  [[nodiscard]] static ipc::ScheduleOrder order_of(std::optional<ipc::PauseMode> paused);
  /// What an engine's schedulers do while no operation orders them about.
  [[nodiscard]] static ipc::Schedule schedule_of(const EngineRecord& engine);
  void tell(const ipc::IncarnationId& scheduler, const ipc::Schedule& order);
  void tell(const ipc::IncarnationId& scheduler,
            const ipc::Schedule& order,
            ipc::Deadline deadline);
  void tell_again(const ipc::IncarnationId& scheduler, ipc::Deadline deadline);
  void finish(const OperationRef& operation);
  void end_early(const OperationRef& operation, const ipc::Error& why);
  template <typename Reply> void answer(const Operation& operation, const Reply& reply) const;
  [[nodiscard]] OperationRef find(const EngineRecord& engine) const;
  [[nodiscard]] static std::chrono::microseconds took(const Operation& operation);

  ManagerContext& context_;
  ClearOperations& clears_;
  ReinitOperations& reinits_;
  std::vector<OperationRef> operations_;
  std::uint64_t last_update_ = 0;  ///< Of weights.
};

}  // namespace kvferry::cache_manager
