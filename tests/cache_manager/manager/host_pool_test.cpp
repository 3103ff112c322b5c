// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/host_pool.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

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

}  // namespace
}  // namespace kvferry::cache_manager
