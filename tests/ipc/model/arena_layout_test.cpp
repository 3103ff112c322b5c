// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/arena_layout.hpp"

#include "kvferry/ipc/wire/messages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>

namespace kvferry::ipc {
namespace {

using testing::HasSubstr;

constexpr std::array kOrders = {ArenaOrder::kLayerFirst, ArenaOrder::kLayerFirstMany,
                                ArenaOrder::kBlockFirst};

ArenaOptions options(ArenaOrder order,
                     std::uint32_t gpu_blocks,
                     std::uint64_t slot_bytes = 0,
                     std::uint32_t slots = 0) {
  return ArenaOptions{order, gpu_blocks, slot_bytes, slots};
}

Geometry random_geometry(std::mt19937& random) {
  const auto pick = [&random](std::uint32_t low, std::uint32_t high) {
    return std::uniform_int_distribution<std::uint32_t>(low, high)(random);
  };
  Geometry geometry;
  geometry.name = "random";
  geometry.tokens_per_block = pick(1, 64);
  geometry.ranks = pick(1, 8);
  const std::uint32_t groups = pick(1, 4);
  for (std::uint32_t g = 0; g < groups; ++g) {
    GroupSpec& group = geometry.groups.emplace_back();
    group.name = fmt::format("group{}", g);
    group.blocks_percent = pick(10, 250);
    const std::uint32_t regions = pick(1, 9);
    for (std::uint32_t r = 0; r < regions; ++r) {
      group.regions.push_back(RegionSpec{static_cast<RegionKind>(pick(1, 8)), DataType::kUint8, r,
                                         pick(0, 2) == 0, pick(1, 3000)});
    }
  }
  return geometry;
}

struct Slice {
  std::uint32_t segment;
  std::uint64_t begin;
  std::uint64_t end;
};

/// Every slice of every block and every staging slot, one by one.
std::vector<Slice> slices(const ArenaLayout& layout) {
  std::vector<Slice> result;
  for (const Region& region : layout.regions) {
    for (std::uint64_t b = 0; b < layout.groups[region.group.value].block_count; ++b) {
      const std::uint64_t begin = region.offset + b * region.block_stride;
      result.push_back({region.segment, begin, begin + region.block_bytes});
    }
  }
  for (std::uint64_t s = 0; s < layout.staging.slots; ++s) {
    const std::uint64_t begin = layout.staging.offset + s * layout.staging.slot_bytes;
    result.push_back({layout.staging.segment, begin, begin + layout.staging.slot_bytes});
  }
  return result;
}

bool are_sound(const ArenaLayout& layout, std::vector<Slice> all) {
  std::sort(all.begin(), all.end(), [](const Slice& a, const Slice& b) {
    return a.segment != b.segment ? a.segment < b.segment : a.begin < b.begin;
  });
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].segment >= layout.segment_bytes.size()) return false;
    if (all[i].end > layout.segment_bytes[all[i].segment]) return false;
    if (i > 0 && all[i].segment == all[i - 1].segment && all[i].begin < all[i - 1].end) {
      return false;
    }
  }
  return true;
}

TEST(PlanArenaTest, RandomGeometriesNeverOverlapAndStayInBounds) {
  std::mt19937 random(20240613);
  for (std::uint32_t round = 0; round < 200; ++round) {
    const Geometry geometry = random_geometry(random);
    for (const ArenaOrder order : kOrders) {
      const bool staged = round % 2 == 0;
      const Result<ArenaLayout> layout =
          plan_arena(geometry, options(order, 10 + round % 13, staged ? 30'000 : 0, 3));
      ASSERT_TRUE(layout.has_value()) << layout.error().to_string();
      EXPECT_TRUE(are_sound(*layout, slices(*layout))) << round << to_string(order);
      EXPECT_TRUE(layout->validate(geometry).has_value())
          << layout->validate(geometry).error().to_string();
      EXPECT_EQ(layout->staging.slots, staged ? 3U : 0U);
    }
  }
}

TEST(PlanArenaTest, LayerFirstBasesAreAlignedAndStridesExact) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    const Geometry geometry = random_geometry(random);
    for (const ArenaOrder order : {ArenaOrder::kLayerFirst, ArenaOrder::kLayerFirstMany}) {
      const ArenaLayout layout = *plan_arena(geometry, options(order, 16, 40'000, 2));
      const std::size_t segments = order == ArenaOrder::kLayerFirst ? 1 : layout.regions.size() + 1;
      EXPECT_EQ(layout.segment_bytes.size(), segments);
      for (const Region& region : layout.regions) {
        EXPECT_EQ(region.offset % kArenaAlignment, 0U);
        EXPECT_EQ(region.block_stride, region.block_bytes);
      }
      EXPECT_EQ(layout.staging.offset % kArenaAlignment, 0U);
      EXPECT_EQ(layout.staging.slot_bytes % kArenaAlignment, 0U);
    }
  }
}

TEST(PlanArenaTest, BlockFirstBlockIsOneRunReplicatedPartFirst) {
  std::mt19937 random(11);
  for (int round = 0; round < 100; ++round) {
    const Geometry geometry = random_geometry(random);
    const ArenaLayout layout = *plan_arena(geometry, options(ArenaOrder::kBlockFirst, 10));
    ASSERT_EQ(layout.segment_bytes.size(), 1U);
    for (std::uint32_t g = 0; g < geometry.groups.size(); ++g) {
      const HostBlockShape shape = host_block_shape(geometry, GroupId{g});
      std::vector<Region> own;
      for (const Region& region : layout.regions) {
        if (region.group == GroupId{g}) own.push_back(region);
      }
      std::stable_sort(own.begin(), own.end(), [](const Region& a, const Region& b) {
        return a.replicated && !b.replicated;
      });
      std::uint64_t offset = own.front().offset;
      EXPECT_EQ(offset % kArenaAlignment, 0U);
      for (const Region& region : own) {
        EXPECT_EQ(region.offset, offset);
        EXPECT_EQ(region.block_stride, shape.replicated_bytes + shape.shard_bytes);
        offset += region.block_bytes;
      }
    }
  }
}

TEST(PlanArenaTest, KeepsGeometryOrderAndGroupsAndFingerprint) {
  const Geometry geometry = *load_geometry("tiny-draft", 2);
  for (const ArenaOrder order : kOrders) {
    const ArenaLayout layout = *plan_arena(geometry, options(order, 100));
    EXPECT_EQ(layout.fingerprint, geometry.fingerprint(order));
    ASSERT_EQ(layout.regions.size(), 10U);
    EXPECT_EQ(layout.regions[9].group, GroupId{1});
    EXPECT_EQ(layout.regions[9].kind, RegionKind::kValue);
    EXPECT_EQ(layout.groups[0].block_count, 100U);
    EXPECT_EQ(layout.groups[1].block_count, 150U);
    EXPECT_EQ(layout.total_bytes(), 100U * 8 * 2048 + 150U * 2 * 2048);
  }
}

TEST(PlanArenaTest, ErrorsNameTheSizeThatIsWrong) {
  const Geometry geometry = *load_geometry("tiny-state", 1);
  const auto message = [&](const ArenaOptions& wrong) {
    const Result<ArenaLayout> layout = plan_arena(geometry, wrong);
    return layout ? std::string("ok") : layout.error().to_string();
  };
  EXPECT_THAT(message(options(ArenaOrder::kLayerFirst, 0)), HasSubstr("gpu_blocks is 0"));
  EXPECT_THAT(message(options(ArenaOrder::kLayerFirst, 1)), HasSubstr("50 % of 1 gpu_blocks"));
  EXPECT_THAT(message(options(ArenaOrder::kLayerFirst, ~0U)), HasSubstr("4294967295"));
  EXPECT_THAT(message(options(ArenaOrder::kLayerFirst, 8, 100, 2)), HasSubstr("slot of 100 bytes"));
  EXPECT_THAT(message(options(ArenaOrder::kLayerFirst, 8, 65536, 0)), HasSubstr("has 0 slots"));
  EXPECT_THAT(message(options(ArenaOrder::kLayerFirst, 8, ~0ULL, 2)), HasSubstr("staging slot"));
  EXPECT_THAT(message(options(static_cast<ArenaOrder>(4), 8)), HasSubstr("arena order 4"));
}

TEST(PlanArenaTest, SizesBeyondTheLargestArenaAreRefusedNotWrapped) {
  Geometry geometry = *load_geometry("tiny", 1);
  geometry.groups[0].regions.assign(
      64, RegionSpec{RegionKind::kOther, DataType::kUint8, 0, false, kMaxRegionBlockBytes});
  // The most blocks overflow; with 2^17, only the sum of the regions is too large.
  for (const std::uint32_t blocks : {kMaxDeviceBlocks, 1U << 17}) {
    for (const ArenaOrder order : kOrders) {
      const Result<ArenaLayout> layout = plan_arena(geometry, options(order, blocks));
      ASSERT_FALSE(layout.has_value());
      EXPECT_EQ(layout.error().code, ErrorCode::kInvalidArgument);
      EXPECT_THAT(layout.error().message, HasSubstr("lower gpu_blocks"));
    }
  }
}

struct Corruption {
  const char* name;
  std::function<void(ArenaLayout&)> apply;
};

TEST(ArenaLayoutValidateTest, RejectsEverySingleFieldCorruption) {
  const std::vector<Corruption> corruptions = {
      {"order zero", [](ArenaLayout& l) { l.order = static_cast<ArenaOrder>(0); }},
      {"order unknown", [](ArenaLayout& l) { l.order = static_cast<ArenaOrder>(4); }},
      {"another order",
       [](ArenaLayout& l) {
         l.order =
             l.order == ArenaOrder::kBlockFirst ? ArenaOrder::kLayerFirst : ArenaOrder::kBlockFirst;
       }},
      {"fingerprint", [](ArenaLayout& l) { l.fingerprint.bytes[3] ^= 1; }},
      {"no segments", [](ArenaLayout& l) { l.segment_bytes.clear(); }},
      {"many segments", [](ArenaLayout& l) { l.segment_bytes.resize(10'000, 1); }},
      {"empty segment", [](ArenaLayout& l) { l.segment_bytes[0] = 0; }},
      {"short segment", [](ArenaLayout& l) { l.segment_bytes.back() -= 1; }},
      {"short first segment", [](ArenaLayout& l) { l.segment_bytes.front() -= 1; }},
      {"huge segment", [](ArenaLayout& l) { l.segment_bytes[0] = ~0ULL; }},
      {"fewer regions", [](ArenaLayout& l) { l.regions.pop_back(); }},
      {"more regions", [](ArenaLayout& l) { l.regions.push_back(l.regions.back()); }},
      {"regions swapped", [](ArenaLayout& l) { std::swap(l.regions[0], l.regions[1]); }},
      {"fewer groups", [](ArenaLayout& l) { l.groups.pop_back(); }},
      {"more groups", [](ArenaLayout& l) { l.groups.push_back(l.groups.back()); }},
      {"no blocks", [](ArenaLayout& l) { l.groups[0].block_count = 0; }},
      {"one block more", [](ArenaLayout& l) { l.groups[1].block_count += 1; }},
      {"one block more in group 0", [](ArenaLayout& l) { l.groups[0].block_count += 1; }},
      {"very many blocks", [](ArenaLayout& l) { l.groups[0].block_count = ~0U; }},
      {"staging segment", [](ArenaLayout& l) { l.staging.segment = 999; }},
      {"staging offset on a region", [](ArenaLayout& l) { l.staging.offset -= 256; }},
      {"staging offset past the end", [](ArenaLayout& l) { l.staging.offset += 256; }},
      {"staging offset that overflows", [](ArenaLayout& l) { l.staging.offset = ~0ULL; }},
      {"larger staging slots", [](ArenaLayout& l) { l.staging.slot_bytes += 256; }},
      {"empty staging slots", [](ArenaLayout& l) { l.staging.slot_bytes = 0; }},
      {"huge staging slots", [](ArenaLayout& l) { l.staging.slot_bytes = 1ULL << 63; }},
      {"more staging slots", [](ArenaLayout& l) { l.staging.slots += 1; }},
      {"no staging slots but a place", [](ArenaLayout& l) { l.staging.slots = 0; }},
      {"very many staging slots", [](ArenaLayout& l) { l.staging.slots = ~0U; }},
  };
  const std::vector<std::pair<const char*, std::function<void(Region&)>>> of_regions = {
      {"kind", [](Region& r) { r.kind = RegionKind::kOther; }},
      {"layer", [](Region& r) { r.layer += 1; }},
      {"group", [](Region& r) { r.group.value ^= 1; }},
      {"replicated", [](Region& r) { r.replicated = !r.replicated; }},
      {"segment", [](Region& r) { r.segment = ~0U; }},
      {"offset on the next", [](Region& r) { r.offset += 8; }},
      {"offset that overflows", [](Region& r) { r.offset = ~0ULL; }},
      {"offset far away", [](Region& r) { r.offset = 1ULL << 40; }},
      {"stride too small", [](Region& r) { r.block_stride = r.block_bytes - 1; }},
      {"no stride", [](Region& r) { r.block_stride = 0; }},
      {"stride larger", [](Region& r) { r.block_stride += 8; }},
      {"stride that overflows", [](Region& r) { r.block_stride = 1ULL << 62; }},
      {"bytes fewer", [](Region& r) { r.block_bytes -= 1; }},
      {"bytes more", [](Region& r) { r.block_bytes += 1; }},
      {"no bytes", [](Region& r) { r.block_bytes = 0; }},
  };
  const Geometry geometry = *load_geometry("tiny-window", 1);
  for (const ArenaOrder order : kOrders) {
    const ArenaLayout good = *plan_arena(geometry, options(order, 4, 32768, 2));
    ASSERT_TRUE(good.validate(geometry).has_value());
    const auto expect_bad = [&](const ArenaLayout& layout, const std::string& name) {
      const Status status = layout.validate(geometry);
      ASSERT_FALSE(status.has_value()) << to_string(order) << ": " << name;
      EXPECT_TRUE(status.error().code == ErrorCode::kProtocol ||
                  status.error().code == ErrorCode::kGeometryMismatch)
          << status.error().to_string();
    };
    for (const Corruption& corruption : corruptions) {
      // In its own segment the ring has no region before it.
      if (order == ArenaOrder::kLayerFirstMany &&
          std::string_view(corruption.name) == "staging offset on a region") {
        continue;
      }
      ArenaLayout layout = good;
      corruption.apply(layout);
      expect_bad(layout, corruption.name);
    }
    for (std::size_t i = 0; i < good.regions.size(); ++i) {
      for (const auto& [name, apply] : of_regions) {
        ArenaLayout layout = good;
        apply(layout.regions[i]);
        expect_bad(layout, fmt::format("region {}: {}", i, name));
      }
    }
  }
}

TEST(ArenaLayoutValidateTest, AcceptsNothingUnsoundUnderRandomCorruption) {
  std::mt19937 random(99);
  const Geometry geometry = *load_geometry("tiny-window", 1);
  int accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    ArenaLayout layout =
        *plan_arena(geometry, options(kOrders[static_cast<std::size_t>(round) % 3], 4, 32768, 2));
    Region& region = layout.regions[random() % layout.regions.size()];
    switch (random() % 5) {
      case 0: region.offset = random() % (layout.segment_bytes[0] + 512); break;
      case 1: region.block_stride = random() % 65536; break;
      case 2: region.segment = static_cast<std::uint32_t>(random() % 4); break;
      case 3: layout.staging.offset = random() % (layout.segment_bytes.back() + 512); break;
      default: layout.groups[random() % 2].block_count = 1 + random() % 8; break;
    }
    if (!layout.validate(geometry)) continue;
    ++accepted;
    ASSERT_TRUE(are_sound(layout, slices(layout))) << round;
  }
  EXPECT_GT(accepted, 0);
}

TEST(ArenaLayoutValidateTest, AcceptsKeysAndValuesInterleavedPerBlock) {
  const Geometry geometry = *load_geometry("tiny", 1);
  ArenaLayout layout = *plan_arena(geometry, options(ArenaOrder::kLayerFirst, 4));
  // Layer 0 as one tensor [block][K, V].
  layout.regions[0].block_stride = layout.regions[1].block_stride = 8192;
  layout.regions[1].offset = 4096;
  EXPECT_TRUE(layout.validate(geometry).has_value());
  layout.regions[1].offset = 4095;
  EXPECT_THAT(layout.validate(geometry).error().message, HasSubstr("overlaps"));
}

TEST(ArenaLayoutValidateTest, RejectsInterleavedRegionsWithDifferentStrides) {
  const Geometry geometry = *load_geometry("tiny", 1);
  ArenaLayout layout = *plan_arena(geometry, options(ArenaOrder::kLayerFirst, 4));
  // Block 0 of both lies side by side; block 1 of the second meets block 2 of the first.
  layout.regions[0].block_stride = 8192;
  layout.regions[1].offset = 4096;
  layout.regions[1].block_stride = 12288;
  layout.segment_bytes[0] += 1U << 20;
  for (std::size_t i = 2; i < layout.regions.size(); ++i) layout.regions[i].offset += 1U << 20;
  EXPECT_THAT(layout.validate(geometry).error().message, HasSubstr("overlaps"));
  layout.regions[1].block_stride = 8192;
  EXPECT_TRUE(layout.validate(geometry).has_value());
}

TEST(ArenaLayoutValidateTest, RejectsBlockFirstBlocksThatAreNotTheirPackedForm) {
  const Geometry geometry = *load_geometry("tiny", 1);
  const ArenaLayout good = *plan_arena(geometry, options(ArenaOrder::kBlockFirst, 4));
  ArenaLayout swapped = good;
  std::swap(swapped.regions[0].offset, swapped.regions[1].offset);
  EXPECT_THAT(swapped.validate(geometry).error().message, HasSubstr("block-first group 0"));
  ArenaLayout gap = good;
  gap.segment_bytes[0] += 1U << 20;
  for (Region& region : gap.regions) region.block_stride += 4096;
  EXPECT_TRUE(gap.validate(geometry).has_value());
  gap.regions.back().offset += 4096;
  EXPECT_THAT(gap.validate(geometry).error().message, HasSubstr("block-first group 0"));
}

TEST(ArenaLayoutValidateTest, AnotherGeometryIsAMismatch) {
  const ArenaLayout layout =
      *plan_arena(*load_geometry("tiny", 1), options(ArenaOrder::kLayerFirst, 4));
  const Status status = layout.validate(*load_geometry("tiny", 2));
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ErrorCode::kGeometryMismatch);
}

TEST(ModelOnTheWireTest, GeometryAndLayoutComeBackFieldByField) {
  for (const PresetInfo& info : geometry_presets()) {
    const Geometry geometry = *load_geometry(info.name, info.default_ranks);
    const Result<Geometry> seen = decode<Geometry>(encode(geometry), "Geometry");
    ASSERT_TRUE(seen.has_value()) << seen.error().to_string();
    EXPECT_EQ(*seen, geometry);
    for (const ArenaOrder order : kOrders) {
      const ArenaLayout layout = *plan_arena(geometry, options(order, 64, 64U << 20, 4));
      const Result<ArenaLayout> got = decode<ArenaLayout>(encode(layout), "ArenaLayout");
      ASSERT_TRUE(got.has_value()) << got.error().to_string();
      EXPECT_EQ(*got, layout);
      EXPECT_TRUE(got->validate(*seen).has_value());
    }
  }
}

}  // namespace
}  // namespace kvferry::ipc
