// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The thread blocks that kernels of a staging agent take: of each class of jobs its own.
#include "worker/agent_fixture.hpp"

#include <gtest/gtest.h>

namespace kvferry::worker {
namespace {

class AgentBudgetTest : public AgentFixture {
 protected:
  AgentBudgetTest() { budget_ = {.gather = 3, .scatter = 5, .ahead = 1}; }
  void SetUp() override {
    AgentFixture::SetUp();
    ASSERT_TRUE(connect().has_value());
    lend();
  }
  /// Of the kernels that it launches for that.
  std::uint32_t thread_blocks(StageKind kind, bool is_ahead) {
    ask(kind, is_ahead);
    const auto reply = receive();
    EXPECT_TRUE(reply.has_value() && !reply->error.has_value());
    return plan_.thread_blocks();
  }
};

TEST_F(AgentBudgetTest, StoresLoadsAndLoadsFetchedAheadHaveOneEach) {
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(thread_blocks(StageKind::kGather, false), 3U);
    EXPECT_EQ(thread_blocks(StageKind::kScatter, false), 5U);
    EXPECT_EQ(thread_blocks(StageKind::kScatter, true), 1U);
    EXPECT_EQ(thread_blocks(StageKind::kStore, false), 3U);
    EXPECT_EQ(thread_blocks(StageKind::kLoad, false), 5U);
    EXPECT_EQ(thread_blocks(StageKind::kLoad, true), 1U);
  }
}

}  // namespace
}  // namespace kvferry::worker
