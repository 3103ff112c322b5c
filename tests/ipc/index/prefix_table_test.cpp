// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/index/prefix_table.hpp"

#include "index/table_format.hpp"
#include "os/huge_pages.hpp"
#include "support/huge_pages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <random>

namespace kvferry::ipc {
namespace {

using testing::HasSubstr;

Digest digest(std::uint64_t i) { return Digest::hash(&i, sizeof(i), 7); }

PrefixTableView view_of(const PrefixTable& table) {
  auto view = PrefixTableView::map(table.fd(), table.size_bytes());
  if (!view) throw Exception(view.error());
  return std::move(view).value();
}

class PrefixTableTest : public testing::Test {
 protected:
  BlockKey key(std::uint64_t block, std::uint32_t group = 0) const {
    return {root_, digest(block), GroupId{group}};
  }
  /// The blocks of one prefix, first to last.
  std::vector<Digest> prefix(std::uint32_t count) const {
    std::vector<Digest> blocks;
    for (std::uint32_t i = 0; i < count; ++i) blocks.push_back(digest(i));
    return blocks;
  }
  void put_run(PrefixTable& table, std::uint32_t first, std::uint32_t end, std::uint32_t group) {
    for (std::uint32_t i = first; i < end; ++i) table.put(key(i, group), {false, i - first + 1});
  }

  const Digest root_ = digest(1'000'000);
};

// Whoever has the table, its seed and a block's hash, but not the root, which is a secret then.
TEST_F(PrefixTableTest, LargeTablesAreOfHugePagesToWhoeverLooks) {
  if (!test::makes_huge_pages()) GTEST_SKIP() << "this kernel makes no huge pages of shared memory";
  PrefixTable table(std::uint64_t{1} << 20U);
  table.reserve(300'000);  // 8 MiB of slots
  table.put(key(1), {});
  const SharedMapping looks =
      SharedMemory::map_single_writer(table.fd(), table.size_bytes()).value();
  const std::byte* const slots =
      looks.data() +
      prefix_table::offset_of(static_cast<std::uint32_t>(std::bit_width(table.stats().slots) - 1));
  // Of two bytes a huge page apart one lies in a whole one.
  int sum = 0;
  for (std::uint64_t at = 0; at < table.stats().bytes; at += kHugePageBytes) {
    sum += std::to_integer<int>(slots[at]);
  }
  EXPECT_GE(sum, 0);
  // All but the edges, on a machine whose memory is not in pieces.
  EXPECT_GE(test::mapped_as_huge_bytes(looks.data()), kHugePageBytes);
  EXPECT_TRUE(view_of(table).find(key(1)).has_value());
}

TEST_F(PrefixTableTest, AnEntrySaysNothingToWhoDoesNotKnowItsRoot) {
  PrefixTable table(1000);
  const BlockKey secret{Digest::random(), digest(1), GroupId{0}};
  table.put(secret, {false, 1});
  const PrefixTableView view = view_of(table);
  EXPECT_TRUE(view.find(secret).has_value());
  for (std::uint64_t guess = 0; guess < 1000; ++guess) {
    EXPECT_EQ(view.find({digest(2000 + guess), digest(1), GroupId{0}}), std::nullopt);
  }
  // Half of all bits are others under a root that differs in one.
  const prefix_table::Hash hash = prefix_table::hash_of(secret, 5);
  int changed = 0;
  for (std::size_t bit = 0; bit < 128; ++bit) {
    BlockKey near = secret;
    near.root.bytes[bit / 8] ^= static_cast<std::uint8_t>(1U << (bit % 8));
    const prefix_table::Hash other = prefix_table::hash_of(near, 5);
    changed += std::popcount(hash.low ^ other.low) + std::popcount(hash.tag ^ other.tag);
  }
  EXPECT_NEAR(changed, 128 * 104 / 2, 128 * 104 / 20);
}

TEST_F(PrefixTableTest, WhatIsEnteredAtOnceIsThereAsIfItCameOneByOne) {
  std::mt19937_64 random(3);
  for (const std::size_t count : {0U, 1U, 15U, 16U, 17U, 40'000U}) {
    PrefixTable at_once(100'000);
    PrefixTable one_by_one(100'000);
    std::vector<PrefixTable::Put> puts;
    for (std::size_t i = 0; i < count; ++i) {  // some of them again, with another run
      puts.push_back({key(random() % (count + 1)), {false, static_cast<std::uint32_t>(i)}});
    }
    at_once.put(puts);
    for (const PrefixTable::Put& put : puts) one_by_one.put(put.key, put.entry);
    EXPECT_EQ(at_once.stats().entries, one_by_one.stats().entries);
    const PrefixTableView view = view_of(at_once);
    const PrefixTableView expected = view_of(one_by_one);
    for (std::size_t i = 0; i <= count; ++i) ASSERT_EQ(view.find(key(i)), expected.find(key(i)));
  }
}

TEST_F(PrefixTableTest, ABlockIsFoundAsItWasEnteredLast) {
  PrefixTable table(100);
  const PrefixTableView view = view_of(table);
  EXPECT_EQ(view.find(key(1)), std::nullopt);
  table.put(key(1), {true, 0});
  EXPECT_EQ(view.find(key(1)), (TableEntry{true, 0}));
  table.put(key(1), {false, 5});
  EXPECT_EQ(view.find(key(1)), (TableEntry{false, 5}));
  EXPECT_EQ(table.stats().entries, 1U);
  EXPECT_EQ(view.find(key(1, 1)), std::nullopt) << "another group's";
  EXPECT_EQ(view.find({digest(3), digest(1), GroupId{0}}), std::nullopt) << "other weights'";
  table.erase(key(1));
  table.erase(key(1));
  EXPECT_EQ(view.find(key(1)), std::nullopt);
  EXPECT_EQ(table.stats().entries, 0U);
}

TEST_F(PrefixTableTest, ARunThatIsLongerThanAnEntryTellsIsTold) {
  PrefixTable table(10);
  table.put(key(1), {false, PrefixTable::kMostRun});
  table.put(key(2), {false, PrefixTable::kMostRun + 1});
  const PrefixTableView view = view_of(table);
  EXPECT_EQ(view.find(key(1))->run, PrefixTable::kMostRun);
  EXPECT_EQ(view.find(key(2))->run, PrefixTable::kMostRun);
}

TEST_F(PrefixTableTest, EveryRandomHistoryIsThatOfAMap) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    std::mt19937_64 random(seed);
    // Small ones are nearly full all the time, so that rows are long, and others grow.
    PrefixTable table(seed % 2 == 0 ? 2'000 : 200'000);
    const PrefixTableView view = view_of(table);
    const std::uint64_t keys = seed % 2 == 0 ? 2'600 : 60'000;
    std::map<std::uint64_t, TableEntry> expected;
    for (int step = 0; step < 120'000; ++step) {
      const std::uint64_t block = random() % keys;
      if (random() % 5 < 2) {
        table.erase(key(block));
        expected.erase(block);
      } else {
        const TableEntry entry{random() % 4 == 0, static_cast<std::uint32_t>(random() % 1'000)};
        table.put(key(block), entry);
        expected.insert_or_assign(block, entry);
      }
      if (step % 8 != 0) continue;
      const std::uint64_t looked = random() % keys;
      const auto there = expected.find(looked);
      ASSERT_EQ(view.find(key(looked)),
                there == expected.end() ? std::nullopt : std::optional(there->second))
          << "seed " << seed << " step " << step;
    }
    ASSERT_EQ(table.stats().entries, expected.size());
    for (std::uint64_t block = 0; block < keys; ++block) {
      const auto there = expected.find(block);
      ASSERT_EQ(view.find(key(block)),
                there == expected.end() ? std::nullopt : std::optional(there->second))
          << "seed " << seed << " block " << block;
    }
    EXPECT_EQ(table.stats().unkept, 0U);
  }
}

TEST_F(PrefixTableTest, ItGrowsAndReadersFollow) {
  PrefixTable table(1'000'000);
  const PrefixTableView view = view_of(table);
  constexpr std::uint32_t kBlocks = 300'000;
  put_run(table, 0, kBlocks, 0);
  EXPECT_GE(table.stats().slots, kBlocks);
  EXPECT_LE(table.stats().bytes / table.stats().entries, 48U);
  for (std::uint32_t i = 0; i < kBlocks; i += 7) {
    ASSERT_EQ(view.find(key(i)), (TableEntry{false, i + 1})) << i;
  }
}

TEST_F(PrefixTableTest, WhatItHasNoRoomForIsNotFoundAndCounted) {
  PrefixTable table(10);
  const std::uint64_t slots = table.stats().slots;
  put_run(table, 0, static_cast<std::uint32_t>(slots), 0);
  EXPECT_EQ(table.stats().slots, slots);
  EXPECT_EQ(table.stats().entries, slots / 3 * 2);
  EXPECT_EQ(table.stats().entries + table.stats().unkept, slots);
  const PrefixTableView view = view_of(table);
  EXPECT_TRUE(view.find(key(0)).has_value());
  EXPECT_FALSE(view.find(key(slots - 1)).has_value());
  table.erase(key(slots - 1));
  EXPECT_EQ(table.stats().entries, slots / 3 * 2);
}

TEST_F(PrefixTableTest, APrefixIsUsableAsFarAsItIsThere) {
  PrefixTable table(10'000);
  const PrefixTableView view = view_of(table);
  const std::vector<GroupRule> full = {{HitRule::kFull, 0}};
  for (const std::uint32_t there : {0U, 1U, 2U, 499U, 998U, 999U, 1'000U}) {
    put_run(table, 0, there, 0);
    EXPECT_EQ(view.match(root_, prefix(1'000), full), (PrefixMatch{there, false})) << there;
  }
  EXPECT_EQ(view.match(root_, prefix(2'000), full).usable, 1'000U);
  EXPECT_EQ(view.match(root_, prefix(10), full).usable, 10U);
  EXPECT_EQ(view.match(digest(5), prefix(10), full).usable, 0U);
  EXPECT_EQ(view.match(root_, {}, full).usable, 0U);
  EXPECT_EQ(view.match(root_, prefix(10), {}).usable, 0U);
  table.put(key(1'000), {true, 0});
  EXPECT_EQ(view.match(root_, prefix(2'000), full), (PrefixMatch{1'000, true}));
}

TEST_F(PrefixTableTest, ABlockBehindAGapIsNoHit) {
  PrefixTable table(1'000);
  put_run(table, 0, 40, 0);
  put_run(table, 50, 100, 0);  // whose runs begin anew
  EXPECT_EQ(view_of(table).match(root_, prefix(100), std::vector<GroupRule>{{HitRule::kFull, 0}}),
            (PrefixMatch{40, false}));
}

TEST_F(PrefixTableTest, EveryRandomPrefixIsThatOfTheRules) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 300; ++round) {
    PrefixTable table(1'000);
    std::vector<GroupRule> rules;
    std::vector<std::vector<std::uint32_t>> runs;  // of each group's blocks
    constexpr std::uint32_t kBlocks = 30;
    for (std::uint32_t group = 0; group < 1 + random() % 3; ++group) {
      const auto kind = static_cast<HitRule>(1 + random() % 3);
      rules.push_back({kind, static_cast<std::uint32_t>(random() % 6)});
      std::vector<std::uint32_t>& of_group = runs.emplace_back(kBlocks);
      const std::uint64_t gap = 2 + random() % 30;
      for (std::uint32_t i = 0; i < kBlocks; ++i) {
        if (random() % gap == 0) continue;
        of_group[i] = i > 0 ? of_group[i - 1] + 1 : 1;
        table.put(key(i, group), {false, of_group[i]});
      }
    }
    std::uint32_t expected = 0;
    for (std::uint32_t n = 1; n <= kBlocks; ++n) {
      bool all = true;
      for (std::size_t g = 0; g < rules.size(); ++g) {
        all = all && runs[g][n - 1] >= blocks_needed(rules[g], n);
      }
      if (all) expected = n;
    }
    ASSERT_EQ(view_of(table).match(root_, prefix(kBlocks), rules).usable, expected)
        << "round " << round;
  }
}

TEST_F(PrefixTableTest, WhatIsNoTableIsRefused) {
  auto other = SharedMemory::create_single_writer("other", 1U << 20U);
  ASSERT_TRUE(other.has_value());
  const auto refused = [](const UniqueFd& fd, std::uint64_t bytes) {
    const auto view = PrefixTableView::map(fd, bytes);
    return view ? Error{} : view.error();
  };
  EXPECT_EQ(refused(other->fd, 1U << 20U).code, ErrorCode::kProtocol);
  EXPECT_EQ(refused(other->fd, 4096).code, ErrorCode::kProtocol) << "too small";
  auto pool = SharedMemory::create_pool("pool", 1U << 20U, false);
  ASSERT_TRUE(pool.has_value());
  EXPECT_EQ(refused(*pool, 1U << 20U).code, ErrorCode::kProtocol) << "others can write it";

  const std::uint64_t size = prefix_table::size_for(prefix_table::kLeastLog2);
  auto forged = SharedMemory::create_single_writer("forged", size);
  ASSERT_TRUE(forged.has_value());
  auto* header = reinterpret_cast<prefix_table::Header*>(forged->mapping.data());
  header->magic = prefix_table::kMagic;
  header->version = prefix_table::kVersion + 1;
  const Error other_version = refused(forged->fd, size);
  EXPECT_EQ(other_version.code, ErrorCode::kVersionMismatch);
  EXPECT_THAT(other_version.message, HasSubstr("version 3"));
  header->version = prefix_table::kVersion;
  header->most_log2 = 60;
  EXPECT_EQ(refused(forged->fd, size).code, ErrorCode::kProtocol);
  header->most_log2 = prefix_table::kLeastLog2;
  EXPECT_TRUE(PrefixTableView::map(forged->fd, size).has_value());
}

TEST_F(PrefixTableTest, AWriterThatLiesOrDiedInTheMiddleHoldsNoReaderUp) {
  const std::uint64_t size = prefix_table::size_for(prefix_table::kLeastLog2);
  auto forged = SharedMemory::create_single_writer("forged", size);
  ASSERT_TRUE(forged.has_value());
  auto* header = reinterpret_cast<prefix_table::Header*>(forged->mapping.data());
  header->magic = prefix_table::kMagic;
  header->version = prefix_table::kVersion;
  header->most_log2 = prefix_table::kLeastLog2;
  const auto view = PrefixTableView::map(forged->fd, size);
  ASSERT_TRUE(view.has_value());
  auto* slots = reinterpret_cast<prefix_table::Slot*>(
      forged->mapping.data() + prefix_table::offset_of(prefix_table::kLeastLog2));
  for (std::uint64_t i = 0; i < std::uint64_t{1} << prefix_table::kLeastLog2; ++i) {
    slots[i].rest = ~std::uint64_t{0};  // no end to any row
  }
  header->moves = 1;
  for (const std::uint32_t log2 : {0U, 12U, 13U, 63U, ~0U}) {
    header->slots_log2 = log2;
    EXPECT_EQ(view->find(key(1)), std::nullopt) << log2;
  }
}

TEST_F(PrefixTableTest, RoomThatWasReservedIsThereAndWhatIsInItStays) {
  PrefixTable table(200'000);
  put_run(table, 0, 100, 0);
  table.reserve(50'000);
  const std::uint64_t slots = table.stats().slots;
  put_run(table, 0, 50'100, 0);
  EXPECT_EQ(table.stats().slots, slots);
  EXPECT_EQ(table.stats().entries, 50'100U);
  table.reserve(0);
  table.reserve(~std::uint64_t{0});
  EXPECT_EQ(view_of(table).find(key(99)), (TableEntry{false, 100}));
}

}  // namespace
}  // namespace kvferry::ipc
