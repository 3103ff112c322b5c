// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::JobId;
using ipc::MessageKind;
using ipc::ProcessKind;
using testing::ElementsAre;

/// Engine "chat" of two ranks as always, and beside it "code" of one rank.
class ManagerEnginesTest : public ManagerTest {
 protected:
  void TearDown() override {
    code_worker_.reset();
    code_mover_.reset();
    code_client_.reset();
    ManagerTest::TearDown();
  }
  void start_both() {
    ASSERT_NO_FATAL_FAILURE(start_engine());
    ASSERT_NO_FATAL_FAILURE(start_code(tiny_geometry(1)));
  }
  void start_code(const ipc::Geometry& geometry) {
    code_worker_ = peer(ProcessKind::kWorker, "worker code/0");
    code_mover_ = peer(ProcessKind::kMover, "mover code/0");
    for (ScriptedPeer* rank : {code_worker_.get(), code_mover_.get()}) {
      ASSERT_TRUE(rank->rank_hello(0, geometry, ipc::CacheOwner::kWorker, "code").has_value());
      rank->report_mapped(0, 1);
    }
    ASSERT_NO_FATAL_FAILURE(settle(*code_worker_));
    code_client_ = peer(ProcessKind::kEngine, "engine code");
    ipc::EngineHello hello = client_hello(1);
    hello.engine = "code";
    hello.fingerprint = geometry.fingerprint(ipc::ArenaOrder::kLayerFirst);
    const auto state = code_client_->call<ipc::EngineState>(MessageKind::kEngineHello, hello);
    ASSERT_TRUE(state.has_value()) << state.error().to_string();
    code_state_ = *state;
    while (!code_state_.offload_ready) {
      const auto event = code_client_->next_body<ipc::EngineState>(MessageKind::kEngineState);
      ASSERT_TRUE(event.has_value());
      code_state_ = *event;
    }
  }
  static ipc::SwapSequence swap(std::uint64_t job, const ipc::EngineState& state) {
    return {JobId{job}, state.generation, 7, {{GroupId{0}, BlockId{2}, 0}}};
  }

  std::unique_ptr<ScriptedPeer> code_worker_;
  std::unique_ptr<ScriptedPeer> code_mover_;
  std::unique_ptr<ScriptedPeer> code_client_;
  ipc::EngineState code_state_;
};

// The same job ids, handles and block numbers, at the same time.
TEST_F(ManagerEnginesTest, JobsOfTwoEnginesLiveSideBySideAndAClearOfOneLeavesTheOthersAlone) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  store(1, 1);
  client_->notify(MessageKind::kSwapOut, swap(1, state_));
  code_client_->notify(MessageKind::kSwapOut, swap(1, code_state_));
  std::vector<ipc::MoverJob> chat_jobs;
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    chat_jobs.push_back(*job);
  }
  auto code_job = code_mover_->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(code_job.has_value()) << "the same block number of another engine is no conflict";
  EXPECT_NE(code_job->job, chat_jobs[0].job);
  EXPECT_NE(code_job->items[0].shard_offset, chat_jobs[0].items[0].shard_offset);

  operator_->ask(MessageKind::kClear, ipc::ClearRequest{"code"});
  for (ScriptedPeer* rank : {code_worker_.get(), code_mover_.get()}) {
    const auto request = rank->next(MessageKind::kRankClear);
    ASSERT_TRUE(request.has_value());
    if (rank == code_worker_.get()) {
      // What runs drains before the arena goes.
      ErrorCode revoked = ErrorCode::kRevoked;
      code_mover_->finish(*code_job, &revoked);
    }
    rank->report_cleared(0, 1);
    rank->reply(*request, ipc::RankClearReply{});
  }
  const auto cleared = operator_->next_body<ipc::ClearReply>(MessageKind::kClear);
  ASSERT_TRUE(cleared.has_value()) << cleared.error().to_string();
  EXPECT_EQ(cleared->host_blocks_dropped, 0U);
  const auto code_done = code_client_->next_body<ipc::JobDone>(MessageKind::kJobDone);
  ASSERT_TRUE(code_done.has_value());
  EXPECT_THAT(code_done->results, ElementsAre(code(ErrorCode::kRevoked)));

  EXPECT_FALSE(client_->has(MessageKind::kJobDone)) << "chat's job still runs";
  movers_[0]->finish(chat_jobs[0]);
  movers_[1]->finish(chat_jobs[1]);
  EXPECT_THAT(wait_done().results, ElementsAre(0));
  EXPECT_EQ(lookup({1}).presence.at(0), static_cast<std::uint8_t>(ipc::BlockPresence::kHit));
  EXPECT_EQ(status()["sequences"]["count"], 1);

  // An answer in the name of the other engine's job is nobody's.
  client_->notify(MessageKind::kSwapIn, swap(2, state_));
  const auto job = movers_[0]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(job.has_value());
  code_mover_->finish(*job);
  EXPECT_FALSE(code_mover_->has(MessageKind::kMoverJob));
  EXPECT_FALSE(client_->has(MessageKind::kJobDone));
  movers_[0]->finish(*job);
  const auto other = movers_[1]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(other.has_value());
  movers_[1]->finish(*other);
  EXPECT_THAT(wait_done().results, ElementsAre(0));
}

// What an engine may have under way beside others is less than two of code's jobs; what it may have
// alone is more than three.
TEST_F(ManagerEnginesTest, EngineIsAloneOnItsLinkOnceTheOnlyRankThatSharedItHasLostItsMover) {
  ipc::Geometry large = tiny_geometry(1);
  for (ipc::RegionSpec& region : large.groups[0].regions) region.block_bytes = 20ULL << 20U;
  pool_bytes_ = 256ULL << 20U;
  start_manager();
  ASSERT_NO_FATAL_FAILURE(connect_client());
  for (const std::uint32_t rank : {0U, 1U}) ASSERT_NO_FATAL_FAILURE(add_worker(rank));
  movers_[0] = peer(ProcessKind::kMover, "mover chat/0");
  ASSERT_TRUE(movers_[0]
                  ->rank_hello(0, tiny_geometry(), ipc::CacheOwner::kWorker, "chat", "another")
                  .has_value());
  movers_[0]->report_mapped(0, 1);
  ASSERT_NO_FATAL_FAILURE(settle(0));
  // Of code's link.
  ChildProcess mover = peer_child("mover", 1);
  ASSERT_TRUE(mover.wait_line("ready", soon())) << mover.stderr_text();
  ASSERT_NO_FATAL_FAILURE(settle(1));
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  ASSERT_NO_FATAL_FAILURE(start_code(large));
  // No job fails for memory that is still to come.
  const ipc::Deadline ready = soon();
  for (auto pool = status()["pool"]; pool["ready_bytes"] != pool["bytes"];) {
    ASSERT_FALSE(ready.expired());
    pool = status()["pool"];
  }

  client_->notify(MessageKind::kSwapOut, swap(1, state_));
  ASSERT_TRUE(mover.wait_line("job 1", soon()));
  for (std::uint32_t i = 0; i < 3; ++i) {
    code_client_->notify(
        MessageKind::kSwapOut,
        ipc::SwapSequence{
            JobId{i + 1}, code_state_.generation, i + 1, {{GroupId{0}, BlockId{i}, 0}}});
  }
  const auto next_of_code = [this] {
    const auto job = code_mover_->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    EXPECT_TRUE(job.has_value()) << job.error().to_string();
    return job.value_or(ipc::MoverJob{});
  };
  std::vector<ipc::MoverJob> jobs{next_of_code(), next_of_code()};
  ASSERT_FALSE(code_client_->has(MessageKind::kJobDone));
  ASSERT_FALSE(code_mover_->has(MessageKind::kMoverJob)) << "chat shares the link";
  mover.kill();
  jobs.push_back(next_of_code());

  // So that no job keeps the manager from its end.
  for (const ipc::MoverJob& job : jobs) code_mover_->finish(job);
  const auto quiesce = workers_[1]->next(MessageKind::kQuiesceStaging);
  ASSERT_TRUE(quiesce.has_value());
  workers_[1]->reply(*quiesce, ipc::Empty{});
  const auto job = movers_[0]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(job.has_value());
  movers_[0]->finish(*job);
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kPeerDied)));
}

}  // namespace
}  // namespace kvferry::test
