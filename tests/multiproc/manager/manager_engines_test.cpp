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
    code_worker_ = peer(ProcessKind::kWorker, "worker code/0");
    code_mover_ = peer(ProcessKind::kMover, "mover code/0");
    for (ScriptedPeer* rank : {code_worker_.get(), code_mover_.get()}) {
      ASSERT_TRUE(
          rank->rank_hello(0, tiny_geometry(1), ipc::CacheOwner::kWorker, "code").has_value());
      rank->report_mapped(0, 1);
    }
    ASSERT_NO_FATAL_FAILURE(settle(*code_worker_));
    code_client_ = peer(ProcessKind::kEngine, "engine code");
    ipc::EngineHello hello = client_hello(1);
    hello.engine = "code";
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

}  // namespace
}  // namespace kvferry::test
