// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/geometry.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>

namespace kvferry::ipc {
namespace {

using testing::HasSubstr;

Geometry load(std::string_view name, std::uint32_t ranks) {
  Result<Geometry> geometry = load_geometry(name, ranks);
  EXPECT_TRUE(geometry.has_value()) << (geometry ? "" : geometry.error().to_string());
  return geometry ? *geometry : Geometry{};
}

std::uint64_t bytes_per_token(const Geometry& geometry) {
  return geometry.host_block_bytes(GroupId{0}) / geometry.tokens_per_block;
}

TEST(GeometryPresetTest, BytesPerTokenAreThePublishedOnes) {
  EXPECT_EQ(bytes_per_token(load("llama-3-8b", 1)), 128U << 10);
  EXPECT_EQ(bytes_per_token(load("llama-3-70b", 4)), 320U << 10);
  EXPECT_EQ(bytes_per_token(load("qwen3-30b-a3b", 1)), 96U << 10);
  EXPECT_EQ(bytes_per_token(load("deepseek-v3", 8)), 70'272U);  // 68.6 KiB
}

TEST(GeometryPresetTest, ShardedHostBlockIsTheSameForEveryRankCount) {
  for (const std::uint32_t ranks : {1U, 2U, 4U, 8U}) {
    EXPECT_EQ(bytes_per_token(load("llama-3-8b", ranks)), 128U << 10) << ranks;
  }
}

TEST(GeometryPresetTest, RegionsOfLlamaAreSharded) {
  const Geometry geometry = load("llama-3-8b", 2);
  ASSERT_EQ(geometry.groups.size(), 1U);
  ASSERT_EQ(geometry.groups[0].regions.size(), 64U);
  EXPECT_EQ(geometry.groups[0].regions[0],
            (RegionSpec{RegionKind::kKey, DataType::kBf16, 0, false, 16ULL * 4 * 128 * 2}));
  EXPECT_EQ(geometry.groups[0].regions[63].kind, RegionKind::kValue);
  EXPECT_EQ(geometry.groups[0].regions[63].layer, 31U);
}

TEST(GeometryPresetTest, LatentOfDeepseekIsReplicatedForEveryRankCount) {
  for (const std::uint32_t ranks : {1U, 3U, 8U}) {
    const Geometry geometry = load("deepseek-v3", ranks);
    EXPECT_EQ(geometry.tokens_per_block, 64U);
    EXPECT_EQ(geometry.sharded_bytes(GroupId{0}), 0U);
    EXPECT_EQ(geometry.replicated_bytes(GroupId{0}), 61U * 64 * 576 * 2);
    EXPECT_EQ(geometry.host_block_bytes(GroupId{0}), 61U * 64 * 576 * 2);
  }
}

TEST(GeometryPresetTest, TinyVariantsHaveTheShapesTheyAreFor) {
  EXPECT_EQ(load("tiny", 1).groups[0].regions[0].block_bytes, 4096U);
  const Geometry fp8 = load("tiny-fp8", 1);
  ASSERT_EQ(fp8.groups[0].regions.size(), 12U);
  EXPECT_EQ(fp8.groups[0].regions[2],
            (RegionSpec{RegionKind::kScale, DataType::kFp32, 0, false, 512}));
  EXPECT_GT(load("tiny-mla", 2).replicated_bytes(GroupId{0}), 0U);
  EXPECT_GT(load("tiny-draft", 1).groups.at(1).blocks_percent, 100U);
  EXPECT_EQ(load("tiny-window", 1).groups.at(1).rule, HitRule::kSlidingWindow);
  EXPECT_EQ(load("tiny-window", 1).groups.at(1).window_blocks, 4U);
  EXPECT_EQ(load("tiny-state", 2).groups.at(1).rule, HitRule::kLastState);
}

TEST(GeometryPresetTest, EveryPresetLoadsWithItsDefaultRanks) {
  std::set<std::string_view> names;
  for (const PresetInfo& info : geometry_presets()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_FALSE(info.description.empty()) << info.name;
    EXPECT_EQ(load(info.name, info.default_ranks).name, info.name);
  }
  EXPECT_GE(names.size(), 9U);
}

TEST(GeometryPresetTest, UnknownNameListsTheKnownOnes) {
  const Result<Geometry> geometry = load_geometry("llama-9", 1);
  ASSERT_FALSE(geometry.has_value());
  EXPECT_EQ(geometry.error().code, ErrorCode::kNotFound);
  for (const PresetInfo& info : geometry_presets()) {
    EXPECT_THAT(geometry.error().message, HasSubstr(std::string(info.name)));
  }
}

TEST(GeometryPresetTest, RanksThatDoNotDivideTheHeadsNameTheOnesThatDo) {
  for (const std::uint32_t ranks : {3U, 8U}) {
    const Result<Geometry> geometry = load_geometry("qwen3-30b-a3b", ranks);
    ASSERT_FALSE(geometry.has_value());
    EXPECT_EQ(geometry.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(geometry.error().message, HasSubstr("out of 1, 2, 4"));
  }
  EXPECT_EQ(load_geometry("tiny", 0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(load_geometry("tiny-mla", kMaxRanks + 1).error().code, ErrorCode::kInvalidArgument);
}

struct Change {
  const char* name;
  std::function<void(Geometry&)> apply;
};

/// One change per field that decides how bytes are read.
const std::vector<Change>& changes() {
  static const std::vector<Change> kChanges = {
      {"tokens_per_block", [](Geometry& g) { g.tokens_per_block = 32; }},
      {"ranks", [](Geometry& g) { g.ranks = 2; }},
      {"key_before_value", [](Geometry& g) { g.key_before_value = false; }},
      {"group name", [](Geometry& g) { g.groups[0].name = "other"; }},
      {"group order", [](Geometry& g) { std::swap(g.groups[0], g.groups[1]); }},
      {"fewer groups", [](Geometry& g) { g.groups.pop_back(); }},
      {"rule", [](Geometry& g) { g.groups[0].rule = HitRule::kLastState; }},
      {"window_blocks", [](Geometry& g) { g.groups[1].window_blocks += 1; }},
      {"fewer regions", [](Geometry& g) { g.groups[0].regions.pop_back(); }},
      {"K and V swapped",
       [](Geometry& g) { std::swap(g.groups[0].regions[0], g.groups[0].regions[1]); }},
      {"kind", [](Geometry& g) { g.groups[0].regions[0].kind = RegionKind::kOther; }},
      {"dtype", [](Geometry& g) { g.groups[0].regions[0].dtype = DataType::kBf16; }},
      {"layer", [](Geometry& g) { g.groups[0].regions[0].layer = 7; }},
      {"replicated", [](Geometry& g) { g.groups[0].regions[0].replicated = true; }},
      {"block_bytes", [](Geometry& g) { g.groups[0].regions[0].block_bytes += 2; }},
      {"last region's block_bytes",
       [](Geometry& g) { g.groups.back().regions.back().block_bytes += 2; }},
  };
  return kChanges;
}

TEST(GeometryFingerprintTest, DiffersForEveryFieldThatDecidesHowBytesAreRead) {
  const Geometry base = load("tiny-window", 1);
  std::set<std::string> seen = {base.fingerprint(ArenaOrder::kLayerFirst).hex()};
  for (const Change& change : changes()) {
    Geometry other = base;
    change.apply(other);
    ASSERT_TRUE(other.validate().has_value()) << change.name;
    EXPECT_TRUE(seen.insert(other.fingerprint(ArenaOrder::kLayerFirst).hex()).second)
        << change.name;
  }
}

TEST(GeometryFingerprintTest, DiffersForEveryRegion) {
  const Geometry base = load("tiny-fp8", 1);
  std::set<std::string> seen;
  for (std::size_t i = 0; i < base.groups[0].regions.size(); ++i) {
    Geometry other = base;
    other.groups[0].regions[i].block_bytes += 4;
    EXPECT_TRUE(seen.insert(other.fingerprint(ArenaOrder::kLayerFirst).hex()).second) << i;
  }
}

TEST(GeometryFingerprintTest, DiffersByArenaOrder) {
  const Geometry geometry = load("tiny", 1);
  EXPECT_NE(geometry.fingerprint(ArenaOrder::kLayerFirst),
            geometry.fingerprint(ArenaOrder::kBlockFirst));
  EXPECT_NE(geometry.fingerprint(ArenaOrder::kLayerFirst),
            geometry.fingerprint(ArenaOrder::kLayerFirstMany));
}

TEST(GeometryFingerprintTest, IgnoresNameAndBlockCounts) {
  const Geometry base = load("tiny-draft", 1);
  Geometry other = base;
  other.name = "another";
  other.groups[1].blocks_percent = 300;
  EXPECT_EQ(base.fingerprint(ArenaOrder::kBlockFirst), other.fingerprint(ArenaOrder::kBlockFirst));
}

TEST(GeometryFingerprintTest, IsTheSameInEveryBuild) {
  EXPECT_EQ(load("tiny", 1).fingerprint(ArenaOrder::kLayerFirst).hex(),
            "4d0b6b3514ba91f500c970a2d13fc75f");
}

TEST(GeometryValidateTest, RejectsEveryFieldOutOfRange) {
  const std::vector<Change> bad = {
      {"empty name", [](Geometry& g) { g.name.clear(); }},
      {"name with a slash", [](Geometry& g) { g.name = "a/b"; }},
      {"name with a zero byte", [](Geometry& g) { g.name = std::string("a\0b", 3); }},
      {"long name", [](Geometry& g) { g.name = std::string(kMaxNameLength + 1, 'a'); }},
      {"no tokens", [](Geometry& g) { g.tokens_per_block = 0; }},
      {"many tokens", [](Geometry& g) { g.tokens_per_block = kMaxTokensPerBlock + 1; }},
      {"no ranks", [](Geometry& g) { g.ranks = 0; }},
      {"many ranks", [](Geometry& g) { g.ranks = kMaxRanks + 1; }},
      {"no groups", [](Geometry& g) { g.groups.clear(); }},
      {"many groups",
       [](Geometry& g) {
         const GroupSpec group = g.groups[0];
         for (std::uint32_t i = 0; i < kMaxGroups; ++i) {
           g.groups.push_back(group);
           g.groups.back().name = fmt::format("group{}", i);
         }
       }},
      {"duplicate group", [](Geometry& g) { g.groups[1].name = g.groups[0].name; }},
      {"group without name", [](Geometry& g) { g.groups[0].name.clear(); }},
      {"unknown rule", [](Geometry& g) { g.groups[0].rule = static_cast<HitRule>(4); }},
      {"rule zero", [](Geometry& g) { g.groups[0].rule = static_cast<HitRule>(0); }},
      {"window without the rule", [](Geometry& g) { g.groups[0].window_blocks = 1; }},
      {"rule without a window", [](Geometry& g) { g.groups[1].window_blocks = 0; }},
      {"huge window", [](Geometry& g) { g.groups[1].window_blocks = kMaxWindowBlocks + 1; }},
      {"no percent", [](Geometry& g) { g.groups[0].blocks_percent = 0; }},
      {"much percent", [](Geometry& g) { g.groups[0].blocks_percent = kMaxBlocksPercent + 1; }},
      {"no regions", [](Geometry& g) { g.groups[0].regions.clear(); }},
      {"many regions",
       [](Geometry& g) {
         g.groups[0].regions.assign(kMaxRegionsPerGroup + 1, g.groups[0].regions[0]);
       }},
      {"kind zero", [](Geometry& g) { g.groups[0].regions[0].kind = static_cast<RegionKind>(0); }},
      {"unknown kind",
       [](Geometry& g) { g.groups[0].regions[0].kind = static_cast<RegionKind>(9); }},
      {"dtype zero", [](Geometry& g) { g.groups[0].regions[0].dtype = static_cast<DataType>(0); }},
      {"unknown dtype",
       [](Geometry& g) { g.groups[0].regions[0].dtype = static_cast<DataType>(8); }},
      {"high layer", [](Geometry& g) { g.groups[0].regions[0].layer = kMaxLayers; }},
      {"no bytes", [](Geometry& g) { g.groups[0].regions[0].block_bytes = 0; }},
      {"bytes that overflow", [](Geometry& g) { g.groups[0].regions[0].block_bytes = ~0ULL; }},
      {"many bytes",
       [](Geometry& g) { g.groups[0].regions[0].block_bytes = kMaxRegionBlockBytes + 2; }},
      {"half an element", [](Geometry& g) { g.groups[1].regions[0].block_bytes = 4097; }},
  };
  for (const Change& change : bad) {
    Geometry geometry = load("tiny-window", 1);
    ASSERT_TRUE(geometry.validate().has_value());
    change.apply(geometry);
    const Status status = geometry.validate();
    ASSERT_FALSE(status.has_value()) << change.name;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument) << change.name;
  }
}

TEST(GeometryValidateTest, KeepsControlBytesOutOfTheMessage) {
  Geometry geometry = load("tiny", 1);
  geometry.groups[0].name = "x\n\x1b[31m";
  EXPECT_THAT(geometry.validate().error().message, testing::Not(HasSubstr("\x1b")));
}

TEST(GeometryValidateTest, LargestGeometryDoesNotOverflow) {
  Geometry geometry = load("tiny", 1);
  geometry.ranks = kMaxRanks;
  geometry.groups[0].regions.assign(
      kMaxRegionsPerGroup,
      RegionSpec{RegionKind::kOther, DataType::kUint8, 0, false, kMaxRegionBlockBytes});
  ASSERT_TRUE(geometry.validate().has_value());
  EXPECT_EQ(geometry.host_block_bytes(GroupId{0}),
            std::uint64_t{kMaxRanks} * kMaxRegionsPerGroup * kMaxRegionBlockBytes);
}

TEST(GeometryDeathTest, AskingForAGroupThatIsNotThereAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Geometry geometry = load("tiny", 1);
  EXPECT_DEATH((void)geometry.host_block_bytes(GroupId{1}), "asked for group 1");
}

TEST(ArenaOrderTest, NamesRoundTrip) {
  for (const ArenaOrder order :
       {ArenaOrder::kLayerFirst, ArenaOrder::kLayerFirstMany, ArenaOrder::kBlockFirst}) {
    EXPECT_EQ(*parse_arena_order(to_string(order)), order);
  }
  EXPECT_THAT(parse_arena_order("rows").error().message,
              HasSubstr("layer-first, layer-first-many, block-first"));
}

}  // namespace
}  // namespace kvferry::ipc
