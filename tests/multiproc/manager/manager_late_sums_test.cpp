// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Checksums that an earlier manager was killed before it had heard of.
#include "multiproc/manager/manager_restart_fixture.hpp"

#include <gmock/gmock.h>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::BlockPresence;
using ipc::MessageKind;
using testing::ElementsAre;

class ManagerLateSumsTest : public ManagerRestartTest {
 protected:
  void SetUp() override {
    ManagerRestartTest::SetUp();
    tells_sums_ = false;
  }
  /// Stored by the earlier manager, and without checksums when it was killed.
  void store_and_restart() {
    place_ = place_of_store(1, 3);
    EXPECT_EQ(status()["pool"]["integrity"]["unsummed"], 1);
    ASSERT_NO_FATAL_FAILURE(restart());
    for (const auto& mover : movers_) {
      ASSERT_TRUE(mover->next_body<ipc::Empty>(MessageKind::kTellSums).has_value());
    }
    EXPECT_EQ(status()["pool"]["kept"]["awaited"], 1);
    EXPECT_EQ(presence(1), BlockPresence::kMiss);
  }
  [[nodiscard]] std::vector<ipc::KeptSum> kept_of(std::uint32_t rank) const {
    return kept_sums(stored_.at(rank));
  }

  std::uint64_t place_ = 0;
};

TEST_F(ManagerLateSumsTest, ABlockIsFoundOnceAllRanksHaveToldItsChecksumsAndCheckedAgainstThem) {
  ASSERT_NO_FATAL_FAILURE(store_and_restart());
  const auto of_rank_0 = kept_of(0);
  ASSERT_NO_FATAL_FAILURE(tell_kept(0, of_rank_0, /*is_last=*/true));
  EXPECT_EQ(presence(1), BlockPresence::kMiss) << "the other rank's part has none";
  ASSERT_NO_FATAL_FAILURE(tell_kept(1, kept_of(1), /*is_last=*/false));
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  EXPECT_EQ(kept()["adopted"], 1);
  EXPECT_EQ(kept()["awaited"], 0);
  EXPECT_EQ(status()["pool"]["integrity"]["unsummed"], 0);
  submit_load(5, {{kMain, BlockId{7}, key(1)}});
  const auto job = movers_[0]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(job.has_value());
  EXPECT_EQ(job->items.at(0).shard_offset, place_);
  EXPECT_EQ(job->items.at(0).shard_sum, place_ + 1);
  movers_[0]->finish(*job);
  movers_[1]->finish(*movers_[1]->next_body<ipc::MoverJob>(MessageKind::kMoverJob));
  EXPECT_THAT(wait_done().results, ElementsAre(0));
  EXPECT_EQ(status()["pool"]["integrity"]["checked"], 1);
}

// A slot that was written again has another job's contents.
TEST_F(ManagerLateSumsTest, WhatIsToldOfAnotherJobOrRankOrPlaceCountsForNothing) {
  ASSERT_NO_FATAL_FAILURE(store_and_restart());
  const auto right = kept_of(1);
  auto of_another_job = right;
  for (ipc::KeptSum& sum : of_another_job) --sum.job.value;
  auto elsewhere = right;
  for (ipc::KeptSum& sum : elsewhere) sum.offset += 8;
  auto none = right;
  for (ipc::KeptSum& sum : none) sum.sum = 0;
  for (const auto& wrong : {of_another_job, elsewhere, none}) {
    ASSERT_NO_FATAL_FAILURE(tell_kept(1, wrong, /*is_last=*/false));
  }
  std::vector<ipc::KeptSum> of_both = kept_of(0);
  of_both.push_back({right.at(0).job, right.at(0).offset, right.at(0).sum});
  ASSERT_NO_FATAL_FAILURE(tell_kept(0, of_both, /*is_last=*/true));
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  EXPECT_EQ(status()["pool"]["kept"]["awaited"], 1);
  ASSERT_NO_FATAL_FAILURE(tell_kept(1, {}, /*is_last=*/true));
  EXPECT_EQ(kept()["unsummed"], 1);
  ASSERT_NO_FATAL_FAILURE(tell_kept(1, right, /*is_last=*/false));
  EXPECT_EQ(presence(1), BlockPresence::kMiss) << "its slot is anybody's";
  EXPECT_EQ(status()["pool"]["blocks"], 0);
}

TEST_F(ManagerLateSumsTest, ABlockThatIsStoredAnewMeanwhileIsThatOne) {
  ASSERT_NO_FATAL_FAILURE(store_and_restart());
  const auto earlier = std::vector{kept_of(0), kept_of(1)};
  tells_sums_ = true;
  const std::uint64_t place = place_of_store(1, 4);
  EXPECT_NE(place, place_);
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(tell_kept(rank, earlier[rank], /*is_last=*/true));
  }
  EXPECT_EQ(kept()["stored_anew"], 1);
  EXPECT_EQ(kept()["unsummed"], 0);
  EXPECT_EQ(status()["pool"]["blocks"], 1);
  EXPECT_EQ(presence(1), BlockPresence::kHit);
}

// As one that is stopped: it lives, has come, and tells nothing.
TEST_F(ManagerLateSumsTest, WhatAMoverHasNotToldByTheDeadlineIsDropped) {
  late_sums_deadline_ = std::chrono::milliseconds(1);
  place_ = place_of_store(1, 3);
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["unsummed"], 1);
  EXPECT_EQ(kept()["awaited"], 0);
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  EXPECT_EQ(status()["pool"]["blocks"], 0) << "its slot is anybody's";
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(tell_kept(rank, kept_of(rank), /*is_last=*/true));
  }
  EXPECT_EQ(presence(1), BlockPresence::kMiss) << "it goes on, too late";
}

class ManagerChecksTest : public ManagerTest {
 protected:
  void SetUp() override {
    verify_loads_ = "always";
    ManagerTest::SetUp();
    ASSERT_NO_FATAL_FAILURE(start_engine());
  }
  /// The movers answer with their sums, or without.
  void store_answered(bool with_sums) {
    const auto slots = reserve({{ipc::GroupId{0}, key(1)}});
    submit_store(1, {{ipc::GroupId{0}, BlockId{3}, slots.at(0)}});
    for (const auto& mover : movers_) {
      const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
      ASSERT_TRUE(job.has_value());
      EXPECT_TRUE(job->wants_sums && job->sums_first);
      ipc::MoverJobDone done;
      done.job = job->job;
      done.results = {0};
      if (with_sums) {
        done.shard_sums = {11};
        done.replicated_sums = {job->items.at(0).with_replicated ? 12U : 0U};
      }
      mover->notify(MessageKind::kMoverJobDone, done);
    }
    EXPECT_THAT(wait_done().results, ElementsAre(0));
  }
};

TEST_F(ManagerChecksTest, WhereAllLoadsAreCheckedABlockComesWithItsChecksums) {
  ASSERT_NO_FATAL_FAILURE(store_answered(/*with_sums=*/true));
  submit_load(2, {{ipc::GroupId{0}, BlockId{7}, key(1)}});
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    EXPECT_FALSE(job->sums_first);
    EXPECT_EQ(job->items.at(0).shard_sum, 11);
    EXPECT_EQ(job->items.at(0).replicated_sum, 12);
    mover->finish(*job);
  }
  EXPECT_THAT(wait_done().results, ElementsAre(0));
  const nlohmann::json integrity = status()["pool"]["integrity"];
  EXPECT_EQ(integrity["checked"], 1);
  EXPECT_EQ(integrity["unchecked"], 0);
  EXPECT_EQ(integrity["unsummed"], 0);
}

TEST_F(ManagerChecksTest, WhereAllLoadsAreCheckedABlockWithoutChecksumsIsAMiss) {
  ASSERT_NO_FATAL_FAILURE(store_answered(/*with_sums=*/false));
  EXPECT_EQ(status()["pool"]["integrity"]["unsummed"], 1);
  submit_load(2, {{ipc::GroupId{0}, BlockId{7}, key(1)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ipc::ErrorCode::kNotFound)));
  const nlohmann::json pool = status()["pool"];
  EXPECT_EQ(pool["integrity"]["unchecked"], 1);
  EXPECT_EQ(pool["integrity"]["unsummed"], 0);
  EXPECT_EQ(pool["blocks"], 0) << "the next store of it has a place";
}

}  // namespace
}  // namespace kvferry::test
