// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The control plane over rings in shared memory: one order with what goes over the socket, and
// peers that write what they like into the memory that they share with the server.
#include "ipc/wire/control_fixture.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "wire/message_channel.hpp"
#include "wire/wire_version.hpp"
#include "wire/zmq_socket.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <random>
#include <string>
#include <thread>

namespace kvferry::ipc {
namespace {

using test::link_options;
using test::server_options;
using test::ServerThread;

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

std::optional<Envelope> wait_message(ControlLink& link) {
  for (;;) {
    auto envelope = link.try_receive();
    if (!envelope) return std::nullopt;
    if (envelope->has_value()) return std::move(**envelope);
    pollfd entry{link.fd(), POLLIN, 0};
    if (::poll(&entry, 1, 20'000) <= 0 || link.server_lost()) return std::nullopt;
  }
}

Envelope numbered(std::uint64_t number, std::size_t size_bytes) {
  JobDone done;
  done.job = JobId{number};
  done.message.assign(size_bytes, 'x');
  Envelope envelope;
  envelope.kind = MessageKind::kJobDone;
  envelope.body = encode(done);
  return envelope;
}

// Small ones, ones around the largest that a ring takes, and large ones.
std::size_t some_size(std::mt19937_64& random) {
  switch (random() % 6) {
    case 0: return MessageChannel::kMaxMessageBytes - 100 + random() % 200;
    case 1: return random() % 300'000;
    default: return random() % 500;
  }
}

std::size_t mapped_rings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("kvferry-messages") != std::string::npos) ++count;
  }
  return count;
}

class ControlRingsTest : public ::testing::Test {
 protected:
  test::ShortTempDir dir_;
};

class ControlOrderTest : public ::testing::TestWithParam<bool> {
 protected:
  test::ShortTempDir dir_;
};

TEST_P(ControlOrderTest, MessagesOfAllSizesKeepTheirOrderBothWays) {
  constexpr std::uint64_t kMessages = 3000;
  std::atomic<std::uint64_t> taken{0};
  std::atomic<bool> in_order{true};
  ServerThread server(server_options(dir_.path()), [&](const Peer&, const Envelope& envelope) {
    if (envelope.kind != MessageKind::kJobDone) return;
    if (decode<JobDone>(envelope.body, "job")->job.value != ++taken) in_order = false;
  });
  ControlLink::Options options = link_options(dir_.path(), "peer");
  options.rings = GetParam();
  auto link = *ControlLink::connect(options, soon());
  std::jthread downwards([&] {
    std::mt19937_64 random(1);
    for (std::uint64_t i = 1; i <= kMessages;) {
      server.call([&] {
        for (int burst = 0; burst < 40 && i <= kMessages; ++burst, ++i) {
          EXPECT_TRUE(
              server.server->send(options.incarnation, numbered(i, some_size(random))).has_value());
        }
      });
    }
  });
  std::mt19937_64 random(2);
  std::uint64_t received = 0;
  for (std::uint64_t i = 1; i <= kMessages; ++i) {
    ASSERT_TRUE(link->send(numbered(i, some_size(random))).has_value());
    if (random() % 3 != 0) continue;
    const auto message = wait_message(*link);
    ASSERT_TRUE(message.has_value());
    ASSERT_EQ(decode<JobDone>(message->body, "job")->job.value, ++received);
  }
  while (received < kMessages) {
    const auto message = wait_message(*link);
    ASSERT_TRUE(message.has_value()) << "after " << received;
    ASSERT_EQ(decode<JobDone>(message->body, "job")->job.value, ++received);
  }
  // Behind all of them.
  ASSERT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
  EXPECT_EQ(taken, kMessages);
  EXPECT_TRUE(in_order);
  server.call([&] { EXPECT_EQ(server.server->protocol_errors(), 0U); });
}

INSTANTIATE_TEST_SUITE_P(Rings, ControlOrderTest, ::testing::Bool(), [](const auto& param) {
  return param.param ? "with_rings" : "without";
});

TEST_F(ControlRingsTest, TheirMemoryGoesWithTheConnection) {
  const std::size_t before = mapped_rings();
  ServerThread server(server_options(dir_.path()));
  for (int i = 1; i <= 3; ++i) {
    ControlLink::Options options = link_options(dir_.path(), "peer " + std::to_string(i));
    auto link = *ControlLink::connect(options, soon());
    ASSERT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
    EXPECT_EQ(mapped_rings(), before + 2) << "each end has mapped it";
    server.call([&] { server.server->forget_when_closed(options.incarnation); });
    link.reset();
    ASSERT_TRUE(server.handler.wait_for("left " + options.name));
    server.call([] {});  // the end of the round in which it was told
    EXPECT_EQ(mapped_rings(), before);
  }
}

/// A peer that follows the protocol up to its presence, and then does what a test wants.
class RawPeer {
 public:
  explicit RawPeer(const std::filesystem::path& dir)
      : registry_(*PacketSocket::connect(dir / "registry", soon())),
        socket_(ZmqSocket::connect(dir / "control", incarnation_, 10'000)) {
    RegistryHello hello;
    hello.kind = ProcessKind::kEngine;
    hello.incarnation = incarnation_;
    hello.name = "raw";
    hello.wants_rings = true;
    EXPECT_TRUE(registry_.send(encode(hello)).has_value());
    Packet packet = *registry_.receive(soon());
    welcome_ = *decode<RegistryWelcome>(packet.bytes, "welcome");
    EXPECT_NE(welcome_.ring_connection, 0U);
    EXPECT_EQ(packet.fds.size(), 1U);
    memory_ = *SharedMemory::map_pool(packet.fds.front(), MessageChannel::kSegmentBytes);
    EXPECT_EQ(socket_.send(nullptr, std::nullopt, {}), 0);
  }

  [[nodiscard]] const IncarnationId& id() const { return incarnation_; }
  void ring() { ring_bell(registry_); }
  void send(const std::optional<SequenceFrame>& frame, const Bytes& body) {
    EXPECT_EQ(socket_.send(nullptr, frame, body), 0);
  }
  /// All that came outside the rings, to the end of that message. When a socket closes while one of
  /// several frames is half there, libzmq 4.3.4 forgets to free those frames' metadata.
  void read_to(std::uint64_t number) {
    for (;;) {
      while (const auto message = socket_.try_receive()) {
        const auto envelope =
            decode_versioned<Envelope>(message->bytes(), "envelope", "the server");
        if (!envelope || envelope->kind != MessageKind::kJobDone) continue;
        if (decode<JobDone>(envelope->body, "job")->job.value == number) return;
      }
      pollfd entry{socket_.fd(), POLLIN, 0};
      ASSERT_EQ(::poll(&entry, 1, 20'000), 1);
    }
  }
  [[nodiscard]] std::uint64_t connection() const { return welcome_.ring_connection; }
  [[nodiscard]] std::byte* memory() { return memory_.data(); }

 private:
  IncarnationId incarnation_ = Digest::random();
  PacketSocket registry_;
  ZmqSocket socket_;
  RegistryWelcome welcome_;
  SharedMapping memory_;
};

TEST_F(ControlRingsTest, WhoeverScribblesInItsRingsHarmsNobodyElse) {
  std::mt19937_64 random(5);
  ServerThread server(server_options(dir_.path()));
  auto link = *ControlLink::connect(link_options(dir_.path(), "honest"), soon());
  for (int peer = 0; peer < 20; ++peer) {
    RawPeer raw(dir_.path());
    ASSERT_TRUE(server.handler.wait_for("peer raw", peer + 1));
    for (int i = 0; i < 50; ++i) {
      // Words more often than what is between them.
      const std::size_t half = random() % 2 * ring::segment_bytes(MessageChannel::kCapacity);
      const std::size_t place = random() % 3 == 0 ? random() % 4096 : random() % 4 * 128;
      const std::uint64_t value = random() >> random() % 64;
      std::memcpy(raw.memory() + half + place, &value, sizeof(value));
      if (random() % 2 == 0) raw.ring();
      if (random() % 4 == 0) {
        const std::uint64_t connection = raw.connection() + (random() % 4 == 0 ? 1 : 0);
        raw.send(SequenceFrame{connection, random() >> random() % 64}, encode(numbered(1, 10)));
      }
      server.call([&] { (void)server.server->send(raw.id(), numbered(2, random() % 50'000)); });
    }
    ASSERT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
    bool is_sent = false;  // not to a peer that was sent away
    server.call([&] {
      const auto sent = server.server->send(raw.id(), numbered(3, 2 * MessageChannel::kCapacity));
      is_sent = sent.has_value();
    });
    if (!is_sent) continue;
    ASSERT_NO_FATAL_FAILURE(raw.read_to(3));
  }
  server.call([&] { EXPECT_GT(server.server->protocol_errors(), 0U); });
}

TEST_F(ControlRingsTest, MessagesOutOfTurnAreCountedAndThoseAfterThemTaken) {
  std::vector<std::uint64_t> taken;
  ServerThread server(server_options(dir_.path()), [&](const Peer&, const Envelope& envelope) {
    if (envelope.kind == MessageKind::kJobDone) {
      taken.push_back(decode<JobDone>(envelope.body, "job")->job.value);
    }
  });
  RawPeer raw(dir_.path());
  ASSERT_TRUE(server.handler.wait_for("peer raw"));
  const auto send = [&](std::uint64_t connection, std::uint64_t sequence, std::uint64_t number) {
    raw.send(SequenceFrame{connection, sequence}, encode(numbered(number, 0)));
  };
  send(raw.connection(), 0, 1);
  send(raw.connection(), 0, 2);      // a number that has been
  send(raw.connection() + 1, 1, 3);  // of another connection
  raw.send(std::nullopt, encode(numbered(4, 0)));
  send(raw.connection(), 7, 5);  // a gap: what is missing is the sender's loss
  send(raw.connection(), 8, 6);
  ASSERT_TRUE(server.handler.wait_for("job_done raw", 3));
  server.call([&] {
    EXPECT_EQ(taken, (std::vector<std::uint64_t>{1, 5, 6}));
    EXPECT_EQ(server.server->protocol_errors(), 4U);
  });
}

TEST_F(ControlRingsTest, WhatAPeerPutIntoItsRingBeforeItClosedIsTaken) {
  ServerThread server(server_options(dir_.path()));
  for (int i = 1; i <= 20; ++i) {
    RawPeer raw(dir_.path());
    ASSERT_TRUE(server.handler.wait_for("peer raw", i));
    server.call([&] {  // while the server does not look
      RingWriter writer(raw.memory(), MessageChannel::kCapacity);
      EXPECT_TRUE(writer.try_write(0, encode(numbered(1, 10))));
    });
  }
  EXPECT_TRUE(server.handler.wait_for("job_done raw", 20)) << "no bell was rung for any of them";
}

}  // namespace
}  // namespace kvferry::ipc
