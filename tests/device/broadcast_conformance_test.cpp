// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Broadcasts between the devices of several processes, of each backend that has them. On one GPU
// the ranks pass for several hosts, each with a GPU of its own: NCCL then goes through sockets.
#include "device/broadcast_bytes.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "support/child_process.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace kvferry::ipc {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::kBroadcastBytes;
using testing::AnyOf;
using testing::HasSubstr;

bool on_host() { return std::string(KVFERRY_TEST_DEVICE) == "host"; }

class BroadcastTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_host() && cuda_device_count() == 0) {
      if (environment("KVFERRY_REQUIRE_GPU") == "1") {
        FAIL() << "KVFERRY_REQUIRE_GPU=1, but no CUDA device is usable here";
      }
      GTEST_SKIP() << "no CUDA device";
    }
    device_ = open_device(*DeviceSpec::parse(device_of(0)));
    auto port = device_->broadcast_port();
    if (!port && !on_host() && environment("KVFERRY_REQUIRE_NCCL") != "1") {
      GTEST_SKIP() << port.error().to_string();
    }
    ASSERT_TRUE(port.has_value()) << port.error().to_string();
    port_ = *port;
    memory_ = std::move(device_->allocate(kBroadcastBytes, HandleKind::kVmm, nullptr)).value();
    stream_ = std::move(device_->make_stream(StreamPriority::kNormal)).value();
    buffer_ = std::move(device_->make_pinned_buffer(kBroadcastBytes)).value();
    root_ = std::move(device_->open_broadcast()).value();
  }
  /// With as many GPUs as ranks, each has its own.
  [[nodiscard]] static std::string device_of(std::uint32_t rank) {
    if (on_host()) return fmt::format("host:broadcast-{}-{}:128MiB", ::getpid(), rank);
    return fmt::format("cuda:{}", static_cast<int>(rank) % cuda_device_count());
  }
  test::ChildProcess& start_rank(std::uint32_t rank, std::uint32_t ranks) {
    test::ChildOptions options{.program = test::sibling_program("kvferry_broadcast_peer"),
                               .arguments = {device_of(rank), std::to_string(rank),
                                             std::to_string(ranks), test::hex_of(root_->id())}};
    if (!on_host() && static_cast<int>(ranks) > cuda_device_count()) {
      options.environment = {fmt::format("NCCL_HOSTID=rank-{}", rank), "NCCL_SOCKET_IFNAME=lo"};
    }
    peers_.push_back(std::make_unique<test::ChildProcess>(std::move(options)));
    return *peers_.back();
  }
  [[nodiscard]] Result<std::unique_ptr<BroadcastGroup>> join(std::uint32_t ranks,
                                                             Duration patience = 30s) {
    return device_->join_broadcast({root_->id(), 0, ranks, root_.get()},
                                   {Deadline::after(patience), cancelled_});
  }
  /// All ranks of a group of that size.
  void form(std::uint32_t ranks) {
    for (std::uint32_t rank = 1; rank < ranks; ++rank) start_rank(rank, ranks);
    auto joined = join(ranks);
    ASSERT_TRUE(joined.has_value()) << joined.error().to_string();
    group_ = std::move(joined).value();
    for (auto& peer : peers_) ASSERT_EQ(peer->read_line(test::soon()), "joined");
  }
  [[nodiscard]] Status send(std::uint64_t size, std::uint64_t seed, Duration patience = 30s) {
    for (std::uint64_t i = 0; i < size; ++i) buffer_->data()[i] = test::byte_at(seed, i);
    const CopyOp op{buffer_->data(), memory_->address(), size};
    if (auto copied = stream_->copy(CopyDirection::kHostToDevice, {&op, 1}, CopyMode::kEach);
        !copied) {
      return copied;
    }
    return group_->broadcast(*stream_, memory_->address(), size,
                             {Deadline::after(patience), cancelled_});
  }

  std::unique_ptr<Device> device_;
  BroadcastPort port_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<PinnedBuffer> buffer_;
  std::unique_ptr<BroadcastRoot> root_;
  std::atomic<bool> cancelled_{false};
  std::vector<std::unique_ptr<test::ChildProcess>> peers_;
  std::unique_ptr<BroadcastGroup> group_;
};

TEST_F(BroadcastTest, EveryRankGetsWhatRankZeroHas) {
  ASSERT_NO_FATAL_FAILURE(form(3));
  std::uint64_t seed = 0;
  for (const std::uint64_t size :
       std::vector<std::uint64_t>{1, 4096, 65537, kBroadcastBytes, 3U << 20U}) {
    ++seed;
    for (auto& peer : peers_) peer->write_line(fmt::format("take {} {}", size, seed));
    const Status sent = send(size, seed);
    ASSERT_TRUE(sent.has_value()) << sent.error().to_string();
    EXPECT_EQ(test::look_at(*stream_, *group_, *memory_, *buffer_, size, seed), "ok");
    for (auto& peer : peers_) EXPECT_EQ(peer->read_line(test::soon()), "ok") << size;
  }
}

TEST_F(BroadcastTest, PortsTellDevicesApartAndAgreeOnTheTransport) {
  EXPECT_THAT(port_.transport, HasSubstr(on_host() ? "host" : "nccl 2."));
  const auto again = open_device(*DeviceSpec::parse(device_of(0)))->broadcast_port();
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->device, port_.device);
  if (!on_host()) return;
  const auto other = open_device(*DeviceSpec::parse(device_of(1)))->broadcast_port();
  ASSERT_TRUE(other.has_value());
  EXPECT_NE(other->device, port_.device);
}

TEST_F(BroadcastTest, ARankThatNeverJoinsEndsTheWaitAtTheDeadline) {
  const auto joined = join(2, 300ms);
  ASSERT_FALSE(joined.has_value());
  EXPECT_EQ(joined.error().code, ErrorCode::kTimeout);
}

TEST_F(BroadcastTest, JoiningCanBeCalledOff) {
  cancelled_.store(true);
  const auto joined = join(2);
  ASSERT_FALSE(joined.has_value());
  EXPECT_EQ(joined.error().code, ErrorCode::kCancelled);
}

TEST_F(BroadcastTest, ASeatThatCannotBeIsRefused) {
  const BroadcastWait wait{Deadline::after(30s), cancelled_};
  for (const BroadcastSeat& seat :
       {BroadcastSeat{root_->id(), 2, 2, root_.get()},
        BroadcastSeat{root_->id(), 0, 1, root_.get()}, BroadcastSeat{{1, 2, 3}, 1, 2, nullptr}}) {
    const auto joined = device_->join_broadcast(seat, wait);
    ASSERT_FALSE(joined.has_value());
    EXPECT_EQ(joined.error().code, ErrorCode::kInvalidArgument) << joined.error().to_string();
  }
}

// The stream ends, whatever the other rank does: its memory can be let go of.
TEST_F(BroadcastTest, ARankThatHangsIsLeftAndTheStreamEnds) {
  ASSERT_NO_FATAL_FAILURE(form(2));
  ASSERT_TRUE(peers_[0]->stop());
  const Status sent = send(kBroadcastBytes, 1, 2s);
  // Both are in order: to find it out at once, or while the stream is waited for.
  if (sent) {
    EXPECT_NE(test::await_group(*stream_, *group_, 1s), "ok");
  }
  group_.reset();
  const EventFd done;
  ASSERT_TRUE(stream_->notify(done.fd()).has_value());
  pollfd waited{done.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&waited, 1, test::soon().poll_timeout_ms()), 1) << "the stream hangs";
  EXPECT_TRUE(stream_->query().has_value());
}

TEST_F(BroadcastTest, ADeathFailsTheGroupAndAnotherOneForms) {
  ASSERT_NO_FATAL_FAILURE(form(2));
  peers_[0]->kill();
  ASSERT_TRUE(peers_[0]->wait(test::soon()).has_value());
  if (const Status sent = send(kBroadcastBytes, 1, 5s); sent) {
    const std::string ended = test::await_group(*stream_, *group_, 5s);
    EXPECT_NE(ended, "ok");
  }
  group_.reset();
  peers_.clear();
  root_ = std::move(device_->open_broadcast()).value();
  ASSERT_NO_FATAL_FAILURE(form(2));
  peers_[0]->write_line("take 4096 9");
  ASSERT_TRUE(send(4096, 9).has_value());
  EXPECT_EQ(test::await_group(*stream_, *group_), "ok");
  EXPECT_EQ(peers_[0]->read_line(test::soon()), "ok");
}

// Nobody else of this machine takes a seat.
TEST_F(BroadcastTest, ARankThatIsNoneIsNotSeated) {
  if (!on_host()) GTEST_SKIP() << "NCCL's own affair";
  const BroadcastWait wait{Deadline::after(30s), cancelled_};
  const BroadcastWait short_wait{Deadline::after(2s), cancelled_};
  const auto device = open_device(*DeviceSpec::parse(device_of(1)));
  Result<std::unique_ptr<BroadcastGroup>> stray = KVFERRY_ERROR(kBusy, "not yet");
  std::thread second([&] {
    // Of another group, as it thinks: one rank too many.
    stray = device->join_broadcast({root_->id(), 7, 8, nullptr}, short_wait);
  });
  start_rank(1, 2);
  auto joined = join(2);
  EXPECT_TRUE(joined.has_value());
  EXPECT_EQ(peers_[0]->read_line(test::soon()), "joined");
  joined = KVFERRY_ERROR(kCancelled, "done");
  root_.reset();
  second.join();
  EXPECT_FALSE(stray.has_value());
  // Nobody is there any more.
  const auto late = device->join_broadcast(
      {test::id_of("00112233445566778899aabbccddeeff"), 1, 2, nullptr}, wait);
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error().code, ErrorCode::kPeerDied);
}

TEST_F(BroadcastTest, RanksThatDoNotBroadcastTheSameFail) {
  if (!on_host()) GTEST_SKIP() << "undefined with NCCL";
  ASSERT_NO_FATAL_FAILURE(form(2));
  peers_[0]->write_line("take 100 1");
  ASSERT_TRUE(send(200, 1).has_value());
  EXPECT_THAT(peers_[0]->read_line(test::soon()).value_or(""),
              HasSubstr("the ranks do not broadcast the same"));
}

}  // namespace
}  // namespace kvferry::ipc
