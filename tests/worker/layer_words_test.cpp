// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/layer_words.hpp"

#include "worker/host_device.hpp"

#include <gtest/gtest.h>

#include <memory>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::ErrorCode;
using std::chrono_literals::operator""s;

class LayerWordsTest : public ::testing::Test {
 protected:
  const std::unique_ptr<ipc::Device> device_ = test::open_host_device(1U << 20);
  LayerWords words_{*device_};
};

ipc::Error error() { return KVFERRY_ERROR(kPeerDied, "its mover died"); }

TEST_F(LayerWordsTest, UseBeginsAtZeroWhoeverComesFirst) {
  ASSERT_TRUE(words_.begin({4, 1}, Deadline::after(60s)).has_value());
  words_.word(4).store(9);
  ASSERT_TRUE(words_.enter({4, 1}).has_value());
  EXPECT_EQ(words_.word(4).load(), 9U);  // the same use
  ASSERT_TRUE(words_.leave({4, 1}, true).has_value());
  ASSERT_TRUE(words_.end({4, 1}).has_value());
  ASSERT_TRUE(words_.enter({4, 2}).has_value());
  EXPECT_EQ(words_.word(4).load(), 0U);
  words_.word(4).store(5);
  ASSERT_TRUE(words_.begin({4, 2}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(4).load(), 5U);
}

TEST_F(LayerWordsTest, FailedUseLetsWaitersGoAndTellsItsEngine) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  words_.fail({0, 1}, error());
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  EXPECT_EQ(words_.enter({0, 1}).error().code, ErrorCode::kPeerDied);
  EXPECT_EQ(words_.end({0, 1}).error().code, ErrorCode::kPeerDied);
  EXPECT_EQ(words_.next_look(), std::nullopt);
}

TEST_F(LayerWordsTest, FailureThatComesBeforeTheStepIsKeptForIt) {
  words_.fail({0, 1}, error());
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  EXPECT_EQ(words_.end({0, 1}).error().code, ErrorCode::kPeerDied);
}

TEST_F(LayerWordsTest, WhatATransferWritesAfterTheFailureHoldsNobody) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.enter({0, 1}).has_value());
  words_.fail({0, 1}, error());
  words_.word(0).store(3);  // as the staging stream does
  ASSERT_TRUE(words_.next_look().has_value());
  words_.expire(ipc::MonotonicClock::now());
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  words_.word(0).store(4);
  EXPECT_EQ(words_.leave({0, 1}, true).error().code, ErrorCode::kPeerDied);
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  EXPECT_EQ(words_.next_look(), std::nullopt);
}

TEST_F(LayerWordsTest, UseFailsAtItsDeadlineUnlessItsTransferHasEnded) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.begin({1, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.enter({1, 1}).has_value());
  ASSERT_TRUE(words_.leave({1, 1}, true).has_value());
  const auto look = words_.next_look();
  ASSERT_TRUE(look.has_value());
  words_.expire(*look - 1s);
  EXPECT_EQ(words_.word(0).load(), 0U);
  words_.expire(*look);
  EXPECT_EQ(words_.end({0, 1}).error().code, ErrorCode::kTimeout);
  EXPECT_TRUE(words_.end({1, 1}).has_value());
}

TEST_F(LayerWordsTest, StepThatBeginsAfterItsTransferHasNoDeadline) {
  ASSERT_TRUE(words_.enter({2, 1}).has_value());
  ASSERT_TRUE(words_.leave({2, 1}, true).has_value());
  ASSERT_TRUE(words_.begin({2, 1}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.next_look(), std::nullopt);
  EXPECT_TRUE(words_.end({2, 1}).has_value());
}

TEST_F(LayerWordsTest, UseThatOnlyATransferBeganHasADeadline) {
  int looks = 0;
  words_.on_sooner([&looks] { ++looks; });
  ASSERT_TRUE(words_.enter({0, 1}).has_value());
  EXPECT_EQ(looks, 1) << "nobody would fail it in time";
  ASSERT_TRUE(words_.enter({0, 1}).has_value());
  EXPECT_EQ(looks, 1) << "that is known";
  const auto look = words_.next_look();
  ASSERT_TRUE(look.has_value());
  words_.expire(*look);
  EXPECT_EQ(words_.leave({0, 1}, false).error().code, ErrorCode::kTimeout);
  EXPECT_EQ(words_.leave({0, 1}, false).error().code, ErrorCode::kTimeout);
}

TEST_F(LayerWordsTest, SlotIsNotUsedAgainWhileATransferOfItRuns) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.enter({0, 1}).has_value());
  ASSERT_TRUE(words_.end({0, 1}).has_value());
  EXPECT_EQ(words_.begin({0, 2}, Deadline::after(60s)).error().code, ErrorCode::kBusy);
  // A store goes on after the step that computed its blocks.
  ASSERT_TRUE(words_.enter({0, 1}).has_value());
  ASSERT_TRUE(words_.leave({0, 1}, false).has_value());
  ASSERT_TRUE(words_.leave({0, 1}, true).has_value());
  EXPECT_TRUE(words_.begin({0, 2}, Deadline::after(60s)).has_value());
}

TEST_F(LayerWordsTest, SlotIsNotUsedAgainWhileAStepOfItRuns) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  words_.word(0).store(2);
  const auto look = words_.next_look();
  EXPECT_EQ(words_.begin({0, 2}, Deadline::after(1s)).error().code, ErrorCode::kBusy);
  EXPECT_EQ(words_.enter({0, 2}).error().code, ErrorCode::kBusy);
  EXPECT_EQ(words_.end({0, 2}).error().code, ErrorCode::kBusy);
  EXPECT_EQ(words_.word(0).load(), 2U) << "its waiters stand where they stood";
  EXPECT_EQ(words_.next_look(), look) << "its deadline is another use's";
  EXPECT_TRUE(words_.end({0, 1}).has_value());
  EXPECT_TRUE(words_.begin({0, 2}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(0).load(), 0U);
}

// What is left of it in its stream would mark layers of the next use.
TEST_F(LayerWordsTest, SlotOfAFailedUseIsFreeWhenItsStepHasEnded) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  words_.expire(*words_.next_look());
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  EXPECT_EQ(words_.begin({0, 2}, Deadline::after(60s)).error().code, ErrorCode::kBusy);
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  EXPECT_EQ(words_.end({0, 1}).error().code, ErrorCode::kTimeout);
  EXPECT_TRUE(words_.begin({0, 2}, Deadline::after(60s)).has_value());
}

TEST_F(LayerWordsTest, UseThatNoStepHasBegunGivesItsSlotOn) {
  ASSERT_TRUE(words_.enter({0, 1}).has_value());
  EXPECT_EQ(words_.begin({0, 2}, Deadline::after(60s)).error().code, ErrorCode::kBusy);
  ASSERT_TRUE(words_.leave({0, 1}, true).has_value());
  EXPECT_TRUE(words_.begin({0, 2}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.begin({0, 1}, Deadline::after(60s)).error().code, ErrorCode::kStaleEpoch);
  EXPECT_EQ(words_.enter({0, 1}).error().code, ErrorCode::kStaleEpoch);
}

TEST_F(LayerWordsTest, FailureThatComesWhileTheSlotIsBusyIsKeptForItsStep) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  words_.fail({0, 2}, error());
  words_.fail({0, 1}, KVFERRY_ERROR(kNotFound, "gone"));
  EXPECT_EQ(words_.end({0, 1}).error().code, ErrorCode::kNotFound);
  ASSERT_TRUE(words_.begin({0, 2}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  EXPECT_EQ(words_.end({0, 2}).error().code, ErrorCode::kPeerDied);
  ASSERT_TRUE(words_.begin({0, 3}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(0).load(), 0U) << "it was another use's";
}

TEST_F(LayerWordsTest, FailureOfALaterUseStaysUntilThatOneBegins) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  words_.fail({0, 3}, error());
  words_.fail({0, 2}, KVFERRY_ERROR(kNotFound, "an earlier one, which is told of late"));
  ASSERT_TRUE(words_.end({0, 1}).has_value());
  ASSERT_TRUE(words_.begin({0, 2}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(0).load(), 0U);
  ASSERT_TRUE(words_.end({0, 2}).has_value());
  EXPECT_EQ(words_.enter({0, 3}).error().code, ErrorCode::kPeerDied);
}

TEST_F(LayerWordsTest, UsesThatAreOverAndSlotsThatThereAreNotAreRefused) {
  ASSERT_TRUE(words_.begin({0, 5}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.begin({0, 4}, Deadline::after(60s)).error().code, ErrorCode::kStaleEpoch);
  EXPECT_EQ(words_.enter({0, 4}).error().code, ErrorCode::kStaleEpoch);
  words_.fail({0, 4}, error());
  ASSERT_TRUE(words_.end({0, 5}).has_value());
  EXPECT_EQ(words_.end({0, 5}).error().code, ErrorCode::kStaleEpoch);
  EXPECT_EQ(words_.begin({0, 5}, Deadline::after(60s)).error().code, ErrorCode::kStaleEpoch);
  EXPECT_EQ(words_.begin({ipc::kLayerSlots, 1}, Deadline::after(60s)).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(words_.enter({ipc::kLayerSlots, 1}).error().code, ErrorCode::kInvalidArgument);
  words_.fail({ipc::kLayerSlots, 1}, error());
}

TEST_F(LayerWordsTest, RevocationFailsWhatRunsAndNothingElse) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.begin({1, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.end({1, 1}).has_value());
  words_.fail_all(KVFERRY_ERROR(kRevoked, "the epoch is being revoked"));
  EXPECT_EQ(words_.end({0, 1}).error().code, ErrorCode::kRevoked);
  EXPECT_TRUE(words_.begin({1, 2}, Deadline::after(60s)).has_value());
  EXPECT_TRUE(words_.end({1, 2}).has_value());
}

TEST_F(LayerWordsTest, WhatALoadIsAwaitedForFailsWithItsManagerAndNothingElse) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.begin({1, 1}, Deadline::after(60s), LayerWords::Use::kIsStored).has_value());
  ASSERT_TRUE(words_.begin({2, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.enter({2, 1}).has_value());
  ASSERT_TRUE(words_.leave({2, 1}, /*is_last=*/true).has_value());
  ASSERT_TRUE(words_.enter({3, 1}).has_value());  // which no step waits for yet
  words_.fail_awaited(KVFERRY_ERROR(kPeerDied, "gone"));
  EXPECT_EQ(words_.end({0, 1}).error().code, ipc::ErrorCode::kPeerDied);
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  EXPECT_TRUE(words_.end({1, 1}).has_value());
  EXPECT_TRUE(words_.end({2, 1}).has_value());
  EXPECT_TRUE(words_.leave({3, 1}, /*is_last=*/true).has_value());
  EXPECT_TRUE(words_.end({3, 1}).has_value());
}

// The step comes after the word of the manager's end, which it may have been sent before.
TEST_F(LayerWordsTest, LoadThatBeginsWithoutAManagerFailsAtOnce) {
  words_.fail_awaited(KVFERRY_ERROR(kPeerDied, "gone"));
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  EXPECT_EQ(words_.end({0, 1}).error().code, ErrorCode::kPeerDied);
  // What is computed goes on.
  ASSERT_TRUE(words_.begin({1, 1}, Deadline::after(60s), LayerWords::Use::kIsStored).has_value());
  EXPECT_EQ(words_.word(1).load(), 0U);
  EXPECT_TRUE(words_.end({1, 1}).has_value());

  words_.serve_awaited();
  ASSERT_TRUE(words_.begin({0, 2}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(0).load(), 0U);
  EXPECT_TRUE(words_.end({0, 2}).has_value());
}

TEST_F(LayerWordsTest, LoadOfALostManagerFailsTheStepThatComesWhenTheNextOneIsThere) {
  for (const std::uint32_t slot : {0U, 1U, 2U}) {
    ASSERT_TRUE(words_.enter({slot, 1}).has_value());
  }
  ASSERT_TRUE(words_.leave({1, 1}, /*is_last=*/true).has_value());
  words_.fail_awaited(KVFERRY_ERROR(kPeerDied, "gone"));
  words_.serve_awaited();
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(0).load(), LayerWords::kReleased);
  ASSERT_FALSE(words_.leave({0, 1}, /*is_last=*/false).has_value());
  EXPECT_EQ(words_.end({0, 1}).error().code, ErrorCode::kPeerDied);
  // All of it had come.
  ASSERT_TRUE(words_.begin({1, 1}, Deadline::after(60s)).has_value());
  EXPECT_TRUE(words_.end({1, 1}).has_value());
  // It is a store.
  ASSERT_TRUE(words_.begin({2, 1}, Deadline::after(60s), LayerWords::Use::kIsStored).has_value());
  ASSERT_TRUE(words_.leave({2, 1}, /*is_last=*/true).has_value());
  EXPECT_TRUE(words_.end({2, 1}).has_value());
  // The next use is its own.
  ASSERT_TRUE(words_.begin({0, 2}, Deadline::after(60s)).has_value());
  EXPECT_EQ(words_.word(0).load(), 0U);
  EXPECT_TRUE(words_.end({0, 2}).has_value());
}

TEST_F(LayerWordsTest, StoreFailsWithTheLoadThatItIsComputedOf) {
  const auto stored = LayerWords::Use::kIsStored;
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.begin({1, 1}, Deadline::after(60s), stored).has_value());
  words_.follow({1, 1}, {0, 1});
  words_.fail({0, 1}, error());
  EXPECT_EQ(words_.enter({1, 1}).error().code, ErrorCode::kCancelled);
  EXPECT_EQ(words_.end({1, 1}).error().code, ErrorCode::kCancelled);
  EXPECT_EQ(words_.end({0, 1}).error().code, ErrorCode::kPeerDied);
  // The next uses of both slots have nothing to do with each other.
  ASSERT_TRUE(words_.begin({0, 2}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.begin({1, 2}, Deadline::after(60s), stored).has_value());
  words_.fail({0, 2}, error());
  EXPECT_TRUE(words_.end({1, 2}).has_value());
  ASSERT_FALSE(words_.end({0, 2}).has_value());
}

TEST_F(LayerWordsTest, StoreThatFollowsALoadThatHasFailedFailsAtOnce) {
  words_.fail({0, 1}, error());
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.begin({1, 1}, Deadline::after(60s), LayerWords::Use::kIsStored).has_value());
  words_.follow({1, 1}, {0, 1});
  EXPECT_EQ(words_.word(1).load(), LayerWords::kReleased);
  EXPECT_EQ(words_.end({1, 1}).error().code, ErrorCode::kCancelled);
}

// And the load does not fail with its store.
TEST_F(LayerWordsTest, LoadGoesOnWithoutTheStoreThatFollowsIt) {
  ASSERT_TRUE(words_.begin({0, 1}, Deadline::after(60s)).has_value());
  ASSERT_TRUE(words_.begin({1, 1}, Deadline::after(60s), LayerWords::Use::kIsStored).has_value());
  words_.follow({1, 1}, {0, 1});
  words_.fail({1, 1}, error());
  EXPECT_EQ(words_.end({1, 1}).error().code, ErrorCode::kPeerDied);
  EXPECT_TRUE(words_.end({0, 1}).has_value());
}

}  // namespace
}  // namespace kvferry::worker
