// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Stores that ask for their room themselves: one message, one completion, and nobody waits.
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>

#include <functional>
#include <utility>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::BlockPresence;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::MessageKind;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr GroupId kMain{0};
constexpr GroupId kState{1};

class ManagerOffersTest : public ManagerTest {
 protected:
  void SetUp() override {
    ManagerTest::SetUp();
    pool_bytes_ = pool();
    ASSERT_NO_FATAL_FAILURE(start_engine());
  }
  [[nodiscard]] virtual std::uint64_t pool() const { return pool_bytes_; }

  /// Keys `first` and so on, each of the device block of the same number.
  [[nodiscard]] ipc::OfferStore offer(std::uint64_t first, std::uint64_t count) {
    ipc::OfferStore offer;
    offer.store.job = ipc::JobId{next_job_++};
    offer.store.generation = state_.generation;
    offer.weights = state_.weights;
    for (std::uint64_t i = 0; i < count; ++i) {
      offer.keys.push_back({kMain, key(first + i)});
      offer.store.items.push_back({kMain, BlockId{static_cast<std::uint32_t>(first + i)}, i});
    }
    return offer;
  }
  void send(const ipc::OfferStore& offer) { client_->notify(MessageKind::kOfferStore, offer); }
  ipc::JobDone refused(const ipc::OfferStore& offer, ErrorCode error) {
    send(offer);
    ipc::JobDone done = wait_done();
    EXPECT_EQ(done.job, offer.store.job);
    EXPECT_EQ(done.results.size(), offer.store.items.size());
    EXPECT_THAT(done.results, Each(code(error))) << done.message;
    EXPECT_FALSE(done.message.empty());
    EXPECT_EQ(status()["index"]["reserved"], 0);
    return done;
  }
  BlockPresence presence(std::uint64_t of) {
    return static_cast<BlockPresence>(lookup({of}).presence.at(0));
  }
  /// Of the next job, which each mover takes: its device blocks.
  std::vector<std::uint32_t> finish_next() {
    std::vector<std::uint32_t> blocks;
    for (const auto& mover : movers_) {
      const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
      EXPECT_TRUE(job.has_value());
      if (!job) return {};
      blocks.clear();
      for (const ipc::MoverItem& item : job->items) blocks.push_back(item.block.value);
      mover->finish(*job);
    }
    return blocks;
  }
};

TEST_F(ManagerOffersTest, WhatGetsRoomIsStoredInOneMessage) {
  send(offer(1, 3));
  EXPECT_THAT(finish_next(), ElementsAre(1, 2, 3));
  const ipc::JobDone done = wait_done();
  EXPECT_THAT(done.results, ElementsAre(0, 0, 0));
  for (const std::uint64_t i : {1U, 2U, 3U}) EXPECT_EQ(presence(i), BlockPresence::kHit);
  EXPECT_EQ(status()["engines"][0]["jobs"]["done"], 1);
}

TEST_F(ManagerOffersTest, WhatIsThereOrIsBeingStoredIsLeftOut) {
  store(2, 2);
  ipc::OfferStore first = offer(3, 1);
  send(first);
  ipc::OfferStore second = offer(1, 4);
  second.keys.push_back({kMain, key(1)});  // Once more.
  second.store.items.push_back({kMain, BlockId{9}, 4});
  send(second);
  EXPECT_THAT(finish_next(), ElementsAre(3));
  EXPECT_THAT(wait_done().results, ElementsAre(0));
  EXPECT_THAT(finish_next(), ElementsAre(1, 4));
  const ipc::JobDone done = wait_done();
  const std::uint8_t there = code(ErrorCode::kAlreadyExists);
  const std::uint8_t pending = code(ErrorCode::kNotIdle);  // That store may fail.
  EXPECT_THAT(done.results, ElementsAre(0, there, pending, 0, pending));
  EXPECT_THAT(done.message, IsEmpty());
  EXPECT_EQ(presence(4), BlockPresence::kHit);
  EXPECT_EQ(status()["engines"][0]["jobs"]["failed"], 0);
}

TEST_F(ManagerOffersTest, ByLayersTheOthersAreStoredBesideWhatIsLeftOut) {
  store(2, 2);
  ipc::OfferStore layered = offer(1, 3);
  layered.store.layers = ipc::LayerTicket{3, 1};
  send(layered);
  EXPECT_THAT(finish_next(), ElementsAre(1, 3));
  EXPECT_THAT(wait_done().results, ElementsAre(0, code(ErrorCode::kAlreadyExists), 0));
  EXPECT_EQ(status()["index"]["blocks"], 3);
  for (const auto& worker : workers_) EXPECT_FALSE(worker->has(MessageKind::kLayersFailed));
}

TEST_F(ManagerOffersTest, NothingToCopyIsAnsweredAtOnceThoughTheCopiesWait) {
  store(1, 1);
  send(offer(2, 1));  // No mover answers it.
  ipc::OfferStore again = offer(1, 1);
  again.store.layers = ipc::LayerTicket{3, 1};
  send(again);
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kAlreadyExists)));
  for (const auto& worker : workers_) {
    EXPECT_FALSE(worker->has(MessageKind::kLayersFailed)) << "its compute has not failed";
  }
  EXPECT_EQ(status()["index"]["reserved"], 1) << "of the one before";
  ipc::OfferStore twice = offer(1, 1);
  twice.store.job = again.store.job;
  send(twice);
  EXPECT_THAT(finish_next(), ElementsAre(2));
  EXPECT_THAT(wait_done().results, ElementsAre(0)) << "an id is taken once";
}

TEST_F(ManagerOffersTest, HostClearUnderAnOfferRevokesItAndKeepsTheOtherResults) {
  store(2, 2);
  send(offer(1, 2));
  std::vector<ipc::MoverJob> jobs;
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    jobs.push_back(*job);
  }
  operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat", ipc::HostPolicy::kDrop});
  for (std::size_t rank = 0; rank < jobs.size(); ++rank) {
    ErrorCode revoked = ErrorCode::kRevoked;
    movers_[rank]->finish(jobs[rank], &revoked);
  }
  ASSERT_NO_FATAL_FAILURE(answer_clears(1));
  ASSERT_TRUE(operator_->next_body<ipc::ClearReply>(MessageKind::kClear).has_value());
  const ipc::JobDone done = wait_done();
  EXPECT_THAT(done.results,
              ElementsAre(code(ErrorCode::kRevoked), code(ErrorCode::kAlreadyExists)));
  EXPECT_EQ(status()["index"]["blocks"], 0);
  EXPECT_EQ(status()["index"]["reserved"], 0);
}

TEST_F(ManagerOffersTest, MoversThatFailSayWhyAndWhatWasLeftOutKeepsItsResult) {
  store(2, 2);
  ipc::OfferStore layered = offer(1, 2);
  layered.store.layers = ipc::LayerTicket{3, 1};
  send(layered);
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    ErrorCode failed = ErrorCode::kCuda;
    mover->finish(*job, &failed);
  }
  const ipc::JobDone done = wait_done();
  EXPECT_THAT(done.results, ElementsAre(code(ErrorCode::kCuda), code(ErrorCode::kAlreadyExists)));
  EXPECT_FALSE(done.message.empty());
  for (const auto& worker : workers_) {
    const auto told = worker->next_body<ipc::LayersFailed>(MessageKind::kLayersFailed);
    ASSERT_TRUE(told.has_value());
    EXPECT_EQ(told->error.code, ErrorCode::kCuda);
  }
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  EXPECT_EQ(presence(2), BlockPresence::kHit);
}

TEST_F(ManagerOffersTest, DeadEnginesOfferLeavesNothing) {
  send(offer(1, 2));
  for (const auto& mover : movers_) {
    ASSERT_TRUE(mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob).has_value());
  }
  EXPECT_EQ(status()["index"]["reserved"], 2);
  client_.reset();
  for (const auto& mover : movers_) {
    const auto cancel = mover->next_body<ipc::MoverCancel>(MessageKind::kMoverCancel);
    ASSERT_TRUE(cancel.has_value());
    ipc::MoverJob job;
    job.job = cancel->job;
    job.items.resize(2);
    ErrorCode cancelled = ErrorCode::kCancelled;
    mover->finish(job, &cancelled);
  }
  const ipc::Deadline deadline = soon();
  while (status()["index"]["reserved"] != 0 && !deadline.expired()) {
  }
  EXPECT_EQ(status()["index"]["reserved"], 0);
  EXPECT_EQ(status()["index"]["blocks"], 0);
}

TEST_F(ManagerOffersTest, OtherGenerationsAndWeightsAreRefused) {
  ipc::OfferStore late = offer(1, 2);
  ++late.store.generation;
  refused(late, ErrorCode::kStaleEpoch);
  ipc::OfferStore other = offer(1, 2);
  other.weights = key(77);
  EXPECT_THAT(refused(other, ErrorCode::kStaleEpoch).message, HasSubstr("weights"));
}

TEST_F(ManagerOffersTest, MalformedOnesAreRefusedAsAWhole) {
  using Spoil = std::function<void(ipc::OfferStore&)>;
  const std::vector<std::pair<const char*, Spoil>> spoils = {
      {"a place beyond the keys", [](ipc::OfferStore& o) { o.store.items[1].slot = 2; }},
      {"the largest place", [](ipc::OfferStore& o) { o.store.items[1].slot = ~std::uint64_t{0}; }},
      {"a key without a block",
       [](ipc::OfferStore& o) {
         o.keys.push_back({kMain, key(9)});
       }},
      {"no key at all", [](ipc::OfferStore& o) { o.keys.clear(); }},
      {"one place for two blocks", [](ipc::OfferStore& o) { o.store.items[1].slot = 0; }},
      {"another group than the key's", [](ipc::OfferStore& o) { o.keys[1].group = kState; }},
      {"a group that is not there", [](ipc::OfferStore& o) { o.keys[1].group = GroupId{9}; }},
      {"a part of units of one", [](ipc::OfferStore& o) { o.store.items[0].part = 1; }},
      {"the largest part", [](ipc::OfferStore& o) { o.store.items[0].part = ~0U; }},
      {"a device block twice", [](ipc::OfferStore& o) { o.store.items[1].block = BlockId{1}; }},
      {"a device block that is not there",
       [](ipc::OfferStore& o) { o.store.items[1].block = BlockId{1U << 30U}; }},
      {"a hash of zero", [](ipc::OfferStore& o) { o.keys[0].block = {}; }},
      {"parts beyond the unit", [](ipc::OfferStore& o) { o.keys[0].parts = 2; }}};
  for (const auto& [what, spoil] : spoils) {
    SCOPED_TRACE(what);
    ipc::OfferStore bad = offer(1, 2);
    spoil(bad);
    refused(bad, ErrorCode::kInvalidArgument);
  }
  send(offer(1, 2));
  EXPECT_THAT(finish_next(), ElementsAre(1, 2));
  EXPECT_THAT(wait_done().results, Each(0));
}

TEST_F(ManagerOffersTest, UnitInUseIsToldFromAFullPool) {
  ipc::EngineHello hello = client_hello();
  hello.unit_blocks = 2;
  const auto state = client_->call<ipc::EngineState>(MessageKind::kEngineHello, hello);
  ASSERT_TRUE(state.has_value()) << state.error().to_string();
  state_ = *state;
  ipc::OfferStore half = offer(1, 1);
  half.keys[0].parts = 0b10;
  half.store.items[0].part = 1;
  send(half);
  EXPECT_THAT(finish_next(), ElementsAre(1));
  EXPECT_THAT(wait_done().results, ElementsAre(0));
  ASSERT_EQ(client_->call<ipc::PinReply>(MessageKind::kPin, ipc::PinRequest{{key(1)}})->pinned, 1U);
  ipc::OfferStore whole = offer(1, 1);
  whole.keys[0].parts = 0b11;
  refused(whole, ErrorCode::kInvalidArgument);  // Not all of the parts that it promises.
  whole.store.job = ipc::JobId{next_job_++};
  whole.store.items.push_back({kMain, BlockId{2}, 0, 1});
  send(whole);
  EXPECT_THAT(wait_done().results, Each(code(ErrorCode::kNotIdle)));
  EXPECT_EQ(presence(1), BlockPresence::kHit);
}

class ManagerFullPoolTest : public ManagerOffersTest {
 protected:
  // Fewer places than the device has blocks.
  [[nodiscard]] std::uint64_t pool() const override { return 128ULL << 10U; }
};

TEST_F(ManagerFullPoolTest, WhatGetsNoRoomIsLeftOutAndTheOthersAreStored) {
  const std::uint64_t blocks = state_.group_blocks.at(0) - 1;
  send(offer(1, blocks));
  const std::size_t stored = finish_next().size();
  ASSERT_GT(stored, 0U);
  ASSERT_LT(stored, blocks) << "the pool is too large for this test";
  const ipc::JobDone done = wait_done();
  ASSERT_EQ(done.results.size(), blocks);
  for (std::size_t i = 0; i < blocks; ++i) {
    EXPECT_EQ(done.results[i], i < stored ? 0 : code(ErrorCode::kNoHostMemory)) << i;
  }
  EXPECT_THAT(done.message, IsEmpty());
  EXPECT_EQ(status()["index"]["blocks"], stored);
}

}  // namespace
}  // namespace kvferry::test
