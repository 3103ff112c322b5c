// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "scheduler/paged_cache.hpp"

#include "kvferry/ipc/base/clock.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <set>

namespace kvferry::worker {
namespace {

using Admission = PagedCache::Admission;
using testing::IsEmpty;
using testing::SizeIs;

constexpr std::uint32_t kTokens = 4;

ipc::Geometry hybrid() {
  ipc::Geometry geometry;
  geometry.name = "hybrid";
  geometry.tokens_per_block = kTokens;
  geometry.groups.resize(3);
  geometry.groups[0].name = "main";
  geometry.groups[1].name = "window";
  geometry.groups[1].rule = ipc::HitRule::kSlidingWindow;
  geometry.groups[1].window_blocks = 2;
  geometry.groups[2].name = "state";
  geometry.groups[2].rule = ipc::HitRule::kLastState;
  return geometry;
}

Sequence sequence_of(std::uint32_t first, std::uint32_t length) {
  Sequence sequence;
  sequence.tokens.resize(length);
  std::iota(sequence.tokens.begin(), sequence.tokens.end(), first);
  sequence.prompt_tokens = length;
  hash_full_blocks(sequence, kTokens);
  return sequence;
}

class PagedCacheTest : public testing::Test {
 protected:
  PagedCacheTest() { remake(20); }
  void remake(std::uint32_t blocks) { cache_.remake(std::array{blocks, blocks, blocks}); }
  static BlockSource nowhere(ipc::GroupId, std::uint32_t) { return BlockSource::kNowhere; }
  static BlockSource everywhere(ipc::GroupId, std::uint32_t) { return BlockSource::kHost; }
  Admission admit(Sequence& sequence) {
    loads_.clear();
    return cache_.admit(sequence, nowhere, loads_);
  }
  /// As after a pass that computed all its tokens.
  void compute(Sequence& sequence) {
    sequence.computed = sequence.length();
    (void)cache_.publish(sequence);
    cache_.judge(sequence, policy_);
  }

  const ipc::Geometry geometry_ = hybrid();
  PagedCache cache_{geometry_};
  WritePolicy policy_;
  std::vector<LoadItem> loads_;
};

TEST_F(PagedCacheTest, APrefixIsFoundOnceItWasComputed) {
  Sequence first = sequence_of(0, 14);
  ASSERT_EQ(admit(first), Admission::kReady);
  EXPECT_EQ(first.computed, 0U);
  Sequence early = sequence_of(0, 14);
  ASSERT_EQ(admit(early), Admission::kReady);
  EXPECT_EQ(early.computed, 0U) << "what nobody has computed yet was found";
  cache_.release(early);
  compute(first);
  Sequence second = sequence_of(0, 14);
  ASSERT_EQ(admit(second), Admission::kReady);
  EXPECT_EQ(second.computed, 12U);
  EXPECT_EQ(second.table[0].at(2).block, first.table[0].at(2).block);
  EXPECT_NE(second.table[0].at(3).block, first.table[0].at(3).block) << "it is not full";
  cache_.release(first);
  cache_.release(second);
  Sequence other = sequence_of(1, 14);
  ASSERT_EQ(admit(other), Admission::kReady);
  EXPECT_EQ(other.computed, 0U);
}

TEST_F(PagedCacheTest, WhatIsForgottenIsNotFoundAndStaysWithWhoHasIt) {
  Sequence first = sequence_of(0, 8);
  ASSERT_EQ(admit(first), Admission::kReady);
  compute(first);
  cache_.forget_contents();
  Sequence second = sequence_of(0, 8);
  ASSERT_EQ(admit(second), Admission::kReady);
  EXPECT_EQ(second.computed, 0U);
  EXPECT_NE(second.table[0].at(0).block, first.table[0].at(0).block);
  cache_.release(first);
  cache_.release(second);
  EXPECT_EQ(cache_.least_available(), 20U);
}

TEST_F(PagedCacheTest, BlocksOfHostMemoryAreLoadedBeforeTheyCount) {
  Sequence sequence = sequence_of(0, 10);
  ASSERT_EQ(cache_.admit(sequence, everywhere, loads_), Admission::kLoading);
  EXPECT_EQ(sequence.computed, 8U);
  EXPECT_THAT(loads_, SizeIs(2 + 2 + 1));
  EXPECT_THAT(cache_.unstored(sequence), IsEmpty()) << "they are not there yet";
  ASSERT_TRUE(cache_.publish(sequence));
  cache_.judge(sequence, policy_);
  EXPECT_THAT(cache_.unstored(sequence), SizeIs(2 + 2 + 1));
  for (const auto& block : cache_.unstored(sequence)) {
    cache_.mark_stored(block);
  }
  EXPECT_THAT(cache_.unstored(sequence), IsEmpty());
  EXPECT_FALSE(cache_.publish(sequence)) << "nothing became full";
}

TEST_F(PagedCacheTest, EachUseOfABlockIsJudgedOnceAndWhatIsWantedIsUnstored) {
  policy_ = WritePolicy({.mode = WriteMode::kSelective, .uses = 2});
  Sequence first = sequence_of(0, 8);
  ASSERT_EQ(admit(first), Admission::kReady);
  compute(first);
  cache_.judge(first, policy_);
  EXPECT_THAT(cache_.unstored(first), IsEmpty()) << "one use was counted twice";
  Sequence second = sequence_of(0, 8);
  ASSERT_EQ(admit(second), Admission::kReady);
  cache_.judge(second, policy_);
  // Of the state, only the last block is found.
  EXPECT_THAT(cache_.unstored(second), SizeIs(2 + 2 + 1));
  EXPECT_THAT(cache_.unstored(first), IsEmpty());
}

TEST_F(PagedCacheTest, OfUnstoredBlocksTheFirstOfThePrefixAreKeptInEveryGroup) {
  Sequence sequence = sequence_of(0, 4 * kTokens);
  ASSERT_EQ(admit(sequence), Admission::kReady);
  compute(sequence);
  std::vector<PagedCache::Unstored> blocks = cache_.unstored(sequence);
  ASSERT_GT(blocks.size(), 5U);
  std::reverse(blocks.begin(), blocks.end());
  std::vector<std::uint32_t> first;
  for (const auto& block : blocks) first.push_back(block.position);
  std::sort(first.begin(), first.end());
  first.resize(5);
  PagedCache::keep_first(blocks, 5);
  std::vector<std::uint32_t> kept;
  for (const auto& block : blocks) {
    kept.push_back(block.position);
    EXPECT_EQ(block.target.block, sequence.hashes[block.position]);
  }
  EXPECT_EQ(kept, first);
  PagedCache::keep_first(blocks, 9);
  EXPECT_THAT(blocks, SizeIs(5));
  cache_.release(sequence);
}

TEST_F(PagedCacheTest, UnitsAreStoredWholeAndPartialOnesOnlyWhereTheSequenceMayBeContinued) {
  PagedCache cache(geometry_, 4);
  cache.remake(std::array<std::uint32_t, 3>{40, 40, 40});
  const auto full_group = [&cache](Sequence& sequence) {
    std::vector<std::pair<std::uint32_t, std::size_t>> units;
    for (const auto& unit : cache.unstored(sequence)) {
      if (unit.target.group.value != 0) continue;
      EXPECT_EQ(unit.target.block, sequence.hashes[unit.position + unit.blocks.size() - 1]);
      EXPECT_EQ(unit.target.parts, (std::uint64_t{1} << unit.blocks.size()) - 1);
      units.emplace_back(unit.position, unit.blocks.size());
    }
    return units;
  };
  Sequence sequence = sequence_of(0, 11 * kTokens);
  sequence.prompt_tokens = 6 * kTokens + 1;
  sequence.max_tokens = 5 * kTokens;
  ASSERT_EQ(cache.admit(sequence, nowhere, loads_), Admission::kReady);
  using Units = std::vector<std::pair<std::uint32_t, std::size_t>>;
  const std::vector<std::pair<std::uint32_t, Units>> steps = {
      {3, {}},       {5, {{0, 4}}},         {6, {{0, 4}, {4, 2}}},  // where its prompt ends
      {7, {{0, 4}}}, {9, {{0, 4}, {4, 4}}}, {11, {{0, 4}, {4, 4}, {8, 3}}}};
  for (const auto& [blocks, units] : steps) {
    sequence.computed = blocks * kTokens;
    (void)cache.publish(sequence);
    cache.judge(sequence, policy_);
    EXPECT_EQ(full_group(sequence), units) << blocks;
  }
  for (const auto& unit : cache.unstored(sequence)) cache.mark_stored(unit);
  EXPECT_THAT(cache.unstored(sequence), IsEmpty());
  cache.release(sequence);
}

TEST_F(PagedCacheTest, AUnitThatLacksPartsIsUnstoredForWhoHasThemAndAWholeOneForNobody) {
  PagedCache cache(geometry_, 4);
  cache.remake(std::array<std::uint32_t, 3>{40, 40, 40});
  constexpr ipc::GroupId kWindow{1};
  Sequence sequence = sequence_of(0, 8 * kTokens);
  ASSERT_EQ(cache.admit(sequence, nowhere, loads_), Admission::kReady);
  sequence.computed = sequence.length();
  ASSERT_TRUE(cache.publish(sequence));
  cache.judge(sequence, policy_);
  const auto unstored = [&] {
    Sequence again = sequence_of(0, 8 * kTokens);
    EXPECT_EQ(cache.admit(again, nowhere, loads_), Admission::kReady);
    cache.judge(again, policy_);
    auto units = cache.unstored(again);
    cache.release(again);
    return units;
  };
  // For a request that finds them on the device.
  const auto parts = [&](std::uint32_t group) {
    std::vector<std::uint64_t> wanted;
    for (const auto& unit : unstored()) {
      if (unit.target.group.value == group) wanted.push_back(unit.target.parts);
    }
    return wanted;
  };
  using Parts = std::vector<std::uint64_t>;
  ASSERT_EQ(parts(1), Parts{0b1100}) << "its window of two blocks";
  // Of a unit that another one made, the last part came from host memory: what else it has, who
  // knows.
  cache.mark_loaded(kWindow, {sequence.hashes[7], 3});
  EXPECT_EQ(parts(1), Parts{0b1100});
  cache.mark_loaded(kWindow, {sequence.hashes[7], 2});
  EXPECT_EQ(parts(1), Parts{});
  cache.mark_not_found(kWindow, {sequence.hashes[7], 2});
  EXPECT_EQ(parts(1), Parts{0b1100}) << "it has gone since";
  for (const auto& unit : unstored()) cache.mark_stored(unit);
  EXPECT_EQ(parts(1), Parts{});
  // A full group's unit has all its parts when it has one.
  cache.mark_not_found({}, {sequence.hashes[3], 0});
  EXPECT_EQ(parts(0), Parts{0b1111});
  cache.mark_loaded({}, {sequence.hashes[3], 1});
  EXPECT_EQ(parts(0), Parts{});
  cache.release(sequence);
}

TEST_F(PagedCacheTest, WhatIsNotStoredIsTriedAgainAndOfWhatIsUnderWayNothingIsSaid) {
  Sequence sequence = sequence_of(0, 6 * kTokens);
  ASSERT_EQ(admit(sequence), Admission::kReady);
  compute(sequence);
  const auto positions = [&](std::size_t most, std::uint32_t under_way) {
    std::vector<std::uint32_t> found;
    const auto is_under_way = [&](const StoreTarget& target) {
      return target.block == sequence.hashes[under_way];
    };
    for (const auto& unit : cache_.unstored(sequence, most, is_under_way)) {
      if (unit.target.group.value == 0) found.push_back(unit.position);
    }
    return found;
  };
  using Positions = std::vector<std::uint32_t>;
  EXPECT_EQ(positions(2, 0), (Positions{1, 2, 3})) << "enough to tell that there are more";
  for (const auto& unit : cache_.unstored(sequence)) {
    if (unit.position != 1) cache_.mark_stored(unit);
  }
  EXPECT_EQ(positions(SIZE_MAX, 5), Positions{1});
  EXPECT_EQ(positions(SIZE_MAX, 5), Positions{1}) << "its store failed";
  for (const auto& unit : cache_.unstored(sequence)) cache_.mark_stored(unit);
  EXPECT_EQ(positions(SIZE_MAX, 5), Positions{});
  cache_.release(sequence);
}

// Each step looks at what it added. If it looked at all there is, this would take minutes.
TEST_F(PagedCacheTest, ALongGenerationCostsAsMuchByStepAsAShortOne) {
  constexpr std::uint32_t kBlocks = 40'000;
  remake(kBlocks + 2);
  Sequence sequence = sequence_of(0, kTokens);
  ASSERT_EQ(admit(sequence), Admission::kReady);
  const auto deadline = ipc::MonotonicClock::now() + std::chrono::seconds(20);
  std::size_t stored = 0;
  for (std::uint32_t block = 1; block < kBlocks; ++block) {
    compute(sequence);
    for (const auto& unit : cache_.unstored(sequence)) {
      cache_.mark_stored(unit);
      stored += unit.target.group.value == 0 ? 1 : 0;
    }
    cache_.trim(sequence);
    for (std::uint32_t i = 0; i < kTokens; ++i) sequence.tokens.push_back(block + i);
    hash_full_blocks(sequence, kTokens);
    ASSERT_TRUE(cache_.extend(sequence));
    ASSERT_LT(ipc::MonotonicClock::now(), deadline) << "at block " << block << " of " << kBlocks;
  }
  EXPECT_EQ(stored, kBlocks - 1);
  cache_.release(sequence);
}

TEST_F(PagedCacheTest, WhatIsTakenAheadLeavesRoomForWhatRuns) {
  Sequence sequence = sequence_of(0, 4 * kTokens + 1);
  const PrefixPlan wanted = cache_.plan(sequence, everywhere);
  const std::vector<std::uint64_t> none(3);
  const auto take = [&](std::uint64_t spare) {
    return cache_.take_ahead(sequence, wanted, none, 1, spare);
  };
  EXPECT_THAT(take(17), IsEmpty()) << "20 blocks, of which 4 are taken";
  EXPECT_EQ(cache_.least_available(), 20U);
  const auto ahead = take(16);
  EXPECT_THAT(ahead, testing::Not(IsEmpty()));
  EXPECT_EQ(cache_.least_available(), 16U);
  for (const PagedCache::Ahead& block : ahead) cache_.release(block.group, block.block);
}

TEST_F(PagedCacheTest, RoomThatHoldsUnstoredContentsIsWrittenBackBeforeASequenceIsLetIn) {
  remake(4);
  policy_ = WritePolicy({.mode = WriteMode::kWriteBack});
  const std::array<std::uint64_t, 3> none{};
  Sequence first = sequence_of(0, 12);
  ASSERT_EQ(admit(first), Admission::kReady);
  compute(first);
  EXPECT_THAT(cache_.unstored(first), IsEmpty());
  cache_.release(first);
  Sequence second = sequence_of(100, 8);
  const PrefixPlan wanted = cache_.plan(second, nowhere);
  ASSERT_TRUE(cache_.fits(wanted, second));
  const WriteBackPlan room = cache_.plan_room(second, wanted, 0, none, policy_);
  EXPECT_TRUE(room.waits);
  ASSERT_THAT(room.stores, testing::Not(IsEmpty()));
  EXPECT_EQ(room.stores.front().hash, first.hashes.back()) << "the deepest one goes first";
  EXPECT_EQ(room.stores.front().before, first.hashes[1]);
  for (const EvictedBlock& block : room.stores) {
    cache_.acquire(block.group, block.block);
    PagedCache::Unstored unit;
    unit.target = {block.group, block.hash, block.before};
    unit.blocks = {block.block};
    cache_.mark_stored(unit);
    cache_.release_as_oldest(block.group, block.block);
  }
  EXPECT_FALSE(cache_.plan_room(second, wanted, 0, none, policy_).waits);
  // What goes on with the first one needs none of what it finds to be stored.
  Sequence third = sequence_of(0, 14);
  const PrefixPlan found = cache_.plan(third, nowhere);
  EXPECT_EQ(found.hit_blocks, 3U);
  for (const EvictedBlock& block : cache_.plan_room(third, found, 0, none, policy_).stores) {
    EXPECT_EQ(std::find(third.hashes.begin(), third.hashes.end(), block.hash), third.hashes.end());
  }
}

TEST_F(PagedCacheTest, NoRoomChangesNothing) {
  remake(4);
  Sequence first = sequence_of(0, 12);
  ASSERT_EQ(admit(first), Admission::kReady);
  Sequence second = sequence_of(100, 12);
  EXPECT_FALSE(cache_.may_fit(second));
  EXPECT_EQ(admit(second), Admission::kNoRoom);
  EXPECT_THAT(second.table, IsEmpty());
  cache_.release(first);
  EXPECT_EQ(cache_.least_available(), 4U);
  EXPECT_EQ(admit(second), Admission::kReady);
}

TEST_F(PagedCacheTest, ASequenceThatCanNeverFitIsToldTheGroupAndBothNumbers) {
  remake(4);
  EXPECT_TRUE(cache_.check_fits(16).has_value());
  const auto refused = cache_.check_fits(17);
  ASSERT_FALSE(refused.has_value());
  EXPECT_THAT(refused.error().message, testing::HasSubstr("5 blocks of group 'main'"));
  EXPECT_THAT(refused.error().message, testing::HasSubstr("has 4"));
}

TEST_F(PagedCacheTest, WindowsAndStatesLetGoOfWhatIsBehindThem) {
  Sequence sequence = sequence_of(0, 3);
  ASSERT_EQ(admit(sequence), Admission::kReady);
  for (std::uint32_t token = 3; token < 40; ++token) {
    compute(sequence);
    cache_.trim(sequence);
    sequence.tokens.push_back(token);
    hash_full_blocks(sequence, kTokens);
    ASSERT_TRUE(cache_.extend(sequence));
    EXPECT_THAT(sequence.table[0], SizeIs(token / kTokens + 1));
    EXPECT_LE(sequence.table[1].size(), 3U);
    EXPECT_LE(sequence.table[2].size(), 2U);
  }
}

/// Whatever is done, in any order: no block is with two sequences that did not find it, and all are
/// back in the end.
TEST_F(PagedCacheTest, NoBlockIsHandedOutTwice) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 random(seed);
    remake(24);
    std::vector<Sequence> running;
    for (int step = 0; step < 400; ++step) {
      switch (random() % 6) {
        case 0:
        case 1: {
          Sequence sequence = sequence_of(static_cast<std::uint32_t>(random() % 3) * 7,
                                          1 + static_cast<std::uint32_t>(random() % 30));
          loads_.clear();
          const bool in_host = random() % 3 == 0;
          if (cache_.admit(sequence, in_host ? everywhere : nowhere, loads_) !=
              Admission::kNoRoom) {
            running.push_back(std::move(sequence));
          }
          break;
        }
        case 2:
          if (!running.empty()) compute(running[random() % running.size()]);
          break;
        case 3:
          if (!running.empty()) {
            Sequence& grown = running[random() % running.size()];
            compute(grown);
            cache_.trim(grown);
            grown.tokens.push_back(static_cast<std::uint32_t>(random()));
            hash_full_blocks(grown, kTokens);
            if (!cache_.extend(grown)) {
              cache_.release(grown);
              std::swap(grown, running.back());
              running.pop_back();
            }
          }
          break;
        case 4:
          if (!running.empty()) {
            std::swap(running[random() % running.size()], running.back());
            cache_.release(running.back());
            running.pop_back();
          }
          break;
        default:
          if (random() % 10 == 0) cache_.forget_contents();
          break;
      }
      for (std::uint32_t group = 0; group < 3; ++group) {
        std::set<std::uint32_t> own;
        for (const Sequence& sequence : running) {
          for (const auto& [position, held] : sequence.table[group]) {
            if (!held.indexed) {
              EXPECT_TRUE(own.insert(held.block.value).second) << "seed " << seed;
            }
          }
        }
      }
    }
    for (Sequence& sequence : running) cache_.release(sequence);
    ASSERT_EQ(cache_.least_available(), 24U) << "seed " << seed;
  }
}

}  // namespace
}  // namespace kvferry::worker
