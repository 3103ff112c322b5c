// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A mover whose worker is lost with a scatter under way: the job ends only when that scatter cannot
// write any more.
#include "cache_manager/staged_fixture.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;
using ipc::PacketSocket;
using test::soon;

class StagedLossTest : public StagedFixture {};

TEST_F(StagedLossTest, ClosedConnectionOfALivingWorkerEndsNoJobBeforeItsAgentSaysSo) {
  submit_load();
  {
    PacketSocket agent = next_hello();
    greet(agent);
    EXPECT_EQ(next_request(agent).kind, ipc::StageKind::kScatter);
  }
  // It asks the agent again, for it must know when the scatter has ended. That takes as long as it
  // takes: the first attempt is left without an answer.
  (void)next_hello();
  PacketSocket agent = next_hello();
  EXPECT_FALSE(is_answered());
  greet(agent);
  EXPECT_EQ(wait_answer().results,
            std::vector<std::uint8_t>{static_cast<std::uint8_t>(ErrorCode::kPeerDied)});
}

TEST_F(StagedLossTest, AProvenJobIsAnsweredAlthoughTheNextOneIsNotOver) {
  submit_load(1);
  {
    PacketSocket agent = next_hello();
    greet(agent);
    EXPECT_EQ(next_request(agent).kind, ipc::StageKind::kScatter);
  }
  PacketSocket agent = next_hello();
  submit_load(2);
  EXPECT_FALSE(is_answered());
  greet(agent);
  const ipc::StageRequest request = next_request(agent);
  EXPECT_EQ(wait_answer(1).job, ipc::JobId{1});
  ASSERT_TRUE(agent.send(ipc::encode(ipc::StageReply{request.id, std::nullopt})).has_value());
  EXPECT_EQ(wait_answer(2).results, std::vector<std::uint8_t>{0});
}

TEST_F(StagedLossTest, EndOfTheEpochIsNotHeldUpByTheWaitAndDoesNotEndIt) {
  submit_load();
  {
    PacketSocket agent = next_hello();
    greet(agent);
    EXPECT_EQ(next_request(agent).kind, ipc::StageKind::kScatter);
  }
  (void)next_hello();
  EXPECT_FALSE(is_answered());
  EXPECT_TRUE(engine_->quiesce(ipc::Epoch{1}, soon()).has_value());
  EXPECT_FALSE(is_answered()) << "the worker may still write the block";
  PacketSocket agent = next_hello();
  greet(agent);
  EXPECT_EQ(wait_answer().results.size(), 1U);
}

TEST_F(StagedLossTest, JobAfterAWorkersReplacementGoesToTheNextAgent) {
  submit_load();
  {
    PacketSocket agent = next_hello();
    greet(agent);
    const ipc::StageRequest request = next_request(agent);
    ASSERT_TRUE(agent.send(ipc::encode(ipc::StageReply{request.id, std::nullopt})).has_value());
    EXPECT_EQ(wait_answer().results, std::vector<std::uint8_t>{0});
  }
  // The agent is gone while the mover is idle. The next job does not pay for that.
  submit_load(2);
  PacketSocket agent = next_hello();
  greet(agent);
  reply(agent, next_request(agent));
  EXPECT_EQ(wait_answer(2).results, std::vector<std::uint8_t>{0});
}

}  // namespace
}  // namespace kvferry::cache_manager
