// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/engine_state.hpp"

#include <gtest/gtest.h>

namespace kvferry::cache_manager {
namespace {

using ipc::CacheOwner;
using ipc::CachePhase;
using ipc::ErrorCode;
using ipc::PauseMode;
using ipc::ProcessKind;

ipc::Geometry geometry_for(std::uint32_t ranks) {
  ipc::RegionSpec region;
  region.block_bytes = 4096;
  ipc::GroupSpec group;
  group.name = "main";
  group.regions = {region};
  ipc::Geometry geometry;
  geometry.name = "tiny";
  geometry.tokens_per_block = 16;
  geometry.ranks = ranks;
  geometry.groups = {group};
  return geometry;
}

/// One rank; worker and mover report what a test says.
class EngineRecordTest : public testing::Test {
 protected:
  static ipc::Peer peer(ProcessKind kind, std::uint64_t life) {
    ipc::Peer made;
    made.id = ipc::Digest::from_words(static_cast<std::uint64_t>(kind), life);
    made.kind = kind;
    made.name = "peer";
    made.pid = 100;
    return made;
  }
  ipc::Status admit(const ipc::Peer& who) {
    ipc::RankHello hello;
    hello.engine = "chat";
    hello.kind = who.kind;
    hello.cache_owner = owner_;
    hello.geometry = geometry_for(1);
    return engine_.admit(who, hello);
  }
  void report(const ipc::Peer& who,
              std::uint64_t session,
              std::uint64_t epoch,
              bool mapped,
              std::vector<ipc::IncarnationId> holders = {},
              std::uint64_t prepared_by = 0) {
    ipc::RankState state;
    state.session = ipc::Digest::from_words(5, session);
    state.epoch = ipc::Epoch{epoch};
    state.phase = mapped ? ipc::LeasePhase::kReady : ipc::LeasePhase::kCleared;
    state.mapped = mapped;
    state.prepared_by = ipc::LeaseId{prepared_by};
    state.group_blocks = {8};
    state.lease_holders = std::move(holders);
    ASSERT_TRUE(engine_.report(who.id, state).has_value());
    (void)engine_.refresh(generation_);
  }
  void start() {
    ASSERT_TRUE(admit(worker_).has_value());
    ASSERT_TRUE(admit(mover_).has_value());
    report(worker_, 1, 1, true);
    report(mover_, 1, 1, true);
    settle();
  }
  /// The workers have shown that they run nothing for other movers.
  void settle() {
    for (const RankPair& pair : engine_.unsettled()) engine_.note_settled(pair);
    (void)engine_.refresh(generation_);
  }

  CacheOwner owner_ = CacheOwner::kWorker;
  ipc::Peer worker_ = peer(ProcessKind::kWorker, 1);
  ipc::Peer mover_ = peer(ProcessKind::kMover, 1);
  std::uint64_t generation_ = 100;
  EngineRecord engine_{"chat", 1};
};

TEST_F(EngineRecordTest, IsReadyWhenTheWorkerHasMappedAndOffloadsWhenTheMoverHasToo) {
  ASSERT_TRUE(admit(worker_).has_value());
  report(worker_, 1, 1, true);
  EXPECT_EQ(engine_.phase(), CachePhase::kReady);
  EXPECT_FALSE(engine_.offload_ready());
  ASSERT_TRUE(admit(mover_).has_value());
  report(mover_, 1, 1, true);
  settle();
  EXPECT_TRUE(engine_.offload_ready());
  EXPECT_TRUE(engine_.targets(engine_.generation()).has_value());
}

TEST_F(EngineRecordTest, MoverOfAnotherEpochOrSessionIsNoOffload) {
  start();
  report(mover_, 1, 2, true);
  EXPECT_FALSE(engine_.offload_ready());
  report(mover_, 2, 1, true);
  EXPECT_FALSE(engine_.offload_ready());
  EXPECT_EQ(engine_.targets(engine_.generation()).error().code, ErrorCode::kNotReady);
}

TEST_F(EngineRecordTest, LeaseOfAnotherMoverHoldsOffloadBack) {
  start();
  const ipc::IncarnationId other = peer(ProcessKind::kMover, 9).id;
  report(worker_, 1, 1, true, {other, mover_.id});
  EXPECT_EQ(engine_.phase(), CachePhase::kReady);
  EXPECT_FALSE(engine_.offload_ready());
  // The worker's report may be older than the mover's: one lease need not be the one that counts.
  report(worker_, 1, 1, true, {other});
  EXPECT_FALSE(engine_.offload_ready());
  EXPECT_TRUE(engine_.unsettled().empty()) << "no proof is asked for while the other may yet ask";
  report(worker_, 1, 1, true, {mover_.id});
  EXPECT_TRUE(engine_.offload_ready());
}

TEST_F(EngineRecordTest, OffloadWaitsForTheProofThatNoOtherMoverIsWorkedFor) {
  ASSERT_TRUE(admit(worker_).has_value());
  ASSERT_TRUE(admit(mover_).has_value());
  report(worker_, 1, 1, true);
  EXPECT_TRUE(engine_.unsettled().empty());
  report(mover_, 1, 1, true);
  EXPECT_FALSE(engine_.offload_ready());
  ASSERT_EQ(engine_.unsettled(), (std::vector<RankPair>{{mover_.id, worker_.id}}));
  engine_.note_settled({peer(ProcessKind::kMover, 9).id, worker_.id});
  EXPECT_FALSE(engine_.unsettled().empty()) << "that was about another mover";
  settle();
  EXPECT_TRUE(engine_.offload_ready());
  // The next mover needs a proof of its own: this one may have left something behind.
  engine_.remove(mover_.id);
  mover_ = peer(ProcessKind::kMover, 2);
  ASSERT_TRUE(admit(mover_).has_value());
  report(mover_, 1, 1, true);
  EXPECT_FALSE(engine_.offload_ready());
  settle();
  EXPECT_TRUE(engine_.offload_ready());
}

TEST_F(EngineRecordTest, WorkerIsNotReadyWhileTheOwningMoverIsDead) {
  owner_ = CacheOwner::kMover;
  start();
  EXPECT_TRUE(engine_.offload_ready());
  engine_.remove(mover_.id);
  (void)engine_.refresh(generation_);
  EXPECT_EQ(engine_.phase(), CachePhase::kDetached);
}

TEST_F(EngineRecordTest, GenerationGrowsWithEveryOtherArenaAndOnlyThen) {
  start();
  const std::uint64_t first = engine_.generation();
  report(worker_, 1, 1, true);
  engine_.set_connected(mover_.id, false);
  (void)engine_.refresh(generation_);
  EXPECT_EQ(engine_.generation(), first);
  report(worker_, 1, 1, false);
  EXPECT_EQ(engine_.phase(), CachePhase::kCleared);
  EXPECT_EQ(engine_.generation(), first) << "nothing else is mapped yet";
  report(worker_, 1, 2, true);
  EXPECT_GT(engine_.generation(), first);
  EXPECT_EQ(engine_.targets(first).error().code, ErrorCode::kStaleEpoch);
}

/// A mover owns the arena; the worker of lease 1 has zeroed it.
class MoverOwnedRecordTest : public EngineRecordTest {
 protected:
  void SetUp() override {
    owner_ = CacheOwner::kMover;
    ASSERT_TRUE(admit(worker_).has_value());
    ASSERT_TRUE(admit(mover_).has_value());
    report(mover_, 1, 1, true, {}, 1);
    report(worker_, 1, 1, true, {}, 1);
    ASSERT_EQ(engine_.phase(), CachePhase::kReady);
    first_ = engine_.generation();
    engine_.remove(worker_.id);
    (void)engine_.refresh(generation_);
    ASSERT_EQ(engine_.phase(), CachePhase::kDetached);
  }
  const ipc::Peer next_ = peer(ProcessKind::kWorker, 2);
  std::uint64_t first_ = 0;
};

TEST_F(MoverOwnedRecordTest, AnotherWorkerOnTheSameContentsIsTheSameGeneration) {
  EXPECT_TRUE(engine_.waits_for_worker());
  ASSERT_TRUE(admit(next_).has_value());
  report(next_, 1, 1, true, {}, 1);
  EXPECT_EQ(engine_.phase(), CachePhase::kReady);
  EXPECT_FALSE(engine_.waits_for_worker());
  EXPECT_EQ(engine_.generation(), first_);
  const ipc::EngineState state = engine_.view();
  ASSERT_EQ(state.ranks.size(), 1U);
  EXPECT_EQ(state.ranks[0].worker, next_.id) << "the engine has to learn that it is another one";
  EXPECT_EQ(state.ranks[0].prepared_by, ipc::LeaseId{1});
  settle();
  EXPECT_EQ(engine_.targets(first_)->at(0).worker, next_.id);
}

TEST_F(MoverOwnedRecordTest, ChangeOfTheWorkerAloneIsAChange) {
  engine_.set_connected(worker_.id, false);
  ASSERT_TRUE(admit(next_).has_value());
  ipc::RankState state;
  state.session = ipc::Digest::from_words(5, 1);
  state.epoch = ipc::Epoch{1};
  state.phase = ipc::LeasePhase::kReady;
  state.mapped = true;
  state.prepared_by = ipc::LeaseId{1};
  state.group_blocks = {8};
  ASSERT_TRUE(engine_.report(next_.id, state).has_value());
  EXPECT_TRUE(engine_.refresh(generation_));
  EXPECT_FALSE(engine_.refresh(generation_)) << "nothing is new the second time";
}

TEST_F(MoverOwnedRecordTest, SameArenaZeroedAgainIsAnotherGeneration) {
  ASSERT_TRUE(admit(next_).has_value());
  report(mover_, 1, 1, true, {}, 2);
  report(next_, 1, 1, true, {}, 2);
  EXPECT_EQ(engine_.phase(), CachePhase::kReady);
  EXPECT_GT(engine_.generation(), first_);
}

TEST_F(MoverOwnedRecordTest, WorkerWhoseZeroingTheOwnerHasNotHeardOfIsNotServed) {
  ASSERT_TRUE(admit(next_).has_value());
  report(next_, 1, 1, true, {}, 2);
  EXPECT_EQ(engine_.phase(), CachePhase::kDetached);
  EXPECT_EQ(engine_.targets(first_).error().code, ErrorCode::kNotReady);
  report(mover_, 1, 1, true, {}, 2);
  EXPECT_EQ(engine_.phase(), CachePhase::kReady);
}

TEST_F(MoverOwnedRecordTest, NextEpochOrSessionIsAnotherGenerationAndNothingWaitsForAWorker) {
  ASSERT_TRUE(admit(next_).has_value());
  report(mover_, 1, 2, true, {}, 0);
  EXPECT_FALSE(engine_.waits_for_worker()) << "the contents are gone";
  report(mover_, 1, 2, true, {}, 2);
  report(next_, 1, 2, true, {}, 2);
  EXPECT_GT(engine_.generation(), first_);
}

TEST_F(MoverOwnedRecordTest, NothingWaitsForAWorkerWhileTheOwnerIsGone) {
  engine_.set_connected(mover_.id, false);
  (void)engine_.refresh(generation_);
  EXPECT_FALSE(engine_.waits_for_worker());
}

TEST_F(EngineRecordTest, WorkerThatOwnsTakesItsContentsAlong) {
  start();
  const std::uint64_t first = engine_.generation();
  engine_.remove(worker_.id);
  (void)engine_.refresh(generation_);
  EXPECT_FALSE(engine_.waits_for_worker());
  const ipc::Peer next = peer(ProcessKind::kWorker, 2);
  ASSERT_TRUE(admit(next).has_value());
  report(next, 2, 1, true);
  EXPECT_GT(engine_.generation(), first);
}

TEST_F(EngineRecordTest, LivingPeerIsNotReplacedASilentOneIs) {
  start();
  const ipc::Peer second = peer(ProcessKind::kMover, 2);
  EXPECT_EQ(admit(second).error().code, ErrorCode::kAlreadyExists);
  engine_.set_connected(mover_.id, false);
  EXPECT_TRUE(admit(second).has_value());
  report(second, 1, 1, true);
  settle();
  EXPECT_EQ(engine_.targets(engine_.generation())->at(0).mover, second.id);
}

TEST_F(EngineRecordTest, ClearedIsSaidOnlyWhenAllRanksAre) {
  start();
  engine_.begin(EngineOperation::kClear);
  (void)engine_.refresh(generation_);
  EXPECT_EQ(engine_.phase(), CachePhase::kClearing);
  EXPECT_EQ(engine_.targets(engine_.generation()).error().code, ErrorCode::kNotReady);
  engine_.end_operation(/*succeeded=*/false);
  engine_.set_connected(worker_.id, false);
  (void)engine_.refresh(generation_);
  EXPECT_EQ(engine_.phase(), CachePhase::kDetached);
  engine_.begin(EngineOperation::kClear);
  engine_.end_operation(/*succeeded=*/true);
  (void)engine_.refresh(generation_);
  EXPECT_EQ(engine_.phase(), CachePhase::kCleared);
  EXPECT_EQ(engine_.clears(), 1U) << "a failed clear counts";
}

TEST_F(EngineRecordTest, TheLeaseOfOneThatWasTurnedAwayIsNoReasonToWait) {
  start();
  const ipc::Peer stranger = peer(ProcessKind::kMover, 99);
  report(worker_, 1, 1, true, {mover_.id, stranger.id});
  EXPECT_FALSE(engine_.offload_ready()) << "it may copy for an earlier manager";
  EXPECT_EQ(admit(stranger).error().code, ErrorCode::kAlreadyExists);
  engine_.note_turned_away(stranger.id);
  (void)engine_.refresh(generation_);
  EXPECT_TRUE(engine_.offload_ready()) << "it came idle and gets no job";
  engine_.forget_turned_away(stranger.id);
  (void)engine_.refresh(generation_);
  EXPECT_FALSE(engine_.offload_ready()) << "another life under its lease is not known";
}

TEST_F(EngineRecordTest, CountsWhatClearedAndWhatMadeReadyAndNothingElse) {
  start();
  const auto run = [this](EngineOperation operation, bool succeeded) {
    engine_.begin(operation);
    engine_.end_operation(succeeded);
    (void)engine_.refresh(generation_);
  };
  report(worker_, 1, 1, false);
  run(EngineOperation::kClear, true);
  run(EngineOperation::kClear, true);
  EXPECT_EQ(engine_.clears(), 1U) << "the cache was clear already";
  run(EngineOperation::kReinit, false);
  EXPECT_EQ(engine_.reinits(), 0U);
  EXPECT_EQ(engine_.phase(), CachePhase::kCleared);
  report(worker_, 1, 2, true);
  run(EngineOperation::kReinit, true);
  EXPECT_EQ(engine_.reinits(), 1U);
  report(worker_, 1, 2, false);
  run(EngineOperation::kClear, true);
  EXPECT_EQ(engine_.clears(), 2U);
}

TEST_F(EngineRecordTest, LateReportOfAClearedEpochIsOldAndTheNextOneCounts) {
  start();
  engine_.note_cleared(0, ipc::Digest::from_words(5, 1), ipc::Epoch{1});
  report(worker_, 1, 1, true);
  EXPECT_EQ(engine_.phase(), CachePhase::kDetached);
  report(worker_, 1, 2, true);
  EXPECT_EQ(engine_.phase(), CachePhase::kReady);
}

TEST_F(EngineRecordTest, ConfigurationIsForgottenWithTheLastProcess) {
  start();
  engine_.remove(worker_.id);
  EXPECT_TRUE(engine_.config().has_value());
  engine_.remove(mover_.id);
  EXPECT_FALSE(engine_.config().has_value());
  EXPECT_FALSE(engine_.has_rank_peers());
}

TEST_F(EngineRecordTest, ProcessMayServeOneRankOnly) {
  ipc::RankHello hello;
  hello.kind = ProcessKind::kWorker;
  hello.geometry = geometry_for(2);
  ASSERT_TRUE(engine_.admit(worker_, hello).has_value());
  hello.rank = ipc::Rank{1};
  EXPECT_EQ(engine_.admit(worker_, hello).error().code, ErrorCode::kProtocol);
}

TEST_F(EngineRecordTest, AnEpochThatEndedBeforeThisManagerCameWaitsForAReinit) {
  ASSERT_TRUE(admit(worker_).has_value());
  ASSERT_TRUE(admit(mover_).has_value());
  EXPECT_EQ(engine_.phase(), CachePhase::kDetached);
  report(worker_, 1, 1, false);
  report(mover_, 1, 1, false);
  EXPECT_EQ(engine_.phase(), CachePhase::kCleared);
  report(worker_, 1, 2, true);
  report(mover_, 1, 2, true);
  EXPECT_EQ(engine_.phase(), CachePhase::kReady);
}

TEST_F(EngineRecordTest, AnOwnerThatClearedOnlyAfterTheClearHadFailedLeavesItCleared) {
  start();
  engine_.begin(EngineOperation::kClear);
  engine_.end_operation(/*succeeded=*/false);
  (void)engine_.refresh(generation_);
  report(worker_, 1, 1, false);
  EXPECT_EQ(engine_.phase(), CachePhase::kCleared);
  engine_.remove(worker_.id);
  (void)engine_.refresh(generation_);
  EXPECT_EQ(engine_.phase(), CachePhase::kDetached);
}

TEST_F(EngineRecordTest,
       AUsersPauseOfAnEarlierManagerHoldsAgainstAReleasesInWhateverOrderTheyCome) {
  engine_.adopt_pause(PauseMode::kRetract, /*by_release=*/true);
  EXPECT_TRUE(engine_.paused_by_release());
  engine_.adopt_pause(PauseMode::kInPlace, /*by_release=*/false);
  EXPECT_FALSE(engine_.paused_by_release());
  EXPECT_EQ(engine_.paused(), PauseMode::kInPlace);
  engine_.adopt_pause(PauseMode::kRetract, /*by_release=*/true);
  EXPECT_FALSE(engine_.paused_by_release());
  engine_.end_release_pause();
  EXPECT_EQ(engine_.paused(), PauseMode::kInPlace) << "a resume ends a release's alone";
}

TEST_F(EngineRecordTest, ItHoldsAgainstAReleaseOfThisManagersToo) {
  engine_.pause_for_release();
  engine_.adopt_pause(PauseMode::kAbort, /*by_release=*/false);
  EXPECT_FALSE(engine_.paused_by_release());
  EXPECT_EQ(engine_.paused(), PauseMode::kAbort);
  EngineRecord resumed("chat", 2);
  resumed.pause_for_release();
  resumed.end_release_pause();
  resumed.adopt_pause(PauseMode::kRetract, /*by_release=*/true);
  EXPECT_FALSE(resumed.paused()) << "the release is over";
  resumed.adopt_pause(PauseMode::kAbort, /*by_release=*/false);
  EXPECT_EQ(resumed.paused(), PauseMode::kAbort);
}

TEST_F(EngineRecordTest, WhatAUserToldThisManagerHoldsAgainstWhateverSchedulersComeWith) {
  engine_.set_paused(std::nullopt);
  engine_.adopt_pause(PauseMode::kAbort, /*by_release=*/false);
  EXPECT_FALSE(engine_.paused());
  engine_.pause_for_release();
  engine_.adopt_pause(PauseMode::kAbort, /*by_release=*/false);
  EXPECT_TRUE(engine_.paused_by_release());
}

TEST_F(EngineRecordTest, ACacheThatWentWithAnEarlierManagersReleaseIsHeldBackUnderAUsersPauseToo) {
  start();
  engine_.adopt_pause(PauseMode::kRetract, /*by_release=*/true);
  engine_.adopt_pause(PauseMode::kAbort, /*by_release=*/false);
  report(worker_, 1, 1, false);
  report(mover_, 1, 1, false);
  EXPECT_EQ(engine_.phase(), CachePhase::kCleared);
  EXPECT_TRUE(engine_.held_back().has(ipc::MemoryTag::kKvCache));
}

}  // namespace
}  // namespace kvferry::cache_manager
