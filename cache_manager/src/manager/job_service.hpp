// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/store_messages.hpp"
#include "manager/awaited_sums.hpp"
#include "manager/context.hpp"
#include "manager/waiting_loads.hpp"

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <vector>

namespace kvferry::cache_manager {

/// The jobs of engine clients: checks submits, takes host blocks, hands over to the job table, and
/// turns what comes back into visible blocks and one JobDone each. @threading the loop's thread.
class JobService {
 public:
  explicit JobService(ManagerContext& context);
  JobService(const JobService&) = delete;
  JobService& operator=(const JobService&) = delete;
  ~JobService();

  void submit_store(const ClientRecord& client, const ipc::Envelope& request);
  void offer_store(const ClientRecord& client, const ipc::Envelope& request);
  void submit_load(const ClientRecord& client, const ipc::Envelope& request);
  void swap_out(const ClientRecord& client, const ipc::Envelope& request);
  void swap_in(const ClientRecord& client, const ipc::Envelope& request);
  void cancel(const ClientRecord& client, ipc::JobId job);
  /// Of an engine, or of all: loads that wait for blocks to be stored.
  void fail_waiting(std::uint32_t engine, const ipc::Error& error) {
    waiting_.fail_waiting(engine, error);
  }
  void fail_all_waiting(const ipc::Error& error) { waiting_.fail_all_waiting(error); }
  /// The job table's port: commits or discards, then answers.
  void finished(Job& job);
  /// A mover's event, of the rank's part of a store.
  void summed(std::uint32_t rank, ipc::MoverSums sums);
  /// Stores of which some checksum has not been told: the next manager would not serve them.
  [[nodiscard]] std::size_t sums_awaited() const noexcept { return sums_.jobs(); }
  void forget_client(const ipc::IncarnationId& client);
  /// It ends, and its jobs are to be orphaned: nobody computes what its stores wait for.
  void fail_layers(const ipc::IncarnationId& client);
  /// The client takes messages again.
  void on_writable(const ipc::IncarnationId& client);
  /// Completions that wait for clients whose queues are full.
  [[nodiscard]] std::size_t unsent() const noexcept;

 private:
  /// Everything that has to be right with jobs of all kinds: id, engine, generation, ranges, no
  /// device block twice.
  template <typename Items>
  [[nodiscard]] ipc::Status check(const ClientRecord& client,
                                  ipc::JobId job,
                                  std::uint64_t generation,
                                  const Items& items) const;
  [[nodiscard]] ipc::Status check_all_there(const ClientRecord& client,
                                            ipc::JobId job,
                                            const std::vector<ipc::LoadItem>& items) const;
  /// Whether one more job can be taken now; asked when nothing is wrong with it.
  [[nodiscard]] ipc::Status admit(const ClientRecord& client) const;
  [[nodiscard]] static Job begin(const ClientRecord& client,
                                 ipc::JobId job,
                                 std::uint64_t generation,
                                 JobKind kind);
  void refuse(const ClientRecord& client,
              const ipc::Envelope& request,
              ipc::JobId job,
              std::size_t items,
              const ipc::Error& error);
  /// So that no worker goes on waiting for the layers of a job that ended with an error.
  void tell_failed(std::uint32_t engine, const ipc::LayerTicket& layers, const ipc::Error& error);
  void accept(const ClientRecord& client, const ipc::Envelope& request, Job job);
  /// Alone or nearly so, and small: over before a sleeping thread has slept well.
  [[nodiscard]] bool is_brief(const Job& job) const;
  /// The reservations that a store fills, and which parts of each.
  using Fills = std::map<PrefixIndex::Token, std::uint64_t>;
  [[nodiscard]] ipc::Result<Fills> check_slots(const ClientRecord& client,
                                               const ipc::SubmitStore& store) const;
  /// Of an offer: its slots are places of keys.
  [[nodiscard]] static ipc::Result<Fills> check_places(const ClientRecord& client,
                                                       const ipc::OfferStore& offer);
  /// What an offer fills of what there is room for; the other items have their results.
  [[nodiscard]] Job take_offer(const ClientRecord& client,
                               const ipc::OfferStore& offer,
                               const Fills& fills);
  /// Host blocks for all items of a swap to the host, or an error.
  [[nodiscard]] ipc::Status take_slots(const ClientRecord& client,
                                       const ipc::SwapSequence& swap,
                                       Job& job);
  [[nodiscard]] ipc::Error does_not_fit(const ClientRecord& client,
                                        const ipc::SwapSequence& swap,
                                        PrefixIndex::Fit why) const;
  /// The block that a load names, with that part of it; null: it is not there.
  [[nodiscard]] HostBlockRef acquire(const ipc::BlockKey& key, std::uint32_t part) const;
  [[nodiscard]] static ipc::Status check_parts(const ClientRecord& client,
                                               const ipc::SubmitLoad& load);
  /// All loads are checked, and this block has nothing to be checked against.
  [[nodiscard]] bool must_not_load(const HostBlock& block) const;
  /// Says what the load of that part is checked against, if it is. False, with its result: all are,
  /// and this one cannot be.
  [[nodiscard]] bool set_sums(const HostBlock& block, JobItem& item);
  void end_load(Job& job);
  void wait_for(const ClientRecord& client,
                const ipc::Envelope& request,
                const ipc::SubmitLoad& load);
  void commit_store(Job& job);
  /// So that checksums of it can be told to the next manager.
  void note_awaited(const Job& job);
  void commit_swap_out(Job& job);
  void send(const ipc::IncarnationId& client, ipc::JobDone done);
  [[nodiscard]] bool has_backlog(const ClientRecord& client) const;
  [[nodiscard]] std::size_t unsent(const ipc::IncarnationId& client) const;

  ManagerContext& context_;
  std::uint32_t loads_ = 0;  ///< Of blocks, for the sample.
  AwaitedSums sums_;
  WaitingLoads waiting_;
  std::map<ipc::IncarnationId, std::deque<ipc::JobDone>> unsent_;  ///< Never empty ones.
};

}  // namespace kvferry::cache_manager
