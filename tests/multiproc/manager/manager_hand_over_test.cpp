// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Two engines of one model on one host: what one stores, the other loads, block by block.
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>

#include <array>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::CachePhase;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::JobId;
using ipc::MessageKind;
using ipc::ProcessKind;
using testing::Each;
using testing::ElementsAre;

constexpr GroupId kMain{0};

class ManagerHandOverTest : public ManagerTest {
 protected:
  /// Prefill is the fixture's engine; decode comes beside it.
  void start_both() {
    ASSERT_NO_FATAL_FAILURE(start_engine());
    for (const std::uint32_t rank : {0U, 1U}) {
      const std::string name = "decode/" + std::to_string(rank);
      for (auto* peers : {&decode_workers_, &decode_movers_}) {
        const bool works = peers == &decode_workers_;
        (*peers)[rank] = peer(works ? ProcessKind::kWorker : ProcessKind::kMover, name);
        ASSERT_TRUE((*peers)[rank]
                        ->rank_hello(rank, tiny_geometry(), ipc::CacheOwner::kWorker, "decode")
                        .has_value());
        (*peers)[rank]->report_mapped(rank, 1);
      }
      settle(*decode_workers_[rank]);
    }
    decode_ = peer(ProcessKind::kEngine, "decode engine");
    ipc::EngineHello hello = client_hello();
    hello.engine = "decode";
    const auto state = decode_->call<ipc::EngineState>(MessageKind::kEngineHello, hello);
    ASSERT_TRUE(state.has_value()) << state.error().to_string();
    decode_state_ = *state;
    while (!decode_state_.offload_ready) {
      const auto event = decode_->next_body<ipc::EngineState>(MessageKind::kEngineState);
      ASSERT_TRUE(event.has_value());
      decode_state_ = *event;
    }
  }
  void TearDown() override {
    decode_.reset();
    for (auto& worker : decode_workers_) worker.reset();
    for (auto& mover : decode_movers_) mover.reset();
    ManagerTest::TearDown();
  }
  /// Loads the keys into blocks 1, 2, ….
  ipc::Status await_load(std::uint64_t job,
                         const std::vector<std::uint64_t>& keys,
                         std::chrono::milliseconds patience = std::chrono::seconds(60)) {
    ipc::SubmitLoad load;
    load.job = JobId{job};
    load.generation = decode_state_.generation;
    load.urgency = {1, ipc::Urgency::ns_of(ipc::MonotonicClock::now() + patience)};
    load.waits = true;
    std::uint32_t block = 1;
    for (const std::uint64_t value : keys) {
      load.items.push_back({kMain, BlockId{block++}, key(value)});
    }
    const auto taken = decode_->call<ipc::Empty>(MessageKind::kSubmitLoad, load);
    return taken ? ipc::ok() : ipc::Status(taken.error());
  }
  /// The decode's movers do what they are told: how many blocks that were.
  std::size_t movers_load() {
    std::size_t items = 0;
    for (const auto& mover : decode_movers_) {
      const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
      EXPECT_TRUE(job.has_value());
      if (!job) return 0;
      EXPECT_EQ(job->direction, ipc::CopyDirection::kHostToDevice);
      items = job->items.size();
      mover->finish(*job);
    }
    return items;
  }
  ipc::JobDone loaded() {
    const auto done = decode_->next_body<ipc::JobDone>(MessageKind::kJobDone);
    EXPECT_TRUE(done.has_value()) << "no completion came";
    return done ? *done : ipc::JobDone{};
  }

  std::array<std::unique_ptr<ScriptedPeer>, 2> decode_workers_;
  std::array<std::unique_ptr<ScriptedPeer>, 2> decode_movers_;
  std::unique_ptr<ScriptedPeer> decode_;
  ipc::EngineState decode_state_;
};

TEST_F(ManagerHandOverTest, EachBlockIsLoadedWhenItHasBeenStoredAndTheLoadIsAnsweredOnce) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  ASSERT_TRUE(await_load(7, {1, 2, 3}).has_value());
  EXPECT_EQ(movers_load(), 1U) << "what is there goes at once";
  for (const std::uint64_t block : {3U, 2U}) {
    EXPECT_FALSE(decode_movers_[0]->has(MessageKind::kMoverJob));
    EXPECT_FALSE(decode_->has(MessageKind::kJobDone));
    ASSERT_NO_FATAL_FAILURE(store(block, static_cast<std::uint32_t>(block)));
    EXPECT_EQ(movers_load(), 1U);
  }
  const ipc::JobDone done = loaded();
  EXPECT_EQ(done.job.value, 7U);
  EXPECT_THAT(done.results, ElementsAre(0, 0, 0)) << done.message;
  EXPECT_FALSE(decode_->has(MessageKind::kJobDone));
}

TEST_F(ManagerHandOverTest, BlocksOfOneStoreGoTogether) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1, 2, 3}).has_value());
  const auto slots = reserve({{kMain, key(1)}, {kMain, key(2)}, {kMain, key(3)}});
  submit_store(50, {{kMain, BlockId{1}, slots.at(0)},
                    {kMain, BlockId{2}, slots.at(1)},
                    {kMain, BlockId{3}, slots.at(2)}});
  EXPECT_FALSE(decode_movers_[0]->has(MessageKind::kMoverJob)) << "they are being stored";
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  EXPECT_THAT(wait_done().results, Each(0));
  EXPECT_EQ(movers_load(), 3U);
  EXPECT_THAT(loaded().results, ElementsAre(0, 0, 0));
}

TEST_F(ManagerHandOverTest, WhatIsNotStoredInTimeIsToldAndTheRestIsLoaded) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  ASSERT_TRUE(await_load(7, {1, 2}, std::chrono::milliseconds(300)).has_value());
  EXPECT_EQ(movers_load(), 1U);
  const ipc::JobDone done = loaded();
  EXPECT_THAT(done.results, ElementsAre(0, code(ErrorCode::kTimeout)));
  EXPECT_THAT(done.message, testing::HasSubstr("1 blocks were not stored in time"));
  // Whoever comes too late is not loaded any more.
  ASSERT_NO_FATAL_FAILURE(store(2, 2));
  EXPECT_FALSE(decode_movers_[0]->has(MessageKind::kMoverJob));
}

TEST_F(ManagerHandOverTest, AStoreThatFailsIsWaitedForUntilAnotherOneDoesIt) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1}).has_value());
  const auto slots = reserve({{kMain, key(1)}});
  submit_store(50, {{kMain, BlockId{1}, slots.at(0)}});
  ErrorCode failure = ErrorCode::kCuda;
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    mover->finish(*job, &failure);
  }
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kCuda)));
  EXPECT_FALSE(decode_->has(MessageKind::kJobDone));
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  EXPECT_EQ(movers_load(), 1U);
  EXPECT_THAT(loaded().results, ElementsAre(0));
}

TEST_F(ManagerHandOverTest, ACancelledLoadEndsWhatWaitsAndWhatIsQueued) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1, 2}).has_value());
  ASSERT_TRUE(decode_->call<ipc::Empty>(MessageKind::kCancel, ipc::CancelJob{JobId{7}}));
  EXPECT_THAT(loaded().results, Each(code(ErrorCode::kCancelled)));
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  EXPECT_FALSE(decode_movers_[0]->has(MessageKind::kMoverJob));
  EXPECT_EQ(await_load(7, {1}).error().code, ErrorCode::kAlreadyExists);
}

TEST_F(ManagerHandOverTest, OneLoadOfAnIdIsTakenAndOthersOfItAreRefused) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1}).has_value());
  EXPECT_EQ(await_load(7, {2}).error().code, ErrorCode::kAlreadyExists);
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  EXPECT_EQ(movers_load(), 1U);
  EXPECT_THAT(loaded().results, ElementsAre(0));
}

TEST_F(ManagerHandOverTest, ALoadThatWaitsNeedsAnEndAndNoLayers) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ipc::SubmitLoad load;
  load.job = JobId{7};
  load.generation = decode_state_.generation;
  load.waits = true;
  load.items.push_back({kMain, BlockId{1}, key(1)});
  ASSERT_TRUE(decode_->call<ipc::Empty>(MessageKind::kSubmitLoad, load).has_value());
  EXPECT_THAT(loaded().results, ElementsAre(code(ErrorCode::kInvalidArgument)));
  load.job = JobId{8};
  load.urgency = {1, ipc::Urgency::ns_of(ipc::MonotonicClock::now() + std::chrono::seconds(9))};
  load.layers = ipc::LayerTicket{};
  ASSERT_TRUE(decode_->call<ipc::Empty>(MessageKind::kSubmitLoad, load).has_value());
  EXPECT_THAT(loaded().results, ElementsAre(code(ErrorCode::kInvalidArgument)));
}

TEST_F(ManagerHandOverTest, ADeadClientsLoadWaitsForNothingAndHoldsNothing) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  ASSERT_TRUE(await_load(7, {1, 2}).has_value());
  ipc::Envelope bye;
  bye.kind = MessageKind::kBye;
  decode_->send(bye);
  decode_.reset();
  EXPECT_EQ(movers_load(), 1U) << "what was sent goes on to its end";
  ASSERT_NO_FATAL_FAILURE(store(2, 2));
  EXPECT_FALSE(decode_movers_[0]->has(MessageKind::kMoverJob));
}

TEST_F(ManagerHandOverTest, TheEndOfTheCacheEndsTheWait) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1}).has_value());
  decode_movers_[0].reset();  // the engine has lost a mover
  const ipc::JobDone done = loaded();
  EXPECT_THAT(done.results, ElementsAre(code(ErrorCode::kNotReady)));
}

TEST_F(ManagerHandOverTest, ManyLoadsMayWaitForOneBlock) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  for (std::uint64_t job = 1; job <= 4; ++job) {
    ipc::SubmitLoad load;
    load.job = JobId{job};
    load.generation = decode_state_.generation;
    load.urgency = {1, ipc::Urgency::ns_of(ipc::MonotonicClock::now() + std::chrono::seconds(60))};
    load.waits = true;
    load.items.push_back({kMain, BlockId{static_cast<std::uint32_t>(job)}, key(1)});
    ASSERT_TRUE(decode_->call<ipc::Empty>(MessageKind::kSubmitLoad, load).has_value());
  }
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(movers_load(), 1U);
    EXPECT_THAT(loaded().results, ElementsAre(0));
  }
}

TEST_F(ManagerHandOverTest, HoweverManyPartsALoadHasItIsOneJobOfItsEngine) {
  max_jobs_ = 2;
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1, 2, 3, 4, 5, 6}).has_value());
  for (std::uint32_t block = 1; block <= 6; ++block) {
    ASSERT_NO_FATAL_FAILURE(store(block, block));
  }
  // Its movers have not done anything yet.
  const auto load = [this](std::uint64_t job, std::uint32_t block) {
    ipc::SubmitLoad submit;
    submit.job = JobId{job};
    submit.generation = decode_state_.generation;
    submit.items.push_back({kMain, BlockId{block}, key(1)});
    ASSERT_TRUE(decode_->call<ipc::Empty>(MessageKind::kSubmitLoad, submit).has_value());
  };
  ASSERT_NO_FATAL_FAILURE(load(8, 10));
  EXPECT_FALSE(decode_->has(MessageKind::kJobDone)) << "one more is taken";
  ASSERT_NO_FATAL_FAILURE(load(9, 11));
  const ipc::JobDone busy = loaded();
  EXPECT_EQ(busy.job.value, 9U);
  EXPECT_THAT(busy.results, ElementsAre(code(ErrorCode::kBusy)));
  EXPECT_THAT(busy.message, testing::HasSubstr("2 jobs of this engine are unfinished"));
}

TEST_F(ManagerHandOverTest, WhatIsStoredWhileSomePartsAreUnderWayGoesTogetherAfterThem) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1, 2, 3, 4, 5, 6, 7}).has_value());
  for (std::uint32_t block = 1; block <= 7; ++block) {
    ASSERT_NO_FATAL_FAILURE(store(block, block));
  }
  EXPECT_EQ(movers_load(), 1U);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(movers_load(), 1U);
  EXPECT_EQ(movers_load(), 3U) << "held until the first part had ended";
  EXPECT_THAT(loaded().results, testing::AllOf(testing::SizeIs(7), Each(0)));
}

// What is held has a reader to come.
TEST_F(ManagerHandOverTest, WhatIsHeldIsNotEvicted) {
  pool_bytes_ = 256ULL << 10U;  // 16 host blocks.
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1, 2, 3, 4, 5, 6}).has_value());
  for (std::uint32_t block = 1; block <= 6; ++block) {
    ASSERT_NO_FATAL_FAILURE(store(block, block));
  }
  std::vector<ipc::StoreKey> others;
  for (std::uint64_t i = 0; i < 16; ++i) others.push_back({kMain, key(100 + i)});
  const auto reply = client_->call<ipc::ReserveStoreReply>(
      MessageKind::kReserveStore, ipc::ReserveStore{others, state_.weights});
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->slots.at(9).outcome, ipc::ReserveOutcome::kReserved);
  EXPECT_EQ(reply->slots.at(10).outcome, ipc::ReserveOutcome::kFull);
  EXPECT_EQ(status()["index"]["blocks"], 6);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(movers_load(), 1U);
  EXPECT_EQ(movers_load(), 2U);
  EXPECT_THAT(loaded().results, testing::AllOf(testing::SizeIs(6), Each(0)));
}

TEST_F(ManagerHandOverTest, WhatIsHeldWhenTheTimeIsOverIsNotLoadedAnyMore) {
  constexpr std::chrono::milliseconds kPatience{1500};
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1, 2, 3, 4, 5, 6}, kPatience).has_value());
  for (std::uint32_t block = 1; block <= 6; ++block) {
    ASSERT_NO_FATAL_FAILURE(store(block, block));
  }
  // One that ends later says that the first one's time is over.
  ASSERT_TRUE(await_load(8, {404}, kPatience).has_value());
  EXPECT_EQ(loaded().job.value, 8U);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(movers_load(), 1U) << "they had begun";
  const ipc::JobDone done = loaded();
  EXPECT_THAT(done.results,
              ElementsAre(0, 0, 0, 0, code(ErrorCode::kTimeout), code(ErrorCode::kTimeout)));
  EXPECT_THAT(done.message, testing::HasSubstr("2 blocks were not copied in time"));
  EXPECT_FALSE(decode_movers_[0]->has(MessageKind::kMoverJob));
}

TEST_F(ManagerHandOverTest, ACancelEndsWhatIsHeld) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_TRUE(await_load(7, {1, 2, 3, 4, 5, 6}).has_value());
  for (std::uint32_t block = 1; block <= 6; ++block) {
    ASSERT_NO_FATAL_FAILURE(store(block, block));
  }
  ASSERT_TRUE(decode_->call<ipc::Empty>(MessageKind::kCancel, ipc::CancelJob{JobId{7}}));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(movers_load(), 1U) << "they had begun";
  EXPECT_THAT(loaded().results,
              ElementsAre(0, 0, 0, 0, code(ErrorCode::kCancelled), code(ErrorCode::kCancelled)));
  EXPECT_FALSE(decode_movers_[0]->has(MessageKind::kMoverJob));
}

// Their ids are not next to each other, and are no ids of the client's jobs.
TEST_F(ManagerHandOverTest, ThousandsOfPartsLeaveTheClientsOwnIdsToIt) {
  ASSERT_NO_FATAL_FAILURE(start_both());
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  std::uint64_t job = 10'000;
  for (int i = 0; i < 1100; ++i) {
    for (const bool is_prefills : {false, true}) {
      ScriptedPeer& client = is_prefills ? *client_ : *decode_;
      ipc::SubmitLoad load;
      load.job = JobId{++job};
      load.generation = is_prefills ? state_.generation : decode_state_.generation;
      load.urgency = {1, ipc::Urgency::ns_of(ipc::MonotonicClock::now() + std::chrono::minutes(1))};
      load.waits = true;
      load.items.push_back({kMain, BlockId{2}, key(1)});
      client.notify(MessageKind::kSubmitLoad, load);
      for (std::size_t rank = 0; rank < 2; ++rank) {
        ScriptedPeer& mover = is_prefills ? *movers_[rank] : *decode_movers_[rank];
        const auto part = mover.next_body<ipc::MoverJob>(MessageKind::kMoverJob);
        ASSERT_TRUE(part.has_value()) << "after " << job << " jobs";
        mover.finish(*part);
      }
      const auto done = client.next_body<ipc::JobDone>(MessageKind::kJobDone);
      ASSERT_TRUE(done.has_value());
      ASSERT_THAT(done->results, ElementsAre(0)) << done->message;
    }
  }
}

}  // namespace
}  // namespace kvferry::test
