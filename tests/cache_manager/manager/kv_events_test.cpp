// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Which engines are told what, over real sockets.
#include "manager/kv_events.hpp"

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/wire/kv_event_subscriber.hpp"
#include "support/kv_picture.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::KvPicture;
using Kind = ipc::KvEventSubscriber::News::Kind;

constexpr std::uint64_t kPool = 64ULL * 4096;

Digest digest(std::uint64_t value) { return Digest::from_words(0xB10C, value); }

SlabShape shape_of() {
  SlabShape shape;
  shape.fingerprint = digest(99);
  shape.bytes.shard_bytes = 4096;
  return shape;
}

class KvEventsManagerTest : public testing::Test {
 protected:
  void SetUp() override {
    config_.kv_events = "ipc://" + (dir_.path() / "events").string();
    config_.kv_events_snapshot = "ipc://" + (dir_.path() / "ask").string();
    events_.emplace(loop_, directory_, index_, config_, digest(1));
    subscriber_.emplace(
        ipc::KvEventSubscriber::Options{config_.kv_events, config_.kv_events_snapshot});
    ASSERT_TRUE(run_until([&] { return picture_.is_complete(); }));
  }

  bool run_until(const std::function<bool()>& done) {
    const ipc::Deadline end = ipc::Deadline::after(30s);
    while (!end.expired()) {
      if (done()) return true;
      loop_.run_once(ipc::Deadline::after(1ms));
      const auto news = subscriber_->next(ipc::Deadline::after(1ms));
      if (!news) ADD_FAILURE() << news.error().to_string();
      if (news && *news) picture_.apply(**news);
    }
    return false;
  }
  /// All that was told so far is in the picture.
  bool follow() {
    loop_.run_once(ipc::Deadline::after(0ms));
    return run_until(
        [&] { return subscriber_->expected() == events_->publisher().stats().batches; });
  }

  ClientRecord& join(const std::string& engine, std::uint64_t client, const Digest& root) {
    ClientRecord record;
    record.peer.id = digest(client);
    record.engine = &directory_.open(engine);
    record.identity.model = "tiny";
    record.root = root;
    return directory_.set_client(std::move(record));
  }
  static std::string topic(const std::string& engine, const Digest& root) {
    return ipc::KvTopic{engine, "default", root, "tiny"}.text();
  }
  void store(const Digest& root, std::uint64_t first, std::uint64_t count) {
    std::vector<PrefixIndex::Token> tokens;
    for (std::uint64_t i = first; i < first + count; ++i) {
      Extent alone;
      const auto slot = index_.reserve(digest(2000), {root, digest(i), ipc::GroupId{0}},
                                       i == first ? Digest{} : digest(i - 1), shape_of(), alone);
      ASSERT_EQ(slot.outcome, ipc::ReserveOutcome::kReserved);
      tokens.push_back(slot.slot);
      (void)index_.begin_fill(digest(2000), slot.slot);
    }
    (void)index_.commit(tokens);
  }
  void drop(const Digest& root) {
    (void)index_.drop_root(root, [](const auto&) { return false; });
  }
  static KvPicture::Blocks blocks(std::uint64_t first, std::uint64_t count) {
    KvPicture::Blocks all;
    for (std::uint64_t i = first; i < first + count; ++i) all.emplace(0, digest(i));
    return all;
  }
  std::uint64_t batches() { return events_->publisher().stats().batches; }

  const test::ShortTempDir dir_;
  ipc::EventLoop loop_;
  ManagerConfig config_;
  EngineDirectory directory_;
  HostPool pool_{kPool};
  PrefixIndex index_{pool_, "lru"};
  const Digest root_ = digest(1000);
  const Digest other_root_ = digest(1001);
  std::optional<KvEvents> events_;
  std::optional<ipc::KvEventSubscriber> subscriber_;
  KvPicture picture_;
};

TEST_F(KvEventsManagerTest, ATurnOfTheLoopIsOneBatch) {
  (void)join("chat", 1, root_);
  store(root_, 10, 20);
  store(root_, 40, 5);
  EXPECT_EQ(batches(), 0U);
  ASSERT_TRUE(follow());
  EXPECT_EQ(batches(), 1U);
  EXPECT_EQ(events_->publisher().stats().events, 2U) << "one for each chain";
  KvPicture::Blocks expected = blocks(10, 20);
  expected.merge(blocks(40, 5));
  EXPECT_EQ(picture_.of(topic("chat", root_)), expected);
}

// Whoever knows the tokens knows the hashes.
TEST_F(KvEventsManagerTest, NobodyIsToldOfANamespaceWithAKey) {
  ClientRecord record;
  record.peer.id = digest(1);
  record.engine = &directory_.open("chat");
  record.identity.name_space_key = digest(7);
  record.root = root_;
  (void)directory_.set_client(std::move(record));
  (void)join("chat", 2, other_root_);
  store(root_, 10, 20);
  store(other_root_, 100, 5);
  ASSERT_TRUE(follow());
  EXPECT_EQ(events_->publisher().stats().events, 1U);
  EXPECT_EQ(picture_.of(topic("chat", other_root_)), blocks(100, 5));
}

TEST_F(KvEventsManagerTest, EnginesOfOneRootAreEachTold) {
  (void)join("chat", 1, root_);
  (void)join("code", 2, root_);
  (void)join("code", 3, root_);
  (void)join("other", 4, other_root_);
  store(root_, 10, 4);
  ASSERT_TRUE(follow());
  EXPECT_EQ(picture_.of(topic("chat", root_)), blocks(10, 4));
  EXPECT_EQ(picture_.of(topic("code", root_)), blocks(10, 4));
  EXPECT_EQ(picture_.topics().size(), 2U);
  EXPECT_EQ(batches(), 2U);
}

TEST_F(KvEventsManagerTest, AnEngineThatComesToBlocksOfOthersIsToldThem) {
  (void)join("chat", 1, root_);
  store(root_, 10, 8);
  store(other_root_, 30, 3);  // nobody's
  ASSERT_TRUE(follow());
  (void)join("code", 2, root_);
  store(root_, 20, 2);  // before it is told of the others
  ASSERT_TRUE(run_until([&] { return picture_.of(topic("code", root_)).size() == 10; }));
  ASSERT_TRUE(follow());
  EXPECT_EQ(picture_.of(topic("code", root_)), picture_.of(topic("chat", root_)));
}

TEST_F(KvEventsManagerTest, ADropOfAllIsOneEventForEachEngine) {
  (void)join("chat", 1, root_);
  (void)join("code", 2, root_);
  store(root_, 10, 12);
  ASSERT_TRUE(follow());
  const std::uint64_t before = events_->publisher().stats().events;
  drop(root_);
  ASSERT_TRUE(follow());
  EXPECT_EQ(events_->publisher().stats().events, before + 2);
  EXPECT_EQ(picture_.clears(), 2U);
  EXPECT_TRUE(picture_.of(topic("chat", root_)).empty());
}

TEST_F(KvEventsManagerTest, WhatStaysAfterADropIsNotCleared) {
  (void)join("chat", 1, root_);
  store(root_, 10, 6);
  const std::vector<Digest> pinned = {digest(12)};
  (void)index_.pin(digest(7), root_, pinned, 1);
  (void)index_.drop_root(root_, [](const auto& client) { return client == digest(7); });
  ASSERT_TRUE(follow());
  EXPECT_EQ(picture_.clears(), 0U);
  EXPECT_EQ(picture_.of(topic("chat", root_)), blocks(12, 1));
}

TEST_F(KvEventsManagerTest, AnEngineOfOtherWeightsNoLongerHasWhatItStored) {
  ClientRecord& client = join("chat", 1, root_);
  (void)join("code", 2, root_);
  store(root_, 10, 6);
  ASSERT_TRUE(follow());
  directory_.set_root(client, other_root_);
  ASSERT_TRUE(follow());
  EXPECT_TRUE(picture_.of(topic("chat", root_)).empty());
  EXPECT_EQ(picture_.of(topic("code", root_)), blocks(10, 6)) << "of the same weights still";
  store(root_, 20, 1);
  store(other_root_, 50, 2);
  ASSERT_TRUE(follow());
  EXPECT_TRUE(picture_.of(topic("chat", root_)).empty());
  EXPECT_EQ(picture_.of(topic("chat", other_root_)), blocks(50, 2));
  // And back.
  directory_.set_root(client, root_);
  ASSERT_TRUE(run_until([&] { return picture_.of(topic("chat", root_)).size() == 7; }));
  EXPECT_TRUE(picture_.of(topic("chat", other_root_)).empty());
}

TEST_F(KvEventsManagerTest, ARootStaysWhileAnotherClientOfTheEngineUsesIt) {
  ClientRecord& client = join("chat", 1, root_);
  (void)join("chat", 2, root_);
  store(root_, 10, 2);
  directory_.set_root(client, other_root_);
  ASSERT_TRUE(follow());
  EXPECT_EQ(picture_.of(topic("chat", root_)), blocks(10, 2));
}

TEST_F(KvEventsManagerTest, ARestartedEngineFindsItsTopicAsItWas) {
  (void)join("chat", 1, root_);
  store(root_, 10, 2);
  (void)directory_.remove_client(digest(1));
  (void)directory_.drop_if_unused("chat");
  store(root_, 20, 1);
  ASSERT_TRUE(follow());
  const std::uint64_t before = batches();
  (void)join("chat", 5, root_);
  ASSERT_TRUE(follow());
  EXPECT_EQ(batches(), before) << "all of it was told";
  EXPECT_EQ(picture_.of(topic("chat", root_)).size(), 3U);
}

TEST_F(KvEventsManagerTest, RandomStoresEvictionsDropsAndLatecomersKeepEveryPictureRight) {
  std::mt19937_64 random(11);
  for (const std::uint64_t client : {1U, 2U}) {
    (void)join("engine" + std::to_string(client), client, client == 1 ? root_ : other_root_);
  }
  std::uint64_t next = 10'000;
  const auto truth = [&](const Digest& root) {
    KvPicture::Blocks all;
    std::size_t from = 0;
    do {
      from = index_.visit_visible(from, 1000, [&](const ipc::BlockKey& key, const Digest&) {
        if (key.root == root) all.emplace(key.group.value, key.block);
      });
    } while (from != 0);
    return all;
  };
  for (int round = 0; round < 200; ++round) {
    const Digest root = random() % 2 == 0 ? root_ : other_root_;
    if (random() % 12 == 0) {
      drop(root);
    } else {
      const std::uint64_t count = 1 + random() % 9;
      store(root, next, count);
      next += count;
    }
    if (random() % 3 == 0) loop_.run_once(ipc::Deadline::after(0ms));
    if (round == 60) (void)join("late", 3, root_);
    if (round == 120) {
      subscriber_.emplace(
          ipc::KvEventSubscriber::Options{config_.kv_events, config_.kv_events_snapshot});
      picture_ = {};
    }
  }
  EXPECT_GT(index_.stats().evicted, 100U);
  ASSERT_TRUE(run_until([&] { return picture_.is_complete(); }));
  ASSERT_TRUE(follow());
  EXPECT_EQ(picture_.of(topic("engine1", root_)), truth(root_));
  EXPECT_EQ(picture_.of(topic("engine2", other_root_)), truth(other_root_));
  EXPECT_EQ(picture_.of(topic("late", root_)), truth(root_));
}

}  // namespace
}  // namespace kvferry::cache_manager
