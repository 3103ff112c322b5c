// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/kernels/host_twins.hpp"

#include "kernels/random_layout.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace kvferry::kernels {
namespace {

BlockIds to_ids(const std::vector<std::uint32_t>& ids) {
  BlockIds out;
  out.count = static_cast<std::uint32_t>(ids.size());
  std::copy(ids.begin(), ids.end(), out.ids);
  return out;
}

SeededBlocks to_seeded(const std::vector<std::uint32_t>& ids, std::uint64_t seed) {
  SeededBlocks out;
  for (const std::uint32_t id : ids) out.blocks[out.count++] = SeededBlock{seed + id, id, 0};
  return out;
}

/// The pattern's byte at an offset, from its definition alone.
unsigned char pattern_byte(std::uint64_t seed, std::uint64_t salt, std::uint64_t offset) {
  return static_cast<unsigned char>(pattern_word(seed, salt, offset / 8) >> (8 * (offset % 8)));
}

constexpr std::uint32_t kLayouts = 200;

TEST(HostTwinsTest, GatherMovesExactlyTheSlices) {
  for (std::uint32_t seed = 0; seed < kLayouts; ++seed) {
    RandomLayout layout(seed);
    const auto ids = layout.draw_ids();
    std::vector<unsigned char> packed(layout.packed_stride * ids.size() + 1, 0xEE);
    std::vector<unsigned char> expected = packed;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      for (std::size_t r = 0; r < layout.regions.size(); ++r) {
        for (std::uint64_t b = 0; b < layout.regions[r].block_bytes; ++b) {
          expected[i * layout.packed_stride + layout.regions[r].packed_offset + b] =
              layout.slice(r, ids[i])[b];
        }
      }
    }
    const std::vector<unsigned char> arena_before = layout.arena;
    host::gather({layout.regions.data(), static_cast<std::uint32_t>(layout.regions.size()),
                  packed.data(), layout.packed_stride},
                 to_ids(ids));
    ASSERT_EQ(packed, expected) << seed;
    ASSERT_EQ(layout.arena, arena_before) << seed;
  }
}

TEST(HostTwinsTest, ScatterWritesExactlyTheSlices) {
  for (std::uint32_t seed = 0; seed < kLayouts; ++seed) {
    RandomLayout layout(seed);
    const auto ids = layout.draw_ids();
    std::vector<unsigned char> packed(layout.packed_stride * ids.size() + 1);
    for (unsigned char& byte : packed) byte = static_cast<unsigned char>(layout.draw(0, 255));
    std::vector<unsigned char> expected = layout.arena;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      for (std::size_t r = 0; r < layout.regions.size(); ++r) {
        for (std::uint64_t b = 0; b < layout.regions[r].block_bytes; ++b) {
          expected[static_cast<std::size_t>(layout.slice(r, ids[i]) - layout.arena.data()) + b] =
              packed[i * layout.packed_stride + layout.regions[r].packed_offset + b];
        }
      }
    }
    host::scatter({layout.regions.data(), static_cast<std::uint32_t>(layout.regions.size()),
                   packed.data(), layout.packed_stride},
                  to_ids(ids));
    ASSERT_EQ(layout.arena, expected) << seed;
  }
}

TEST(HostTwinsTest, FillFollowsThePatternByteForByteAndTouchesNothingElse) {
  for (std::uint32_t seed = 0; seed < kLayouts; ++seed) {
    RandomLayout layout(seed);
    const auto ids = layout.draw_ids();
    std::vector<unsigned char> expected = layout.arena;
    for (const std::uint32_t id : ids) {
      for (std::size_t r = 0; r < layout.regions.size(); ++r) {
        for (std::uint64_t b = 0; b < layout.regions[r].block_bytes; ++b) {
          expected[static_cast<std::size_t>(layout.slice(r, id) - layout.arena.data()) + b] =
              pattern_byte(900 + id, layout.regions[r].salt, b);
        }
      }
    }
    const auto count = static_cast<std::uint32_t>(layout.regions.size());
    host::fill_pattern(layout.regions.data(), count, to_seeded(ids, 900));
    ASSERT_EQ(layout.arena, expected) << seed;

    std::array<std::uint64_t, kMaxSeededPerLaunch> mismatches{};
    host::verify_pattern(layout.regions.data(), count, to_seeded(ids, 900), mismatches.data());
    ASSERT_EQ(std::count(mismatches.begin(), mismatches.end(), 0U), kMaxSeededPerLaunch) << seed;
  }
}

TEST(HostTwinsTest, VerifyCountsEachWrongWordOfTheRightBlock) {
  std::uint32_t flips = 0;
  for (std::uint32_t seed = 0; seed < kLayouts; ++seed) {
    RandomLayout layout(seed);
    const auto ids = layout.draw_ids();
    if (ids.empty()) continue;
    const auto count = static_cast<std::uint32_t>(layout.regions.size());
    const SeededBlocks blocks = to_seeded(ids, 7);
    host::fill_pattern(layout.regions.data(), count, blocks);
    const std::size_t victim = layout.draw(std::uint64_t{0}, ids.size() - 1);
    const std::size_t region = layout.draw(std::uint64_t{0}, layout.regions.size() - 1);
    const std::uint64_t bytes = layout.regions[region].block_bytes;
    // One bit in the first and, where it is another word, in the last byte.
    layout.slice(region, ids[victim])[0] ^= 1U;
    layout.slice(region, ids[victim])[bytes - 1] ^= 0x80U;
    const std::uint64_t expected = bytes > 8 ? 2 : 1;
    std::vector<std::uint64_t> mismatches(ids.size(), 5);
    host::verify_pattern(layout.regions.data(), count, blocks, mismatches.data());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ASSERT_EQ(mismatches[i], i == victim ? 5 + expected : 5U) << seed;
    }
    ++flips;
  }
  EXPECT_GT(flips, kLayouts / 2);
}

TEST(HostTwinsTest, ChecksumFollowsItsDefinitionAndSeesMovedWords) {
  for (std::uint32_t seed = 0; seed < kLayouts; ++seed) {
    RandomLayout layout(seed);
    const auto ids = layout.draw_ids();
    const auto count = static_cast<std::uint32_t>(layout.regions.size());
    std::vector<std::uint64_t> sums(ids.size() + 1, 1);
    host::checksum(layout.regions.data(), count, to_ids(ids), sums.data());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::uint64_t expected = 0;
      for (std::uint32_t r = 0; r < count; ++r) {
        std::vector<unsigned char> slice(layout.slice(r, ids[i]),
                                         layout.slice(r, ids[i]) + layout.regions[r].block_bytes);
        slice.resize((slice.size() + 7) / 8 * 8);
        for (std::uint64_t w = 0; w < slice.size() / 8; ++w) {
          std::uint64_t word = 0;
          for (unsigned b = 0; b < 8; ++b) word |= std::uint64_t{slice[w * 8 + b]} << (8 * b);
          expected += checksum_term(word, r, w);
        }
      }
      ASSERT_EQ(sums[i], expected) << seed;
    }
    ASSERT_EQ(sums.back(), 1U);
  }
  // Two different words exchanged within a slice and across two regions.
  std::array<std::uint64_t, 4> words = {1, 2, 3, 4};
  auto* const base = reinterpret_cast<unsigned char*>(words.data());
  const std::array<StridedRegion, 2> regions = {StridedRegion{base, 16, 16, 0, 0},
                                                StridedRegion{base + 16, 16, 16, 16, 0}};
  const auto sum = [&] {
    std::uint64_t out = 0;
    host::checksum(regions.data(), 2, to_ids({0}), &out);
    return out;
  };
  const std::uint64_t original = sum();
  std::swap(words[0], words[1]);
  EXPECT_NE(sum(), original);
  std::swap(words[0], words[1]);
  std::swap(words[0], words[2]);
  EXPECT_NE(sum(), original);
  std::swap(words[0], words[2]);
  EXPECT_EQ(sum(), original);
}

TEST(HostTwinsTest, ScatterThenGatherIsTheIdentityForAFullLaunch) {
  constexpr std::uint64_t kBlockBytes = 4096;
  std::vector<unsigned char> arena(kBlockBytes * kMaxBlocksPerLaunch);
  const StridedRegion region{arena.data(), kBlockBytes, kBlockBytes, 0, 3};
  std::vector<std::uint32_t> ids(kMaxBlocksPerLaunch);
  std::iota(ids.rbegin(), ids.rend(), 0U);
  std::vector<unsigned char> packed(arena.size());
  std::vector<unsigned char> back(arena.size());
  std::mt19937_64 random(1);
  for (unsigned char& byte : packed) byte = static_cast<unsigned char>(random());
  host::scatter({&region, 1, packed.data(), kBlockBytes}, to_ids(ids));
  EXPECT_NE(arena, packed);
  host::gather({&region, 1, back.data(), kBlockBytes}, to_ids(ids));
  EXPECT_EQ(back, packed);
}

TEST(HostTwinsTest, OffsetsBeyondFourGibibytesAreReached) {
  constexpr std::uint64_t kSpan = 9ULL << 30;
  void* const space = ::mmap(nullptr, kSpan, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(space, MAP_FAILED);
  auto* const base = static_cast<unsigned char*>(space);
  constexpr std::uint64_t kStride = (64ULL << 20) + 8;
  const StridedRegion region{base, kStride, 1001, 5, 9};
  const std::vector<std::uint32_t> ids = {100, 0, 70};  // 100 * stride > 6 GiB.
  host::fill_pattern(&region, 1, to_seeded(ids, 40));
  EXPECT_EQ(base[100 * kStride + 1000], pattern_byte(140, 9, 1000));
  EXPECT_EQ(base[100 * kStride + 1001], 0);

  // The packed side, too: 3 GiB apart.
  unsigned char* const packed = base + (1ULL << 20);
  constexpr std::uint64_t kPackedStride = 3ULL << 30;
  host::gather({&region, 1, packed, kPackedStride}, to_ids({0, 70, 100}));
  EXPECT_EQ(std::memcmp(packed + 2 * kPackedStride + 5, base + 100 * kStride, 1001), 0);
  EXPECT_EQ(std::memcmp(packed + 1 * kPackedStride + 5, base + 70 * kStride, 1001), 0);
  std::array<std::uint64_t, 3> mismatches{};
  host::verify_pattern(&region, 1, to_seeded(ids, 40), mismatches.data());
  EXPECT_EQ(mismatches, (std::array<std::uint64_t, 3>{}));
  ::munmap(space, kSpan);
}

}  // namespace
}  // namespace kvferry::kernels
