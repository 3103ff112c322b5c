// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/rank/pool_keeper.hpp"
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {
/// What a mover has beside its copies: keeps the pool of its manager.
class Keeper {
 public:
  Keeper(const std::filesystem::path& path, ipc::PoolMemory memory) {
    std::promise<void> made;
    thread_ = std::make_unique<ipc::OwnThread>(
        "keeper", ipc::OwnThread::Runs::kOurCode,
        [this, &path, memory = std::make_shared<ipc::PoolMemory>(std::move(memory)), &made] {
          keeper_.emplace(loop_, path, [this] { dropped_ = true; });
          keeper_->keep(std::move(*memory));
          made.set_value();
          (void)loop_.run();
          keeper_.reset();
        });
    made.get_future().wait();
  }
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;
  ~Keeper() {
    loop_.post([this] { loop_.stop(); });
    thread_->wait_end();
  }
  /// Its manager is gone.
  void offer() {
    loop_.post([this] { keeper_->offer(); });
  }
  [[nodiscard]] bool has_dropped() const { return dropped_; }

 private:
  ipc::EventLoop loop_;
  std::optional<ipc::PoolKeeper> keeper_;
  std::atomic<bool> dropped_ = false;
  std::unique_ptr<ipc::OwnThread> thread_;
};

/// Scripted movers, whose pool a killed manager's successor gets.
class ManagerRestartTest : public ManagerTest {
 protected:
  static constexpr ipc::GroupId kMain{0};

  void SetUp() override {
    ManagerTest::SetUp();
    ASSERT_NO_FATAL_FAILURE(start_engine());
    memory_ = movers_[0]->link().take_pool();
    ASSERT_TRUE(memory_.valid());
    ASSERT_TRUE(memory_.catalogue.valid());
    keeper_ = std::make_unique<Keeper>(keeper_name(), memory_.duplicate().value());
  }
  void TearDown() override {
    ManagerTest::TearDown();
    keeper_.reset();
  }
  [[nodiscard]] std::filesystem::path keeper_name() const {
    return ipc::RuntimeDir::find(dir_.string(), "default")
        ->rank_socket("chat", 0, ipc::PoolKeeper::kSocket);
  }
  void kill_manager() {
    manager_->signal(SIGKILL);
    ASSERT_TRUE(manager_->wait(soon()).has_value());
    operator_.reset();
    keeper_->offer();
  }
  /// The peer comes to the next manager, as the process that it was.
  std::unique_ptr<ScriptedPeer> again(std::unique_ptr<ScriptedPeer>& peer,
                                      ipc::ProcessKind kind,
                                      const std::string& name) {
    const ipc::IncarnationId id = peer->id();
    peer.reset();
    return std::make_unique<ScriptedPeer>(dir_.string(), kind, name, id);
  }
  void client_again() {
    client_ = again(client_, ipc::ProcessKind::kEngine, "engine");
    ASSERT_NO_FATAL_FAILURE(say_hello());
  }
  void say_hello() {
    ipc::EngineHello hello = client_hello();
    hello.unit_blocks = unit_blocks_;
    const auto state = client_->call<ipc::EngineState>(ipc::MessageKind::kEngineHello, hello);
    ASSERT_TRUE(state.has_value()) << state.error().to_string();
    state_ = *state;
  }
  void ranks_again() {
    for (const std::uint32_t rank : {0U, 1U}) {
      workers_[rank] = again(workers_[rank], ipc::ProcessKind::kWorker, "worker");
      ASSERT_TRUE(workers_[rank]->rank_hello(rank, tiny_geometry()).has_value());
      workers_[rank]->report_mapped(rank, 1);
      movers_[rank] = again(movers_[rank], ipc::ProcessKind::kMover, "mover");
      ASSERT_TRUE(movers_[rank]->rank_hello(rank, tiny_geometry()).has_value());
      movers_[rank]->report_mapped(rank, 1);
      settle(rank);
    }
    ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  }
  void restart() {
    ASSERT_NO_FATAL_FAILURE(kill_manager());
    ASSERT_NO_FATAL_FAILURE(start_manager());
    ASSERT_NO_FATAL_FAILURE(client_again());
    ASSERT_NO_FATAL_FAILURE(ranks_again());
  }
  /// Once what was left is there, or not: asks until the count is told.
  [[nodiscard]] nlohmann::json kept() {
    for (;;) {
      const nlohmann::json kept = status()["pool"]["kept"];
      if (kept.is_null() ||
          kept["adopted"].get<int>() + kept["dropped"].get<int>() == kept["found"].get<int>()) {
        return kept;
      }
    }
  }
  [[nodiscard]] ipc::BlockPresence presence(std::uint64_t block) {
    return static_cast<ipc::BlockPresence>(lookup({block}).presence.at(0));
  }
  /// Stores the block, and returns where rank 0 was told to put it.
  [[nodiscard]] std::uint64_t place_of_store(std::uint64_t block, std::uint32_t device_block) {
    const auto slots = reserve({{kMain, key(block)}});
    submit_store(next_job_++, {{kMain, ipc::BlockId{device_block}, slots.at(0)}});
    std::uint64_t place = 0;
    stored_.clear();
    for (const auto& mover : movers_) {
      const auto job = mover->next_body<ipc::MoverJob>(ipc::MessageKind::kMoverJob);
      EXPECT_TRUE(job.has_value());
      EXPECT_TRUE(job->wants_sums);
      if (mover == movers_[0]) place = job->items.at(0).shard_offset;
      mover->finish(*job);
      stored_.push_back(*job);
      if (tells_sums_) tell_sums(mover == movers_[0] ? 0 : 1, *job);
    }
    EXPECT_THAT(wait_done().results, testing::ElementsAre(0));
    return place;
  }

  void tell_sums(std::uint32_t rank, const ipc::MoverJob& job) {
    ScriptedPeer& mover = *movers_[rank];
    ipc::MoverSums sums;
    sums.job = job.job;
    for (const ipc::MoverItem& item : job.items) {
      sums.shard.push_back(item.shard_offset + 1);
      sums.replicated.push_back(item.with_replicated ? item.replicated_offset + 1 : 0);
    }
    mover.notify(ipc::MessageKind::kMoverSums, sums);
    // Behind it: the manager has taken it when it answers.
    ASSERT_TRUE(
        mover.call<ipc::Empty>(ipc::MessageKind::kRankState, ScriptedPeer::mapped_state(rank)));
  }

  /// Of what the job stored, as tell_sums() has it: to the next manager.
  [[nodiscard]] static std::vector<ipc::KeptSum> kept_sums(const ipc::MoverJob& job) {
    std::vector<ipc::KeptSum> sums;
    for (const ipc::MoverItem& item : job.items) {
      sums.push_back({job.job, item.shard_offset, item.shard_offset + 1});
      if (!item.with_replicated) continue;
      sums.push_back({job.job, item.replicated_offset, item.replicated_offset + 1});
    }
    return sums;
  }
  void tell_kept(std::uint32_t rank, std::vector<ipc::KeptSum> sums, bool is_last) {
    ScriptedPeer& mover = *movers_[rank];
    mover.notify(ipc::MessageKind::kKeptSums, ipc::KeptSums{std::move(sums), is_last});
    ASSERT_TRUE(
        mover.call<ipc::Empty>(ipc::MessageKind::kRankState, ScriptedPeer::mapped_state(rank)));
  }

  ipc::PoolMemory memory_;
  std::unique_ptr<Keeper> keeper_;
  std::vector<ipc::MoverJob> stored_;  ///< By the last place_of_store(), of each rank.
  bool tells_sums_ = true;
  std::uint32_t unit_blocks_ = 1;
};

}  // namespace kvferry::test
