// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/pool_checks.hpp"

#include "cache_manager/faulty_engine_fixture.hpp"
#include "kvferry/ipc/base/checksum.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using ipc::ErrorCode;
using test::DeviceCall;
using test::FaultKind;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Ne;

constexpr std::uint8_t kCorrupt = static_cast<std::uint8_t>(ErrorCode::kCorrupt);

class PoolChecksTest : public FaultyEngineFixture {
 protected:
  void adjust(TransferEngine::Options& options) override {
    options.strategy = CopyStrategy::kBatch;
    options.on_sums = [this](ipc::MoverSums sums, std::vector<ipc::KeptSum> places) {
      const std::lock_guard lock(mutex_);
      const std::uint64_t job = sums.job.value;
      EXPECT_TRUE(sums_.emplace(job, std::move(sums)).second);
      for (const ipc::KeptSum& place : places) places_.push_back(place);
      answered_.notify_all();
    };
  }
  ipc::MoverSums wait_sums(std::uint64_t job) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(answered_.wait_until(lock, test::soon().when(),
                                     [this, job] { return sums_.contains(job); }));
    return sums_[job];
  }
  [[nodiscard]] std::uint64_t sum_of(std::uint32_t at) {
    const Bytes bytes = place(at);
    return ipc::checksum(std::as_bytes(std::span(bytes)));
  }
  /// A load of place i to block i, each named with its sum.
  [[nodiscard]] ipc::MoverJob load_of(std::uint64_t id, std::uint32_t blocks) {
    std::vector<Move> moves;
    for (std::uint32_t i = 0; i < blocks; ++i) moves.push_back({i, i});
    ipc::MoverJob load = job(id, CopyDirection::kHostToDevice, moves);
    for (std::uint32_t i = 0; i < blocks; ++i) {
      load.items[i].shard_sum = sum_of(i);
      load.items[i].replicated_sum = ipc::checksum({});
    }
    return load;
  }
  void flip(std::uint32_t at, std::size_t byte, unsigned bit) {
    pool_view_.data()[at * kBlockBytes + byte] ^= static_cast<std::byte>(1U << bit);
  }

  std::map<std::uint64_t, ipc::MoverSums> sums_;  ///< mutex_ guards it, and the next one.
  std::vector<ipc::KeptSum> places_;
};

TEST_F(PoolChecksTest, AStoresSumsAreThoseOfWhatItLeft) {
  ipc::MoverJob store = job(1, CopyDirection::kDeviceToHost, {{0, 3}, {1, 5}});
  store.wants_sums = true;
  put_block(0, contents(10));
  put_block(1, contents(11));
  engine_->submit(store);
  EXPECT_THAT(wait_answer(1).results, Each(0));
  const ipc::MoverSums sums = wait_sums(1);
  EXPECT_THAT(sums.shard, ElementsAre(sum_of(3), sum_of(5)));
  EXPECT_THAT(sums.replicated, Each(ipc::checksum({})));
  EXPECT_EQ(place(3), contents(10));
}

TEST_F(PoolChecksTest, OfWhatFailedThereIsNoSum) {
  ipc::MoverJob store = job(1, CopyDirection::kDeviceToHost, {{0, 3}, {100, 5}});  // no such block
  store.wants_sums = true;
  engine_->submit(store);
  EXPECT_THAT(wait_answer(1).results, ElementsAre(0, Ne(0)));
  const ipc::MoverSums sums = wait_sums(1);
  EXPECT_THAT(sums.shard, ElementsAre(sum_of(3), 0));
  EXPECT_THAT(sums.replicated, ElementsAre(Ne(0), 0));
}

TEST_F(PoolChecksTest, AStoreThatIsNotAskedForSumsHasNone) {
  engine_->submit(job(1, CopyDirection::kDeviceToHost, {{0, 3}}));
  ipc::MoverJob store = job(2, CopyDirection::kDeviceToHost, {{0, 3}});
  store.wants_sums = true;
  (void)wait_answer(1);
  engine_->submit(store);
  (void)wait_sums(2);
  const std::lock_guard lock(mutex_);
  EXPECT_EQ(sums_.size(), 1U);
}

TEST_F(PoolChecksTest, AnAnswerThatWaitsForSumsHasThemOfWhatWasStored) {
  ipc::MoverJob store = job(1, CopyDirection::kDeviceToHost, {{0, 3}, {100, 5}});  // no such block
  store.wants_sums = store.sums_first = true;
  put_block(0, contents(10));
  engine_->submit(store);
  const ipc::MoverJobDone done = wait_answer(1);
  EXPECT_THAT(done.results, ElementsAre(0, Ne(0)));
  EXPECT_THAT(done.shard_sums, ElementsAre(sum_of(3), 0));
  EXPECT_THAT(done.replicated_sums, ElementsAre(ipc::checksum({}), 0));
  // What is checked against them from that moment on is found.
  flip(3, 4097, 2);
  ipc::MoverJob load = job(2, CopyDirection::kHostToDevice, {{1, 3}});
  load.items[0].shard_sum = done.shard_sums[0];
  load.items[0].replicated_sum = done.replicated_sums[0];
  engine_->submit(load);
  EXPECT_THAT(wait_answer(2).results, ElementsAre(kCorrupt));
  EXPECT_EQ(engine_->sums_queued(), 0U);
}

TEST_F(PoolChecksTest, OfAStoreThatFailedTheAnswerWaitsForNoSums) {
  ipc::MoverJob store = job(1, CopyDirection::kDeviceToHost, {{100, 5}});  // no such block
  store.wants_sums = store.sums_first = true;
  engine_->submit(store);
  const ipc::MoverJobDone done = wait_answer(1);
  EXPECT_THAT(done.results, ElementsAre(Ne(0)));
  EXPECT_THAT(done.shard_sums, testing::IsEmpty());
}

TEST_F(PoolChecksTest, OfABurstOfStoresEachHasItsSums) {
  constexpr std::uint32_t kStores = 300;
  for (std::uint32_t i = 1; i <= kStores; ++i) {
    ipc::MoverJob store = job(i, CopyDirection::kDeviceToHost, {{i % 4, i % kPlaces}});
    store.wants_sums = true;
    engine_->submit(store);
  }
  for (std::uint32_t i = 1; i <= kStores; ++i) (void)wait_sums(i);
  EXPECT_EQ(engine_->sums_queued(), kStores);
}

TEST_F(PoolChecksTest, SumsAreComputedAlsoWhenTheManagerIsGoneAndTellOfWhichPlaceTheyAre) {
  ipc::MoverJob store = job(1, CopyDirection::kDeviceToHost, {{0, 3}});
  store.wants_sums = true;
  put_block(0, contents(10));
  engine_->submit(store);
  (void)wait_answer(1);
  engine_->drop_pool();
  EXPECT_THAT(wait_sums(1).shard, ElementsAre(sum_of(3)));
  const std::lock_guard lock(mutex_);
  ASSERT_EQ(places_.size(), 1U);
  EXPECT_EQ(places_[0].job.value, 1U);
  EXPECT_EQ(places_[0].offset, 3 * kBlockBytes);
  EXPECT_EQ(places_[0].sum, sums_.at(1).shard.at(0));
}

// As often as managers follow each other; each thread hands over what it has left.
TEST_F(PoolChecksTest, NothingIsLostBetweenThreadsThatSumInTurn) {
  constexpr std::uint64_t kStores = 60;
  put_block(0, contents(10));
  for (std::uint64_t id = 1; id <= kStores; ++id) {
    ipc::MoverJob store = job(id, CopyDirection::kDeviceToHost, {{0, 3}});
    store.wants_sums = true;
    engine_->submit(store);
    EXPECT_THAT(wait_answer(id).results, Each(0));
    if (id % 10 == 0) engine_->sum_at_once(id % 20 != 0);
  }
  for (std::uint64_t id = 1; id <= kStores; ++id) {
    EXPECT_THAT(wait_sums(id).shard, ElementsAre(sum_of(3)));
  }
}

/// Threads of that name of this process, by their policies.
std::vector<int> policies_of(std::string_view name) {
  std::vector<int> policies;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string comm;
    std::getline(std::ifstream(task.path() / "comm"), comm);
    if (comm != name) continue;
    policies.push_back(::sched_getscheduler(std::stoi(task.path().filename().string())));
  }
  return policies;
}

TEST_F(PoolChecksTest, SumsThatSomebodyWaitsForAreComputedAtOrdinaryPriority) {
  engine_->sum_at_once(true);
  ipc::MoverJob store = job(1, CopyDirection::kDeviceToHost, {{0, 3}});
  store.wants_sums = true;
  put_block(0, contents(10));
  engine_->submit(store);
  EXPECT_THAT(wait_answer(1).results, Each(0));
  EXPECT_THAT(wait_sums(1).shard, ElementsAre(sum_of(3)));
  EXPECT_THAT(policies_of("kvf-sums"), testing::Contains(SCHED_OTHER));
}

TEST_F(PoolChecksTest, ALoadWhoseSumsAreRightIsGood) {
  for (std::uint32_t i = 0; i < 4; ++i) put_place(i, contents(i));
  engine_->submit(load_of(1, 4));
  const ipc::MoverJobDone done = wait_answer(1);
  EXPECT_THAT(done.results, Each(0)) << done.message;
  EXPECT_EQ(done.results.size(), 4U);
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_EQ(block(i), contents(i));
}

TEST_F(PoolChecksTest, AnyFlippedBitOfABlockIsFoundAndTheOtherBlocksAreGood) {
  for (std::uint32_t i = 0; i < 4; ++i) put_place(i, contents(i));
  std::uint64_t id = 0;
  for (const std::size_t byte : {std::size_t{0}, std::size_t{4097}, std::size_t{kBlockBytes - 1}}) {
    for (const unsigned bit : {0U, 7U}) {
      ipc::MoverJob load = load_of(++id, 4);
      flip(2, byte, bit);
      engine_->submit(load);
      const ipc::MoverJobDone done = wait_answer(id);
      EXPECT_THAT(done.results, ElementsAre(0, 0, kCorrupt, 0));
      EXPECT_THAT(done.message, HasSubstr("damaged"));
      flip(2, byte, bit);
    }
  }
}

TEST_F(PoolChecksTest, WhatIsNotNamedIsNotChecked) {
  for (std::uint32_t i = 0; i < 2; ++i) put_place(i, contents(i));
  ipc::MoverJob load = load_of(1, 2);
  load.items[1].shard_sum = load.items[1].replicated_sum = 0;
  flip(1, 5, 3);
  engine_->submit(load);
  EXPECT_THAT(wait_answer(1).results, Each(0));
}

TEST_F(PoolChecksTest, AnErrorOfTheCopyIsToldAndNotThatOfTheCheck) {
  put_place(0, contents(0));
  ipc::MoverJob load = load_of(1, 1);
  load.items[0].block = ipc::BlockId{100};
  flip(0, 5, 3);
  engine_->submit(load);
  EXPECT_THAT(wait_answer(1).results,
              ElementsAre(static_cast<std::uint8_t>(ErrorCode::kInvalidArgument)));
}

// Compute would read it before anybody could say so.
TEST_F(PoolChecksTest, NothingOfADamagedLoadByLayersIsToldToTheWorker) {
  for (std::uint32_t i = 0; i < 3; ++i) put_place(i, contents(i));
  ipc::MoverJob load = load_of(1, 3);
  load.layers = ipc::LayerTicket{};
  flip(1, 77, 1);
  engine_->submit(load);
  ipc::PacketSocket worker = next_hello();
  greet(worker);
  const ipc::MoverJobDone done = wait_answer(1);
  EXPECT_THAT(done.results, ElementsAre(static_cast<std::uint8_t>(ErrorCode::kCancelled), kCorrupt,
                                        static_cast<std::uint8_t>(ErrorCode::kCancelled)));
  EXPECT_THAT(done.message, HasSubstr("damaged"));
  expect_silent(worker);
}

TEST_F(PoolChecksTest, OfAGoodLoadByLayersTheWorkerIsToldAll) {
  for (std::uint32_t i = 0; i < 3; ++i) put_place(i, contents(i));
  ipc::MoverJob load = load_of(1, 3);
  load.layers = ipc::LayerTicket{};
  engine_->submit(load);
  ipc::PacketSocket worker = next_hello();
  greet(worker);
  ipc::StageRequest request;
  do {
    request = next_request(worker);
    ASSERT_TRUE(request.layers.has_value());
    reply(worker, request);
  } while (!request.layers->last);
  EXPECT_THAT(wait_answer(1).results, Each(0));
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_EQ(block(i), contents(i));
}

TEST_F(PoolChecksTest, ManyLoadsAtATimeAreEachToldTheirOwn) {
  constexpr std::uint32_t kLoads = 60;
  for (std::uint32_t i = 0; i < 8; ++i) put_place(i, contents(i));
  const ipc::MoverJob good = load_of(1, 8);
  flip(6, 9, 1);
  for (std::uint32_t i = 0; i < kLoads; ++i) {
    ipc::MoverJob load = good;
    load.job = ipc::JobId{i + 1};
    load.items.resize(1 + i % 8);
    engine_->submit(load);
  }
  for (std::uint32_t i = 0; i < kLoads; ++i) {
    const ipc::MoverJobDone done = wait_answer(i + 1);
    ASSERT_EQ(done.results.size(), 1 + i % 8);
    for (std::size_t item = 0; item < done.results.size(); ++item) {
      EXPECT_EQ(done.results[item], item == 6 ? kCorrupt : 0);
    }
  }
  const ipc::Deadline deadline = test::soon();
  while (!engine_->idle() && !deadline.expired()) {
  }
  EXPECT_TRUE(engine_->idle());
}

}  // namespace
}  // namespace kvferry::cache_manager
