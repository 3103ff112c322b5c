// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/manager/manager_client_fixture.hpp"

#include <csignal>

// What an engine has seen in host memory, and others' stores that want the room: with pins nothing
// goes between a look and its load.

namespace kvferry::test {
namespace {

using ipc::BlockId;
using worker::Completion;
using worker::LoadItem;
using worker::PinnedBlock;
using worker::PinWanted;
using worker::Presence;

class ManagerPinsTest : public ManagerClientTest {
 protected:
  /// One block of each of these keys and of group kMain.
  static std::vector<PinnedBlock> blocks(std::uint64_t first, std::uint64_t last) {
    std::vector<PinnedBlock> all;
    for (std::uint64_t i = first; i <= last; ++i) all.push_back({kMain, key(i)});
    return all;
  }
  std::vector<bool> pin(const std::vector<PinnedBlock>& wanted) {
    const auto there = engine_->pin_blocks(wanted, soon());
    EXPECT_TRUE(there.has_value()) << there.error().to_string();
    return there.value_or(std::vector<bool>{});
  }
  /// What another store of kMain gets for each of so many blocks that are new. 4 MiB hold fewer
  /// than 300 blocks of two ranks with 8 KiB each.
  std::vector<ipc::ReservedSlot> crowd(std::uint64_t count = 300) {
    ipc::ReserveStore wanted{{}, state_.weights};
    for (std::uint64_t i = 0; i < count; ++i) wanted.keys.push_back({kMain, key(next_++)});
    const auto reply =
        client_->call<ipc::ReserveStoreReply>(ipc::MessageKind::kReserveStore, wanted);
    EXPECT_TRUE(reply.has_value()) << reply.error().to_string();
    return reply ? reply->slots : std::vector<ipc::ReservedSlot>{};
  }
  ipc::JobId load(std::uint64_t first, std::uint64_t last) {
    std::vector<LoadItem> items;
    for (std::uint64_t i = first; i <= last; ++i) {
      items.push_back({kMain, BlockId{static_cast<std::uint32_t>(i)}, key(i)});
    }
    const auto job = engine_->submit_load(items, 1);
    EXPECT_TRUE(job.has_value()) << job.error().to_string();
    return job.value_or(ipc::JobId{});
  }
  std::vector<std::uint8_t> results(ipc::JobId job) {
    auto done = engine_->wait({&job, 1}, soon());
    EXPECT_TRUE(done.has_value()) << done.error().to_string();
    return done ? done->front().results : std::vector<std::uint8_t>{};
  }

  std::uint64_t next_ = 1000;
};

TEST_F(ManagerPinsTest, WhatWasOnlySeenGoesForOthersStoresBeforeItsLoad) {
  start_engine();
  connect_engine();
  store_prefix(1, 3);
  ASSERT_EQ(engine_->match_prefix(keys(3)).value().usable, 3U);
  EXPECT_EQ(crowd().back().outcome, ipc::ReserveOutcome::kFull);
  EXPECT_THAT(results(load(1, 3)), testing::Each(code(ipc::ErrorCode::kNotFound)));
  EXPECT_THAT(pin(blocks(1, 3)), testing::Each(false)) << "pinned: what is not there";
  EXPECT_EQ(status()["index"]["pinned"], 0);
}

TEST_F(ManagerPinsTest, WhatIsPinnedIsThereForItsLoadHoweverMuchIsStored) {
  start_engine();
  connect_engine();
  store_prefix(1, 3);
  EXPECT_EQ(pin(blocks(1, 4)), (std::vector<bool>{true, true, true, false}));
  EXPECT_EQ(status()["index"]["pinned"], 3);
  // Nobody waits for the room: who stores is told that there is none.
  EXPECT_EQ(crowd().back().outcome, ipc::ReserveOutcome::kFull);
  const ipc::JobId job = load(1, 3);
  // From here on the load keeps them itself.
  ASSERT_TRUE(engine_->unpin_blocks(blocks(1, 3)).has_value());
  ASSERT_TRUE(engine_->status(soon()).has_value());  // comes behind both
  EXPECT_EQ(status()["index"]["pinned"], 0);
  EXPECT_EQ(crowd(1).back().outcome, ipc::ReserveOutcome::kFull);
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  EXPECT_THAT(results(job), testing::ElementsAre(0, 0, 0));
  EXPECT_EQ(crowd(1).back().outcome, ipc::ReserveOutcome::kReserved) << "they may go now";
}

TEST_F(ManagerPinsTest, ABlockOfAnotherGroupUnderTheSameKeyIsNotPinned) {
  start_engine();
  connect_engine();
  store_prefix(1, 2);
  EXPECT_EQ(pin({{kState, key(2)}}), std::vector<bool>{true});
  EXPECT_EQ(status()["index"]["pinned"], 1);
  // Nor is a pin of one group's block taken back with another's.
  ASSERT_TRUE(engine_->unpin_blocks(std::vector<PinnedBlock>{{kMain, key(2)}}).has_value());
  ASSERT_TRUE(engine_->status(soon()).has_value());
  EXPECT_EQ(status()["index"]["pinned"], 1);
  EXPECT_EQ(pin({{ipc::GroupId{9}, key(2)}}), std::vector<bool>{false}) << "of no group";
}

TEST_F(ManagerPinsTest, PinsAreCountedAndEndWithTheirClient) {
  start_engine();
  connect_engine();
  store_prefix(1, 1);
  EXPECT_EQ(pin(blocks(1, 1)), std::vector<bool>{true});
  EXPECT_EQ(pin(blocks(1, 1)), std::vector<bool>{true});
  ASSERT_TRUE(engine_->unpin_blocks(blocks(1, 1)).has_value());
  ASSERT_TRUE(engine_->status(soon()).has_value());
  EXPECT_EQ(status()["index"]["pinned"], 1) << "it was pinned twice";
  engine_.reset();
  connect_engine();  // who is greeted when the other one's end has been taken in
  EXPECT_EQ(status()["index"]["pinned"], 0);
}

TEST_F(ManagerPinsTest, AManagerThatAnswersTooLatePinsNothing) {
  start_engine();
  connect_engine();
  store_prefix(1, 2);
  manager_->signal(SIGSTOP);
  const auto late =
      engine_->pin_blocks(blocks(1, 2), ipc::Deadline::after(std::chrono::milliseconds(20)));
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error().code, ipc::ErrorCode::kTimeout);
  manager_->signal(SIGCONT);
  ASSERT_TRUE(engine_->status(soon()).has_value());
  EXPECT_EQ(status()["index"]["pinned"], 0);
  EXPECT_EQ(engine_->presence(kMain, key(2)), Presence::kHit);
}

TEST_F(ManagerPinsTest, ABlockWithoutAPartThatIsAskedForIsNotPinned) {
  start_engine();
  connect_engine();
  store_prefix(1, 2);
  const std::vector<PinWanted> wanted = {{{kMain, key(1)}, 0b11}, {{kMain, key(2)}, 0b01}};
  const auto outcomes = engine_->pin_parts(wanted, soon());
  ASSERT_TRUE(outcomes.has_value()) << outcomes.error().to_string();
  ASSERT_EQ(outcomes->size(), 2U);
  EXPECT_FALSE(outcomes->at(0).pinned);
  EXPECT_EQ(outcomes->at(0).lacking, 0b10U);
  EXPECT_TRUE(outcomes->at(1).pinned);
  EXPECT_EQ(outcomes->at(1).lacking, 0U);
  EXPECT_EQ(status()["index"]["pinned"], 1);
}

TEST_F(ManagerPinsTest, AnAnswerThatComesTooLateTakesNoOtherPinsBack) {
  start_engine();
  connect_engine();
  store_prefix(1, 2);
  EXPECT_EQ(pin(blocks(1, 1)), std::vector<bool>{true});
  manager_->signal(SIGSTOP);
  // Of the first one it names a part that is not there, and so pins the second one alone.
  const std::vector<PinWanted> wanted = {{{kMain, key(1)}, 0b10}, {{kMain, key(2)}, 0b01}};
  const auto late = engine_->pin_parts(wanted, ipc::Deadline::after(std::chrono::milliseconds(20)));
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error().code, ipc::ErrorCode::kTimeout);
  manager_->signal(SIGCONT);
  ASSERT_TRUE(engine_->status(soon()).has_value());
  EXPECT_EQ(status()["index"]["pinned"], 1) << "the first one's";
  ASSERT_TRUE(engine_->unpin_blocks(blocks(1, 1)).has_value());
  ASSERT_TRUE(engine_->status(soon()).has_value());
  EXPECT_EQ(status()["index"]["pinned"], 0);
}

TEST_F(ManagerPinsTest, NothingToPinIsNoQuestionAndNobodyToAskAnError) {
  start_engine();
  connect_engine();
  EXPECT_THAT(pin({}), testing::IsEmpty());
  EXPECT_TRUE(engine_->unpin_blocks({}).has_value());
  engine_->close();
  EXPECT_EQ(engine_->pin_blocks(blocks(1, 1), soon()).error().code, ipc::ErrorCode::kCancelled);
  EXPECT_EQ(engine_->unpin_blocks(blocks(1, 1)).error().code, ipc::ErrorCode::kCancelled);
}

}  // namespace
}  // namespace kvferry::test
