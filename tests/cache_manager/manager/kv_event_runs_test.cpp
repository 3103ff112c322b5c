// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/kv_event_runs.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;
using ipc::GroupId;
using ipc::KvCleared;
using ipc::KvRemoved;
using ipc::KvStored;
using testing::IsEmpty;

constexpr GroupId kMain{0};
constexpr GroupId kWindow{1};

Digest block(std::uint64_t value) { return Digest::from_words(0xB10C, value); }

ipc::KvEvent stored_event(std::uint64_t before, std::vector<Digest> hashes, GroupId group = kMain) {
  KvStored event{.hashes = std::move(hashes),
                 .before = before == 0 ? Digest{} : block(before),
                 .tokens_per_block = 16,
                 .group = group,
                 .group_kind = group == kMain ? "full_attention" : "sliding_window"};
  event.window_tokens = group == kMain ? 0 : 64;
  return event;
}

class KvEventRunsTest : public testing::Test {
 protected:
  void store(std::uint64_t value, std::uint64_t before, GroupId group = kMain) {
    runs_.stored(block(value), before == 0 ? Digest{} : block(before), group, groups_);
  }
  std::vector<ipc::KvEvent> take() {
    std::vector<ipc::KvEvent> events;
    for (ipc::KvEventBatch& batch : runs_.take()) {
      EXPECT_GT(batch.time, 1.7e9) << "seconds since 1970";
      for (ipc::KvEvent& event : batch.events) events.push_back(std::move(event));
    }
    return events;
  }

  KvGroups groups_{16, {{"full_attention", 0}, {"sliding_window", 64}}};
  KvEventRuns runs_;
};

TEST_F(KvEventRunsTest, BlocksThatContinueEachOtherAreOneEvent) {
  std::vector<Digest> chain;
  for (std::uint64_t i = 1; i <= 64; ++i) {
    store(i, i - 1);
    chain.push_back(block(i));
  }
  EXPECT_EQ(take(), std::vector{stored_event(0, chain)});
  EXPECT_TRUE(runs_.empty());
}

TEST_F(KvEventRunsTest, OtherChainsAreOtherEvents) {
  store(1, 0);
  store(2, 1);
  store(7, 5);
  store(8, 0);
  store(9, 0);
  EXPECT_EQ(take(), (std::vector{stored_event(0, {block(1), block(2)}), stored_event(5, {block(7)}),
                                 stored_event(0, {block(8)}), stored_event(0, {block(9)})}));
}

TEST_F(KvEventRunsTest, GroupsThatAlternateAreAnEventEach) {
  for (std::uint64_t i = 1; i <= 3; ++i) {
    store(i, i - 1, kMain);
    store(i, i - 1, kWindow);
  }
  const std::vector<Digest> chain = {block(1), block(2), block(3)};
  EXPECT_EQ(take(), (std::vector{stored_event(0, chain), stored_event(0, chain, kWindow)}));
}

TEST_F(KvEventRunsTest, TheOrderWithinAGroupIsKept) {
  store(1, 0);
  runs_.removed(block(1), kMain);
  runs_.removed(block(2), kMain);
  runs_.removed(block(2), kWindow);
  store(1, 0);
  EXPECT_EQ(take(),
            (std::vector{
                stored_event(0, {block(1)}), ipc::KvEvent(KvRemoved{{block(1), block(2)}, kMain}),
                ipc::KvEvent(KvRemoved{{block(2)}, kWindow}), stored_event(0, {block(1)})}));
}

TEST_F(KvEventRunsTest, AClearMakesWhatCameBeforeNeedless) {
  store(1, 0);
  runs_.removed(block(2), kMain);
  runs_.cleared();
  store(2, 1);
  EXPECT_EQ(take(), (std::vector{ipc::KvEvent(KvCleared{}), stored_event(1, {block(2)})}));
}

TEST_F(KvEventRunsTest, LargeEventsAndBatchesAreCut) {
  for (std::uint64_t i = 1; i <= 2 * KvEventRuns::kMostHashes; ++i) store(i, i - 1);
  store(1, 0, kWindow);
  const auto batches = runs_.take();
  ASSERT_EQ(batches.size(), 3U);
  const auto& second = std::get<KvStored>(batches[1].events.at(0));
  EXPECT_EQ(second.hashes.size(), KvEventRuns::kMostHashes);
  EXPECT_EQ(second.before, block(KvEventRuns::kMostHashes)) << "it continues the first";
  EXPECT_THAT(runs_.take(), IsEmpty());
}

TEST_F(KvEventRunsTest, AGroupThatIsNotKnownHasNoKind) {
  groups_ = {};
  store(1, 0);
  const auto events = take();
  const auto& event = std::get<KvStored>(events.at(0));
  EXPECT_EQ(event.group_kind, "");
  EXPECT_EQ(event.tokens_per_block, 0U);
}

TEST(KvGroupsTest, RulesAreToldByVllmsNames) {
  const auto kinds = [](const char* geometry) {
    std::vector<std::string> names;
    for (const auto& group : KvGroups::of(ipc::load_geometry(geometry, 1).value()).groups) {
      names.push_back(group.kind);
    }
    return names;
  };
  EXPECT_EQ(kinds("tiny"), (std::vector<std::string>{"full_attention"}));
  EXPECT_EQ(kinds("tiny-window"), (std::vector<std::string>{"full_attention", "sliding_window"}));
  EXPECT_EQ(kinds("tiny-state"), (std::vector<std::string>{"full_attention", "mamba"}));
  EXPECT_EQ(kinds("tiny-mla").at(0), "mla_attention");
  const KvGroups window = KvGroups::of(ipc::load_geometry("tiny-window", 1).value());
  EXPECT_EQ(window.tokens_per_block, 16U);
  EXPECT_EQ(window.groups.at(0).window_tokens, 0U);
  EXPECT_EQ(window.groups.at(1).window_tokens, 64U);
}

}  // namespace
}  // namespace kvferry::cache_manager
