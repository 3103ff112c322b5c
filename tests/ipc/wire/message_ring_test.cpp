// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The rings under the control plane: contents, order, room, bells, and what a hostile other end may
// write into the memory that both share.
#include "wire/message_ring.hpp"

#include "kvferry/ipc/os/event_loop.hpp"
#include "wire/message_channel.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <thread>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kCapacity = 1024;

struct alignas(128) Segment {
  std::array<std::byte, ring::segment_bytes(kCapacity)> bytes{};

  template <typename T> void put(std::size_t offset, T value) {
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
  }
};

Bytes message_of(std::mt19937_64& random, std::size_t size) {
  Bytes bytes(size);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

TEST(MessageRingTest, GivesBackWhatWasWrittenInOrderOverManyTurns) {
  const auto segment = std::make_unique<Segment>();
  RingWriter writer(segment->bytes.data(), kCapacity);
  RingReader reader(segment->bytes.data(), kCapacity);
  std::mt19937_64 random(7);
  std::deque<Bytes> unread;
  std::uint64_t written = 0;
  std::uint64_t read = 0;
  int refused = 0;
  for (int step = 0; step < 100'000; ++step) {
    if (random() % 2 == 0) {
      Bytes message = message_of(random, random() % 300);
      if (writer.try_write(written, message)) {
        ++written;
        unread.push_back(std::move(message));
      } else {
        ++refused;
        ASSERT_FALSE(unread.empty()) << "an empty ring takes it";
      }
    } else {
      const auto next = reader.next();
      ASSERT_TRUE(next.has_value()) << next.error().to_string();
      ASSERT_EQ(next->has_value(), !unread.empty());
      if (!next->has_value()) continue;
      ASSERT_EQ(**next, read++);
      const auto message = reader.take();
      ASSERT_TRUE(
          std::equal(message.begin(), message.end(), unread.front().begin(), unread.front().end()));
      unread.pop_front();
    }
  }
  EXPECT_GT(refused, 100) << "the ring was full now and then";
  EXPECT_GT(read, 1000U);
}

TEST(MessageRingTest, RefusesWhatNeverFits) {
  const auto segment = std::make_unique<Segment>();
  RingWriter writer(segment->bytes.data(), kCapacity);
  RingReader reader(segment->bytes.data(), kCapacity);
  EXPECT_FALSE(writer.try_write(0, Bytes(kCapacity + 1)));
  EXPECT_FALSE(writer.try_write(0, Bytes(kCapacity - ring::kHeaderBytes + 1)));
  EXPECT_FALSE(reader.next()->has_value());
  EXPECT_TRUE(writer.try_write(0, Bytes(kCapacity - ring::kHeaderBytes, 5)));
  ASSERT_TRUE(reader.next()->has_value());
  EXPECT_THAT(reader.take(), ::testing::Each(5));
}

TEST(MessageRingTest, ABellIsWantedOnceForEachSleepAndNoneWithoutOne) {
  const auto segment = std::make_unique<Segment>();
  RingWriter writer(segment->bytes.data(), kCapacity);
  RingReader reader(segment->bytes.data(), kCapacity);
  ASSERT_TRUE(writer.try_write(0, Bytes(1)));
  EXPECT_FALSE(writer.take_bell()) << "nobody sleeps";
  EXPECT_FALSE(reader.ask_for_bell()) << "there is a record";
  EXPECT_FALSE(writer.take_bell());
  ASSERT_TRUE(reader.next()->has_value());
  (void)reader.take();
  EXPECT_TRUE(reader.ask_for_bell());
  ASSERT_TRUE(writer.try_write(1, Bytes(1)));
  EXPECT_TRUE(writer.take_bell());
  ASSERT_TRUE(writer.try_write(2, Bytes(1)));
  EXPECT_FALSE(writer.take_bell()) << "it was rung";
}

// Whatever the two do at the same time, who sleeps is woken.
TEST(MessageRingTest, NoMessageIsSleptThrough) {
  const auto segment = std::make_unique<Segment>();
  const EventFd bell;
  constexpr std::uint64_t kMessages = 200'000;
  std::jthread other([&] {
    RingWriter writer(segment->bytes.data(), kCapacity);
    std::mt19937_64 random(3);
    for (std::uint64_t i = 0; i < kMessages;) {
      Bytes message(8 + random() % 40);
      std::memcpy(message.data(), &i, sizeof(i));
      if (!writer.try_write(i, message)) {
        std::this_thread::yield();
        continue;
      }
      ++i;
      if (writer.take_bell()) bell.signal();
    }
  });
  RingReader reader(segment->bytes.data(), kCapacity);
  std::uint64_t taken = 0;
  std::uint64_t sleeps = 0;
  while (taken < kMessages) {
    const auto next = reader.next();
    ASSERT_TRUE(next.has_value()) << next.error().to_string();
    if (next->has_value()) {
      std::uint64_t value = 0;
      std::memcpy(&value, reader.take().data(), sizeof(value));
      ASSERT_EQ(value, taken++);
      continue;
    }
    bell.drain();
    if (!reader.ask_for_bell()) continue;
    ++sleeps;
    pollfd waited{bell.fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&waited, 1, 20'000), 1) << "slept through message " << taken;
  }
  EXPECT_GT(sleeps, 0U);
}

TEST(MessageRingTest, AWriterThatLiesIsToldOnceAndNeverReadAgain) {
  struct Lie {
    const char* what;
    std::uint64_t written;
    std::uint32_t size;
    std::uint32_t zero;
  };
  const std::array lies{Lie{"more than the ring has", kCapacity + 16, 0, 0},
                        Lie{"behind its reader", ~std::uint64_t{0} - 15, 0, 0},
                        Lie{"less than a header", 8, 0, 0},
                        Lie{"a size beyond what was written", 32, 64, 0},
                        Lie{"a size beyond the ring", kCapacity, 0xffff'ffffU, 0},
                        Lie{"a reserved word", 32, 8, 1}};
  for (const Lie& lie : lies) {
    const auto segment = std::make_unique<Segment>();
    RingReader reader(segment->bytes.data(), kCapacity);
    segment->put(ring::kDataOffset + 8, lie.size);
    segment->put(ring::kDataOffset + 12, lie.zero);
    segment->put(ring::kWrittenOffset, lie.written);
    const auto next = reader.next();
    ASSERT_FALSE(next.has_value()) << lie.what;
    EXPECT_EQ(next.error().code, ErrorCode::kProtocol) << lie.what;
    segment->put(ring::kWrittenOffset, std::uint64_t{32});
    segment->put(ring::kDataOffset + 12, std::uint32_t{0});
    EXPECT_FALSE(reader.next()->has_value()) << lie.what;
    EXPECT_TRUE(reader.ask_for_bell()) << "and nobody spins for it";
  }
}

TEST(MessageRingTest, AReaderThatLiesGetsNoMoreThanTheRingHas) {
  for (const std::uint64_t position :
       {std::uint64_t{16}, std::uint64_t{1} << 63U, ~std::uint64_t{0}, ~std::uint64_t{kCapacity}}) {
    const auto segment = std::make_unique<Segment>();
    RingWriter writer(segment->bytes.data(), kCapacity);
    segment->put(ring::kReadOffset, position);
    std::uint64_t written = 0;
    while (written < 1000 && writer.try_write(written, Bytes(100, 9))) ++written;
    EXPECT_LT(written, 1000U) << position;
  }
}

// Two ends of one connection, with a socket that keeps its messages' order and may be slow.
TEST(MessageChannelTest, MessagesOfBothWaysComeInOneOrder) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 20; ++round) {
    auto made = MessageChannel::create("test", 5);
    ASSERT_TRUE(made.has_value()) << made.error().to_string();
    auto other = MessageChannel::join(made->fd, 5);
    ASSERT_TRUE(other.has_value()) << other.error().to_string();
    MessageChannel& from = made->channel;
    MessageChannel& to = *other;
    std::deque<std::pair<SequenceFrame, std::uint64_t>> socket;
    std::uint64_t sent = 0;
    std::uint64_t taken = 0;
    const auto receive = [&] {
      auto message = to.try_receive();
      EXPECT_TRUE(message.has_value()) << message.error().to_string();
      if (!message || !message->has_value()) return false;
      std::uint64_t value = 0;
      std::memcpy(&value, (*message)->data(), sizeof(value));
      EXPECT_EQ(value, taken);
      ++taken;
      return true;
    };
    std::uint64_t over_socket = 0;
    while (taken < 3000) {
      switch (random() % 3) {
        case 0: {
          const bool large = random() % 8 == 0;
          Bytes message(large ? MessageChannel::kMaxMessageBytes + 1 : 8 + random() % 4000);
          std::memcpy(message.data(), &sent, sizeof(sent));
          if (!from.try_send(message)) {
            socket.emplace_back(from.next_frame(), sent);
            from.sent_over_socket();
            ++over_socket;
          }
          ++sent;
          break;
        }
        case 1: (void)receive(); break;
        case 2:
          if (socket.empty()) break;
          while (to.is_early(socket.front().first)) {
            ASSERT_TRUE(receive()) << "what came before it in the ring is there";
          }
          ASSERT_TRUE(to.take(socket.front().first));
          ASSERT_EQ(socket.front().second, taken++);
          socket.pop_front();
          break;
      }
    }
    EXPECT_GT(over_socket, 100U);
  }
}

TEST(MessageChannelTest, AMessageWhoseTurnIsOverIsDropped) {
  auto made = MessageChannel::create("test", 5);
  ASSERT_TRUE(made.has_value()) << made.error().to_string();
  auto other = MessageChannel::join(made->fd, 5);
  ASSERT_TRUE(other.has_value()) << other.error().to_string();
  ASSERT_TRUE(made->channel.try_send(Bytes(8)));
  EXPECT_FALSE(other->is_ours({4, 0}));
  EXPECT_TRUE(other->take({5, 3})) << "a gap is the sender's";
  const auto late = other->try_receive();
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error().code, ErrorCode::kProtocol);
  EXPECT_FALSE(other->take({5, 3}));
  EXPECT_FALSE(other->try_receive()->has_value());
}

TEST(MessageChannelTest, MemoryOfAnotherSizeIsRefused) {
  const auto small = SharedMemory::create_pool("test", MessageChannel::kSegmentBytes / 2, true);
  ASSERT_TRUE(small.has_value()) << small.error().to_string();
  const auto joined = MessageChannel::join(*small, 1);
  ASSERT_FALSE(joined.has_value());
  EXPECT_EQ(joined.error().code, ErrorCode::kProtocol);
}

}  // namespace
}  // namespace kvferry::ipc
