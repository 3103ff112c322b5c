// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/store_units.hpp"

#include <gtest/gtest.h>

namespace kvferry::worker {
namespace {

std::vector<ipc::Digest> hashes(std::uint64_t count) {
  std::vector<ipc::Digest> all;
  for (std::uint64_t i = 0; i < count; ++i) all.push_back(ipc::Digest::from_words(1, i));
  return all;
}

TEST(UnitKeysTest, AUnitIsNamedByItsLastBlock) {
  const auto ten = hashes(10);
  const StoreUnits units(4);
  EXPECT_EQ(units.keys(ten), (std::vector<ipc::Digest>{ten[3], ten[7], ten[9]}));
  EXPECT_EQ(units.keys(hashes(8)), (std::vector<ipc::Digest>{ten[3], ten[7]}));
  EXPECT_TRUE(units.keys({}).empty());
  EXPECT_EQ(units.part_of(ten, 5), (UnitPart{ten[7], 1}));
  EXPECT_EQ(units.part_of(ten, 9), (UnitPart{ten[9], 1}));
  EXPECT_EQ(units.part_of(hashes(9), 8), (UnitPart{ten[8], 0}));
}

TEST(UnitKeysTest, WholeUnitsHaveTheirKeyWhateverComesAfter) {
  const StoreUnits units(4);
  for (std::uint64_t count = 8; count < 20; ++count) {
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(units.part_of(hashes(count), i), units.part_of(hashes(8), i));
    }
  }
}

TEST(UnitKeysTest, AUnitOfOneBlockIsThatBlock) {
  const auto ten = hashes(10);
  const StoreUnits units(1);
  EXPECT_EQ(units.keys(ten), ten);
  EXPECT_EQ(units.part_of(ten, 6), (UnitPart{ten[6], 0}));
}

TEST(UnitKeysTest, ImpossibleUnitsAreRefused) {
  EXPECT_THROW(StoreUnits(0), ipc::Exception);
  EXPECT_THROW(StoreUnits(ipc::kMostUnitBlocks + 1), ipc::Exception);
}

}  // namespace
}  // namespace kvferry::worker
