// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "worker/weights_store_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

namespace kvferry::worker {
namespace {

using testing::HasSubstr;

TEST_F(WeightsStoreTest, EachRankLoadsItsRowsOrAllOfATensor) {
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    WeightsStore store(*device_, allocator_, tables_, ipc::Rank{rank}, 3, false);
    ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
    // 1000 rows cannot be dealt out to 3 ranks; 6 can; 7 cannot.
    EXPECT_EQ(store.tensors()[0].memory.size_bytes(), 1000U * 64 * 2);
    EXPECT_EQ(store.tensors()[1].memory.size_bytes(), 2U * 10 * 4);
    EXPECT_EQ(store.tensors()[2].memory.size_bytes(), 7U * 4);
    ASSERT_NO_FATAL_FAILURE(expect_holds(store, 1, rank, 3));
  }
}

TEST_F(WeightsStoreTest, AnUpdateLeavesAddressesAndTakesTheNewBytes) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  const ipc::DevicePtr before = store.tensors()[0].memory.address();
  const std::uint64_t used = allocator_.stats().used_bytes;
  ASSERT_NO_FATAL_FAILURE(load(store, write(2)));
  EXPECT_EQ(store.tensors()[0].memory.address(), before);
  EXPECT_EQ(allocator_.stats().used_bytes, used);
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 2, 0, 1));
}

TEST_F(WeightsStoreTest, TheModelsTablesAreThoseOfTheWeightsWhateverWasLoadedBefore) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
  EXPECT_THAT(tables(), testing::Each(0U));
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  const std::vector<std::uint64_t> first = tables();
  ASSERT_NO_FATAL_FAILURE(load(store, write(2)));
  EXPECT_NE(tables(), first);
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  EXPECT_EQ(tables(), first);
}

TEST_F(WeightsStoreTest, RanksThatShareRegionsWriteThemWithTheSameTable) {
  std::vector<std::vector<std::uint64_t>> of_ranks;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    WeightsStore store(*device_, allocator_, tables_, ipc::Rank{rank}, 2, true);
    ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
    of_ranks.push_back(tables());
  }
  const auto half = static_cast<std::ptrdiff_t>(kernels::kModelWords);
  EXPECT_TRUE(std::equal(of_ranks[0].begin(), of_ranks[0].begin() + half, of_ranks[1].begin()));
  EXPECT_FALSE(
      std::equal(of_ranks[0].begin() + half, of_ranks[0].end(), of_ranks[1].begin() + half));
  WeightsStore other(*device_, allocator_, tables_, ipc::Rank{0}, 2, true);
  ASSERT_NO_FATAL_FAILURE(load(other, write(2)));
  EXPECT_FALSE(std::equal(of_ranks[0].begin(), of_ranks[0].begin() + half, tables().begin()));
}

TEST_F(WeightsStoreTest, ReleasedWeightsComeBackBitForBitAtWhateverAddress) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{1}, 2, true);
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  const std::vector<std::uint64_t> before = tables();
  const std::uint64_t used = allocator_.stats().used_bytes;
  const auto released = store.release(ipc::WeightsBackup::kHost, Deadline::after(20s));
  ASSERT_TRUE(released.has_value()) << released.error().to_string();
  // Its rows, and the tables.
  EXPECT_EQ(*released, 500U * 64 * 2 + 3 * 10 * 4 + 7 * 4 + 2 * ModelTables::kTableBytes);
  EXPECT_EQ(allocator_.stats().used_bytes, 0U);
  (void)allocator_.empty_cache(ipc::EmptyReason::kRelease);
  EXPECT_EQ(allocator_.stats().reserved_bytes, 0U);
  EXPECT_EQ(tables_.address(Deadline::after(1s)).error().code, ErrorCode::kNotReady);
  EXPECT_EQ(store.prepare(disk(write(2)), Deadline::after(20s)).error().code, ErrorCode::kNotReady);
  EXPECT_EQ(store.release(ipc::WeightsBackup::kNone, Deadline::after(20s)).value(), 0U) << "again";
  // Somebody else writes where they were.
  auto other = allocator_.allocate(4 << 20);
  ASSERT_TRUE(other.has_value());
  std::memset(reinterpret_cast<void*>(other->address().address), 0x5A, other->size_bytes());
  const auto resumed = store.resume(Deadline::after(20s));
  ASSERT_TRUE(resumed.has_value()) << resumed.error().to_string();
  EXPECT_EQ(*resumed, *released);
  *other = {};
  EXPECT_EQ(allocator_.stats().used_bytes, used);
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 1, 1, 2));
  EXPECT_EQ(tables(), before);
  ASSERT_NO_FATAL_FAILURE(load(store, write(2)));
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 2, 1, 2));
  EXPECT_EQ(store.resume(Deadline::after(20s)).value(), 0U) << "again";
}

TEST_F(WeightsStoreTest, ReleasedWithoutABackupNothingComputesUntilTheNextCommit) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  ASSERT_TRUE(store.release(ipc::WeightsBackup::kNone, Deadline::after(20s)).has_value());
  ASSERT_TRUE(store.resume(Deadline::after(20s)).has_value());
  EXPECT_EQ(tables_.address(Deadline::after(1s)).error().code, ErrorCode::kNotReady);
  ASSERT_NO_FATAL_FAILURE(load(store, write(2)));
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 2, 0, 1));
  EXPECT_TRUE(tables_.address(Deadline::after(1s)).has_value());
}

TEST_F(WeightsStoreTest, WhatARefusedReleaseOrResumeLeavesIsWhole) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  const std::vector<std::uint64_t> before = tables();
  ASSERT_TRUE(store.release(ipc::WeightsBackup::kHost, Deadline::after(20s)).has_value());
  (void)allocator_.empty_cache(ipc::EmptyReason::kRelease);
  std::vector<std::unique_ptr<ipc::DeviceMemory>> taken;
  for (std::uint64_t size = 64 << 20; size >= 64 << 10; size /= 2) {
    while (auto piece = device_->allocate(size, ipc::HandleKind::kLegacy, nullptr)) {
      taken.push_back(std::move(*piece));
    }
  }
  EXPECT_EQ(store.resume(Deadline::after(20s)).error().code, ErrorCode::kNoDeviceMemory);
  EXPECT_EQ(allocator_.stats().used_bytes, 0U);
  taken.clear();
  ASSERT_TRUE(store.resume(Deadline::after(20s)).has_value());
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 1, 0, 1));
  EXPECT_EQ(tables(), before);
}

TEST_F(WeightsStoreTest, WhatUpdatesLeaveInTheAllocatorGoesBackWhenItIsEmptied) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
  const std::vector<test::WrittenTensor> large{{"a", "U8", {20ULL << 20}},
                                               {"b", "U8", {13ULL << 20}}};
  ASSERT_NO_FATAL_FAILURE(load(store, write(1, large)));
  (void)allocator_.empty_cache(EmptyReason::kContinue);
  const AllocatorStats lean = allocator_.stats();
  for (std::uint64_t seed = 2; seed < 8; ++seed) {
    ASSERT_NO_FATAL_FAILURE(load(store, write(seed, large)));
  }
  EXPECT_EQ(allocator_.stats().used_bytes, lean.used_bytes);
  EXPECT_GT(allocator_.stats().reserved_bytes, lean.reserved_bytes + (33ULL << 20));
  (void)allocator_.empty_cache(EmptyReason::kContinue);
  EXPECT_EQ(allocator_.stats().reserved_bytes, lean.reserved_bytes);
}

TEST_F(WeightsStoreTest, PreparedOrAbandonedWeightsChangeNothing) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  ASSERT_TRUE(store.prepare(disk(write(2)), Deadline::after(20s)).has_value());
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 1, 0, 1));
  store.abandon();
  const auto committed = store.commit(Deadline::after(20s));
  ASSERT_FALSE(committed.has_value());
  EXPECT_EQ(committed.error().code, ErrorCode::kStaleEpoch);
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 1, 0, 1));
}

TEST_F(WeightsStoreTest, AnotherModelIsRefusedByTheTensorThatDiffers) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  auto other = kModel;
  other[1].shape = {6, 11};
  const auto wide = store.prepare(disk(write(2, other)), Deadline::after(20s));
  ASSERT_FALSE(wide.has_value());
  EXPECT_EQ(wide.error().code, ErrorCode::kGeometryMismatch);
  EXPECT_THAT(wide.error().message,
              HasSubstr("'head' F32 [6, 11], the model in use has 'head' F32 [6, 10]"));
  other = kModel;
  other.pop_back();
  EXPECT_THAT(store.prepare(disk(write(3, other)), Deadline::after(20s)).error().message,
              HasSubstr("is none, the model in use has 'none'"));
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 1, 0, 1));
}

TEST_F(WeightsStoreTest, AFirstLoadThatDoesNotFitLeavesNothing) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
  const auto file = disk(write(1, {{"a", "U8", {200ULL << 20}}, {"b", "U8", {100ULL << 20}}}));
  const auto large = store.prepare(file, Deadline::after(60s));
  ASSERT_FALSE(large.has_value());
  EXPECT_EQ(large.error().code, ErrorCode::kNoDeviceMemory);
  EXPECT_EQ(allocator_.stats().used_bytes, 0U);
  ASSERT_NO_FATAL_FAILURE(load(store, write(2)));
}

TEST_F(WeightsStoreTest, ItsDeadlineEndsIt) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
  const auto late = store.prepare(disk(write(1)), Deadline::after(0ms));
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(late.error().message, HasSubstr("tensor 'embed'"));
}

TEST_F(WeightsStrategyTest, OffloadedTensorsLeaveTheDeviceAndTheNextLoadTakesThemBack) {
  const std::vector<std::uint64_t> first = tables_of(1);
  const std::vector<std::uint64_t> second = tables_of(2);
  const std::uint64_t tables_only = used();
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false,
                     ipc::ComponentStrategy::kOffloaded);
  EXPECT_TRUE(store.give_up(Deadline::after(20s))) << "there is nothing yet";
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  EXPECT_EQ(store.device_bytes(), kTensors);
  ASSERT_TRUE(store.give_up(Deadline::after(20s)));
  EXPECT_EQ(store.device_bytes(), 0U);
  EXPECT_EQ(used(), tables_only);
  ASSERT_NO_FATAL_FAILURE(expect_host_holds(store, 1));
  EXPECT_EQ(tables(), first) << "the model computes on";
  ASSERT_TRUE(store.give_up(Deadline::after(20s))) << "again";
  ASSERT_NO_FATAL_FAILURE(load(store, write(2)));
  EXPECT_EQ(store.device_bytes(), kTensors);
  EXPECT_EQ(host_bytes(store), 0U);
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 2, 0, 1));
  EXPECT_EQ(tables(), second);
}

TEST_F(WeightsStrategyTest, WhilePreparedTheyStayWhereTheyAre) {
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false,
                     ipc::ComponentStrategy::kOffloaded);
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  ASSERT_TRUE(store.prepare(disk(write(2)), Deadline::after(20s)));
  EXPECT_EQ(store.give_up(Deadline::after(20s)).error().code, ErrorCode::kBusy);
  ASSERT_TRUE(store.commit(Deadline::after(20s)));
  ASSERT_NO_FATAL_FAILURE(expect_holds(store, 2, 0, 1));
  // And the deadline leaves all of them where they were.
  EXPECT_EQ(store.give_up(Deadline::after(0ms)).error().code, ErrorCode::kTimeout);
  EXPECT_EQ(store.device_bytes(), kTensors);
  EXPECT_EQ(host_bytes(store), 0U);
}

TEST_F(WeightsStrategyTest, LayerByLayerHasOneTensorAtATimeOnTheDevice) {
  const std::vector<std::uint64_t> first = tables_of(1);
  const std::vector<std::uint64_t> second = tables_of(2);
  const std::uint64_t tables_only = used();
  const std::vector<test::WrittenTensor> layers{
      {"a", "U8", {12 << 20}}, {"b", "U8", {12 << 20}}, {"c", "U8", {12 << 20}}, {"d", "U8", {1}}};
  WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false,
                     ipc::ComponentStrategy::kLayerwise);
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  EXPECT_EQ(tables(), first);
  ASSERT_NO_FATAL_FAILURE(load(store, write(2)));
  EXPECT_EQ(tables(), second);
  EXPECT_EQ(store.device_bytes(), 0U);
  EXPECT_EQ(used(), tables_only);
  ASSERT_NO_FATAL_FAILURE(expect_host_holds(store, 2));
  // 36 MiB of weights, of which twelve and their transient, at most 24, are there at a time.
  CachingAllocator own(*device_);
  ModelTables own_tables(*device_, own);
  WeightsStore large(*device_, own, own_tables, ipc::Rank{0}, 1, false,
                     ipc::ComponentStrategy::kLayerwise);
  ASSERT_NO_FATAL_FAILURE(load(large, write(3, layers)));
  EXPECT_LE(own.stats().peak_reserved_bytes, 40ULL << 20);
}

TEST_F(WeightsStrategyTest, AReleaseAndAResumeLeaveThemInHostMemory) {
  for (const auto strategy :
       {ipc::ComponentStrategy::kOffloaded, ipc::ComponentStrategy::kLayerwise}) {
    WeightsStore store(*device_, allocator_, tables_, ipc::Rank{0}, 1, false, strategy);
    ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
    ASSERT_TRUE(store.give_up(Deadline::after(20s)));
    const std::vector<std::uint64_t> before = tables();
    const auto released = store.release(ipc::WeightsBackup::kHost, Deadline::after(20s));
    ASSERT_TRUE(released.has_value()) << released.error().to_string();
    EXPECT_EQ(*released, 2 * ModelTables::kTableBytes) << "no more was on the device";
    EXPECT_EQ(used(), 0U);
    EXPECT_TRUE(store.give_up(Deadline::after(20s)));
    ASSERT_TRUE(store.resume(Deadline::after(20s)));
    EXPECT_EQ(tables(), before);
    EXPECT_EQ(store.device_bytes(), 0U);
    ASSERT_NO_FATAL_FAILURE(expect_host_holds(store, 1));
    // Without a backup they are gone, and a load brings others.
    ASSERT_TRUE(store.release(ipc::WeightsBackup::kNone, Deadline::after(20s)));
    EXPECT_EQ(host_bytes(store), 0U);
    ASSERT_TRUE(store.resume(Deadline::after(20s)));
    EXPECT_FALSE(tables_.address(Deadline::after(20s)).has_value());
    ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
    EXPECT_EQ(tables(), before);
    ASSERT_TRUE(store.give_up(Deadline::after(20s)));
    ASSERT_NO_FATAL_FAILURE(expect_host_holds(store, 1));
  }
}

}  // namespace
}  // namespace kvferry::worker
