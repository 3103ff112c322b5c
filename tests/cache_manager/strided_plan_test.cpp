// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/copy_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::ArenaLayout;
using ipc::BlockId;
using ipc::GroupId;
using ipc::MoverItem;
using ipc::Region;

constexpr std::uint32_t kBlocks = 16;
constexpr GroupId kGroup{0};

Region region(std::uint64_t bytes, std::uint64_t offset, std::uint32_t segment = 0) {
  Region made;
  made.block_bytes = bytes;
  made.block_stride = bytes;
  made.offset = offset;
  made.segment = segment;
  return made;
}

ArenaLayout layout_of(std::vector<Region> regions) {
  ArenaLayout layout;
  layout.groups = {{kBlocks}};
  layout.regions = std::move(regions);
  return layout;
}

PlannedChunk plan_one(const BlockParts& parts,
                      std::uint32_t block,
                      std::uint64_t place,
                      std::uint64_t pool_piece_bytes) {
  const std::vector<MoverItem> items{{kGroup, BlockId{block}, 0, place, true}};
  const std::vector<std::uint8_t> results(1, 0);
  PlanLimits limits;
  limits.strided = true;
  limits.pool_piece_bytes = pool_piece_bytes;
  CopyPlanner planner;
  planner.start(parts, items, results, limits);
  PlannedChunk chunk;
  planner.plan_next(chunk);
  EXPECT_FALSE(planner.has_next());
  return chunk;
}

TEST(StridedPlanTest, AllLayersOfALayerFirstArenaAreOneCopyPerBlock) {
  std::vector<Region> regions;
  for (std::uint32_t i = 0; i < 64; ++i) regions.push_back(region(512, 100 + i * 9000));
  const BlockParts parts(layout_of(regions));
  const PlannedChunk chunk = plan_one(parts, 3, 4096, 1ULL << 20);
  EXPECT_TRUE(chunk.runs.empty());
  EXPECT_EQ(chunk.rows, (std::vector<CopyRows>{{0, 100 + 3 * 512, 9000, 4096, 512, 512, 64}}));
  EXPECT_EQ(chunk.size_bytes, 64U * 512);
}

TEST(StridedPlanTest, KindsThatTakeTurnsMakeRowsEach) {
  std::vector<Region> regions;  // 512-byte scales beside larger slices
  for (std::uint32_t i = 0; i < 10; ++i) {
    regions.push_back(region(8000, i * 200'000));
    regions.push_back(region(512, i * 200'000 + 150'000));
  }
  const BlockParts parts(layout_of(regions));
  const PlannedChunk chunk = plan_one(parts, 0, 0, 1ULL << 20);
  EXPECT_TRUE(chunk.runs.empty());
  EXPECT_EQ(chunk.rows, (std::vector<CopyRows>{{0, 0, 200'000, 0, 8512, 8000, 10},
                                               {0, 150'000, 200'000, 8000, 8512, 512, 10}}));
}

TEST(StridedPlanTest, AllKeysBeforeAllValuesMakeTwoCopiesThoughTheyAlternateInTheBlock) {
  std::vector<Region> regions;
  for (std::uint32_t layer = 0; layer < 6; ++layer) {
    regions.push_back(region(100, layer * 5000));
    regions.push_back(region(100, 40'000 + layer * 5000));
  }
  const BlockParts parts(layout_of(regions));
  const PlannedChunk chunk = plan_one(parts, 1, 0, 1ULL << 20);
  EXPECT_TRUE(chunk.runs.empty());
  EXPECT_EQ(chunk.rows, (std::vector<CopyRows>{{0, 100, 5000, 0, 200, 100, 6},
                                               {0, 40'100, 5000, 100, 200, 100, 6}}));
}

TEST(StridedPlanTest, ABlockFirstArenaAndSegmentsOfTheirOwnHaveNoRows) {
  std::vector<Region> block_first;
  std::vector<Region> apart;
  for (std::uint32_t i = 0; i < 5; ++i) {
    block_first.push_back(region(100, i * 100));
    block_first.back().block_stride = 500;
    apart.push_back(region(100, 0, i));
  }
  const PlannedChunk whole = plan_one(BlockParts(layout_of(block_first)), 2, 0, 1ULL << 20);
  EXPECT_TRUE(whole.rows.empty());
  EXPECT_EQ(whole.runs, (std::vector<CopyRun>{{0, 1000, 0, 500}}));
  const PlannedChunk each = plan_one(BlockParts(layout_of(apart)), 2, 0, 1ULL << 20);
  EXPECT_TRUE(each.rows.empty());
  EXPECT_EQ(each.runs.size(), 5U);
}

TEST(StridedPlanTest, RowsAreCutWhereAPieceOfThePoolEnds) {
  std::vector<Region> regions;
  for (std::uint32_t i = 0; i < 8; ++i) regions.push_back(region(300, i * 10'000));
  // Rows of 300 bytes from 100 on: the fourth crosses 1024, the seventh 2048.
  const PlannedChunk chunk = plan_one(BlockParts(layout_of(regions)), 0, 100, 1024);
  EXPECT_EQ(chunk.rows, (std::vector<CopyRows>{{0, 0, 10'000, 100, 300, 300, 3},
                                               {0, 40'000, 10'000, 1300, 300, 300, 2}}));
  ASSERT_EQ(chunk.runs.size(), 5U);
  EXPECT_EQ(chunk.runs[0], (CopyRun{0, 30'000, 1000, 24}));
  EXPECT_EQ(chunk.runs[1], (CopyRun{0, 30'024, 1024, 276}));
  EXPECT_EQ(chunk.runs[4], (CopyRun{0, 70'000, 2200, 300}));
}

/// Random regions in random places: mixed sizes, gaps, strides that hold other regions' blocks.
std::vector<Region> random_regions(std::mt19937_64& random) {
  const auto pick = [&random](std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  };
  std::vector<Region> regions;
  std::vector<std::uint64_t> ends(pick(1, 3), pick(0, 50));  // of the segments
  const std::uint64_t kinds = pick(1, 3);
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t i = 0; i < kinds; ++i) sizes.push_back(pick(1, 40));
  const std::uint64_t layers = pick(1, 12);
  const bool same_gap = pick(0, 1) == 1;
  const bool blocks_together = pick(0, 3) == 0;
  for (std::uint64_t layer = 0; layer < layers; ++layer) {
    for (const std::uint64_t size : sizes) {
      const auto segment = static_cast<std::uint32_t>(same_gap ? 0 : pick(0, ends.size() - 1));
      std::uint64_t& end = ends[segment];
      Region made = region(size, end, segment);
      made.replicated = pick(0, 9) == 0;
      if (blocks_together) {
        made.block_stride = 40 * 3 * 12 * 4;
        end += size + (same_gap ? 3 : pick(0, 3));
      } else {
        made.block_stride = size + (same_gap ? 0 : pick(0, 2));
        end += made.block_stride * kBlocks + (same_gap ? 7 : pick(0, 2));
      }
      regions.push_back(made);
    }
  }
  if (pick(0, 2) == 0) std::shuffle(regions.begin(), regions.end(), random);
  return regions;
}

class StridedPlanPropertyTest : public testing::TestWithParam<int> {};

TEST_P(StridedPlanPropertyTest, RowsAndRunsMoveEveryByteOnceAndStayInOnePoolPiece) {
  std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()));
  const auto pick = [&random](std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  };
  const BlockParts parts(layout_of(random_regions(random)));
  PlanLimits limits;
  limits.strided = true;
  limits.pool_piece_bytes = pick(0, 1) == 1 ? 512 : 1ULL << 20;
  limits.chunk_bytes = pick(1, 4000);
  limits.chunk_runs = pick(1, 40);

  std::vector<std::uint32_t> blocks(kBlocks);
  std::iota(blocks.begin(), blocks.end(), 0U);
  std::shuffle(blocks.begin(), blocks.end(), random);
  std::vector<MoverItem> items;
  std::uint64_t place = pick(0, 600);
  for (std::uint64_t i = 0, count = pick(1, kBlocks); i < count; ++i) {
    MoverItem one{kGroup, BlockId{blocks[i]}, place, 0, pick(0, 2) != 0};
    one.shard_offset = place + parts.replicated_bytes(kGroup) + pick(0, 1) * 13;
    place = one.shard_offset + parts.sharded_bytes(kGroup) + pick(0, 1) * 5;
    items.push_back(one);
  }
  using Place = std::pair<std::uint32_t, std::uint64_t>;  // segment, byte
  std::map<std::uint64_t, Place> expected;                // by byte of the pool
  for (const MoverItem& one : items) {
    for (const BlockParts::Slice& slice : parts.slices(kGroup)) {
      if (slice.replicated && !one.with_replicated) continue;
      const std::uint64_t pool =
          (slice.replicated ? one.replicated_offset : one.shard_offset) + slice.part_offset;
      for (std::uint64_t byte = 0; byte < slice.size_bytes; ++byte) {
        expected[pool + byte] = {slice.segment,
                                 slice.offset + one.block.value * slice.block_stride + byte};
      }
    }
  }
  std::map<std::uint64_t, Place> moved;
  const auto move = [&moved](std::uint32_t segment, std::uint64_t device, std::uint64_t pool,
                             std::uint64_t size) {
    for (std::uint64_t byte = 0; byte < size; ++byte) {
      EXPECT_TRUE(moved.emplace(pool + byte, Place{segment, device + byte}).second);
    }
  };
  const std::vector<std::uint8_t> results(items.size(), 0);
  CopyPlanner planner;
  planner.start(parts, items, results, limits);
  PlannedChunk chunk;
  while (planner.has_next()) {
    planner.plan_next(chunk);
    std::uint64_t bytes = 0;
    for (const CopyRun& run : chunk.runs) {
      EXPECT_EQ(run.pool_offset / limits.pool_piece_bytes,
                (run.pool_offset + run.size_bytes - 1) / limits.pool_piece_bytes);
      move(run.segment, run.device_offset, run.pool_offset, run.size_bytes);
      bytes += run.size_bytes;
    }
    for (const CopyRows& rows : chunk.rows) {
      EXPECT_GE(rows.rows, 2U);
      EXPECT_GE(rows.device_pitch, rows.row_bytes);
      EXPECT_GE(rows.pool_pitch, rows.row_bytes);
      EXPECT_EQ(rows.pool_offset / limits.pool_piece_bytes,
                (rows.pool_offset + rows.pool_bytes() - 1) / limits.pool_piece_bytes);
      for (std::uint64_t row = 0; row < rows.rows; ++row) {
        move(rows.segment, rows.device_offset + row * rows.device_pitch,
             rows.pool_offset + row * rows.pool_pitch, rows.row_bytes);
      }
      bytes += rows.rows * rows.row_bytes;
    }
    EXPECT_EQ(bytes, chunk.size_bytes);
    EXPECT_LT(chunk.size_bytes, 2 * limits.chunk_bytes) << "larger blocks go in several";
    EXPECT_EQ(std::set(chunk.items.begin(), chunk.items.end()).size(), chunk.items.size());
  }
  EXPECT_EQ(moved, expected);
}

INSTANTIATE_TEST_SUITE_P(Seeds, StridedPlanPropertyTest, testing::Range(0, 120));

}  // namespace
}  // namespace kvferry::cache_manager
