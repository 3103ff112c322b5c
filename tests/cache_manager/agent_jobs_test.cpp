// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Jobs that the worker's agent copies by itself, straight between its blocks and the pool that the
// mover lends to it. The agent is the test.
#include "cache_manager/staged_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using ipc::ErrorCode;
using ipc::PacketSocket;
using ipc::RegionSet;
using ipc::StageKind;
using ipc::StageRequest;
using testing::Each;
using testing::ElementsAre;

class AgentJobsTest : public StagedFixture {
 protected:
  void adjust(TransferEngine::Options& options) override {
    options.strategy = CopyStrategy::kAgent;
  }
  PacketSocket connect() {
    PacketSocket agent = next_hello();
    greet(agent);
    return agent;
  }
  /// The next packet lends a pool: its size, or 0 when it takes it back.
  static std::uint64_t next_pool(PacketSocket& agent) {
    const auto packet = agent.receive(test::soon());
    EXPECT_TRUE(packet.has_value());
    if (!packet) return 0;
    const auto request = ipc::decode<StageRequest>(packet->bytes, "StageRequest");
    EXPECT_TRUE(request.has_value() && request->kind == StageKind::kPool);
    EXPECT_EQ(packet->fds.size(), request->pool_bytes > 0 ? 1U : 0U);
    struct stat about = {};
    if (!packet->fds.empty()) {
      EXPECT_EQ(::fstat(packet->fds[0].get(), &about), 0);
    }
    EXPECT_EQ(static_cast<std::uint64_t>(about.st_size), request->pool_bytes);
    return request->pool_bytes;
  }
  static void refuse(PacketSocket& agent, const StageRequest& request, const ipc::Error& error) {
    ASSERT_TRUE(agent.send(ipc::encode(ipc::StageReply{request.id, error})).has_value());
  }
};

TEST_F(AgentJobsTest, PoolIsLentOnceAndEachJobNamesItsPlacesThere) {
  submit(1, CopyDirection::kDeviceToHost, 2);
  PacketSocket agent = connect();
  EXPECT_EQ(next_pool(agent), kPoolBytes);
  const StageRequest store = next_request(agent);
  EXPECT_EQ(store.kind, StageKind::kStore);
  EXPECT_THAT(store.blocks, ElementsAre(0, 1));
  ASSERT_EQ(store.parts.size(), 1U) << "they follow each other";
  EXPECT_EQ(store.parts[0].set, RegionSet::kSharded);
  EXPECT_EQ(store.parts[0].first, 0U);
  EXPECT_EQ(store.parts[0].count, 2U);
  EXPECT_EQ(store.parts[0].pool_offset, 8 * kSlotBytes);
  EXPECT_FALSE(is_answered(1));
  reply(agent, store);
  const ipc::MoverJobDone done = wait_answer(1);
  EXPECT_THAT(done.results, ElementsAre(0, 0));
  EXPECT_EQ(done.bytes, 2 * kSlotBytes);
  submit(2, CopyDirection::kDeviceToHost);
  reply(agent, next_request(agent));
  EXPECT_THAT(wait_answer(2).results, ElementsAre(0));
  // The other direction has a connection of its own.
  submit_load(3);
  PacketSocket loads = connect();
  EXPECT_EQ(next_pool(loads), kPoolBytes);
  const StageRequest load = next_request(loads);
  EXPECT_EQ(load.kind, StageKind::kLoad);
  EXPECT_EQ(load.parts.at(0).pool_offset, 24 * kSlotBytes);
  reply(loads, load);
  EXPECT_THAT(wait_answer(3).results, ElementsAre(0));
}

TEST_F(AgentJobsTest, PoolOfALostManagerIsTakenBackAndTheNextOneLent) {
  submit_load(1);
  PacketSocket agent = connect();
  EXPECT_EQ(next_pool(agent), kPoolBytes);
  reply(agent, next_request(agent));
  EXPECT_THAT(wait_answer(1).results, ElementsAre(0));
  engine_->drop_pool();  // with nothing under way
  EXPECT_EQ(next_pool(agent), 0U);
  constexpr std::uint64_t kNextBytes = kPoolBytes / 2;
  auto fd = ipc::SharedMemory::create_pool("kvferry-test-pool", kNextBytes, false);
  ASSERT_TRUE(fd.has_value());
  engine_->set_pool(ipc::PoolMapping::map(*device_, std::move(fd).value(), kNextBytes).value());
  submit_load(2);
  EXPECT_EQ(next_pool(agent), kNextBytes);
  reply(agent, next_request(agent));
  EXPECT_THAT(wait_answer(2).results, ElementsAre(0));
}

TEST_F(AgentJobsTest, PoolIsTakenBackWhileAJobOfItEnds) {
  submit_load(1);
  PacketSocket agent = connect();
  EXPECT_EQ(next_pool(agent), kPoolBytes);
  const StageRequest load = next_request(agent);
  engine_->drop_pool();
  EXPECT_EQ(next_pool(agent), 0U);
  EXPECT_FALSE(is_answered(1)) << "its blocks are still written";
  reply(agent, load);
  EXPECT_THAT(wait_answer(1).results, ElementsAre(0));
}

TEST_F(AgentJobsTest, WhatTheAgentRefusesFailsWithItsTextAndTheNextJobGoesOn) {
  submit(1, CopyDirection::kDeviceToHost, 2);
  PacketSocket agent = connect();
  EXPECT_EQ(next_pool(agent), kPoolBytes);
  refuse(agent, next_request(agent), KVFERRY_ERROR(kCuda, "no memory to pin"));
  const ipc::MoverJobDone done = wait_answer(1);
  EXPECT_THAT(done.results, Each(static_cast<std::uint8_t>(ErrorCode::kCuda)));
  EXPECT_EQ(done.message, "no memory to pin");
  EXPECT_EQ(done.bytes, 0U);
  submit(2, CopyDirection::kDeviceToHost);
  reply(agent, next_request(agent));
  EXPECT_THAT(wait_answer(2).results, ElementsAre(0));
}

TEST_F(AgentJobsTest, ClosedConnectionEndsNoJobBeforeTheAgentSaysSoAndThePoolIsLentAnew) {
  submit(1, CopyDirection::kDeviceToHost);
  {
    PacketSocket agent = connect();
    EXPECT_EQ(next_pool(agent), kPoolBytes);
    EXPECT_EQ(next_request(agent).kind, StageKind::kStore);
  }
  (void)next_hello();
  PacketSocket agent = next_hello();
  EXPECT_FALSE(is_answered()) << "the agent may still write to the pool";
  greet(agent);
  EXPECT_THAT(wait_answer().results, ElementsAre(static_cast<std::uint8_t>(ErrorCode::kPeerDied)));
  submit(2, CopyDirection::kDeviceToHost);
  EXPECT_EQ(next_pool(agent), kPoolBytes);
  reply(agent, next_request(agent));
  EXPECT_THAT(wait_answer(2).results, ElementsAre(0));
}

TEST_F(AgentJobsTest, LongJobsAreCutAndFewPartsAreAskedForAtATime) {
  // Places that are apart: the cut is by bytes.
  constexpr std::uint32_t kBlocks = 200;
  ipc::MoverJob job;
  job.job = ipc::JobId{1};
  job.session = session_;
  job.epoch = ipc::Epoch{1};
  job.direction = CopyDirection::kDeviceToHost;
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    job.items.push_back({ipc::GroupId{0}, ipc::BlockId{i % 8}, i * kSlotBytes, 0, true});
  }
  engine_->submit(job);
  PacketSocket agent = connect();
  EXPECT_EQ(next_pool(agent), kPoolBytes);
  constexpr std::size_t kMostAsked = 4;
  std::vector<StageRequest> asked;
  for (std::size_t i = 0; i < kMostAsked; ++i) asked.push_back(next_request(agent));
  const auto more = agent.try_receive();
  ASSERT_TRUE(more.has_value());
  EXPECT_FALSE(more->has_value());
  std::size_t blocks = 0;
  for (const StageRequest& one : asked) {
    EXPECT_LE(one.blocks.size() * kSlotBytes, 8ULL << 20);
    blocks += one.blocks.size();
    reply(agent, one);
  }
  while (blocks < kBlocks) {
    const StageRequest one = next_request(agent);
    ASSERT_FALSE(one.blocks.empty());
    blocks += one.blocks.size();
    reply(agent, one);
  }
  EXPECT_THAT(wait_answer(1).results, Each(0));
}

class SmallSwapsTest : public AgentJobsTest {
 protected:
  void adjust(TransferEngine::Options& options) override {
    options.strategy = CopyStrategy::kAuto;
    options.agent_swap_bytes = 2 * kSlotBytes;
  }
};

TEST_F(SmallSwapsTest, WhatTheAgentHasNoPoolForGoesThroughTheRingUntilItsNextConnection) {
  submit(1, CopyDirection::kDeviceToHost, 2);
  {
    PacketSocket agent = connect();
    EXPECT_EQ(next_pool(agent), kPoolBytes);
    refuse(agent, next_request(agent), KVFERRY_ERROR(kCuda, "no memory to pin"));
    for (std::uint64_t id = 1; id < 3; ++id) {
      for (int i = 0; i < 2; ++i) {
        const StageRequest request = next_request(agent);
        EXPECT_EQ(request.kind, StageKind::kGather);
        reply(agent, request);
      }
      const ipc::MoverJobDone done = wait_answer(id);
      EXPECT_THAT(done.results, ElementsAre(0, 0)) << done.message;
      EXPECT_EQ(done.message, "");
      EXPECT_EQ(done.bytes, 2 * kSlotBytes);
      submit(id + 1, CopyDirection::kDeviceToHost, 2);
    }
    // Of the last one.
    for (int i = 0; i < 2; ++i) reply(agent, next_request(agent));
    EXPECT_THAT(wait_answer(3).results, ElementsAre(0, 0));
  }
  submit(4, CopyDirection::kDeviceToHost, 2);
  PacketSocket agent = connect();
  EXPECT_EQ(next_pool(agent), kPoolBytes);
  reply(agent, next_request(agent));
  EXPECT_THAT(wait_answer(4).results, ElementsAre(0, 0));
}

TEST_F(SmallSwapsTest, WhatAnAgentSaysOfTheEpochEndsTheJob) {
  submit(1, CopyDirection::kDeviceToHost);
  PacketSocket agent = connect();
  EXPECT_EQ(next_pool(agent), kPoolBytes);
  refuse(agent, next_request(agent), KVFERRY_ERROR(kStaleEpoch, "another one"));
  EXPECT_THAT(wait_answer(1).results,
              ElementsAre(static_cast<std::uint8_t>(ErrorCode::kStaleEpoch)));
}

class SwapsWithoutARingTest : public SmallSwapsTest {
 protected:
  void adjust_arena(ipc::ArenaOptions& options) override {
    options.staging_slots = 0;
    options.staging_slot_bytes = 0;
  }
};

TEST_F(SwapsWithoutARingTest, JobsOfAWorkerThatIsNotThereAreCopiedByTheMover) {
  listener_.reset();
  submit(1, CopyDirection::kDeviceToHost, 2);
  EXPECT_THAT(wait_answer(1).results, ElementsAre(0, 0));
}

TEST_F(SmallSwapsTest, SmallJobsThatAreAloneGoToTheAgentAndOthersThroughTheRing) {
  submit(1, CopyDirection::kDeviceToHost, 2);
  PacketSocket agent = connect();
  EXPECT_EQ(next_pool(agent), kPoolBytes);
  const StageRequest small = next_request(agent);
  EXPECT_EQ(small.kind, StageKind::kStore);
  submit(2, CopyDirection::kDeviceToHost, 1);  // small, and not alone
  const StageRequest second = next_request(agent);
  EXPECT_EQ(second.kind, StageKind::kGather);
  reply(agent, second);
  reply(agent, small);
  EXPECT_THAT(wait_answer(1).results, Each(0));
  EXPECT_THAT(wait_answer(2).results, Each(0));
  submit(3, CopyDirection::kDeviceToHost, 3);
  for (int i = 0; i < 3; ++i) {
    const StageRequest large = next_request(agent);
    EXPECT_EQ(large.kind, StageKind::kGather);
    reply(agent, large);
  }
  EXPECT_THAT(wait_answer(3).results, Each(0));
}

}  // namespace
}  // namespace kvferry::cache_manager
