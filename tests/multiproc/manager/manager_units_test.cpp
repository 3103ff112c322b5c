// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Store units of several device blocks: one key, one slot, stored and evicted as one, loaded part
// by part.
#include "kvferry/ipc/model/block_key.hpp"
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>

#include <functional>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::BlockPresence;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::MessageKind;
using ipc::ProcessKind;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Ne;

using ipc::HostPolicy;

constexpr GroupId kMain{0};
constexpr std::uint32_t kUnit = 4;

class ManagerUnitsTest : public ManagerTest {
 protected:
  void SetUp() override {
    ManagerTest::SetUp();
    ASSERT_NO_FATAL_FAILURE(start_engine());
    ASSERT_NO_FATAL_FAILURE(count_in(kUnit));
  }
  void count_in(std::uint32_t unit_blocks) {
    const auto state = hello(unit_blocks);
    ASSERT_TRUE(state.has_value()) << state.error().to_string();
    state_ = *state;
  }
  ipc::Result<ipc::EngineState> hello(std::uint32_t unit_blocks) {
    ipc::EngineHello said = client_hello();
    said.unit_blocks = unit_blocks;
    return client_->call<ipc::EngineState>(MessageKind::kEngineHello, said);
  }
  /// Of the unit, from device blocks first_block and so on, and what each mover was sent.
  std::vector<ipc::MoverJob> begin_store(std::uint64_t unit,
                                         std::uint32_t first_block,
                                         const std::vector<std::uint32_t>& parts) {
    const auto slots = reserve({{kMain, key(unit)}});
    std::vector<ipc::StoreItem> items;
    items.reserve(parts.size());
    for (const std::uint32_t part : parts) {
      items.push_back({kMain, BlockId{first_block++}, slots.at(0), part});
    }
    submit_store(next_job_++, items);
    return sent();
  }
  std::vector<ipc::MoverJob> sent() {
    std::vector<ipc::MoverJob> jobs;
    for (const auto& mover : movers_) {
      auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
      EXPECT_TRUE(job.has_value());
      jobs.push_back(job.value_or(ipc::MoverJob{}));
    }
    return jobs;
  }
  void finish(const std::vector<ipc::MoverJob>& jobs) {
    for (std::size_t rank = 0; rank < jobs.size(); ++rank) movers_[rank]->finish(jobs[rank]);
    EXPECT_THAT(wait_done().results, Each(0));
  }
  /// Device blocks go, which the ranks answer at once; `meanwhile` is before that.
  void clear_device(
      HostPolicy host, const std::function<void()>& meanwhile = [] {}) {
    operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat", host});
    ASSERT_TRUE(wait_state(ipc::CachePhase::kClearing, false));
    ASSERT_NO_FATAL_FAILURE(meanwhile());
    ASSERT_NO_FATAL_FAILURE(answer_clears(1));
    ASSERT_TRUE(operator_->next_body<ipc::ClearReply>(MessageKind::kClear).has_value());
    for (const std::uint32_t rank : {0U, 1U}) {
      workers_[rank]->report_mapped(rank, 2);
      movers_[rank]->report_mapped(rank, 2);
    }
    ASSERT_TRUE(wait_state(ipc::CachePhase::kCleared, false));
    ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  }
  /// Both parts of unit 1 can be stored and loaded.
  void expect_storable() {
    const ipc::ReservedSlot slot = reserve_parts(0b11).value().slots.at(0);
    ASSERT_EQ(slot.outcome, ipc::ReserveOutcome::kReserved);
    submit_store(next_job_++,
                 {{kMain, BlockId{3}, slot.slot, 0}, {kMain, BlockId{4}, slot.slot, 1}});
    finish(sent());
    EXPECT_EQ(presence(1), BlockPresence::kHit);
    submit_load(next_job_++, {{kMain, BlockId{5}, key(1), 0}, {kMain, BlockId{6}, key(1), 1}});
    finish(sent());
    EXPECT_EQ(status()["index"]["reserved"], 0);
  }
  [[nodiscard]] ipc::SubmitLoad waiting_load(std::uint64_t job) const {
    ipc::SubmitLoad load;
    load.job = ipc::JobId{job};
    load.generation = state_.generation;
    load.urgency = {1, ipc::Urgency::ns_of(ipc::MonotonicClock::now() + std::chrono::seconds(60))};
    load.waits = true;
    return load;
  }
  ipc::Result<ipc::ReserveStoreReply> reserve_parts(std::uint64_t parts) {
    return client_->call<ipc::ReserveStoreReply>(
        MessageKind::kReserveStore,
        ipc::ReserveStore{{{kMain, key(1), {}, std::nullopt, parts}}, {}});
  }
  [[nodiscard]] BlockPresence presence(std::uint64_t unit) {
    return static_cast<BlockPresence>(lookup({unit}).presence.at(0));
  }
};

TEST_F(ManagerUnitsTest, AUnitIsOneKeyAndItsPartsLieOneAfterAnother) {
  const auto jobs = begin_store(1, 8, {2, 0, 3, 1});
  finish(jobs);
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  EXPECT_EQ(status()["index"]["blocks"], 1);
  for (const ipc::MoverJob& job : jobs) {
    ASSERT_EQ(job.items.size(), kUnit);
    const std::uint64_t first = job.items[1].shard_offset;
    const std::uint64_t bytes = job.items[3].shard_offset - first;
    EXPECT_GT(bytes, 0U);
    EXPECT_EQ(job.items[0].shard_offset, first + 2 * bytes);
    EXPECT_EQ(job.items[2].shard_offset, first + 3 * bytes);
  }
  submit_load(7, {{kMain, BlockId{3}, key(1), 3}, {kMain, BlockId{4}, key(1), 0}});
  const auto loads = sent();
  for (std::size_t rank = 0; rank < loads.size(); ++rank) {
    EXPECT_EQ(loads[rank].items.at(0).shard_offset, jobs[rank].items[2].shard_offset);
    EXPECT_EQ(loads[rank].items.at(1).shard_offset, jobs[rank].items[1].shard_offset);
  }
  finish(loads);
}

TEST_F(ManagerUnitsTest, APartialUnitHasThePartsThatWereStored) {
  finish(begin_store(1, 8, {0, 2}));
  submit_load(7, {{kMain, BlockId{3}, key(1), 0},
                  {kMain, BlockId{4}, key(1), 1},
                  {kMain, BlockId{5}, key(1), 2},
                  {kMain, BlockId{6}, key(1), 3}});
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  const std::uint8_t missing = code(ErrorCode::kNotFound);
  EXPECT_THAT(wait_done().results, ElementsAre(0, missing, 0, missing));
}

TEST_F(ManagerUnitsTest, AUnitWithoutPartsThatComeNowGivesWay) {
  finish(begin_store(1, 8, {3}));
  EXPECT_EQ(reserve_parts(0).value().slots.at(0).outcome, ipc::ReserveOutcome::kAlreadyThere);
  EXPECT_EQ(reserve_parts(0b1000).value().slots.at(0).outcome, ipc::ReserveOutcome::kAlreadyThere);
  const auto refused = reserve_parts(0b10001);
  ASSERT_FALSE(refused.has_value()) << "a unit has four parts";
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  const ipc::ReservedSlot slot = reserve_parts(0b1001).value().slots.at(0);
  ASSERT_EQ(slot.outcome, ipc::ReserveOutcome::kReserved);
  EXPECT_EQ(presence(1), BlockPresence::kHitPending);
  submit_store(next_job_++, {{kMain, BlockId{3}, slot.slot, 0}, {kMain, BlockId{4}, slot.slot, 3}});
  finish(sent());
  submit_load(next_job_++, {{kMain, BlockId{5}, key(1), 0}, {kMain, BlockId{6}, key(1), 3}});
  finish(sent());
  EXPECT_EQ(status()["pool"]["blocks"], 1);
}

TEST_F(ManagerUnitsTest, AUnitInUseKeepsItsPlaceAndPartsItLacksAreNotSaidToBeThere) {
  finish(begin_store(1, 8, {3}));
  const ipc::PinRequest pins{{key(1)}};
  ASSERT_EQ(client_->call<ipc::PinReply>(MessageKind::kPin, pins).value().pinned, 1U);
  EXPECT_EQ(reserve_parts(0b1001).value().slots.at(0).outcome, ipc::ReserveOutcome::kInUse);
  EXPECT_EQ(reserve_parts(0b1000).value().slots.at(0).outcome, ipc::ReserveOutcome::kAlreadyThere);
  EXPECT_EQ(reserve_parts(0).value().slots.at(0).outcome, ipc::ReserveOutcome::kAlreadyThere);
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  ASSERT_EQ(client_->call<ipc::PinReply>(MessageKind::kUnpin, pins).value().pinned, 1U);
  EXPECT_EQ(reserve_parts(0b1001).value().slots.at(0).outcome, ipc::ReserveOutcome::kReserved);
}

TEST_F(ManagerUnitsTest, WhatIsUnderWayWhenAClientCountsInOtherUnitsEndsInItsOwn) {
  const auto jobs = begin_store(1, 8, {0, 1});
  const auto reserved = reserve({{kMain, key(2)}});
  ASSERT_NO_FATAL_FAILURE(count_in(2));
  finish(jobs);
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  submit_store(next_job_++, {{kMain, BlockId{3}, reserved.at(0), 0}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kInvalidArgument)));
  ASSERT_NO_FATAL_FAILURE(count_in(kUnit));
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  EXPECT_EQ(status()["index"]["reserved"], 0);
}

TEST_F(ManagerUnitsTest, AUnitIsWholeOrNotThere) {
  const auto slots = reserve({{kMain, key(1)}, {kMain, key(2)}});
  submit_store(7, {{kMain, BlockId{3}, slots.at(0), 0},
                   {kMain, BlockId{4}, slots.at(0), 1},
                   {kMain, BlockId{5}, slots.at(1), 0},
                   {kMain, BlockId{6}, slots.at(1), 1}});
  const auto jobs = sent();
  for (std::size_t rank = 0; rank < jobs.size(); ++rank) {
    ipc::MoverJobDone done;
    done.job = jobs[rank].job;
    done.results = {0, 0, 0, rank == 1 ? code(ErrorCode::kCuda) : std::uint8_t{0}};
    done.message = "a copy failed";
    movers_[rank]->notify(MessageKind::kMoverJobDone, done);
  }
  const ipc::JobDone done = wait_done();
  EXPECT_THAT(done.results, ElementsAre(0, 0, code(ErrorCode::kCuda), code(ErrorCode::kCuda)));
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  EXPECT_EQ(presence(2), BlockPresence::kMiss);
  EXPECT_EQ(status()["pool"]["blocks"], 1);
}

class ManagerUnitClearTest : public ManagerUnitsTest,
                             public testing::WithParamInterface<HostPolicy> {
 protected:
  [[nodiscard]] static bool keeps() { return GetParam() == HostPolicy::kKeep; }
};

TEST_P(ManagerUnitClearTest, AUnitThatAClearMeetsWithOnePartStoredIsNotThere) {
  finish(begin_store(2, 8, {0}));
  const auto jobs = begin_store(1, 4, {0, 1});
  movers_[0]->finish(jobs[0]);
  EXPECT_EQ(presence(1), BlockPresence::kHitPending);
  ASSERT_NO_FATAL_FAILURE(clear_device(GetParam(), [&] {
    ipc::MoverJobDone done;
    done.job = jobs[1].job;
    done.results = {0, code(ErrorCode::kRevoked)};
    done.message = "the clear came first";
    movers_[1]->notify(MessageKind::kMoverJobDone, done);
    EXPECT_THAT(wait_done().results, Each(code(ErrorCode::kRevoked)));
    EXPECT_EQ(presence(1), BlockPresence::kMiss);
  }));
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  EXPECT_EQ(presence(2), keeps() ? BlockPresence::kHit : BlockPresence::kMiss);
  submit_load(next_job_++, {{kMain, BlockId{5}, key(1), 0}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kNotFound)));
  EXPECT_EQ(status()["pool"]["blocks"], keeps() ? 1 : 0);
  expect_storable();
}

TEST_P(ManagerUnitClearTest, AUnitWhoseLastPartCameBeforeTheClearIsThereIfHostMemoryIsKept) {
  const auto jobs = begin_store(1, 4, {0, 1});
  movers_[0]->finish(jobs[0]);
  ASSERT_NO_FATAL_FAILURE(clear_device(GetParam(), [&] {
    movers_[1]->finish(jobs[1]);
    EXPECT_THAT(wait_done().results, Each(0));
  }));
  EXPECT_EQ(presence(1), keeps() ? BlockPresence::kHit : BlockPresence::kMiss);
  if (!keeps()) return expect_storable();
  submit_load(next_job_++, {{kMain, BlockId{5}, key(1), 0}, {kMain, BlockId{6}, key(1), 1}});
  finish(sent());
}

TEST_P(ManagerUnitClearTest, APartThatGaveWayToAUnitThatNeverCameIsGoneWithIt) {
  finish(begin_store(1, 8, {0}));
  const ipc::ReservedSlot slot = reserve_parts(0b11).value().slots.at(0);
  ASSERT_EQ(slot.outcome, ipc::ReserveOutcome::kReserved);
  submit_store(7, {{kMain, BlockId{1}, slot.slot, 0}, {kMain, BlockId{2}, slot.slot, 1}});
  const auto jobs = sent();
  ASSERT_NO_FATAL_FAILURE(clear_device(GetParam(), [&] {
    for (std::size_t rank = 0; rank < jobs.size(); ++rank) {
      ipc::MoverJobDone done;
      done.job = jobs[rank].job;
      done.results = {code(ErrorCode::kRevoked), code(ErrorCode::kRevoked)};
      movers_[rank]->notify(MessageKind::kMoverJobDone, done);
    }
    EXPECT_THAT(wait_done().results, Each(code(ErrorCode::kRevoked)));
  }));
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  EXPECT_EQ(status()["pool"]["blocks"], 0);
  expect_storable();
}

// Its slot is the client's still, and what is written there then comes from the new memory.
TEST_P(ManagerUnitClearTest, AReservedUnitIsFilledAfterTheClearOrReservedAnew) {
  const ipc::ReservedSlot slot = reserve_parts(0b11).value().slots.at(0);
  ASSERT_EQ(slot.outcome, ipc::ReserveOutcome::kReserved);
  ASSERT_NO_FATAL_FAILURE(clear_device(GetParam()));
  submit_store(7, {{kMain, BlockId{3}, slot.slot, 0}, {kMain, BlockId{4}, slot.slot, 1}});
  if (!keeps()) {
    EXPECT_THAT(wait_done().results, Each(Ne(0)));
    return expect_storable();
  }
  EXPECT_EQ(presence(1), BlockPresence::kHitPending);
  finish(sent());
  EXPECT_EQ(presence(1), BlockPresence::kHit);
}

INSTANTIATE_TEST_SUITE_P(Policies,
                         ManagerUnitClearTest,
                         testing::Values(HostPolicy::kKeep, HostPolicy::kDrop),
                         [](const auto& host) {
                           return host.param == HostPolicy::kKeep ? "keep" : "drop";
                         });

TEST_F(ManagerUnitsTest, PartsThatThereAreNotAndPartsNamedTwiceAreRefused) {
  for (const std::uint32_t second : {kUnit, 1U << 31U, 0U}) {
    const auto slots = reserve({{kMain, key(1)}});
    submit_store(next_job_++,
                 {{kMain, BlockId{3}, slots.at(0), 0}, {kMain, BlockId{4}, slots.at(0), second}});
    const ipc::JobDone done = wait_done();
    EXPECT_THAT(done.results, Each(code(ErrorCode::kInvalidArgument)));
    EXPECT_THAT(done.message, HasSubstr("part"));
    EXPECT_EQ(status()["index"]["reserved"], 0);
  }
  for (const std::uint32_t part : {kUnit, 1U << 31U}) {
    submit_load(next_job_++, {{kMain, BlockId{3}, key(1), part}});
    EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kInvalidArgument)));
  }
}

TEST_F(ManagerUnitsTest, UnitsOfAnotherSizeAreMisses) {
  finish(begin_store(1, 8, {0, 1, 2, 3}));
  ASSERT_NO_FATAL_FAILURE(count_in(2));
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  ASSERT_NO_FATAL_FAILURE(count_in(kUnit));
  EXPECT_EQ(presence(1), BlockPresence::kHit);
}

TEST_F(ManagerUnitsTest, ImpossibleUnitsAreRefused) {
  for (const std::uint32_t blocks : {0U, ipc::kMostUnitBlocks + 1, 1U << 31U, ~0U}) {
    const auto refused = hello(blocks);
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr("store units"));
  }
}

TEST_F(ManagerUnitsTest, ALoadWaitsForAUnitThatIsBeingStored) {
  ipc::SubmitLoad load = waiting_load(7);
  load.items = {{kMain, BlockId{3}, key(1), 1}, {kMain, BlockId{4}, key(1), 0}};
  ASSERT_TRUE(client_->call<ipc::Empty>(MessageKind::kSubmitLoad, load).has_value());
  finish(begin_store(1, 8, {0, 1}));
  const auto jobs = sent();
  EXPECT_EQ(jobs[0].items.size(), 2U);
  EXPECT_NE(jobs[0].items.at(0).shard_offset, jobs[0].items.at(1).shard_offset);
  finish(jobs);
}

TEST_F(ManagerUnitsTest, ALoadDoesNotWaitForAPartThatAUnitWasStoredWithout) {
  ipc::SubmitLoad load = waiting_load(7);
  load.items = {{kMain, BlockId{3}, key(1), 1}, {kMain, BlockId{4}, key(1), 0}};
  ASSERT_TRUE(client_->call<ipc::Empty>(MessageKind::kSubmitLoad, load).has_value());
  finish(begin_store(1, 8, {0}));
  const auto jobs = sent();
  for (std::size_t rank = 0; rank < jobs.size(); ++rank) movers_[rank]->finish(jobs[rank]);
  const ipc::JobDone done = wait_done();
  EXPECT_EQ(done.job, ipc::JobId{7});
  EXPECT_THAT(done.results, ElementsAre(code(ErrorCode::kNotFound), 0));
  // Of which nothing is left to come.
  load.job = ipc::JobId{8};
  load.items = {{kMain, BlockId{3}, key(1), 2}};
  ASSERT_TRUE(client_->call<ipc::Empty>(MessageKind::kSubmitLoad, load).has_value());
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kNotFound)));
}

// A look shows units whole: that one lacks a part is told before its load, which would fail.
TEST_F(ManagerUnitsTest, AUnitIsPinnedForThePartsThatItHasAndElseSaysWhichItLacks) {
  finish(begin_store(1, 8, {1, 3}));
  finish(begin_store(2, 8, {0, 1, 2, 3}));
  const auto pin = [this](std::vector<std::uint64_t> parts) {
    ipc::PinBlocks wanted{{}, std::move(parts)};
    for (const std::uint64_t unit : {1U, 2U, 3U}) wanted.blocks.push_back({kMain, key(unit)});
    return client_->call<ipc::PinBlocksReply>(MessageKind::kPinBlocks, wanted);
  };
  const auto lacking = pin({0b1110, 0b1110, 0b1110});
  ASSERT_TRUE(lacking.has_value()) << lacking.error().to_string();
  EXPECT_THAT(lacking->done, ElementsAre(0, 1, 0));
  EXPECT_THAT(lacking->lacking, ElementsAre(0b0100, 0, 0)) << "the third one is not there at all";
  EXPECT_EQ(status()["index"]["pinned"], 1);
  const ipc::ReservedSlot better = reserve_parts(0b1110).value().slots.at(0);
  EXPECT_EQ(better.outcome, ipc::ReserveOutcome::kReserved) << "nobody holds what lacks a part";
  for (const std::uint64_t any : {0b1000ULL, 0ULL}) {
    const auto there = pin({0b1010, any, any});
    ASSERT_TRUE(there.has_value()) << there.error().to_string();
    EXPECT_THAT(there->done, ElementsAre(0, 1, 0)) << "the first one has given way";
    EXPECT_THAT(there->lacking, Each(0));
  }
  const auto without = pin({});
  ASSERT_FALSE(without.has_value());
  EXPECT_EQ(without.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(without.error().message, HasSubstr("3 blocks with parts of 0"));
}

TEST_F(ManagerUnitsTest, OfPinsThatNamedPartsOnlyThoseAreTakenBackThatWereTaken) {
  finish(begin_store(1, 8, {1, 3}));
  const auto ask = [this](MessageKind kind, std::vector<std::uint64_t> parts) {
    return client_->call<ipc::PinBlocksReply>(kind,
                                              ipc::PinBlocks{{{kMain, key(1)}}, std::move(parts)});
  };
  EXPECT_THAT(ask(MessageKind::kPinBlocks, {0b1000}).value().done, ElementsAre(1));
  EXPECT_THAT(ask(MessageKind::kPinBlocks, {0b1100}).value().done, ElementsAre(0));
  EXPECT_THAT(ask(MessageKind::kUnpinBlocks, {0b1100}).value().done, ElementsAre(0));
  EXPECT_EQ(status()["index"]["pinned"], 1) << "the first one's";
  EXPECT_THAT(ask(MessageKind::kUnpinBlocks, {0b1000}).value().done, ElementsAre(1));
  EXPECT_EQ(status()["index"]["pinned"], 0);
  EXPECT_THAT(ask(MessageKind::kUnpinBlocks, {}).value().done, ElementsAre(0));
  const auto other = ask(MessageKind::kUnpinBlocks, {1, 2});
  ASSERT_FALSE(other.has_value());
  EXPECT_THAT(other.error().message, HasSubstr("unpin_blocks of 1 blocks with parts of 2"));
}

}  // namespace
}  // namespace kvferry::test
