// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What a worker that copies by itself takes from its engine, and what it does with what it does
// not: its messages, their bounds, and a real process that this test is the engine of.
#include "bench/copier/messages.hpp"
#include "bench/copier/piece_copies.hpp"
#include "bench/copier/pool_places.hpp"
#include "cli/replay_fixture.hpp"
#include "ipc/wire/message_filler.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <gmock/gmock.h>
#include <poll.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;
using testing::ElementsAre;
using testing::HasSubstr;

template <typename T> T filled(std::uint64_t seed) {
  T message{};
  test::MessageFiller filler(seed);
  filler.fill(message);
  return message;
}

template <typename T> class CopierMessageTest : public testing::Test {};
using CopierMessages = testing::Types<CopierSetUp, CopierReady, CopyRequest, CopyReply>;
TYPED_TEST_SUITE(CopierMessageTest, CopierMessages);

TYPED_TEST(CopierMessageTest, RoundTripsAndEveryTruncationAndExtensionIsRefused) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    ipc::Bytes bytes = ipc::encode(filled<TypeParam>(seed));
    const auto decoded = ipc::decode<TypeParam>(bytes, "message");
    ASSERT_TRUE(decoded.has_value()) << decoded.error().to_string();
    EXPECT_EQ(ipc::encode(*decoded), bytes);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const auto cut = ipc::decode<TypeParam>(std::span(bytes).first(size), "message");
      ASSERT_FALSE(cut.has_value()) << size << " of " << bytes.size() << " bytes";
      EXPECT_EQ(cut.error().code, ipc::ErrorCode::kProtocol);
    }
    bytes.push_back(0);
    EXPECT_FALSE(ipc::decode<TypeParam>(bytes, "message").has_value());
  }
}

CopyRequest request_of(std::uint64_t id, std::vector<CopyItem> items) {
  return {id, ipc::CopyDirection::kDeviceToHost, std::move(items)};
}

CopyItem item_of(std::uint32_t group, std::uint32_t block, std::uint64_t offset) {
  return {ipc::GroupId{group}, ipc::BlockId{block}, offset};
}

TEST(CopyRequestTest, WhatLeavesArenaOrPoolIsRefused) {
  constexpr std::uint64_t kPacked = 4096;
  const CopyBounds bounds{{{10, kPacked}, {4, 2 * kPacked}}, 2 * kCopyPieceBytes};
  const auto code = [&](const CopyRequest& request, std::uint64_t last = 0) {
    const ipc::Status checked = check_copy_request(request, last, bounds);
    return checked ? std::string("ok") : std::string(to_string(checked.error().code));
  };
  EXPECT_EQ(code(request_of(1, {item_of(0, 9, 0), item_of(1, 3, kPacked)})), "ok");
  EXPECT_EQ(code(request_of(1, {item_of(0, 0, 2 * kCopyPieceBytes - kPacked)})), "ok");
  EXPECT_EQ(code(request_of(1, {item_of(0, 0, kCopyPieceBytes - 1)})), "ok") << "it is cut there";
  EXPECT_EQ(code(request_of(5, {item_of(0, 0, 0)}), 5), "protocol");
  EXPECT_EQ(code(request_of(4, {item_of(0, 0, 0)}), 5), "protocol");
  for (const CopyItem& wrong :
       {item_of(2, 0, 0), item_of(~0U, 0, 0), item_of(0, 10, 0), item_of(1, 4, 0),
        item_of(0, 0, 2 * kCopyPieceBytes - kPacked + 1), item_of(0, 0, 2 * kCopyPieceBytes),
        item_of(0, 0, ~std::uint64_t{0}), item_of(0, 0, ~std::uint64_t{0} - kPacked + 1)}) {
    EXPECT_EQ(code(request_of(1, {item_of(0, 0, 0), wrong})), "invalid_argument")
        << wrong.group.value << " " << wrong.block.value << " " << wrong.pool_offset;
  }
  EXPECT_EQ(code(request_of(1, {})), "invalid_argument");
  EXPECT_EQ(code(request_of(1, std::vector(kMostCopyItems, item_of(0, 1, 0)))), "ok");
  EXPECT_EQ(code(request_of(1, std::vector(kMostCopyItems + 1, item_of(0, 1, 0)))),
            "invalid_argument");
}

TEST(CopyRequestTest, TheLargestOneFitsAPacket) {
  const CopyRequest request{~std::uint64_t{0}, ipc::CopyDirection::kHostToDevice,
                            std::vector(kMostCopyItems, item_of(~0U, ~0U, ~std::uint64_t{0}))};
  EXPECT_LE(ipc::encode(request).size(), ipc::PacketSocket::kMaxPacketBytes);
}

TEST(PoolPlacesTest, BlocksLieInOnePieceEachAndKeepTheirPlacesUntilAllAreDropped) {
  ipc::ArenaLayout layout;
  layout.groups.resize(1);
  layout.regions.resize(1);
  layout.regions[0].block_bytes = 24ULL << 20;
  PoolPlaces places(layout, 2 * kCopyPieceBytes);
  const std::vector<worker::SequenceItem> blocks(3);
  const auto of = [&](std::uint64_t handle) {
    const auto found = places.of(handle, blocks);
    return found ? **found : std::vector<std::uint64_t>{};
  };
  EXPECT_THAT(of(1), ElementsAre(0, 24ULL << 20, kCopyPieceBytes));
  EXPECT_EQ(of(1), of(1));
  EXPECT_EQ(places.of(2, blocks).error().code, ipc::ErrorCode::kNoHostMemory);
  places.drop(1);
  EXPECT_THAT(of(2), ElementsAre(0, 24ULL << 20, kCopyPieceBytes));
}

TEST(PoolPlacesTest, BlocksThatFitNoPieceLieOneBehindTheOther) {
  constexpr std::uint64_t kLarge = kCopyPieceBytes + 4096;
  ipc::ArenaLayout layout;
  layout.groups.resize(1);
  layout.regions.resize(1);
  layout.regions[0].block_bytes = kLarge;
  PoolPlaces places(layout, 3 * kLarge);
  const auto found = places.of(1, std::vector<worker::SequenceItem>(3));
  ASSERT_TRUE(found.has_value()) << found.error().to_string();
  EXPECT_THAT(**found, ElementsAre(0, kLarge, 2 * kLarge));
  EXPECT_EQ(places.of(2, std::vector<worker::SequenceItem>(1)).error().code,
            ipc::ErrorCode::kNoHostMemory);
}

/// Copies between a pool at address 0 and a device far from it.
class PieceCopiesTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kDevice = 1ULL << 40;
  using Op = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;  ///< Pool, device, bytes.

  void copy(std::uint64_t pool, std::uint64_t device, std::uint64_t size_bytes) {
    append_copy(ops_, {at(pool), {kDevice + device}, size_bytes}, pool);
  }
  void copy_rows(std::uint64_t pool,
                 std::uint64_t device,
                 std::uint64_t device_pitch,
                 std::uint64_t row_bytes,
                 std::uint64_t rows) {
    append_rows(rows_, ops_,
                {at(pool), row_bytes, {kDevice + device}, device_pitch, row_bytes, rows}, pool);
  }
  [[nodiscard]] std::vector<Op> ops() const {
    std::vector<Op> all;
    for (const ipc::CopyOp& op : ops_) {
      all.emplace_back(offset(op.host), op.device.address - kDevice, op.size_bytes);
    }
    return all;
  }
  /// Of each, its first row, and how many there are.
  [[nodiscard]] std::vector<Op> rows() const {
    std::vector<Op> all;
    for (const ipc::RowCopyOp& op : rows_) {
      all.emplace_back(offset(op.host), op.device.address - kDevice, op.rows);
    }
    return all;
  }

 private:
  static constexpr std::uintptr_t kPool = 1ULL << 32;
  static void* at(std::uint64_t pool) { return reinterpret_cast<void*>(kPool + pool); }
  static std::uint64_t offset(const void* host) {
    return reinterpret_cast<std::uintptr_t>(host) - kPool;
  }
  std::vector<ipc::CopyOp> ops_;
  std::vector<ipc::RowCopyOp> rows_;
};

TEST_F(PieceCopiesTest, NeighboursOnBothSidesAreOneCopy) {
  copy(0, 100, 10);
  copy(10, 110, 10);
  copy(20, 130, 10);  // Not on the device.
  copy(40, 140, 10);  // Not in the pool.
  EXPECT_THAT(ops(), ElementsAre(Op(0, 100, 20), Op(20, 130, 10), Op(40, 140, 10)));
}

TEST_F(PieceCopiesTest, CopiesAreCutWhereAPieceEndsAndNeverJoinedAcross) {
  copy(kCopyPieceBytes - 10, 0, 30 + kCopyPieceBytes);
  copy(2 * kCopyPieceBytes + 20, kCopyPieceBytes + 30, 5);
  EXPECT_THAT(ops(),
              ElementsAre(Op(kCopyPieceBytes - 10, 0, 10), Op(kCopyPieceBytes, 10, kCopyPieceBytes),
                          Op(2 * kCopyPieceBytes, kCopyPieceBytes + 10, 25)));
}

TEST_F(PieceCopiesTest, OfRowsOnlyTheOneThatCrossesAPieceIsCut) {
  copy_rows(kCopyPieceBytes - 25, 0, 100, 10, 6);
  EXPECT_THAT(rows(), ElementsAre(Op(kCopyPieceBytes - 25, 0, 2), Op(kCopyPieceBytes + 5, 300, 3)));
  EXPECT_THAT(ops(), ElementsAre(Op(kCopyPieceBytes - 5, 200, 5), Op(kCopyPieceBytes, 205, 5)));
}

TEST_F(PieceCopiesTest, RowsThatEndWithAPieceAreNotCut) {
  copy_rows(kCopyPieceBytes - 20, 0, 100, 10, 4);
  EXPECT_THAT(rows(), ElementsAre(Op(kCopyPieceBytes - 20, 0, 2), Op(kCopyPieceBytes, 200, 2)));
  EXPECT_THAT(ops(), testing::IsEmpty());
}

TEST_F(PieceCopiesTest, RowsLargerThanAPieceGoAsCopies) {
  copy_rows(0, 0, 3 * kCopyPieceBytes, kCopyPieceBytes + 1, 1);
  EXPECT_THAT(rows(), testing::IsEmpty());
  EXPECT_THAT(ops(),
              ElementsAre(Op(0, 0, kCopyPieceBytes), Op(kCopyPieceBytes, kCopyPieceBytes, 1)));
}

class CopierProcessTest : public test::ReplayTest {
 protected:
  static constexpr std::uint64_t kPoolBytes = 1 << 20;

  /// Starts one and takes its connection.
  void start() {
    std::filesystem::create_directories(path("run"));
    auto listener = ipc::PacketListener::listen(path("run") + "/copier");
    ASSERT_TRUE(listener) << listener.error().to_string();
    running_.emplace(test::ChildOptions{
        .program = KVFERRY_PROGRAM,
        .arguments = {"bench-copier", "--geometry=tiny", "--gpu-blocks=16",
                      "--device=host:copier-test-" + std::to_string(::getpid()) + ":64MiB",
                      "--socket=" + path("run") + "/copier"}});
    pollfd entry{listener->fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&entry, 1, 20'000), 1) << running_->stderr_text();
    auto accepted = listener->try_accept();
    ASSERT_TRUE(accepted && *accepted);
    socket_ = std::move(**accepted);
  }
  void set_up() {
    auto pool = ipc::SharedMemory::create_pool("copier-test", kPoolBytes, false);
    ASSERT_TRUE(pool);
    const int fd = pool->get();
    ASSERT_TRUE(socket_.send(ipc::encode(CopierSetUp{OwnStrategy::kStaged, kPoolBytes}), {&fd, 1}));
    const auto packet = socket_.receive(ipc::Deadline::after(20s));
    ASSERT_TRUE(packet) << running_->stderr_text();
    const auto ready = ipc::decode<CopierReady>(packet->bytes, "CopierReady");
    ASSERT_TRUE(ready);
    EXPECT_GT(ready->arena_bytes, 0U);
  }
  CopyReply ask(const CopyRequest& request) {
    EXPECT_TRUE(socket_.send(ipc::encode(request)));
    const auto packet = socket_.receive(ipc::Deadline::after(20s));
    EXPECT_TRUE(packet) << running_->stderr_text();
    return packet ? ipc::decode<CopyReply>(packet->bytes, "CopyReply").value_or(CopyReply{})
                  : CopyReply{};
  }
  void send_bytes(const ipc::Bytes& bytes) { ASSERT_TRUE(socket_.send(bytes)); }

  ipc::PacketSocket socket_;
};

TEST_F(CopierProcessTest, ServesWhatIsRightRefusesWhatIsNotAndEndsWithItsEngine) {
  ASSERT_NO_FATAL_FAILURE(start());
  ASSERT_NO_FATAL_FAILURE(set_up());
  EXPECT_EQ(ask(request_of(1, {item_of(0, 3, 0)})).error, std::nullopt);
  const CopyReply refused = ask(request_of(2, {item_of(0, 16, 0)}));
  EXPECT_EQ(refused.id, 2U);
  ASSERT_TRUE(refused.error);
  EXPECT_THAT(refused.error->message, HasSubstr("block 16 of group 0 is out of range"));
  EXPECT_EQ(ask(request_of(3, {item_of(0, 15, 0)})).error, std::nullopt);
  socket_ = ipc::PacketSocket();
  EXPECT_EQ(finish_replay(), test::ChildExit::exited(0)) << running_->stderr_text();
}

TEST_F(CopierProcessTest, EndsAtOnceWhenItsEngineBreaksItsWord) {
  const ipc::Bytes good = ipc::encode(request_of(1, {item_of(0, 3, 0)}));
  for (const ipc::Bytes& bad : {ipc::Bytes{0xc1}, ipc::Bytes(good.begin(), good.end() - 1),
                                ipc::encode(request_of(0, {item_of(0, 3, 0)}))}) {
    ASSERT_NO_FATAL_FAILURE(start());
    ASSERT_NO_FATAL_FAILURE(set_up());
    send_bytes(bad);
    EXPECT_EQ(finish_replay(), test::ChildExit::exited(1));
    EXPECT_THAT(running_->stderr_text(), HasSubstr("protocol"));
  }
}

TEST_F(CopierProcessTest, ASetUpWithoutAPoolIsRefused) {
  ASSERT_NO_FATAL_FAILURE(start());
  send_bytes(ipc::encode(CopierSetUp{OwnStrategy::kBatch, kPoolBytes}));
  EXPECT_EQ(finish_replay(), test::ChildExit::exited(1));
  EXPECT_THAT(running_->stderr_text(), HasSubstr("carries 0 descriptors"));
}

}  // namespace
}  // namespace kvferry::cli
