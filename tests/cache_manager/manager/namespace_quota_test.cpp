// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/namespace_quota.hpp"

#include "kvferry/cache_manager/watermarks.hpp"
#include "manager/namespace_accounts.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;
using ipc::ErrorCode;
using testing::HasSubstr;

constexpr std::uint64_t kMiB = 1ULL << 20;

NamespaceQuota quota(const std::string& text) { return parse_namespace_quota(text).value(); }

bool is_nobodys(const NamespaceAccount& /*account*/) { return false; }
bool is_somebodys(const NamespaceAccount& /*account*/) { return true; }

TEST(NamespaceQuotaTest, IsWrittenInSizesOrPercent) {
  EXPECT_EQ(quota("25%:50%").soft.of(1000 * kMiB), 250 * kMiB);
  EXPECT_EQ(quota("25%:50%").hard.of(1000 * kMiB), 500 * kMiB);
  EXPECT_EQ(quota("64MiB:1GiB").soft.of(1), 64 * kMiB);
  EXPECT_EQ(quota("0:12.5%").hard.of(1000 * kMiB), 125 * kMiB);
  EXPECT_EQ(quota("0:12.5%").soft.of(1000 * kMiB), 0U);
  EXPECT_EQ(quota("10%:"), quota("10%:100%"));
  EXPECT_EQ(quota(":10%"), quota("0:10%"));
  EXPECT_EQ(quota("12.5%:2GiB").soft.to_string(), "12.5%");
  EXPECT_EQ(quota("12.5%:2GiB").hard.to_string(), "2.00 GiB");
  const auto named = parse_named_quota("a=b=10%:20%");
  ASSERT_TRUE(named.has_value());
  EXPECT_EQ(named->first, "a=b");
  EXPECT_EQ(named->second, quota("10%:20%"));
}

TEST(NamespaceQuotaTest, TellsWhatIsWrongWithAText) {
  for (const auto& [text, what] : std::vector<std::pair<std::string, std::string>>{
           {"", "no SOFT:HARD"},
           {"10%", "no SOFT:HARD"},
           {":", "no SOFT:HARD"},
           {"101%:", "'101%' in '101%:' is no percentage"},
           {"-1%:50%", "no percentage"},
           {"nan%:50%", "no percentage"},
           {"x:50%", "size 'x' is not a number"},
           {"1:2:3", "unknown unit ':3'"}}) {
    const auto parsed = parse_namespace_quota(text);
    ASSERT_FALSE(parsed.has_value()) << text;
    EXPECT_EQ(parsed.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(parsed.error().message, HasSubstr(what)) << text;
  }
  for (const std::string text : {"10%:20%", "=10%:20%"}) {
    EXPECT_THAT(parse_named_quota(text).error().message, HasSubstr("no NAME=SOFT:HARD"));
  }
}

TEST(NamespaceQuotaTest, APoolCannotHoldToAnyQuota) {
  const auto told = [](const NamespaceQuotas& quotas) {
    const ipc::Status good = quotas.check(1000 * kMiB);
    return good ? std::string() : good.error().message;
  };
  EXPECT_EQ(told({{{"a", quota("50%:")}, {"b", quota("50%:50%")}}, quota("0:10%")}), "");
  EXPECT_THAT(told({{{"a", quota("50%:")}, {"b", quota("50.1%:")}}, {}}),
              HasSubstr("soft shares of 2 namespaces are 1001.0 MiB together"));
  EXPECT_THAT(told({{{"a", quota("50%:40%")}}, {}}), HasSubstr("50%, above its hard limit of 40%"));
  EXPECT_THAT(told({{{"a", quota("0:2GiB")}}, {}}), HasSubstr("0%:2.00 GiB, the host pool has"));
  EXPECT_THAT(told({{{"a", quota("0:0%")}}, {}}),
              HasSubstr("hard limit of namespace a is nothing"));
  EXPECT_THAT(told({{{"a", quota("0:0")}}, {}}), HasSubstr("hard limit of namespace a is nothing"));
  EXPECT_THAT(told({{{"a", quota("0:1")}}, {}}),
              HasSubstr("hard limit of namespace a is 1 bytes, below 4096"));
  EXPECT_THAT(told({{}, quota("0:4095")}), HasSubstr("not named is 4095 bytes, below 4096"));
  EXPECT_EQ(told({{{"a", quota("0:4KiB")}}, {}}), "");
  EXPECT_THAT(told({{}, quota("20%:10%")}), HasSubstr("namespaces that are not named"));
  EXPECT_THAT(told({{{"a\nb", quota("0:10%")}}, {}}), HasSubstr("control characters"));
}

TEST(NamespaceAccountsTest, EveryNamespaceWithAQuotaIsAPartitionOfItsOwn) {
  NamespaceAccounts accounts(1000 * kMiB, {{{"a", quota("10%:20%")}}, {}});
  NamespaceAccount& a = *accounts.open("a", is_nobodys).value();
  NamespaceAccount& b = *accounts.open("b", is_nobodys).value();
  NamespaceAccount& c = *accounts.open("c", is_nobodys).value();
  EXPECT_EQ(a.limits(), (NamespaceAccount::Limits{100 * kMiB, 200 * kMiB}));
  EXPECT_NE(a.partition().id, b.partition().id);
  EXPECT_EQ(b.partition().id, c.partition().id) << "those without are one";
  EXPECT_TRUE(b.has_room_for(5000 * kMiB)) << "no limit";
  b.charge(10);
  c.charge(20);
  EXPECT_EQ(b.partition().bytes, 30U);
  EXPECT_EQ(a.partition().bytes, 0U);
  b.refund(10);
  EXPECT_EQ(b.bytes(), 0U);
  EXPECT_EQ(c.partition().bytes, 20U);
}

TEST(NamespaceAccountsTest, OthersShareWhatTheNamedLeave) {
  NamespaceAccounts accounts(1000 * kMiB, {{{"a", quota("70%:")}}, quota("20%:50%")});
  EXPECT_EQ(accounts.open("b", is_somebodys).value()->limits().soft, 200 * kMiB);
  EXPECT_EQ(accounts.open("c", is_somebodys).value()->limits().soft, 100 * kMiB) << "what is left";
  EXPECT_EQ(accounts.open("d", is_somebodys).value()->limits().soft, 0U);
  EXPECT_EQ(accounts.open("d", is_somebodys).value()->limits().hard, 500 * kMiB);
}

TEST(NamespaceAccountsTest, ThereAreOnlySoMany) {
  NamespaceAccounts accounts(1000 * kMiB, {{{"named", quota("10%:")}}, quota("1%:50%")});
  std::vector<std::uint32_t> gone;
  accounts.on_partition_gone([&](std::uint32_t id) { gone.push_back(id); });
  for (std::size_t i = 1; i < NamespaceAccounts::kMostAccounts; ++i) {
    ASSERT_TRUE(accounts.open("n" + std::to_string(i), is_somebodys).has_value());
  }
  const auto refused = accounts.open("another", is_somebodys);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kBusy);
  EXPECT_TRUE(accounts.open("n1", is_somebodys).has_value()) << "it is there";
  accounts.open("n1", is_somebodys).value()->charge(1);
  ASSERT_TRUE(accounts.open("another", is_nobodys).has_value());
  EXPECT_EQ(accounts.all().size(), 3U) << "named, n1 which has a block, another";
  EXPECT_EQ(gone.size(), NamespaceAccounts::kMostAccounts - 2);
  EXPECT_EQ(accounts.partitions().size(), 4U) << "and those without a quota";
}

TEST(NamespaceAccountsTest, WhoComesFirstSaysWhichKeyItIs) {
  NamespaceAccounts accounts(kMiB, {});
  NamespaceAccount& account = *accounts.open("a", is_nobodys).value();
  const Digest key = Digest::from_words(1, 2);
  const Digest other = Digest::from_words(1, 3);
  ASSERT_TRUE(NamespaceAccounts::claim(account, key, is_nobodys));
  EXPECT_TRUE(account.has_key());
  EXPECT_NE(account.proof(), key) << "it is not kept itself";
  EXPECT_TRUE(NamespaceAccounts::claim(account, key, is_somebodys));
  for (const auto& wrong : {std::optional(other), std::optional<Digest>()}) {
    const ipc::Status refused = NamespaceAccounts::claim(account, wrong, is_somebodys);
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code, ErrorCode::kPermission);
  }
  account.charge(1);
  EXPECT_FALSE(NamespaceAccounts::claim(account, other, is_nobodys)) << "it has blocks";
  account.refund(1);
  EXPECT_TRUE(NamespaceAccounts::claim(account, other, is_nobodys));
  EXPECT_FALSE(NamespaceAccounts::claim(account, key, is_somebodys));
  NamespaceAccount& open = *accounts.open("b", is_nobodys).value();
  ASSERT_TRUE(NamespaceAccounts::claim(open, {}, is_nobodys));
  EXPECT_FALSE(NamespaceAccounts::claim(open, key, is_somebodys)) << "nobody locks the others out";
}

TEST(NamespaceAccountsTest, SharesOfThoseThatAreGoneAreFreeForOthers) {
  NamespaceQuotas quotas;
  quotas.others = parse_namespace_quota("50%:").value();
  NamespaceAccounts accounts(1U << 20U, quotas);
  accounts.on_partition_gone([](std::uint32_t) {});
  for (int i = 0; i < 20; ++i) {
    const auto account = accounts.open("tenant" + std::to_string(i), is_nobodys);
    ASSERT_TRUE(account.has_value());
    EXPECT_EQ((*account)->limits().soft, 1U << 19U) << i;
  }
  EXPECT_EQ(accounts.open("last", is_somebodys).value()->limits().soft, 0U) << "two are there";
}

TEST(NamespaceAccountsTest, AnEarlierManagersKeyHolds) {
  NamespaceAccounts before(kMiB, {});
  const Digest key = Digest::random();
  NamespaceAccount& account = *before.open("a", is_nobodys).value();
  ASSERT_TRUE(NamespaceAccounts::claim(account, key, is_nobodys));
  NamespaceAccounts accounts(kMiB, {});
  NamespaceAccount& adopted = accounts.adopt("a", account.proof());
  adopted.charge(1);
  EXPECT_FALSE(NamespaceAccounts::claim(adopted, {}, is_nobodys));
  EXPECT_TRUE(NamespaceAccounts::claim(adopted, key, is_nobodys));
  EXPECT_EQ(&accounts.adopt("", {}), &accounts.nobody()) << "a name that cannot be";
  // While its blocks are still to come it is not forgotten.
  NamespaceAccount& empty = accounts.adopt("b", {});
  for (std::size_t i = 2; i < NamespaceAccounts::kMostAccounts; ++i) {
    ASSERT_TRUE(accounts.open("n" + std::to_string(i), is_nobodys).has_value());
  }
  EXPECT_FALSE(accounts.open("more", is_nobodys).has_value());
  EXPECT_EQ(accounts.open("b", is_nobodys).value(), &empty);
  accounts.end_adoption();
  EXPECT_TRUE(accounts.open("more", is_nobodys).has_value());
  EXPECT_EQ(accounts.all().size(), 2U) << "a, which has a block, and the new one";
}

TEST(WatermarksTest, AreTwoPercentages) {
  EXPECT_EQ(parse_watermarks("1:2").value(), (Watermarks{10, 20}));
  EXPECT_EQ(parse_watermarks("0.5%:1%").value(), (Watermarks{5, 10}));
  EXPECT_FALSE(parse_watermarks("0:0").value().is_on());
  EXPECT_EQ((Watermarks{5, 10}).low_of(1999), 9U);
  for (const std::string text : {"", "1", "2:1", "0:1", "1:51", "a:2", "1:", "1:2:3", "-1:2"}) {
    const auto parsed = parse_watermarks(text);
    ASSERT_FALSE(parsed.has_value()) << text;
    EXPECT_EQ(parsed.error().code, ErrorCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace kvferry::cache_manager
