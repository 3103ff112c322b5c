// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Namespaces that share a pool: what each may have, and what they cannot take from each other.
#include "manager/prefix_index.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;
using ipc::ReserveOutcome;

constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kPool = 64 * kBlock;

SlabShape shape_of(std::uint64_t bytes = kBlock) {
  SlabShape shape;
  shape.fingerprint = Digest::from_words(9, bytes);
  shape.bytes.shard_bytes = bytes;
  return shape;
}

/// A namespace, with prefixes of its own that it stores one block after another.
struct Tenant {
  Tenant(PrefixIndex& index, const std::string& name)
      : account(index.accounts().open(name, [](const auto&) { return true; }).value()),
        root(Digest::hash(name.data(), name.size())) {}

  NamespaceAccount* account;
  Digest root;
  std::uint64_t next = 0;
  std::map<std::uint64_t, std::uint64_t> prefixes;  ///< Blocks of each that were stored.

  [[nodiscard]] static Digest block(std::uint64_t prefix, std::uint64_t at) {
    return Digest::from_words(prefix + 1, at + 1);
  }
  [[nodiscard]] std::uint64_t blocks() const { return account->bytes() / kBlock; }
};

NamespaceQuotas quotas(const std::map<std::string, std::string>& texts, const std::string& others) {
  NamespaceQuotas made;
  for (const auto& [name, text] : texts) made.named[name] = parse_namespace_quota(text).value();
  if (!others.empty()) made.others = parse_namespace_quota(others).value();
  return made;
}

class PrefixQuotaTest : public testing::Test {
 protected:
  /// Stores the next block of a prefix. @return whether there was room
  bool store(Tenant& tenant, std::uint64_t prefix, const SlabShape& shape = shape_of()) {
    std::uint64_t& end = tenant.prefixes[prefix];
    Extent extent;
    const Digest before = end == 0 ? Digest{} : Tenant::block(prefix, end - 1);
    const auto slot =
        index_->reserve(client_, {tenant.root, Tenant::block(prefix, end), ipc::GroupId{0}}, before,
                        shape, extent, {tenant.account, {}});
    if (slot.outcome == ReserveOutcome::kFull) return false;
    ++end;
    if (slot.outcome == ReserveOutcome::kAlreadyThere) return true;
    (void)index_->begin_fill(client_, slot.slot);
    EXPECT_TRUE(index_->commit(slot.slot));
    return true;
  }
  /// So many blocks, each of a prefix of its own.
  void flood(Tenant& tenant, std::uint64_t blocks) {
    for (std::uint64_t i = 0; i < blocks; ++i) (void)store(tenant, 1000 + tenant.next++);
  }
  void make(const std::map<std::string, std::string>& named,
            const std::string& others = {},
            std::string_view policy = "lru") {
    index_.emplace(pool_, policy, quotas(named, others));
  }

  const ipc::IncarnationId client_ = Digest::from_words(1, 1);
  HostPool pool_{kPool};
  std::optional<PrefixIndex> index_;
};

TEST_F(PrefixQuotaTest, AtItsHardLimitANamespaceEvictsItsOwn) {
  make({{"a", "0:25%"}});
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  flood(b, 8);
  flood(a, 40);
  EXPECT_EQ(a.blocks(), 16U);
  EXPECT_EQ(b.blocks(), 8U);
  EXPECT_EQ(a.account->counters.evicted, 24U);
  EXPECT_EQ(a.account->counters.evicted_for_others, 0U);
  EXPECT_EQ(b.account->counters.evicted, 0U);
  EXPECT_EQ(pool_.stats().blocks, 24U) << "what is free stays so";
}

TEST_F(PrefixQuotaTest, WhatCannotGoAtTheHardLimitRefusesTheNextBlock) {
  make({{"a", "0:25%"}});
  Tenant a(*index_, "a");
  Extent extent;
  std::vector<HostBlockRef> sequences;
  for (int i = 0; i < 16; ++i) {
    extent = {};
    sequences.push_back(index_->allocate(shape_of(), extent, a.account));
    ASSERT_NE(sequences.back(), nullptr);
  }
  extent = {};
  EXPECT_EQ(index_->allocate(shape_of(), extent, a.account), nullptr) << "sequences count";
  EXPECT_FALSE(store(a, 0));
  EXPECT_EQ(a.account->counters.refused_quota, 2U);
  EXPECT_EQ(a.account->counters.refused_room, 0U);
  sequences.pop_back();
  EXPECT_TRUE(store(a, 0));
  EXPECT_EQ(a.blocks(), 16U);
}

TEST_F(PrefixQuotaTest, ABatchThatIsLargerThanTheLimitGetsWhatFits) {
  make({{"a", "0:25%"}});
  Tenant a(*index_, "a");
  flood(a, 16);
  Extent extent{.after = std::nullopt, .left = 20};
  std::vector<HostBlockRef> batch;
  for (int i = 0; i < 20; ++i) {
    batch.push_back(index_->allocate(shape_of(), extent, a.account));
    EXPECT_LE(a.blocks(), 16U);
  }
  EXPECT_EQ(std::count(batch.begin(), batch.end(), nullptr), 4);
  EXPECT_EQ(a.account->counters.evicted, 16U);
}

TEST_F(PrefixQuotaTest, ABlockThatIsLargerThanTheLimitEvictsNothing) {
  make({{"a", "0:25%"}});
  Tenant a(*index_, "a");
  flood(a, 4);
  Extent extent;
  EXPECT_EQ(index_->allocate(shape_of(17 * kBlock), extent, a.account), nullptr);
  EXPECT_EQ(a.blocks(), 4U);
}

TEST_F(PrefixQuotaTest, AFloodTakesNoBlocksOfASoftShare) {
  make({{"a", "25%:"}, {"b", "25%:"}});
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  flood(a, 16);
  flood(b, 1000);
  EXPECT_EQ(a.blocks(), 16U);
  EXPECT_EQ(b.blocks(), 48U) << "what nobody uses it may have";
  EXPECT_EQ(a.account->counters.evicted, 0U);
}

TEST_F(PrefixQuotaTest, AShareThatOthersUseIsTakenBack) {
  make({{"a", "50%:"}, {"b", "25%:"}});
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  flood(b, 100);
  EXPECT_EQ(b.blocks(), 64U);
  flood(a, 100);
  EXPECT_EQ(b.blocks(), 64U - a.blocks());
  // Above their shares both, by as much: 32 and 16, and 16 are left.
  EXPECT_NEAR(static_cast<double>(a.blocks()), 40, 1);
  EXPECT_GT(b.account->counters.evicted_for_others, 38U);
}

TEST_F(PrefixQuotaTest, WhoIsMostAboveItsShareGivesFirst) {
  make({{"a", "10%:"}, {"b", "10%:"}, {"c", "10%:"}});
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  Tenant c(*index_, "c");
  flood(a, 40);
  flood(b, 24);
  flood(c, 6);
  EXPECT_EQ(a.blocks(), 34U);
  EXPECT_EQ(b.blocks(), 24U);
}

TEST_F(PrefixQuotaTest, ThoseWithoutAQuotaHaveNoShareAndAreOneToEviction) {
  make({{"a", "25%:"}});
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  Tenant c(*index_, "c");
  flood(a, 16);
  flood(b, 24);
  flood(c, 40);
  EXPECT_EQ(a.blocks(), 16U);
  EXPECT_EQ(b.blocks(), 8U) << "the oldest of both";
  EXPECT_EQ(c.blocks(), 40U);
}

TEST_F(PrefixQuotaTest, EachThatIsNotNamedHasTheDefault) {
  make({}, "25%:50%");
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  flood(a, 40);
  EXPECT_EQ(a.blocks(), 32U);
  flood(b, 100);
  EXPECT_EQ(b.blocks(), 32U);
  Tenant c(*index_, "c");
  flood(c, 16);
  EXPECT_EQ(c.blocks(), 16U);
  EXPECT_GE(a.blocks(), 16U);
  EXPECT_GE(b.blocks(), 16U);
}

// Blocks of two namespaces lie in one slab; only a whole one becomes another shape's.
TEST_F(PrefixQuotaTest, NoSlabGoesThatHasBlocksOfAShare) {
  make({{"a", "25%:"}});
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  const SlabShape small = shape_of(kBlock / 2);
  for (int i = 0; i < 16; ++i) {  // in turns
    ASSERT_TRUE(store(a, static_cast<std::uint64_t>(i), small));
    ASSERT_TRUE(store(b, static_cast<std::uint64_t>(i), small));
  }
  flood(b, 1000);
  EXPECT_EQ(a.account->bytes(), 8 * kBlock);
  EXPECT_EQ(a.account->counters.evicted, 0U);
}

// Slabs lose room at their ends, so that shares may add up to more than there is: that is lost by
// all, and by nobody who is above its share.
TEST_F(PrefixQuotaTest, WhoIsWithinItsShareIsNotLockedOutByOthersWithin) {
  make({{"a", "50%:"}, {"b", "50%:"}});
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  const SlabShape odd = shape_of(kBlock * 3 / 2);  // Of 16 pages of 4 blocks some are lost.
  while (b.account->bytes() + odd.block_bytes() <= kPool / 2) ASSERT_TRUE(store(b, b.next++, odd));
  for (int i = 0; i < 200; ++i) (void)store(a, a.next++, odd);
  EXPECT_GE(a.account->bytes() * 10, kPool / 2 * 8) << "it has most of its share";
  EXPECT_GE(b.account->bytes() * 10, kPool / 2 * 8);
}

TEST_F(PrefixQuotaTest, ABatchTakesNoMoreOfAShareThanItsBlocksOneByOne) {
  make({{"a", "10%:"}, {"b", "80%:"}});
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  Tenant c(*index_, "c");
  flood(a, 3);
  flood(b, 50);
  std::vector<HostBlockRef> sequences;
  for (int i = 0; i < 11; ++i) {
    Extent one;
    sequences.push_back(index_->allocate(shape_of(), one, c.account));
    ASSERT_NE(sequences.back(), nullptr);
  }
  ASSERT_EQ(pool_.stats().blocks, 64U);
  Extent extent{.after = std::nullopt, .left = 40};
  std::vector<HostBlockRef> batch;
  for (int i = 0; i < 40; ++i) {
    batch.push_back(index_->allocate(shape_of(), extent, a.account));
    EXPECT_GE(b.blocks(), 47U) << "after " << i;
  }
  EXPECT_EQ(a.blocks(), 5U) << "with one more it would have a larger part of its share than b";
}

TEST_F(PrefixQuotaTest, EvictingAheadTakesWhatIsAboveSharesAlone) {
  make({{"a", "50%:"}, {"b", "25%:"}});
  Tenant a(*index_, "a");
  Tenant b(*index_, "b");
  flood(a, 24);
  flood(b, 40);
  std::uint64_t went = 0;
  while (index_->evict_ahead(shape_of())) ++went;
  EXPECT_EQ(went, 24U);
  EXPECT_EQ(a.blocks(), 24U);
  EXPECT_EQ(b.blocks(), 16U);
}

TEST_F(PrefixQuotaTest, WhatAnEarlierManagerLeftAboveALimitGoes) {
  make({{"a", "0:25%"}});
  Tenant a(*index_, "a");
  index_->await_roots(std::vector{a.root});
  std::vector<PrefixIndex::Found> found;
  for (std::uint64_t i = 0; i < 40; ++i) {
    found.push_back({{a.root, Tenant::block(0, i), ipc::GroupId{0}},
                     i == 0 ? Digest{} : Tenant::block(0, i - 1),
                     std::make_shared<const HostBlock>(pool_, *pool_.allocate(shape_of()),
                                                       /*is_doubted=*/true, a.account)});
  }
  EXPECT_EQ(index_->adopt(std::exchange(found, {})), 40U);
  EXPECT_EQ(index_->enforce_limits(10), 10U);
  EXPECT_EQ(index_->enforce_limits(100), 14U);
  EXPECT_EQ(a.blocks(), 16U);
  std::vector<Digest> prefix;
  for (std::uint64_t i = 0; i < 40; ++i) prefix.push_back(Tenant::block(0, i));
  EXPECT_EQ(index_->lookup(a.root, prefix, std::vector<ipc::GroupRule>(1)).usable_prefix, 16U);
}

// ---- whatever comes ----

class PrefixQuotaPropertyTest : public PrefixQuotaTest,
                                public testing::WithParamInterface<std::string_view> {
 protected:
  void check_sums(const std::vector<Tenant>& tenants) {
    std::uint64_t bytes = index_->accounts().nobody().bytes();
    std::uint64_t blocks = index_->accounts().nobody().blocks();
    std::map<std::uint32_t, std::uint64_t> of_partitions;
    for (const Tenant& tenant : tenants) {
      ASSERT_LE(tenant.account->bytes(), tenant.account->limits().hard) << tenant.account->name();
      bytes += tenant.account->bytes();
      blocks += tenant.account->blocks();
      of_partitions[tenant.account->partition().id] += tenant.account->bytes();
    }
    ASSERT_EQ(bytes, pool_.stats().used_bytes);
    ASSERT_EQ(blocks, pool_.stats().blocks);
    for (const auto& partition : index_->accounts().partitions()) {
      ASSERT_EQ(partition->bytes, of_partitions[partition->id]) << partition->id;
    }
  }
  /// What is there of each prefix is its beginning.
  void check_prefixes(const std::vector<Tenant>& tenants) {
    for (const Tenant& tenant : tenants) {
      for (const auto& [prefix, end] : tenant.prefixes) {
        bool was_there = true;
        for (std::uint64_t at = 0; at < end; ++at) {
          const bool is_there =
              index_->has({tenant.root, Tenant::block(prefix, at), ipc::GroupId{0}});
          ASSERT_TRUE(was_there || !is_there)
              << tenant.account->name() << ": prefix " << prefix << " has a gap before " << at;
          was_there = is_there;
        }
      }
    }
  }
  /// What is gone can be stored again.
  void forget_gone(Tenant& tenant) {
    for (auto& [prefix, end] : tenant.prefixes) {
      while (end > 0 &&
             !index_->has({tenant.root, Tenant::block(prefix, end - 1), ipc::GroupId{0}})) {
        --end;
      }
    }
  }
  /// What storing one block may have done to others. @param before bytes of each
  static void check_shares(const std::vector<Tenant>& tenants,
                           const std::vector<std::uint64_t>& before,
                           const Tenant& storing) {
    const auto& own = *storing.account;
    const bool is_within = own.bytes() <= own.limits().soft;
    for (std::size_t i = 0; i < tenants.size(); ++i) {
      const NamespaceAccount& other = *tenants[i].account;
      if (&other == &own || other.bytes() >= before[i]) continue;
      const std::uint64_t soft = other.limits().soft;
      if (other.bytes() >= std::min(before[i], soft)) continue;
      // Both within their shares: the other one still has as large a part of its own.
      ASSERT_TRUE(is_within) << own.name() << " pushed " << other.name() << " below its share";
      ASSERT_GE(static_cast<double>(other.bytes()) / static_cast<double>(soft) + 1e-9,
                static_cast<double>(own.bytes()) / static_cast<double>(own.limits().soft));
    }
  }
};

TEST_P(PrefixQuotaPropertyTest, LimitsAndSharesHoldWhateverIsStoredPinnedOrRead) {
  make({{"a", "30%:60%"}, {"b", "20%:"}, {"c", "0:25%"}, {"d", "40%:40%"}}, {}, GetParam());
  std::vector<Tenant> tenants;
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) tenants.emplace_back(*index_, name);
  std::mt19937 random(17);
  std::vector<HostBlockRef> held;  // sequences, and blocks that are read
  for (int round = 0; round < 6'000; ++round) {
    Tenant& tenant = tenants[random() % tenants.size()];
    forget_gone(tenant);
    std::vector<std::uint64_t> before;
    for (const Tenant& one : tenants) before.push_back(one.account->bytes());
    const std::uint64_t prefix = random() % 12;
    const std::uint64_t what = random() % 20;
    if (what < 14) {
      (void)store(tenant, prefix);
      ASSERT_NO_FATAL_FAILURE(check_shares(tenants, before, tenant)) << "round " << round;
    } else if (what == 14) {
      Extent extent;
      held.push_back(index_->allocate(shape_of(), extent, tenant.account));
      ASSERT_NO_FATAL_FAILURE(check_shares(tenants, before, tenant)) << "round " << round;
    } else if (what == 15 && tenant.prefixes[prefix] > 0) {
      held.push_back(index_->acquire({tenant.root, Tenant::block(prefix, 0), ipc::GroupId{0}}));
    } else if (what == 16) {
      std::vector<Digest> path;
      for (std::uint64_t i = 0; i < tenant.prefixes[prefix]; ++i) {
        path.push_back(Tenant::block(prefix, i));
      }
      index_->use(tenant.root, path, 1);
    } else if (what == 17) {
      (void)index_->pin(client_, tenant.root, std::vector{Tenant::block(prefix, 0)}, 1);
    } else if (what == 18) {
      (void)index_->unpin(client_, tenant.root, std::vector{Tenant::block(prefix, 0)}, 1);
    } else if (random() % 10 == 0) {
      (void)index_->drop_root(tenant.root, [](const auto&) { return false; });
    }
    while (held.size() > 8) held.erase(held.begin() + static_cast<int>(random() % held.size()));
    ASSERT_NO_FATAL_FAILURE(check_sums(tenants)) << "round " << round;
    if (round % 20 != 0) continue;
    ASSERT_NO_FATAL_FAILURE(check_prefixes(tenants)) << "round " << round;
  }
  std::uint64_t taken = 0;
  for (const Tenant& tenant : tenants) taken += tenant.account->counters.evicted_for_others;
  EXPECT_GT(taken, 100U) << "they have met";
  EXPECT_GT(tenants[2].account->counters.evicted, 50U) << "at its limit";
}

// The same with blocks of three sizes, of which slabs change their shapes.
TEST_P(PrefixQuotaPropertyTest, LimitsAndSharesHoldWhenSlabsChangeTheirShape) {
  make({{"a", "30%:60%"}, {"b", "20%:"}, {"c", "0:25%"}}, "10%:50%", GetParam());
  std::vector<Tenant> tenants;
  for (const char* name : {"a", "b", "c", "d", "e"}) tenants.emplace_back(*index_, name);
  const std::vector<SlabShape> shapes = {shape_of(kBlock / 4), shape_of(kBlock),
                                         shape_of(kBlock * 3 / 2)};
  std::mt19937 random(23);
  for (int round = 0; round < 4'000; ++round) {
    Tenant& tenant = tenants[random() % tenants.size()];
    std::vector<std::uint64_t> before;
    for (const Tenant& one : tenants) before.push_back(one.account->bytes());
    (void)store(tenant, tenant.next++, shapes[random() % 100 / (round % 1000 < 500 ? 40 : 45)]);
    ASSERT_NO_FATAL_FAILURE(check_shares(tenants, before, tenant)) << "round " << round;
    ASSERT_NO_FATAL_FAILURE(check_sums(tenants)) << "round " << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies,
                         PrefixQuotaPropertyTest,
                         testing::ValuesIn(eviction_policies().begin(), eviction_policies().end()),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace kvferry::cache_manager
