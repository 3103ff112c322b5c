// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/pool_keeper.hpp"

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/ipc/wire/keeper_messages.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <future>
#include <iterator>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

/// A keeper on this thread's loop, which runs while another thread asks.
class PoolKeeperTest : public testing::Test {
 protected:
  void SetUp() override {
    auto dir = RuntimeDir::open(temp_.path().string(), "default");
    ASSERT_TRUE(dir.has_value()) << dir.error().to_string();
    dir_.emplace(std::move(dir).value());
    path_ = dir_->rank_socket("chat", 0, PoolKeeper::kSocket);
    keeper_.emplace(loop_, path_, [this] { ++dropped_; });
  }
  static PoolMemory memory(std::uint64_t name) {
    PoolMemory memory;
    memory.id = Digest::from_words(1, name);
    memory.pool_bytes = 1U << 20U;
    memory.catalogue_bytes = 1U << 16U;
    memory.pool = SharedMemory::create_pool("test-pool", memory.pool_bytes, false).value();
    memory.catalogue =
        SharedMemory::create_pool("test-catalogue", memory.catalogue_bytes, false).value();
    return memory;
  }
  /// What the other thread got, while the loop ran.
  template <typename Ask> auto while_serving(Ask ask) {
    auto answer = std::async(std::launch::async, [this, ask] {
      auto got = ask();
      loop_.post([this] { loop_.stop(); });
      return got;
    });
    EXPECT_TRUE(loop_.run());
    return answer.get();
  }
  std::vector<KeptPool> find(bool succeeds = false) {
    return while_serving(
        [this, succeeds] { return find_kept_pools(*dir_, succeeds, soon()).pools; });
  }
  Status drop(const KeptPool& pool) {
    return while_serving([&pool] { return drop_kept_pool(pool, soon()); });
  }
  static std::ptrdiff_t open_descriptors() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  }

  test::ShortTempDir temp_;
  std::optional<RuntimeDir> dir_;
  std::filesystem::path path_;
  EventLoop loop_;
  int dropped_ = 0;
  std::optional<PoolKeeper> keeper_;
};

TEST_F(PoolKeeperTest, WhoKeepsNothingSaysSo) { EXPECT_TRUE(find().empty()); }

TEST_F(PoolKeeperTest, AnOfferedPoolIsGivenWithItsCatalogue) {
  const PoolMemory kept = memory(5);
  keeper_->keep(kept.duplicate().value());
  keeper_->offer();
  const auto found = find();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].holder, "chat.0.keep");
  EXPECT_EQ(found[0].pid, ::getpid());
  EXPECT_FALSE(found[0].in_use);
  EXPECT_EQ(found[0].memory.id, kept.id);
  EXPECT_EQ(found[0].memory.pool_bytes, kept.pool_bytes);
  EXPECT_TRUE(is_same_memory(found[0].memory.pool, kept.pool));
  EXPECT_TRUE(is_same_memory(found[0].memory.catalogue, kept.catalogue));
}

TEST_F(PoolKeeperTest, ThoseThatAreStoppedCostNoMoreThanOneOfThem) {
  keeper_->keep(memory(1));
  keeper_->offer();
  std::vector<PacketListener> silent;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    const auto path = dir_->rank_socket("also", rank, PoolKeeper::kSocket);
    silent.push_back(PacketListener::listen(path).value());
  }
  // Two of them, one after the other, would take all of it.
  const auto deadline = Deadline::after(std::chrono::milliseconds(1500));
  const auto found = while_serving(
      [this, deadline] { return find_kept_pools(*dir_, /*succeeds=*/false, deadline); });
  ASSERT_EQ(found.pools.size(), 1U);
  EXPECT_EQ(found.pools[0].memory.id, memory(1).id);
  ASSERT_EQ(found.silent.size(), 4U);
  for (const SilentKeeper& one : found.silent) {
    EXPECT_EQ(one.pid, ::getpid());
    EXPECT_EQ(one.error.code, ErrorCode::kTimeout);
  }
}

TEST_F(PoolKeeperTest, APoolInUseIsNamedAndNotGiven) {
  keeper_->keep(memory(5));
  const auto found = find();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_TRUE(found[0].in_use);
  EXPECT_FALSE(found[0].memory.valid());
  EXPECT_EQ(drop(found[0]).error().code, ErrorCode::kBusy);
  EXPECT_EQ(dropped_, 0);
}

TEST_F(PoolKeeperTest, TheNextManagerIsAnsweredWhenTheEarlierOneIsSeenToBeGone) {
  keeper_->keep(memory(5));
  loop_.after(std::chrono::milliseconds(20), [this] { keeper_->offer(); });
  const auto found = find(/*succeeds=*/true);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_FALSE(found[0].in_use);
  EXPECT_TRUE(found[0].memory.valid());
}

TEST_F(PoolKeeperTest, ADroppedPoolIsLetGoOnce) {
  const std::ptrdiff_t before = open_descriptors();
  keeper_->keep(memory(5));
  keeper_->offer();
  auto found = find();
  ASSERT_EQ(found.size(), 1U);
  KeptPool other = std::move(found[0]);
  other.memory.id = Digest::from_words(1, 6);
  EXPECT_EQ(drop(other).error().code, ErrorCode::kNotFound);
  other.memory.id = Digest::from_words(1, 5);
  ASSERT_TRUE(drop(other).has_value());
  EXPECT_EQ(dropped_, 1);
  EXPECT_EQ(drop(other).error().code, ErrorCode::kNotFound);
  EXPECT_TRUE(find().empty());
  other = {};
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(PoolKeeperTest, ANewManagersPoolTakesThePlaceOfTheOld) {
  keeper_->keep(memory(5));
  keeper_->offer();
  keeper_->keep(memory(6));
  auto found = find();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_TRUE(found[0].in_use);
  EXPECT_EQ(found[0].memory.id, Digest::from_words(1, 6));
}

TEST_F(PoolKeeperTest, WhoSaysNonsenseIsRefusedAndOthersAreServed) {
  keeper_->keep(memory(5));
  keeper_->offer();
  const auto refused = while_serving([this]() -> Result<KeeperReply> {
    KVFERRY_ASSIGN(PacketSocket socket, PacketSocket::connect(path_, soon()));
    KVFERRY_TRY(socket.send(std::array<std::uint8_t, 3>{0xC1, 2, 3}));
    KVFERRY_ASSIGN(Packet packet, socket.receive(soon()));
    return decode<KeeperReply>(packet.bytes, "reply");
  });
  ASSERT_TRUE(refused.has_value()) << refused.error().to_string();
  ASSERT_TRUE(refused->refused.has_value());
  EXPECT_EQ(refused->refused->code, ErrorCode::kProtocol);
  EXPECT_EQ(find().size(), 1U);
}

TEST_F(PoolKeeperTest, AnotherVersionIsToldBoth) {
  const auto refused = while_serving([this]() -> Result<KeeperReply> {
    KVFERRY_ASSIGN(PacketSocket socket, PacketSocket::connect(path_, soon()));
    KeeperRequest request;
    request.version = kWireVersion + 1;
    KVFERRY_TRY(socket.send(encode(request)));
    KVFERRY_ASSIGN(Packet packet, socket.receive(soon()));
    return decode<KeeperReply>(packet.bytes, "reply");
  });
  ASSERT_TRUE(refused.has_value()) << refused.error().to_string();
  ASSERT_TRUE(refused->refused.has_value());
  EXPECT_EQ(refused->refused->code, ErrorCode::kVersionMismatch);
}

TEST_F(PoolKeeperTest, WhoComesAndGoesWithoutAWordCostsNothing) {
  keeper_->keep(memory(5));
  const std::ptrdiff_t before = open_descriptors();
  for (int i = 0; i < 100; ++i) {
    const auto socket = PacketSocket::connect(path_, soon());
    ASSERT_TRUE(socket.has_value());
    if (i % 10 == 0) (void)find();
  }
  (void)find();
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(PoolKeeperTest, AnAskerThatWaitsWhenTheKeeperEndsIsNotLeftWaiting) {
  keeper_->keep(memory(5));
  loop_.after(std::chrono::milliseconds(20), [this] { keeper_.reset(); });
  EXPECT_TRUE(find(/*succeeds=*/true).empty());
}

TEST_F(PoolKeeperTest, ASecondKeeperOfTheNameIsRefused) {
  EXPECT_THROW(PoolKeeper(loop_, path_, [] {}), Exception);
}

}  // namespace
}  // namespace kvferry::ipc
