// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/prefix_units.hpp"

#include <gmock/gmock.h>

#include <map>
#include <utility>

namespace kvferry::worker {
namespace {

using ipc::Digest;
using ipc::GroupId;
using ipc::HitRule;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::uint32_t kUnit = 4;
constexpr GroupId kFull{0};
constexpr GroupId kWindow{1};
constexpr GroupId kState{2};

std::vector<Digest> hashes(std::uint64_t count, std::uint64_t seed = 1) {
  std::vector<Digest> all;
  for (std::uint64_t i = 0; i < count; ++i) all.push_back(Digest::from_words(seed, i + 1));
  return all;
}

class PrefixUnitsTest : public testing::Test {
 protected:
  PrefixUnitsTest() : groups_(3) {
    groups_[1].rule = HitRule::kSlidingWindow;
    groups_[1].window_blocks = 2;
    groups_[2].rule = HitRule::kLastState;
  }
  PrefixUnits units(std::span<const Digest> prefix) {
    return {StoreUnits(kUnit), groups_, prefix, [this](GroupId group, const UnitPart& place) {
              ++looks_;
              const auto there = there_.find({group.value, name_of(place.key)});
              return there != there_.end() && ((there->second >> place.part) & 1) != 0;
            }};
  }
  /// What a request that holds these blocks stores is there from now on.
  void store(std::span<const Digest> prefix, const std::vector<PrefixBlock>& held) {
    for (const UnitStore& unit : units_to_store(StoreUnits(kUnit), groups_, prefix, held)) {
      there_[{unit.group.value, name_of(unit.key)}] = unit.parts;
    }
  }
  static std::vector<PrefixBlock> all(GroupId group, std::uint32_t from, std::uint32_t to) {
    std::vector<PrefixBlock> blocks;
    for (std::uint32_t i = from; i < to; ++i) blocks.push_back({group, i});
    return blocks;
  }

  static std::uint64_t name_of(const Digest& key) { return key.high() << 32U | key.low(); }

  std::vector<ipc::GroupSpec> groups_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint64_t> there_;
  int looks_ = 0;
};

TEST_F(PrefixUnitsTest, BlocksAreFoundInTheUnitTheyShareOrWhereAPrefixEnded) {
  const auto ten = hashes(10);
  store(ten, all(kFull, 0, 10));
  PrefixUnits same = units(ten);
  EXPECT_EQ(same.find(kFull, 0), (UnitPart{ten[3], 0}));
  EXPECT_EQ(same.find(kFull, 6), (UnitPart{ten[7], 2}));
  EXPECT_EQ(same.find(kFull, 9), (UnitPart{ten[9], 1}));
  const auto longer = hashes(16);
  EXPECT_EQ(units(longer).find(kFull, 8), (UnitPart{ten[9], 0}));
  EXPECT_FALSE(units(longer).find(kFull, 10));
  // What shares six blocks and goes on otherwise has no name for the second unit.
  auto other = hashes(10, 2);
  std::copy_n(ten.begin(), 6, other.begin());
  EXPECT_EQ(units(other).find(kFull, 3), (UnitPart{ten[3], 3}));
  EXPECT_FALSE(units(other).find(kFull, 4));
}

TEST_F(PrefixUnitsTest, OfTwoUnitsTheLongerOneIsTaken) {
  store(hashes(6), all(kFull, 0, 6));
  store(hashes(8), all(kFull, 0, 8));
  const auto prefix = hashes(8);
  EXPECT_EQ(units(prefix).find(kFull, 4), (UnitPart{prefix[7], 0}));
}

TEST_F(PrefixUnitsTest, AnAnswerHoldsWhateverComesAndGoes) {
  const auto prefix = hashes(8);
  PrefixUnits before = units(prefix);
  EXPECT_FALSE(before.find(kFull, 0));
  store(prefix, all(kFull, 0, 8));
  EXPECT_FALSE(before.find(kFull, 0));
  PrefixUnits after = units(prefix);
  EXPECT_TRUE(after.find(kFull, 0));
  there_.clear();
  looks_ = 0;
  EXPECT_TRUE(after.find(kFull, 3));
  EXPECT_EQ(looks_, 0) << "one look for a unit";
}

TEST_F(PrefixUnitsTest, AWindowIsFoundAtTheEndOfEachPrefixThatHeldOne) {
  store(hashes(6), all(kWindow, 4, 6));
  store(hashes(8), all(kWindow, 6, 8));
  const auto prefix = hashes(11);
  PrefixUnits found = units(prefix);
  EXPECT_EQ(found.find(kWindow, 4), (UnitPart{prefix[5], 0}));
  EXPECT_EQ(found.find(kWindow, 5), (UnitPart{prefix[5], 1}));
  EXPECT_EQ(found.find(kWindow, 6), (UnitPart{prefix[7], 2}));
  EXPECT_FALSE(found.find(kWindow, 3));
}

TEST_F(PrefixUnitsTest, PartsThatAWindowsUnitLacksAreRememberedUntilItIsStoredAnew) {
  const auto prefix = hashes(8);
  const UnitPart place{prefix[7], 1};
  constexpr auto kMissing = static_cast<std::uint8_t>(ipc::ErrorCode::kNotFound);
  LackingParts lacking(StoreUnits(kUnit), groups_);
  lacking.note(kWindow, place, static_cast<std::uint8_t>(ipc::ErrorCode::kRevoked));
  EXPECT_FALSE(lacking.has(kWindow, place)) << "nobody looked";
  lacking.note(kWindow, place, kMissing);
  EXPECT_TRUE(lacking.has(kWindow, place));
  EXPECT_FALSE(lacking.has(kWindow, {prefix[7], 2}));
  EXPECT_FALSE(lacking.has(kFull, place));
  lacking.forget(kFull, prefix[7], 0b1111);
  EXPECT_TRUE(lacking.has(kWindow, place));
  lacking.forget(kWindow, prefix[7], 0b1100);
  EXPECT_TRUE(lacking.has(kWindow, place)) << "it was stored with others";
  lacking.forget(kWindow, prefix[7], 0b1110);
  EXPECT_FALSE(lacking.has(kWindow, place));
  // Where a unit has all its parts, or is one, it was evicted, and may come back.
  lacking.note(kFull, place, kMissing);
  EXPECT_FALSE(lacking.has(kFull, place));
  LackingParts single(StoreUnits(1), groups_);
  single.note(kWindow, {prefix[7], 0}, kMissing);
  EXPECT_FALSE(single.has(kWindow, {prefix[7], 0}));
}

TEST_F(PrefixUnitsTest, StatesAreNamedByThePrefixThatEndsWithThem) {
  const auto prefix = hashes(11);
  store(prefix, {{kState, 5}, {kState, 6}, {kState, 10}});
  PrefixUnits found = units(prefix);
  EXPECT_EQ(found.find(kState, 5), (UnitPart{prefix[5], 1}));
  EXPECT_EQ(found.find(kState, 6), (UnitPart{prefix[6], 2}));
  EXPECT_FALSE(found.find(kState, 4));
  EXPECT_FALSE(found.find(kState, 7));
}

TEST_F(PrefixUnitsTest, EachGroupWithOtherUnitsHasAChainOfItsOwn) {
  store(hashes(10), all(kFull, 0, 10));
  const auto prefix = hashes(12);
  EXPECT_THAT(units(prefix).chains(10), ElementsAre(ElementsAre(prefix[3], prefix[7], prefix[9])));
  store(prefix, all(kFull, 0, 12));
  EXPECT_THAT(units(prefix).chains(10), ElementsAre(ElementsAre(prefix[3], prefix[7], prefix[11]),
                                                    ElementsAre(prefix[3], prefix[7], prefix[9])));
  EXPECT_THAT(units(prefix).chains(0), ElementsAre(IsEmpty()));
}

TEST_F(PrefixUnitsTest, EveryUnitThatHoldsSomeOfTheNeededBlocksIsInAChain) {
  groups_[1].window_blocks = 4;
  const auto prefix = hashes(12);
  store(prefix, all(kFull, 0, 12));
  // Two requests ended within the second unit, one went on to its end.
  store(hashes(6), all(kWindow, 4, 6));
  store(hashes(7), all(kWindow, 6, 7));
  store(hashes(8), all(kWindow, 7, 8));
  PrefixUnits found = units(prefix);
  EXPECT_EQ(found.find(kWindow, 4), (UnitPart{prefix[5], 0}));
  EXPECT_EQ(found.find(kWindow, 6), (UnitPart{prefix[6], 2}));
  EXPECT_THAT(found.chains(8), testing::UnorderedElementsAre(ElementsAre(prefix[3], prefix[7]),
                                                             ElementsAre(prefix[3], prefix[5]),
                                                             ElementsAre(prefix[3], prefix[6])));
  // Of ten blocks the window needs 6 to 9: what ended before them is not told.
  EXPECT_THAT(units(prefix).chains(10),
              testing::UnorderedElementsAre(ElementsAre(prefix[3], prefix[7], prefix[11]),
                                            ElementsAre(prefix[3], prefix[7], prefix[9]),
                                            ElementsAre(prefix[3], prefix[6])));
}

TEST_F(PrefixUnitsTest, AUnitThatEndsBeforeThePrefixDoesIsInItsChain) {
  const auto prefix = hashes(12);
  store(hashes(9), all(kFull, 0, 9));
  // The tenth block is on the device.
  EXPECT_EQ(units(prefix).find(kFull, 8), (UnitPart{prefix[8], 0}));
  EXPECT_FALSE(units(prefix).find(kFull, 9));
  EXPECT_THAT(units(prefix).chains(10),
              testing::Contains(ElementsAre(prefix[3], prefix[7], prefix[8])));
  // Six blocks: the whole unit that it has two parts of.
  EXPECT_THAT(units(prefix).chains(6), testing::Contains(ElementsAre(prefix[3], prefix[7])));
}

TEST_F(PrefixUnitsTest, WhatIsNotThereIsLookedForOnceForTheWholeUnit) {
  const auto prefix = hashes(kUnit);
  PrefixUnits found = units(prefix);
  for (std::uint32_t i = 0; i < kUnit; ++i) EXPECT_FALSE(found.find(kFull, i));
  EXPECT_EQ(looks_, static_cast<int>(kUnit)) << "each end, once";
}

TEST_F(PrefixUnitsTest, AUnitIsStoredWithAllItsBlocksOrNotAtAll) {
  const auto ten = hashes(10);
  const auto stores = [&](const std::vector<PrefixBlock>& held) {
    return units_to_store(StoreUnits(kUnit), groups_, ten, held);
  };
  const auto whole = stores(all(kFull, 0, 10));
  ASSERT_EQ(whole.size(), 3U);
  EXPECT_EQ(whole[1].key, ten[7]);
  EXPECT_EQ(whole[1].before, ten[3]);
  EXPECT_EQ(whole[1].parts, 0b1111U);
  EXPECT_THAT(whole[1].blocks, ElementsAre(4, 5, 6, 7));
  EXPECT_EQ(whole[2].key, ten[9]);
  EXPECT_EQ(whole[2].parts, 0b11U);
  EXPECT_TRUE(whole[0].before.is_zero());
  auto gap = all(kFull, 0, 10);
  gap.erase(gap.begin() + 5);
  EXPECT_EQ(stores(gap).size(), 2U);
  EXPECT_THAT(stores(all(kFull, 1, 4)), IsEmpty());
  EXPECT_THAT(stores(all(kFull, 8, 9)), IsEmpty());
  EXPECT_THAT(stores(all(kFull, 10, 14)), IsEmpty());  // beyond the prefix
  EXPECT_EQ(stores(all(kFull, 8, 12)).size(), 1U);
}

TEST_F(PrefixUnitsTest, UnitsOfOneBlockAreTheBlocks) {
  const auto three = hashes(3);
  const auto held = std::vector<PrefixBlock>{{kFull, 0}, {kFull, 2}, {kWindow, 1}};
  const auto stores = units_to_store(StoreUnits(1), groups_, three, held);
  ASSERT_EQ(stores.size(), 3U);
  EXPECT_EQ(stores[1].key, three[2]);
  EXPECT_EQ(stores[1].before, three[1]);
  EXPECT_EQ(stores[2].group, kWindow);
  PrefixUnits found(StoreUnits(1), groups_, three, [&](GroupId, const UnitPart& place) {
    ++looks_;
    return place == UnitPart{three[1], 0};
  });
  EXPECT_TRUE(found.find(kFull, 1));
  EXPECT_FALSE(found.find(kFull, 2));
  EXPECT_EQ(looks_, 2);
  EXPECT_THAT(found.chains(2), ElementsAre(ElementsAre(three[0], three[1])));
}

}  // namespace
}  // namespace kvferry::worker
