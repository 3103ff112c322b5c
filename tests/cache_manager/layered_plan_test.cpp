// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Plans of jobs that go layer by layer.
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
using ipc::RegionSet;

constexpr std::uint32_t kBlocks = 12;
constexpr std::uint64_t kPieceBytes = 1ULL << 12;

struct Random {
  explicit Random(std::uint32_t seed) : engine(seed) {}
  std::uint64_t pick(std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(engine);
  }
  std::mt19937 engine;
};

/// Groups with layers of their own, some shared; regions of odd sizes, some replicated.
ArenaLayout random_layout(Random& random) {
  ArenaLayout layout;
  std::uint64_t offset = 0;
  const std::uint64_t groups = random.pick(1, 3);
  for (std::uint32_t group = 0; group < groups; ++group) {
    layout.groups.push_back({kBlocks});
    const auto first = static_cast<std::uint32_t>(random.pick(0, 5));
    const auto layers = static_cast<std::uint32_t>(random.pick(1, 12));
    for (std::uint32_t layer = first; layer < first + layers; ++layer) {
      const std::uint64_t regions = random.pick(1, 3);
      for (std::uint64_t i = 0; i < regions; ++i) {
        Region region;
        region.group = GroupId{group};
        region.layer = layer;
        region.block_bytes = random.pick(1, 150);
        region.block_stride = region.block_bytes + random.pick(0, 50);
        region.offset = offset;
        region.replicated = random.pick(0, 3) == 0;
        offset += kBlocks * region.block_stride;
        layout.regions.push_back(region);
      }
    }
    std::shuffle(layout.regions.begin(), layout.regions.end(), random.engine);
  }
  std::stable_sort(layout.regions.begin(), layout.regions.end(),
                   [](const Region& a, const Region& b) { return a.group < b.group; });
  return layout;
}

std::vector<MoverItem> random_items(Random& random, const BlockParts& parts, std::size_t groups) {
  std::vector<MoverItem> items;
  std::uint64_t at = 0;
  const std::uint64_t count = random.pick(1, 12);
  std::set<std::pair<std::uint32_t, std::uint32_t>> taken;
  for (std::uint64_t i = 0; i < count; ++i) {
    const GroupId group{static_cast<std::uint32_t>(random.pick(0, groups - 1))};
    const BlockId block{static_cast<std::uint32_t>(random.pick(0, kBlocks - 1))};
    if (!taken.emplace(group.value, block.value).second) continue;
    MoverItem item{group, block, at, at + parts.replicated_bytes(group), random.pick(0, 3) != 0};
    const std::uint64_t gap = random.pick(0, 3) == 0 ? 100 : 0;  // else neighbours, which make rows
    at += parts.replicated_bytes(group) + parts.sharded_bytes(group) + gap;
    items.push_back(item);
  }
  std::shuffle(items.begin(), items.end(), random.engine);
  return items;
}

/// What is copied, byte for byte: place in the pool to place on the device.
using Bytes = std::map<std::uint64_t, std::uint64_t>;

void add(Bytes& bytes, std::uint64_t pool, std::uint64_t device, std::uint64_t size) {
  for (std::uint64_t i = 0; i < size; ++i) {
    EXPECT_TRUE(bytes.emplace(pool + i, device + i).second) << "copied twice: " << pool + i;
  }
}

/// A staged chunk's bytes, by where the worker's kernels put them: the regions of its layers, in
/// the order of a packed block.
void add_staged(Bytes& bytes, const PlannedChunk& chunk, const BlockParts& parts) {
  std::vector<BlockParts::Slice> slices;
  std::uint64_t stride = 0;
  for (const BlockParts::Slice& slice : parts.slices(chunk.group)) {
    if (slice.replicated && chunk.set == RegionSet::kSharded) continue;
    if (!chunk.range.contains(slice.layer)) continue;
    slices.push_back(slice);
    stride += slice.size_bytes;
  }
  std::vector<std::uint64_t> device;  // by byte of the slot
  for (const std::uint32_t block : chunk.blocks) {
    for (const BlockParts::Slice& slice : slices) {
      for (std::uint64_t i = 0; i < slice.size_bytes; ++i) {
        device.push_back(slice.offset + block * slice.block_stride + i);
      }
    }
  }
  EXPECT_EQ(device.size(), chunk.size_bytes);
  EXPECT_EQ(stride * chunk.blocks.size(), chunk.size_bytes);
  std::vector<CopyRun> runs = chunk.runs;
  for (const CopyRows& rows : chunk.rows) {
    EXPECT_EQ(rows.pool_offset / kPieceBytes,
              (rows.pool_offset + rows.pool_bytes() - 1) / kPieceBytes);
    for (std::uint64_t row = 0; row < rows.rows; ++row) {
      runs.push_back({rows.segment, rows.device_offset + row * rows.device_pitch,
                      rows.pool_offset + row * rows.pool_pitch, rows.row_bytes});
    }
  }
  for (const CopyRun& run : runs) {
    for (std::uint64_t i = 0; i < run.size_bytes; ++i) {
      add(bytes, run.pool_offset + i, device.at(run.device_offset + i), 1);
    }
  }
}

Bytes expected(const BlockParts& parts, const std::vector<MoverItem>& items) {
  Bytes bytes;
  for (const MoverItem& item : items) {
    for (const BlockParts::Slice& slice : parts.slices(item.group)) {
      if (slice.replicated && !item.with_replicated) continue;
      add(bytes,
          (slice.replicated ? item.replicated_offset : item.shard_offset) + slice.part_offset,
          slice.offset + item.block.value * slice.block_stride, slice.size_bytes);
    }
  }
  return bytes;
}

/// Layers below `through` whose bytes are not all there yet.
bool has_all_below(const Bytes& moved,
                   const BlockParts& parts,
                   const std::vector<MoverItem>& items,
                   std::uint32_t through) {
  for (const MoverItem& item : items) {
    for (const BlockParts::Slice& slice : parts.slices(item.group)) {
      if (slice.layer >= through || (slice.replicated && !item.with_replicated)) continue;
      const std::uint64_t first =
          (slice.replicated ? item.replicated_offset : item.shard_offset) + slice.part_offset;
      const auto at = moved.find(first);
      const auto end = moved.find(first + slice.size_bytes - 1);
      if (at == moved.end() || end == moved.end()) return false;
    }
  }
  return true;
}

class LayeredPlanTest : public testing::TestWithParam<bool> {};

TEST_P(LayeredPlanTest, EveryByteIsMovedOnceAndLayersAreThereWhenItIsSaid) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const ArenaLayout layout = random_layout(random);
    const BlockParts parts(layout);
    const std::vector<MoverItem> items = random_items(random, parts, layout.groups.size());
    const std::vector<std::uint8_t> results(items.size(), 0);
    PlanLimits limits;
    limits.layered = true;
    limits.step_bytes = random.pick(1, 3000);
    limits.pool_piece_bytes = kPieceBytes;
    limits.chunk_bytes = random.pick(100, 8000);
    limits.slot_bytes = GetParam() ? random.pick(6000, 15000) : 0;
    limits.strided = random.pick(0, 1) == 1;
    CopyPlanner planner;
    PlannedChunk chunk;
    planner.start(parts, items, results, limits);
    Bytes moved;
    std::uint32_t through = 0;
    bool last = false;
    while (planner.has_next()) {
      ASSERT_FALSE(last);
      planner.plan_next(chunk);
      if (GetParam()) {
        ASSERT_LE(chunk.size_bytes, limits.slot_bytes);
        add_staged(moved, chunk, parts);
      } else {
        ASSERT_TRUE(chunk.rows.empty());
        for (const CopyRun& run : chunk.runs) {
          add(moved, run.pool_offset, run.device_offset, run.size_bytes);
        }
      }
      ASSERT_GE(chunk.through, through);
      through = chunk.through;
      last = chunk.last;
      ASSERT_TRUE(has_all_below(moved, parts, items, through)) << through;
    }
    const Bytes wanted = expected(parts, items);
    EXPECT_EQ(moved, wanted);
    EXPECT_EQ(last, !wanted.empty());
  }
}

TEST_P(LayeredPlanTest, FirstLayerComesByItselfAndOthersInStepsOfSomeSize) {
  ArenaLayout layout;
  layout.groups = {{kBlocks}};
  for (std::uint32_t layer = 0; layer < 9; ++layer) {
    Region region;
    region.layer = layer;
    region.block_bytes = region.block_stride = 1000;
    region.offset = layer * 1'000'000ULL;
    layout.regions.push_back(region);
  }
  const BlockParts parts(layout);
  const std::vector<MoverItem> items{{GroupId{0}, BlockId{3}, 0, 0, true},
                                     {GroupId{0}, BlockId{4}, 0, 9000, true}};
  const std::vector<std::uint8_t> results(2, 0);
  PlanLimits limits;
  limits.layered = true;
  limits.step_bytes = 5000;  // of 2000 for a layer
  limits.slot_bytes = GetParam() ? 100'000 : 0;
  CopyPlanner planner;
  PlannedChunk chunk;
  planner.start(parts, items, results, limits);
  std::vector<std::uint32_t> ends;
  while (planner.has_next()) {
    planner.plan_next(chunk);
    ends.push_back(chunk.through);
  }
  EXPECT_EQ(ends, (std::vector<std::uint32_t>{1, 4, 7, 9}));
}

TEST(LayeredRowsTest, LayersOfNeighboursAreRowsAndThoseOfOthersAreNot) {
  ArenaLayout layout;
  layout.groups = {{kBlocks}};
  for (std::uint32_t layer = 0; layer < 4; ++layer) {
    Region region;
    region.layer = layer;
    region.block_bytes = region.block_stride = 100;
    region.offset = layer * 1'000'000ULL;
    layout.regions.push_back(region);
  }
  const BlockParts parts(layout);
  std::vector<MoverItem> items;
  for (const std::uint64_t place : {0ULL, 1ULL, 2ULL, 3ULL, 4ULL, 6ULL, 9ULL}) {
    const BlockId block{static_cast<std::uint32_t>(items.size())};
    items.push_back({GroupId{0}, block, 400 * place, 400 * place, true});
  }
  const std::vector<std::uint8_t> results(items.size(), 0);
  PlanLimits limits;
  limits.layered = true;
  limits.step_bytes = 100;
  limits.slot_bytes = 10'000;
  CopyPlanner planner;
  PlannedChunk chunk;
  planner.start(parts, items, results, limits);
  planner.plan_next(chunk);
  ASSERT_EQ(chunk.rows.size(), 1U);
  EXPECT_EQ(chunk.rows[0], (CopyRows{0, 0, 100, 0, 400, 100, 5}));
  ASSERT_EQ(chunk.runs.size(), 2U);
  EXPECT_EQ(chunk.runs[0], (CopyRun{0, 500, 2400, 100}));
  EXPECT_EQ(chunk.runs[1], (CopyRun{0, 600, 3600, 100}));
}

TEST_P(LayeredPlanTest, WhatIsGivenUpIsEveryBlockOnceAStepIsLeft) {
  ArenaLayout layout;
  layout.groups = {{kBlocks}};
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    Region region;
    region.layer = layer;
    region.block_bytes = region.block_stride = 1000;
    region.offset = layer * 1'000'000ULL;
    layout.regions.push_back(region);
  }
  const BlockParts parts(layout);
  const std::vector<MoverItem> items{{GroupId{0}, BlockId{3}, 0, 0, true},
                                     {GroupId{0}, BlockId{4}, 0, 9000, true}};
  const std::vector<std::uint8_t> results(2, 0);
  PlanLimits limits;
  limits.layered = true;
  limits.step_bytes = 1;
  limits.slot_bytes = GetParam() ? 1000 : 0;
  limits.chunk_bytes = 1;
  CopyPlanner planner;
  PlannedChunk chunk;
  planner.start(parts, items, results, limits);
  planner.plan_next(chunk);
  std::set<std::size_t> dropped;
  planner.drop_rest([&](std::size_t item) { dropped.insert(item); });
  EXPECT_EQ(dropped, (std::set<std::size_t>{0, 1}));
  EXPECT_FALSE(planner.has_next());
}

INSTANTIATE_TEST_SUITE_P(Ways, LayeredPlanTest, testing::Bool(), [](const auto& staged) {
  return staged.param ? "Staged" : "Direct";
});

}  // namespace
}  // namespace kvferry::cache_manager
