// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/host_pool.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace kvferry::cache_manager {
namespace {

constexpr std::uint64_t kMiB = 1ULL << 20U;

SlabShape shape_of(std::uint64_t replicated,
                   std::uint64_t shard,
                   std::uint32_t ranks,
                   std::uint64_t model = 1) {
  SlabShape shape;
  shape.fingerprint = ipc::Digest::from_words(7, model);
  shape.bytes.replicated_bytes = replicated;
  shape.bytes.shard_bytes = shard;
  shape.ranks = ranks;
  return shape;
}

TEST(HostPoolTest, RefusesATinyPool) { EXPECT_THROW(HostPool(1000), ipc::Exception); }

TEST(HostPoolTest, FreshPoolIsAllFree) {
  const HostPool pool(64 * kMiB);
  const HostPool::Stats stats = pool.stats();
  EXPECT_EQ(stats.bytes, 64 * kMiB);
  EXPECT_EQ(stats.page_bytes, 4 * kMiB);
  EXPECT_EQ(stats.free_pages, 16U);
  EXPECT_EQ(stats.used_bytes, 0U);
  EXPECT_EQ(stats.slabs, 0U);
}

TEST(HostPoolTest, LargePoolHasPagesOfAtMost64MiB) {
  const HostPool pool(10'000 * kMiB);
  EXPECT_LE(pool.stats().page_bytes, 64 * kMiB);
  EXPECT_GE(pool.stats().bytes, 9'999 * kMiB);
}

TEST(HostPoolTest, BlocksOfOneRankLieNextToEachOther) {
  HostPool pool(16 * kMiB);
  const SlabShape shape = shape_of(512, 4096, 2);
  const HostSlot first = *pool.allocate(shape);
  const HostSlot second = *pool.allocate(shape);
  for (const std::uint32_t rank : {0U, 1U}) {
    const SlotOffsets a = pool.offsets(first, ipc::Rank{rank});
    const SlotOffsets b = pool.offsets(second, ipc::Rank{rank});
    EXPECT_EQ(b.shard - a.shard, 4096U);
    EXPECT_EQ(b.replicated - a.replicated, 512U);
  }
  EXPECT_EQ(pool.offsets(first, ipc::Rank{0}).replicated,
            pool.offsets(first, ipc::Rank{1}).replicated);
}

TEST(HostPoolTest, BlockLargerThanAPageTakesSeveral) {
  HostPool pool(16 * kMiB);
  const SlabShape shape = shape_of(0, 3 * kMiB / 2, 2);
  const auto slot = pool.allocate(shape);
  ASSERT_TRUE(slot.has_value());
  EXPECT_GE(pool.stats().pages - pool.stats().free_pages, 3U);
  EXPECT_EQ(pool.stats().used_bytes, 3 * kMiB);
}

TEST(HostPoolTest, BlockLargerThanThePoolIsNoHostMemory) {
  HostPool pool(1 * kMiB);
  const SlabShape shape = shape_of(0, 2 * kMiB, 1);
  EXPECT_FALSE(pool.allocate(shape).has_value());
  const ipc::Status status = pool.can_hold(shape);
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ipc::ErrorCode::kNoHostMemory);
  EXPECT_NE(status.error().message.find("2.0"), std::string::npos) << status.error().message;
}

TEST(HostPoolTest, EmptySlabGivesItsPagesToAnotherShape) {
  HostPool pool(1 * kMiB);
  const SlabShape a = shape_of(0, 64 * 1024, 1, 1);
  const SlabShape b = shape_of(0, 32 * 1024, 1, 2);
  std::vector<HostSlot> slots;
  while (const auto slot = pool.allocate(a)) {
    slots.push_back(*slot);
  }
  EXPECT_EQ(slots.size(), 16U);
  EXPECT_FALSE(pool.allocate(b).has_value());
  for (const HostSlot& slot : slots) {
    pool.free(slot);
  }
  EXPECT_EQ(pool.stats().slabs, 0U);
  EXPECT_EQ(pool.stats().free_pages, 16U);
  EXPECT_TRUE(pool.allocate(b).has_value());
}

// Random use of four shapes: parts never overlap, counts are exact, everything comes back.
TEST(HostPoolTest, RandomUseNeverOverlapsAndCountsExactly) {
  std::mt19937 random(20261120);
  HostPool pool(4 * kMiB);
  const std::vector<SlabShape> shapes{shape_of(0, 5000, 2, 1), shape_of(300, 700, 3, 2),
                                      shape_of(4096, 0, 4, 3), shape_of(0, 200'000, 2, 4)};
  std::vector<std::pair<HostSlot, const SlabShape*>> held;
  for (int step = 0; step < 4000; ++step) {
    const SlabShape& shape = shapes[random() % shapes.size()];
    if (random() % 5 < 3) {
      if (const auto slot = pool.allocate(shape)) {
        held.emplace_back(*slot, &shape);
      }
    } else if (!held.empty()) {
      const std::size_t victim = random() % held.size();
      pool.free(held[victim].first);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(victim));
    }
    if (step % 500 != 499) {
      continue;
    }
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
    std::uint64_t used = 0;
    for (const auto& [slot, slot_shape] : held) {
      used += slot_shape->block_bytes();
      for (std::uint32_t rank = 0; rank < slot_shape->ranks; ++rank) {
        const SlotOffsets offsets = pool.offsets(slot, ipc::Rank{rank});
        if (slot_shape->bytes.shard_bytes > 0) {
          ranges.emplace_back(offsets.shard, slot_shape->bytes.shard_bytes);
        }
        if (rank == 0 && slot_shape->bytes.replicated_bytes > 0) {
          ranges.emplace_back(offsets.replicated, slot_shape->bytes.replicated_bytes);
        }
      }
    }
    EXPECT_EQ(pool.stats().used_bytes, used);
    EXPECT_EQ(pool.stats().blocks, held.size());
    std::sort(ranges.begin(), ranges.end());
    for (std::size_t i = 1; i < ranges.size(); ++i) {
      ASSERT_LE(ranges[i - 1].first + ranges[i - 1].second, ranges[i].first);
    }
    if (!ranges.empty()) {
      ASSERT_LE(ranges.back().first + ranges.back().second, pool.stats().bytes);
    }
  }
  for (const auto& [slot, slot_shape] : held) {
    pool.free(slot);
  }
  EXPECT_EQ(pool.stats().free_pages, pool.stats().pages);
  EXPECT_EQ(pool.stats().used_bytes, 0U);
}

/// A batch as stores and swap-outs place it; empty when there is no room for all of it.
std::vector<HostSlot> place(HostPool& pool, const SlabShape& shape, std::uint32_t count) {
  Extent extent{.after = std::nullopt, .left = count};
  std::vector<HostSlot> batch;
  while (batch.size() < count) {
    const auto slot = pool.allocate(shape, extent);
    if (!slot) break;
    extent.advance(*slot);
    batch.push_back(*slot);
  }
  if (batch.size() < count) {
    for (const HostSlot& slot : batch) pool.free(slot);
    batch.clear();
  }
  return batch;
}

std::size_t extents_of(const std::vector<HostSlot>& batch) {
  std::size_t extents = 0;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const bool goes_on =
        i > 0 && batch[i].slab == batch[i - 1].slab && batch[i].index == batch[i - 1].index + 1;
    extents += goes_on ? 0 : 1;
  }
  return extents;
}

TEST(HostPoolExtentTest, ABatchLiesTogetherBehindHolesThatAreTooShort) {
  HostPool pool(1 * kMiB);
  const SlabShape shape = shape_of(0, 1024, 1);
  const std::vector<HostSlot> first = place(pool, shape, 12);
  pool.free(first[2]);
  pool.free(first[6]);
  pool.free(first[7]);
  const std::vector<HostSlot> batch = place(pool, shape, 4);
  ASSERT_EQ(batch.size(), 4U);
  EXPECT_EQ(extents_of(batch), 1U);
  EXPECT_EQ(batch[0].index, 12U);
  EXPECT_EQ(place(pool, shape, 2)[0].index, 6U) << "the hole that suits it";
  EXPECT_EQ(place(pool, shape, 1)[0].index, 2U);
}

TEST(HostPoolExtentTest, WithoutALongRunTheLongestOnesAreTaken) {
  HostPool pool(64 * 1024);  // pages of 4 KiB
  const SlabShape shape = shape_of(0, 1024, 1);
  std::vector<HostSlot> all;
  while (const auto slot = pool.allocate(shape)) all.push_back(*slot);
  std::sort(all.begin(), all.end());
  for (std::size_t i = 0; i < all.size(); ++i) {
    // Free runs of 1 and 3, in turns; none of 4.
    const bool is_free = i % 6 == 0 || (i % 6 >= 2 && i % 6 <= 4);
    if (is_free) pool.free(all[i]);
  }
  const std::vector<HostSlot> batch = place(pool, shape, 6);
  ASSERT_EQ(batch.size(), 6U);
  EXPECT_LE(extents_of(batch), 3U);
}

struct Churn {
  const char* name;
  bool in_order;            ///< The oldest sequence goes; else any.
  std::uint32_t kept_free;  ///< Of 4,096 blocks.
  double least_mean;        ///< Blocks of an extent, of batches of 32.5 on average.
};

class HostPoolChurnTest : public testing::TestWithParam<Churn> {};

// Sequences come and go at a pool that is full all the time: their batches still lie in few runs.
// One block at a time, in the first hole, extents of any order would have 1.8 blocks.
TEST_P(HostPoolChurnTest, ExtentsStayLong) {
  std::mt19937 random(7);
  HostPool pool(16 * kMiB);
  const SlabShape shape = shape_of(0, 4096, 1);
  const std::uint64_t room = pool.stats().bytes / 4096 - GetParam().kept_free;
  std::vector<std::vector<HostSlot>> held;
  std::uint64_t blocks = 0;
  std::uint64_t extents = 0;
  for (int step = 0; step < 20'000; ++step) {
    const auto count = static_cast<std::uint32_t>(1 + random() % 64);
    while (pool.stats().blocks + count > room) {
      const std::size_t victim = GetParam().in_order ? 0 : random() % held.size();
      for (const HostSlot& slot : held[victim]) pool.free(slot);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(victim));
    }
    std::vector<HostSlot> batch = place(pool, shape, count);
    ASSERT_EQ(batch.size(), count);
    if (step >= 10'000) {
      blocks += batch.size();
      extents += extents_of(batch);
    }
    held.push_back(std::move(batch));
  }
  const double mean = static_cast<double>(blocks) / static_cast<double>(extents);
  RecordProperty("mean", std::to_string(mean));
  EXPECT_GE(mean, GetParam().least_mean);
}

INSTANTIATE_TEST_SUITE_P(Orders,
                         HostPoolChurnTest,
                         testing::Values(Churn{"oldest_full", true, 0, 10},
                                         Churn{"any_full", false, 0, 3.5},
                                         Churn{"oldest_32nd_free", true, 128, 20},
                                         Churn{"any_32nd_free", false, 128, 12}),
                         [](const auto& churn) { return churn.param.name; });

TEST(HostPoolDeathTest, DoubleFreeAborts) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  HostPool pool(1 * kMiB);
  const SlabShape shape = shape_of(0, 4096, 1);
  const HostSlot kept = *pool.allocate(shape);
  const HostSlot slot = *pool.allocate(shape);
  EXPECT_NE(kept, slot);
  pool.free(slot);
  EXPECT_DEATH(pool.free(slot), "host slot is not allocated");
}

TEST(HostPoolTest, OnlyWhatIsReadyIsUsedAndTheRestOnceItIs) {
  HostPool pool(64 * kMiB);  // 16 pages
  const SlabShape shape = shape_of(0, kMiB, 1);
  pool.set_ready(0);
  EXPECT_FALSE(pool.allocate(shape).has_value());
  EXPECT_TRUE(pool.can_hold(shape).has_value());
  pool.set_ready(9 * kMiB);  // two pages of four, and a part
  EXPECT_EQ(pool.stats().ready_bytes, 8 * kMiB);
  for (int i = 0; i < 8; ++i) {
    const auto slot = pool.allocate(shape);
    ASSERT_TRUE(slot.has_value()) << i;
    EXPECT_LT(pool.offsets(*slot, ipc::Rank{0}).shard, 8 * kMiB);
  }
  EXPECT_FALSE(pool.allocate(shape).has_value());
  pool.set_ready(1000 * kMiB);
  EXPECT_EQ(pool.stats().ready_bytes, 64 * kMiB);
  EXPECT_TRUE(pool.allocate(shape).has_value());
}

TEST(HostPoolTest, RanksOfALargePoolHavePagesOfTheirOwn) {
  HostPool pool(16'384 * kMiB);
  constexpr std::uint64_t kPage = 64 * kMiB;
  ASSERT_EQ(pool.stats().page_bytes, kPage);
  constexpr std::uint32_t kRanks = 4;
  const SlabShape shape = shape_of(2 * kMiB, 2 * kMiB, kRanks);
  std::vector<std::set<std::uint64_t>> pages(kRanks + 1);  // the last one: of replicated parts
  std::vector<HostSlot> slots;
  for (int i = 0; i < 100; ++i) {
    const HostSlot slot =
        *pool.allocate(shape, {slots.empty() ? std::nullopt : std::optional(slots.back())});
    slots.push_back(slot);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const SlotOffsets offsets = pool.offsets(slot, ipc::Rank{rank});
      pages.at(rank).insert(offsets.shard / kPage);
      pages.at(rank).insert((offsets.shard + 2 * kMiB - 1) / kPage);
      pages.at(kRanks).insert(offsets.replicated / kPage);
      pages.at(kRanks).insert((offsets.replicated + 2 * kMiB - 1) / kPage);
    }
  }
  std::set<std::uint64_t> all;
  std::size_t count = 0;
  for (const auto& own : pages) {
    all.insert(own.begin(), own.end());
    count += own.size();
  }
  EXPECT_EQ(all.size(), count) << "two of them share a page";
  EXPECT_EQ(pages[0].size(), 4U);  // 32 blocks to a page
  for (const HostSlot& slot : slots) pool.free(slot);
  EXPECT_EQ(pool.stats().free_pages, pool.stats().pages);
}

TEST(HostPoolTest, RanksOfASmallPoolShareItsPages) {
  HostPool pool(1024 * kMiB);  // 16 pages: no room for slabs of five
  const SlabShape shape = shape_of(0, 2 * kMiB, 4);
  const HostSlot slot = *pool.allocate(shape);
  EXPECT_EQ(pool.offsets(slot, ipc::Rank{0}).shard / (64 * kMiB),
            pool.offsets(slot, ipc::Rank{3}).shard / (64 * kMiB));
}

}  // namespace
}  // namespace kvferry::cache_manager
