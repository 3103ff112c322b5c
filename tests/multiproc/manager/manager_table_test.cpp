// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/manager/manager_client_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <csignal>

// What engines see of the host tier by looking at the manager's table.

namespace kvferry::test {
namespace {

using worker::PrefixMatch;
using worker::Presence;

class ManagerTableTest : public ManagerClientTest {
 protected:
  PrefixMatch match(std::uint64_t count) {
    const auto found = engine_->match_prefix(keys(count));
    EXPECT_TRUE(found.has_value()) << found.error().to_string();
    return found.value_or(PrefixMatch{});
  }
};

TEST_F(ManagerTableTest, ABlockIsPendingUntilEveryRankHasStoredIt) {
  start_engine();
  connect_engine();
  EXPECT_EQ(engine_->presence(kMain, key(1)), Presence::kMiss);
  EXPECT_EQ(match(1), (PrefixMatch{0, false}));
  const auto slots = reserve({{kMain, key(1)}, {kState, key(1)}});
  EXPECT_EQ(engine_->presence(kMain, key(1)), Presence::kHitPending);
  EXPECT_EQ(match(1), (PrefixMatch{0, true}));
  submit_store(1, {{kMain, ipc::BlockId{0}, slots[0]}, {kState, ipc::BlockId{0}, slots[1]}});
  const auto first = movers_[0]->next_body<ipc::MoverJob>(ipc::MessageKind::kMoverJob);
  ASSERT_TRUE(first.has_value());
  movers_[0]->finish(*first);
  (void)status();  // the manager has taken that in
  EXPECT_EQ(engine_->presence(kMain, key(1)), Presence::kHitPending) << "the other rank has not";
  const auto second = movers_[1]->next_body<ipc::MoverJob>(ipc::MessageKind::kMoverJob);
  ASSERT_TRUE(second.has_value());
  movers_[1]->finish(*second);
  EXPECT_EQ(wait_done().results, (std::vector<std::uint8_t>{0, 0}));
  EXPECT_EQ(engine_->presence(kMain, key(1)), Presence::kHit);
  EXPECT_EQ(engine_->presence(kState, key(1)), Presence::kHit);
  EXPECT_EQ(match(1), (PrefixMatch{1, false}));
}

TEST_F(ManagerTableTest, APrefixIsMatchedByTheRulesOfAllGroupsAsTheManagerDoes) {
  start_engine();
  connect_engine();
  store_prefix(1, 5);
  EXPECT_EQ(match(8).usable, 5U);
  EXPECT_EQ(match(3).usable, 3U);
  store_prefix(7, 8);
  EXPECT_EQ(match(8).usable, 5U) << "block 6 is not there";
  store_prefix(6, 6);
  EXPECT_EQ(match(8).usable, 8U) << "it came later than those that continue it";
  const auto told = engine_->lookup(keys(8), soon());
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->usable_prefix, 8U);
}

TEST_F(ManagerTableTest, WhatWasStoredWithoutSayingWhatItContinuesIsJoinedByAUse) {
  start_engine();
  connect_engine();
  for (const std::uint64_t i : {1U, 2U, 3U}) {
    for (const ipc::GroupId group : {kMain, kState}) {
      store(i, static_cast<std::uint32_t>(i), group.value);
    }
  }
  EXPECT_EQ(match(3).usable, 1U);
  EXPECT_EQ(engine_->presence(kMain, key(3)), Presence::kHit);
  ASSERT_TRUE(engine_->use_prefix(keys(3)).has_value());
  ASSERT_TRUE(engine_->status(soon()).has_value());  // comes behind it
  EXPECT_EQ(match(3).usable, 3U);
}

TEST_F(ManagerTableTest, AStoppedManagerKeepsNobodyFromLookingAndADeadOneHasNothing) {
  start_engine();
  connect_engine();
  store_prefix(1, 4);
  manager_->signal(SIGSTOP);
  EXPECT_EQ(match(4), (PrefixMatch{4, false}));
  EXPECT_EQ(engine_->presence(kMain, key(4)), Presence::kHit);
  EXPECT_EQ(engine_->presence(kMain, key(5)), Presence::kMiss);
  manager_->signal(SIGKILL);
  ASSERT_TRUE(manager_->wait(soon()).has_value());
  const ipc::Deadline deadline = soon();
  while (engine_->state().manager_connected && !deadline.expired()) {
    pollfd entry{engine_->fd(), POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_timeout_ms());
    (void)engine_->poll(1);
  }
  EXPECT_EQ(engine_->match_prefix(keys(4)).error().code, ipc::ErrorCode::kNoManager);
  EXPECT_EQ(engine_->presence(kMain, key(4)), Presence::kMiss);
  EXPECT_EQ(engine_->use_prefix(keys(4)).error().code, ipc::ErrorCode::kNoManager);
  manager_.reset();
}

TEST_F(ManagerTableTest, AHashOfZeroNamesNoBlock) {
  start_engine();
  connect_engine();
  const worker::StoreTarget none{kMain, {}, {}};
  const auto refused = engine_->reserve_store({&none, 1}, soon());
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ipc::ErrorCode::kInvalidArgument);
  EXPECT_THAT(refused.error().message, testing::HasSubstr("zero"));
}

TEST_F(ManagerTableTest, AnotherIdentityAndAnEngineWithoutWorkersFindNothing) {
  start_manager();
  worker::ClientOptions options;
  options.runtime_dir = dir_.string();
  options.engine = "alone";
  options.identity.model = "tiny";
  auto alone = worker::Client::connect(options, soon());
  ASSERT_TRUE(alone.has_value());
  EXPECT_EQ((*alone)->match_prefix(keys(1)).error().code, ipc::ErrorCode::kNotReady);
  EXPECT_EQ((*alone)->presence(kMain, key(1)), Presence::kMiss);
  EXPECT_TRUE((*alone)->use_prefix({}).has_value());
  (*alone)->close();
  EXPECT_EQ((*alone)->match_prefix(keys(1)).error().code, ipc::ErrorCode::kCancelled);
}

TEST_F(ManagerTableTest, AClearThatDropsHostMemoryIsSeenAtOnce) {
  start_engine();
  connect_engine();
  store_prefix(1, 3);
  EXPECT_EQ(match(3).usable, 3U);
  ipc::ClearRequest clear;
  clear.engine = "chat";
  operator_->ask(ipc::MessageKind::kClear, clear);
  ASSERT_NO_FATAL_FAILURE(answer_clears(1));
  ASSERT_TRUE(operator_->next(ipc::MessageKind::kClear).has_value());
  EXPECT_EQ(match(3), (PrefixMatch{0, false}));
  EXPECT_EQ(status()["index"]["unkept"], 0);
}

}  // namespace
}  // namespace kvferry::test
