// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Whether a batch fits is known before anything is evicted for it.
#include "manager/prefix_index.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;
using ipc::ReserveOutcome;
using Fit = PrefixIndex::Fit;

constexpr std::uint64_t kBytes = 4096;
constexpr std::uint64_t kBlocks = 64;

SlabShape shape_of(std::uint32_t group = 0, std::uint64_t bytes = kBytes) {
  SlabShape shape;
  shape.fingerprint = Digest::from_words(7, 7);
  shape.group = ipc::GroupId{group};
  shape.bytes.shard_bytes = bytes;
  return shape;
}

class PrefixFitTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kPrefixes = 12;

  void make(const std::map<std::string, std::string>& named = {}, std::string_view policy = "lru") {
    NamespaceQuotas quotas;
    for (const auto& [name, text] : named) {
      quotas.named[name] = parse_namespace_quota(text).value();
    }
    index_.emplace(pool_, policy, std::move(quotas));
  }
  [[nodiscard]] NamespaceAccount* tenant(const std::string& name) {
    return index_->accounts().open(name, [](const auto&) { return true; }).value();
  }
  static Digest block(std::uint64_t prefix, std::uint64_t at) {
    return Digest::from_words(prefix + 1, at + 1);
  }
  [[nodiscard]] static ipc::BlockKey key_of(const NamespaceAccount* account,
                                            std::uint64_t prefix,
                                            std::uint64_t at,
                                            std::uint32_t group = 0) {
    const std::string name = account == nullptr ? "" : account->name();
    return {Digest::hash(name.data(), name.size()), block(prefix, at), ipc::GroupId{group}};
  }
  /// The block, which continues the one before it.
  bool store(NamespaceAccount* account,
             std::uint64_t prefix,
             std::uint64_t at,
             const SlabShape& shape = shape_of()) {
    Extent alone;
    const auto slot =
        index_->reserve(client_, key_of(account, prefix, at, shape.group.value),
                        at == 0 ? Digest{} : block(prefix, at - 1), shape, alone, {account, {}});
    if (slot.outcome != ReserveOutcome::kReserved) return false;
    (void)index_->begin_fill(client_, slot.slot);
    EXPECT_TRUE(index_->commit(slot.slot));
    return true;
  }
  void store_all(NamespaceAccount* account, std::uint64_t prefix, std::uint64_t blocks) {
    for (std::uint64_t at = 0; at < blocks; ++at) ASSERT_TRUE(store(account, prefix, at));
  }
  [[nodiscard]] Fit fit(std::uint64_t blocks,
                        NamespaceAccount* account = nullptr,
                        const SlabShape& shape = shape_of()) {
    const PrefixIndex::Wanted wanted{shape, blocks};
    return index_->fit({&wanted, 1}, account);
  }
  /// As many of the batch as there is room for.
  std::vector<HostBlockRef> take(std::uint64_t blocks,
                                 NamespaceAccount* account = nullptr,
                                 const SlabShape& shape = shape_of()) {
    std::vector<HostBlockRef> taken;
    Extent extent{.after = std::nullopt, .left = static_cast<std::uint32_t>(blocks)};
    while (taken.size() < blocks) {
      HostBlockRef one = index_->allocate(shape, extent, account);
      if (one == nullptr) break;
      taken.push_back(std::move(one));
    }
    return taken;
  }
  void pin(NamespaceAccount* account, std::uint64_t prefix, std::uint64_t at) {
    ASSERT_TRUE(index_->pin(client_, key_of(account, prefix, at)));
  }

  const ipc::IncarnationId client_ = Digest::from_words(1, 1);
  HostPool pool_{kBlocks * kBytes};
  std::optional<PrefixIndex> index_;
};

TEST_F(PrefixFitTest, WhatIsFreeAndWhatIsCachedIsRoomAndLookingEvictsNothing) {
  make();
  ASSERT_NO_FATAL_FAILURE(store_all(nullptr, 1, 50));
  EXPECT_EQ(fit(kBlocks), Fit::kFits);
  EXPECT_EQ(fit(kBlocks + 1), Fit::kNoRoom);
  EXPECT_EQ(index_->stats().visible, 50U);
  EXPECT_EQ(index_->stats().evicted, 0U);
}

TEST_F(PrefixFitTest, WhatAPinnedBlockContinuesIsNoRoom) {
  make();
  ASSERT_NO_FATAL_FAILURE(store_all(nullptr, 1, 40));
  ASSERT_NO_FATAL_FAILURE(store_all(nullptr, 2, 24));
  ASSERT_NO_FATAL_FAILURE(pin(nullptr, 1, 29));
  EXPECT_EQ(fit(34), Fit::kFits);
  EXPECT_EQ(fit(35), Fit::kNoRoom);
  EXPECT_EQ(take(34).size(), 34U);
}

TEST_F(PrefixFitTest, SequencesAndBlocksThatAreReadAreNoRoom) {
  make();
  const std::vector<HostBlockRef> sequence = take(20);
  ASSERT_NO_FATAL_FAILURE(store_all(nullptr, 1, 44));
  EXPECT_EQ(fit(44), Fit::kFits);
  EXPECT_EQ(fit(45), Fit::kNoRoom);
  const HostBlockRef read = index_->acquire(key_of(nullptr, 1, 9));
  EXPECT_EQ(fit(34), Fit::kFits);
  EXPECT_EQ(fit(35), Fit::kNoRoom) << "ten blocks are read, or come before one that is";
}

TEST_F(PrefixFitTest, AHardLimitIsToldFromAFullPool) {
  make({{"a", "0:25%"}});
  NamespaceAccount* const a = tenant("a");
  const std::vector<HostBlockRef> sequence = take(6, a);
  ASSERT_NO_FATAL_FAILURE(store_all(a, 1, 10));
  EXPECT_EQ(fit(10, a), Fit::kFits);
  EXPECT_EQ(fit(11, a), Fit::kOverLimit);
  ASSERT_NO_FATAL_FAILURE(pin(a, 1, 3));
  EXPECT_EQ(fit(6, a), Fit::kFits);
  EXPECT_EQ(fit(7, a), Fit::kOverLimit);
  EXPECT_EQ(a->counters.evicted, 0U);
}

TEST_F(PrefixFitTest, SoftSharesOfOthersAreNoRoom) {
  make({{"a", "25%:"}, {"b", "25%:"}});
  NamespaceAccount* const a = tenant("a");
  NamespaceAccount* const b = tenant("b");
  ASSERT_NO_FATAL_FAILURE(store_all(a, 1, 30));
  ASSERT_NO_FATAL_FAILURE(store_all(b, 1, 34));
  EXPECT_EQ(fit(48, b), Fit::kFits) << "its own, and what a has above its share";
  EXPECT_EQ(fit(49, b), Fit::kNoRoom);
  EXPECT_EQ(take(48, b).size(), 48U);
  EXPECT_EQ(a->bytes(), 16 * kBytes);
}

TEST_F(PrefixFitTest, SlabsOfOtherShapesAreRoomWhenAllOfThemCanGo) {
  make();
  const SlabShape small = shape_of(1, kBytes / 2);
  for (std::uint64_t i = 0; i < 2 * kBlocks; ++i) ASSERT_TRUE(store(nullptr, 100 + i, 0, small));
  EXPECT_EQ(fit(kBlocks), Fit::kFits);
  EXPECT_EQ(fit(kBlocks + 1), Fit::kNoRoom);
  // One block of a slab that is kept keeps all of it: some slabs have none.
  ASSERT_TRUE(index_->pin(client_, key_of(nullptr, 100, 0, 1)));
  EXPECT_EQ(fit(kBlocks), Fit::kNoRoom);
  std::uint64_t most = kBlocks;
  while (most > 0 && fit(most) != Fit::kFits) --most;
  EXPECT_GE(most, kBlocks / 2);
  const std::vector<HostBlockRef> taken = take(most);
  EXPECT_EQ(taken.size(), most);
  EXPECT_TRUE(take(1).empty());
}

TEST_F(PrefixFitTest, ShapesOfOneBatchShareTheRoom) {
  make();
  ASSERT_NO_FATAL_FAILURE(store_all(nullptr, 1, 30));
  const auto both = [this](std::uint64_t first, std::uint64_t second) {
    const std::vector<PrefixIndex::Wanted> wanted{{shape_of(0), first}, {shape_of(1), second}};
    return index_->fit(wanted);
  };
  EXPECT_EQ(both(40, 24), Fit::kFits);
  EXPECT_EQ(both(64, 0), Fit::kFits);
  EXPECT_EQ(both(0, 64), Fit::kFits);
  EXPECT_EQ(both(64, 64), Fit::kNoRoom);
  EXPECT_EQ(both(44, 24), Fit::kNoRoom);
}

TEST_F(PrefixFitTest, NothingThatWouldHaveToGoFitsWhileNothingIsEvicted) {
  make();
  ASSERT_NO_FATAL_FAILURE(store_all(nullptr, 1, 50));
  index_->set_evicts(false);
  EXPECT_EQ(fit(14), Fit::kFits);
  EXPECT_EQ(fit(15), Fit::kNoRoom);
}

TEST_F(PrefixFitTest, OnlyPagesThatAreThereAreRoom) {
  make();
  pool_.set_ready(kBlocks * kBytes / 2);
  ASSERT_NO_FATAL_FAILURE(store_all(nullptr, 1, 20));
  EXPECT_EQ(fit(kBlocks / 2), Fit::kFits);
  EXPECT_EQ(fit(kBlocks / 2 + 1), Fit::kNoRoom);
}

class PrefixFitPropertyTest : public PrefixFitTest,
                              public testing::WithParamInterface<std::string_view> {
 protected:
  struct Outcome {
    Fit said;
    std::uint64_t wanted;
    std::uint64_t got;
  };
  /// Stores, pins and reads at random, and then takes a batch. Everything goes afterwards.
  Outcome play(std::mt19937& random, const std::vector<SlabShape>& shapes) {
    std::vector<NamespaceAccount*> tenants{tenant("a"), tenant("b"), tenant("c"), tenant("d")};
    std::vector<HostBlockRef> held;
    for (int step = 0; step < 150; ++step) {
      NamespaceAccount* const who = tenants[random() % tenants.size()];
      const SlabShape& shape = shapes[random() % shapes.size()];
      const ipc::BlockKey key = key_of(who, random() % kPrefixes, 0, shape.group.value);
      const std::uint64_t prefix = random() % kPrefixes;
      const std::uint64_t at = random() % 6;
      const auto what = random() % 16;
      if (what < 11) {
        (void)store(who, prefix, at, shape);
      } else if (what == 11) {
        (void)index_->pin(client_, key);
      } else if (what == 12) {
        if (auto one = index_->acquire(key)) held.push_back(std::move(one));
      } else if (what == 13) {
        for (auto& one : take(random() % 6, who, shape)) held.push_back(std::move(one));
      } else if (what == 14 && !held.empty()) {
        held.erase(held.begin() + static_cast<int>(random() % held.size()));
      }
    }
    NamespaceAccount* const who = tenants[random() % tenants.size()];
    const SlabShape& shape = shapes[random() % shapes.size()];
    Outcome outcome{.said = Fit::kFits, .wanted = 1 + random() % 50, .got = 0};
    const auto evicted = index_->stats().evicted;
    outcome.said = fit(outcome.wanted, who, shape);
    EXPECT_EQ(index_->stats().evicted, evicted);
    outcome.got = take(outcome.wanted, who, shape).size();
    held.clear();
    for (const NamespaceAccount* one : tenants) {
      (void)index_->drop_root(key_of(one, 0, 0).root, [](const auto&) { return false; });
    }
    for (const NamespaceAccount* one : tenants) EXPECT_EQ(one->partition().cached, 0U);
    EXPECT_EQ(pool_.stats().blocks, 0U);
    return outcome;
  }
};

TEST_P(PrefixFitPropertyTest, OfOneShapeABatchGetsWhatIsSaid) {
  std::mt19937 random(11);
  std::map<Fit, int> said;
  for (int round = 0; round < 400; ++round) {
    make({{"a", "30%:60%"}, {"b", "0:25%"}}, GetParam());
    const Outcome outcome = play(random, {shape_of()});
    ++said[outcome.said];
    ASSERT_EQ(outcome.got == outcome.wanted, outcome.said == Fit::kFits) << "round " << round;
  }
  for (const Fit answer : {Fit::kFits, Fit::kOverLimit, Fit::kNoRoom}) EXPECT_GT(said[answer], 9);
}

// Which slabs are cut anew depends on which go: there, what is refused could not have been had.
TEST_P(PrefixFitPropertyTest, OfSeveralShapesWhatIsRefusedDoesNotFit) {
  std::mt19937 random(12);
  int refused = 0;
  int in_vain = 0;
  constexpr int kRounds = 400;
  for (int round = 0; round < kRounds; ++round) {
    make({{"a", "30%:60%"}, {"b", "20%:25%"}}, GetParam());
    const Outcome outcome = play(random, {shape_of(), shape_of(1, kBytes / 2)});
    const bool got_all = outcome.got == outcome.wanted;
    refused += outcome.said == Fit::kFits ? 0 : 1;
    in_vain += outcome.said == Fit::kFits && !got_all ? 1 : 0;
    ASSERT_FALSE(outcome.said != Fit::kFits && got_all) << "round " << round;
  }
  EXPECT_GT(refused, 30);
  EXPECT_LT(in_vain, kRounds / 10) << "a pool of sixteen slabs is the worst case";
}

INSTANTIATE_TEST_SUITE_P(Policies,
                         PrefixFitPropertyTest,
                         testing::ValuesIn(eviction_policies().begin(), eviction_policies().end()),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace kvferry::cache_manager
