// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/copy_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::ArenaLayout;
using ipc::BlockId;
using ipc::GroupId;
using ipc::MoverItem;
using ipc::Region;

constexpr std::uint64_t kPiece = 1ULL << 20;

// Two regions, one replicated, of one group with 64 blocks; layer-first in one segment, or block by
// block.
ArenaLayout two_region_layout(std::uint64_t replicated_bytes,
                              std::uint64_t sharded_bytes,
                              bool block_first) {
  ArenaLayout layout;
  layout.order = block_first ? ipc::ArenaOrder::kBlockFirst : ipc::ArenaOrder::kLayerFirst;
  layout.groups = {{64}};
  const std::uint64_t packed = replicated_bytes + sharded_bytes;
  Region shared;
  shared.replicated = true;
  shared.block_bytes = replicated_bytes;
  shared.block_stride = block_first ? packed : replicated_bytes;
  Region shard;
  shard.offset = block_first ? replicated_bytes : 64 * replicated_bytes;
  shard.block_bytes = sharded_bytes;
  shard.block_stride = block_first ? packed : sharded_bytes;
  // Sharded first in layout order: packed order must still be replicated first.
  layout.regions = {shard, shared};
  layout.segment_bytes = {64 * packed};
  return layout;
}

MoverItem item(std::uint32_t block,
               std::uint64_t replicated_offset,
               std::uint64_t shard_offset,
               bool with_replicated = true) {
  return {GroupId{0}, BlockId{block}, replicated_offset, shard_offset, with_replicated};
}

PlanLimits limits() {
  PlanLimits limits;
  limits.pool_piece_bytes = kPiece;
  return limits;
}

/// All chunks of a plan without failed items.
std::vector<PlannedChunk> plan(const BlockParts& parts,
                               const std::vector<MoverItem>& items,
                               const PlanLimits& limits) {
  const std::vector<std::uint8_t> results(items.size(), 0);
  CopyPlanner planner;
  planner.start(parts, items, results, limits);
  std::vector<PlannedChunk> chunks;
  while (planner.has_next()) planner.plan_next(chunks.emplace_back());
  return chunks;
}

PlanLimits staged(std::uint64_t slot_bytes, PlanLimits limits) {
  limits.slot_bytes = slot_bytes;
  return limits;
}

TEST(CopyPlanTest, JoinsNeighboursOfABlockFirstArena) {
  const ArenaLayout layout = two_region_layout(0 + 256, 768, true);
  const BlockParts parts(layout);
  // Host blocks whose parts follow each other, as an extent of a slab without sharding would.
  const std::vector<MoverItem> items = {item(3, 0, 256), item(4, 1024, 1280)};
  const auto chunks = plan(parts, items, limits());
  ASSERT_EQ(chunks.size(), 1U);
  ASSERT_EQ(chunks[0].runs.size(), 1U);
  EXPECT_EQ(chunks[0].runs[0], (CopyRun{0, 3 * 1024, 0, 2048}));
  EXPECT_EQ(chunks[0].items.size(), 2U);
}

TEST(CopyPlanTest, LeavesOutReplicatedPartsThatAnotherRankStores) {
  const BlockParts parts(two_region_layout(256, 768, false));
  const std::vector<MoverItem> items = {item(1, 0, 4096, false)};
  const auto chunks = plan(parts, items, limits());
  ASSERT_EQ(chunks[0].runs.size(), 1U);
  EXPECT_EQ(chunks[0].runs[0], (CopyRun{0, 64 * 256 + 768, 4096, 768}));
}

TEST(CopyPlanTest, CutsRunsAtPoolPieces) {
  const BlockParts parts(two_region_layout(0, 4096, true));
  const std::vector<MoverItem> items = {item(0, 0, kPiece - 1000)};
  const auto chunks = plan(parts, items, limits());
  ASSERT_EQ(chunks[0].runs.size(), 2U);
  EXPECT_EQ(chunks[0].runs[0].size_bytes, 1000U);
  EXPECT_EQ(chunks[0].runs[1].pool_offset, kPiece);
  EXPECT_EQ(chunks[0].runs[1].size_bytes, 3096U);
}

TEST(CopyPlanTest, BlockThatIsLargerThanAChunkGoesInSeveral) {
  constexpr std::uint64_t kBytes = 1000;
  const BlockParts parts(two_region_layout(0, kBytes, true));
  PlanLimits cut = limits();
  cut.chunk_bytes = 400;
  const auto chunks = plan(parts, {item(5, 0, 0), item(9, 0, 5000)}, cut);
  ASSERT_EQ(chunks.size(), 5U);
  EXPECT_EQ(chunks[0].runs, (std::vector<CopyRun>{{0, 5 * kBytes, 0, 400}}));
  EXPECT_EQ(chunks[1].runs, (std::vector<CopyRun>{{0, 5 * kBytes + 400, 400, 400}}));
  EXPECT_EQ(chunks[2].runs,
            (std::vector<CopyRun>{{0, 5 * kBytes + 800, 800, 200}, {0, 9 * kBytes, 5000, 200}}));
  EXPECT_EQ(chunks[2].items, (std::vector<std::size_t>{0, 1})) << "both fail with it";
  EXPECT_EQ(chunks[4].runs, (std::vector<CopyRun>{{0, 9 * kBytes + 600, 5600, 400}}));
}

TEST(CopyPlanTest, WhatIsBegunIsGivenUpWithTheRest) {
  const BlockParts parts(two_region_layout(0, 1000, true));
  PlanLimits cut = limits();
  cut.chunk_bytes = 400;
  const std::vector<MoverItem> items = {item(5, 0, 0), item(9, 0, 5000)};
  const std::vector<std::uint8_t> results(2, 0);
  CopyPlanner planner;
  PlannedChunk chunk;
  planner.start(parts, items, results, cut);
  planner.plan_next(chunk);
  planner.plan_next(chunk);
  planner.plan_next(chunk);
  std::vector<std::size_t> dropped;
  planner.drop_rest([&dropped](std::size_t i) { dropped.push_back(i); });
  EXPECT_EQ(dropped, (std::vector<std::size_t>{1}));
}

TEST(CopyPlanTest, StagedItemsWithNothingToMoveAreInNoChunk) {
  const BlockParts parts(two_region_layout(512, 0, false));
  const std::vector<MoverItem> items = {item(0, 0, 0, false), item(1, 0, 0, true)};
  const auto chunks = plan(parts, items, staged(4096, limits()));
  ASSERT_EQ(chunks.size(), 1U);
  EXPECT_EQ(chunks[0].items, (std::vector<std::size_t>{1}));
}

TEST(CopyPlanTest, NeighboursInThePoolAreJoinedInWhateverOrderTheyCome) {
  const BlockParts parts(two_region_layout(0, 1024, false));
  const std::vector<MoverItem> items = {item(7, 0, 2048), item(1, 0, 0), item(9, 0, 1024)};
  const auto chunks = plan(parts, items, staged(4096, limits()));
  ASSERT_EQ(chunks.size(), 1U);
  EXPECT_EQ(chunks[0].blocks, (std::vector<std::uint32_t>{1, 9, 7}));
  EXPECT_EQ(chunks[0].items, (std::vector<std::size_t>{1, 2, 0}));
  ASSERT_EQ(chunks[0].runs.size(), 1U) << "one copy moves the slot";
  EXPECT_EQ(chunks[0].runs[0], (CopyRun{0, 0, 0, 3072}));
}

TEST(CopyPlanTest, FailedItemsAreLeftOutAndTheRestCanBeDropped) {
  const BlockParts parts(two_region_layout(0, 1024, false));
  std::vector<MoverItem> items;
  for (std::uint32_t i = 0; i < 6; ++i) items.push_back(item(i, 0, i * 2048));
  const std::vector<std::uint8_t> results = {0, 1, 0, 0, 7, 0};
  CopyPlanner planner;
  planner.start(parts, items, results, staged(2048, limits()));
  PlannedChunk chunk;
  planner.plan_next(chunk);
  EXPECT_EQ(chunk.items, (std::vector<std::size_t>{0, 2}));
  std::vector<std::size_t> dropped;
  planner.drop_rest([&dropped](std::size_t i) { dropped.push_back(i); });
  EXPECT_EQ(dropped, (std::vector<std::size_t>{3, 5}));
  EXPECT_FALSE(planner.has_next());
}

TEST(CopyPlanTest, RefusesItemsOutsideArenaOrPool) {
  const ArenaLayout layout = two_region_layout(256, 768, false);
  const BlockParts parts(layout);
  EXPECT_FALSE(check_item(item(63, 0, 256), layout, parts, 1024).has_value());
  EXPECT_TRUE(check_item(item(64, 0, 256), layout, parts, 1024).has_value());
  EXPECT_TRUE(check_item(item(0, 0, 257), layout, parts, 1024).has_value());
  EXPECT_TRUE(check_item(item(0, 769, 0), layout, parts, 1024).has_value());
  EXPECT_TRUE(check_item(item(0, 0, ~0ULL - 10), layout, parts, 1024).has_value());
  MoverItem other_group = item(0, 0, 0);
  other_group.group = GroupId{1};
  EXPECT_TRUE(check_item(other_group, layout, parts, 1024).has_value());
}

// Both plans must move every byte of every item exactly once and to the right place: compared over
// random jobs with a byte-by-byte account.
class CopyPlanPropertyTest : public testing::TestWithParam<int> {};

TEST_P(CopyPlanPropertyTest, MovesEveryByteOnce) {
  std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()));
  const auto pick = [&random](std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  };
  const std::uint64_t replicated = pick(0, 3) == 0 ? 0 : pick(1, 700);
  const std::uint64_t sharded = replicated != 0 && pick(0, 3) == 0 ? 0 : pick(1, 700);
  const ArenaLayout layout = two_region_layout(replicated, sharded, pick(0, 1) == 1);
  const BlockParts parts(layout);
  PlanLimits small;
  small.pool_piece_bytes = 512;
  small.chunk_bytes = pick(1, 4000);
  small.chunk_runs = pick(1, 6);

  std::vector<std::uint32_t> blocks(64);
  for (std::uint32_t i = 0; i < 64; ++i) blocks[i] = i;
  std::shuffle(blocks.begin(), blocks.end(), random);
  std::vector<MoverItem> items;
  std::map<std::uint64_t, std::uint64_t> expected;  // pool byte -> device byte
  for (std::size_t i = 0; i < pick(0, 20); ++i) {
    MoverItem one = item(blocks[i], 2000 * i, 2000 * i + 1000, pick(0, 2) != 0);
    if (pick(0, 1) == 1) one.shard_offset = one.replicated_offset + replicated;
    items.push_back(one);
  }
  for (const MoverItem& one : items) {
    for (const BlockParts::Slice& slice : parts.slices(one.group)) {
      if (slice.replicated && !one.with_replicated) continue;
      const std::uint64_t pool =
          (slice.replicated ? one.replicated_offset : one.shard_offset) + slice.part_offset;
      for (std::uint64_t byte = 0; byte < slice.size_bytes; ++byte) {
        expected[pool + byte] = slice.offset + one.block.value * slice.block_stride + byte;
      }
    }
  }

  std::map<std::uint64_t, std::uint64_t> direct;
  std::set<std::size_t> direct_items;
  for (const PlannedChunk& chunk : plan(parts, items, small)) {
    direct_items.insert(chunk.items.begin(), chunk.items.end());
    EXPECT_EQ(std::set(chunk.items.begin(), chunk.items.end()).size(), chunk.items.size());
    EXPECT_LT(chunk.size_bytes, 2 * small.chunk_bytes) << "larger blocks go in several";
    for (const CopyRun& run : chunk.runs) {
      EXPECT_EQ(run.pool_offset / 512, (run.pool_offset + run.size_bytes - 1) / 512);
      for (std::uint64_t byte = 0; byte < run.size_bytes; ++byte) {
        EXPECT_TRUE(direct.emplace(run.pool_offset + byte, run.device_offset + byte).second);
      }
    }
  }
  std::multiset<std::size_t> with_bytes;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (sharded > 0 || (replicated > 0 && items[i].with_replicated)) with_bytes.insert(i);
  }
  EXPECT_EQ(direct_items, std::set(with_bytes.begin(), with_bytes.end()));
  EXPECT_EQ(direct, expected);

  // Staged: follow each byte through the slot, where packed blocks lie one after another.
  const std::uint64_t slot_bytes = (replicated + sharded) * pick(1, 4);
  std::map<std::uint64_t, std::uint64_t> through_slots;
  std::multiset<std::size_t> staged_items;
  for (const PlannedChunk& chunk : plan(parts, items, staged(slot_bytes, small))) {
    staged_items.insert(chunk.items.begin(), chunk.items.end());
    EXPECT_LE(chunk.size_bytes, slot_bytes);
    std::map<std::uint64_t, std::uint64_t> slot;  // slot byte -> device byte
    std::uint64_t at = 0;
    for (const std::uint32_t block : chunk.blocks) {
      for (const BlockParts::Slice& slice : parts.slices(chunk.group)) {
        if (slice.replicated && chunk.set == ipc::RegionSet::kSharded) continue;
        for (std::uint64_t byte = 0; byte < slice.size_bytes; ++byte) {
          slot[at++] = slice.offset + block * slice.block_stride + byte;
        }
      }
    }
    EXPECT_EQ(at, chunk.size_bytes);
    for (const CopyRun& run : chunk.runs) {
      for (std::uint64_t byte = 0; byte < run.size_bytes; ++byte) {
        EXPECT_TRUE(through_slots.emplace(run.pool_offset + byte, slot.at(run.device_offset + byte))
                        .second);
      }
    }
  }
  EXPECT_EQ(staged_items, with_bytes);
  EXPECT_EQ(through_slots, expected);

  // By kernel: parts of blocks, each where it lies in the pool.
  std::map<std::uint64_t, std::uint64_t> by_kernel;
  std::multiset<std::size_t> kernel_items;
  small.kernel = true;
  for (const PlannedChunk& chunk : plan(parts, items, small)) {
    kernel_items.insert(chunk.items.begin(), chunk.items.end());
    EXPECT_TRUE(chunk.runs.empty());
    EXPECT_EQ(chunk.items.size(), chunk.blocks.size());
    std::uint64_t bytes = 0;
    for (const PackedRun& run : chunk.packed) {
      ASSERT_LE(run.first + run.count, chunk.blocks.size());
      for (std::size_t i = 0; i < run.count; ++i) {
        std::uint64_t at = run.pool_offset + i * run.part_bytes;
        const std::uint32_t block = chunk.blocks[run.first + i];
        for (const BlockParts::Slice& slice : parts.slices(chunk.group)) {
          if (slice.replicated != (run.set == ipc::RegionSet::kReplicated)) continue;
          for (std::uint64_t byte = 0; byte < slice.size_bytes; ++byte, ++at, ++bytes) {
            const std::uint64_t on_device = slice.offset + block * slice.block_stride + byte;
            EXPECT_TRUE(by_kernel.emplace(at, on_device).second);
          }
        }
        EXPECT_EQ(at, run.pool_offset + (i + 1) * run.part_bytes);
      }
    }
    EXPECT_EQ(bytes, chunk.size_bytes);
  }
  EXPECT_EQ(kernel_items, with_bytes);
  EXPECT_EQ(by_kernel, expected);
}

TEST(CopyPlanTest, OneKernelTakesWhatFollowsEachOtherInThePool) {
  const BlockParts parts(two_region_layout(16, 32, false));
  PlanLimits kernel = limits();
  kernel.kernel = true;
  // Each rank's parts in an extent of their own, as a pool has them.
  std::vector<MoverItem> items;
  for (std::uint32_t i = 0; i < 8; ++i) items.push_back(item(50 - i, 16 * i, 4096 + 32 * i));
  items.push_back(item(60, 1000, 9000));
  const std::vector<PlannedChunk> chunks = plan(parts, items, kernel);
  ASSERT_EQ(chunks.size(), 1U);
  using ipc::RegionSet;
  EXPECT_EQ(chunks[0].packed, (std::vector<PackedRun>{{RegionSet::kReplicated, 0, 8, 0, 16},
                                                      {RegionSet::kSharded, 0, 8, 4096, 32},
                                                      {RegionSet::kReplicated, 8, 1, 1000, 16},
                                                      {RegionSet::kSharded, 8, 1, 9000, 32}}));
}

INSTANTIATE_TEST_SUITE_P(Seeds, CopyPlanPropertyTest, testing::Range(0, 60));

}  // namespace
}  // namespace kvferry::cache_manager
