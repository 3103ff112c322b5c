// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "manager/job_table.hpp"
#include "manager/prefix_observer.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// Loads of blocks that somebody is storing, or is about to. What is there is copied at once, each
/// other block when it has been stored, as parts that are jobs of their own; the client is answered
/// once, when all have ended. What has not been stored until then ends as kTimeout. Of one load few
/// parts are under way at a time: what is stored meanwhile is held, so that it stays, and goes
/// together when one of them has ended.
/// @threading the loop's thread. @lifetime the loop outlives it.
class WaitingLoads final : public PrefixObserver {
 public:
  static constexpr std::size_t kMostParts = 4;

  struct Ports {
    /// The slot of a visible block, and what it is checked against; null: it is not there.
    /// Null with a result in the item: it will not come.
    std::function<HostBlockRef(const ipc::BlockKey&, JobItem&)> acquire;
    /// Takes a part: it ends in part_ended().
    std::function<void(Job)> submit;
    std::function<void(const ipc::IncarnationId& client, ipc::JobId part)> cancel;
    /// Of a load, once all of it has ended.
    std::function<void(const ipc::IncarnationId& client, ipc::JobDone)> done;
    std::function<ipc::TimePoint()> now = [] { return ipc::MonotonicClock::now(); };
  };

  WaitingLoads(ipc::EventLoop& loop, Ports ports) : loop_(loop), ports_(std::move(ports)) {}
  WaitingLoads(const WaitingLoads&) = delete;
  WaitingLoads& operator=(const WaitingLoads&) = delete;
  ~WaitingLoads() override {
    *is_living_ = false;
    loop_.cancel(timer_);
  }

  /// @param job without items @param keys of the items @pre no job of the client has that id
  void add(Job job,
           std::vector<ipc::BlockKey> keys,
           const std::vector<ipc::LoadItem>& items,
           ipc::TimePoint until);
  [[nodiscard]] bool has(const ipc::IncarnationId& client, ipc::JobId job) const {
    return by_client_.contains({client, job});
  }
  [[nodiscard]] static bool is_part(ipc::JobId job) noexcept { return job.value >= kFirstPartId; }
  /// A part has ended; its places are free. Submits nothing yet.
  void part_ended(const Job& part);
  /// False when there is none.
  bool cancel(const ipc::IncarnationId& client, ipc::JobId job);
  /// Nobody is answered any more.
  void drop_client(const ipc::IncarnationId& client);
  /// Ends what waits for blocks. Parts end by themselves.
  void fail_waiting(std::uint32_t engine, const ipc::Error& error);
  void fail_all_waiting(const ipc::Error& error);
  [[nodiscard]] std::size_t count(std::uint32_t engine) const;
  [[nodiscard]] std::size_t count() const noexcept { return loads_.size(); }

  void stored(const ipc::BlockKey& key, const ipc::Digest& before) override;
  void removed(const ipc::BlockKey& /*key*/) override {}
  void emptied(const ipc::Digest& /*root*/) override {}

 private:
  using LoadId = std::uint64_t;
  struct Load {
    Job job;  ///< Its items have no slots: results are theirs.
    std::vector<ipc::BlockKey> keys;
    std::size_t missing = 0;  ///< Items that wait to be stored.
    std::vector<bool> is_missing;
    std::map<ipc::JobId, std::vector<std::uint32_t>> parts;  ///< Under way: their items.
    /// The next part: which items, and what they are.
    std::vector<std::uint32_t> held;
    std::vector<JobItem> held_items;

    [[nodiscard]] bool has_unsubmitted() const noexcept { return missing > 0 || !held.empty(); }
    ipc::TimePoint until;
  };
  using ClientKey = std::pair<ipc::IncarnationId, ipc::JobId>;
  using Wait = std::pair<LoadId, std::uint32_t>;

  /// Holds those of the items that are there now, and submits what is held if it may.
  void take(LoadId id, Load& load, const std::vector<std::uint32_t>& items);
  void submit_held(LoadId id, Load& load);
  void forget_wait(LoadId id, const Load& load, std::uint32_t item);
  /// Of the load, to be looked at in flush(). Others than the loop may be in the middle of
  /// something.
  [[nodiscard]] std::vector<std::uint32_t>& ready(LoadId id);
  /// Takes what has become visible.
  void flush();
  void stop_waiting(LoadId id, Load& load, const ipc::Error& error);
  void end_if_over(LoadId id);
  void arm();
  void expire();

  ipc::EventLoop& loop_;
  Ports ports_;
  std::map<LoadId, Load> loads_;
  std::map<ClientKey, LoadId> by_client_;
  std::unordered_multimap<ipc::BlockKey, Wait> waits_;
  std::map<std::pair<ipc::IncarnationId, ipc::JobId>, LoadId> by_part_;
  std::map<LoadId, std::vector<std::uint32_t>> ready_;
  std::set<std::pair<ipc::TimePoint, LoadId>> deadlines_;
  ipc::TimerId timer_ = 0;
  std::shared_ptr<bool> is_living_ = std::make_shared<bool>(true);  ///< For what is posted.
  LoadId next_load_ = 1;
  std::uint64_t next_part_ = kFirstPartId;
};

}  // namespace kvferry::cache_manager
