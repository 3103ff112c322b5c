// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/control.hpp"

#include "ipc/wire/control_fixture.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.hpp>

#include <atomic>
#include <thread>

namespace kvferry::ipc {
namespace {

using test::link_options;
using test::server_options;
using test::ServerThread;
using ::testing::HasSubstr;

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

// Waits for the link's descriptor, then takes a message.
std::optional<Envelope> wait_message(ControlLink& link) {
  for (;;) {
    auto envelope = link.try_receive();
    if (!envelope) return std::nullopt;
    if (envelope->has_value()) return std::move(**envelope);
    pollfd entry{link.fd(), POLLIN, 0};
    if (::poll(&entry, 1, 20'000) <= 0 || link.server_lost()) return std::nullopt;
  }
}

Envelope request_of(MessageKind kind, RequestId id) {
  Envelope envelope;
  envelope.kind = kind;
  envelope.request = id;
  envelope.body = encode(Empty{});
  return envelope;
}

class ControlTest : public ::testing::Test {
 protected:
  std::unique_ptr<ControlLink> connect(const std::string& name = "peer") {
    auto link = ControlLink::connect(link_options(dir_.path(), name), soon());
    EXPECT_TRUE(link.has_value()) << link.error().to_string();
    return link ? std::move(*link) : nullptr;
  }

  test::ShortTempDir dir_;
};

TEST_F(ControlTest, AnswersARequest) {
  ServerThread server(server_options(dir_.path()));
  auto link = connect();
  ASSERT_TRUE(link);
  EXPECT_EQ(link->welcome().manager_session, Digest::from_words(1, 2));
  EXPECT_EQ(link->server().pid(), ::getpid());
  EXPECT_FALSE(link->take_memory_fd().valid());
  // The answer that ends connect() leaves the server before its handler is told.
  EXPECT_TRUE(server.handler.wait_for("peer peer"));
  for (int i = 1; i <= 100; ++i) {
    const auto status = link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon());
    ASSERT_TRUE(status.has_value()) << status.error().to_string();
    EXPECT_EQ(status->json, std::to_string(i));
  }
  EXPECT_FALSE(link->server_lost());
}

TEST_F(ControlTest, SocketsArePrivateAndRemovedAtTheEnd) {
  {
    const mode_t old = ::umask(0);
    ServerThread server(server_options(dir_.path()));
    ::umask(old);
    for (const char* name : {"registry", "control"}) {
      struct stat info {};
      ASSERT_EQ(::stat((dir_ / name).c_str(), &info), 0);
      EXPECT_EQ(info.st_mode & 07777, 0600U) << name;
    }
    auto link = connect();
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
}

TEST_F(ControlTest, ARepeatedRequestGetsTheSameReplyAndReachesTheHandlerOnce) {
  ServerThread server(server_options(dir_.path()));
  auto link = connect();
  ASSERT_TRUE(link);
  const Envelope request = request_of(MessageKind::kStatus, link->next_request());
  std::vector<Bytes> bodies;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(link->send(request).has_value());
    const auto reply = wait_message(*link);
    ASSERT_TRUE(reply.has_value());
    EXPECT_TRUE(reply->is_reply);
    EXPECT_EQ(reply->request, request.request);
    bodies.push_back(reply->body);
  }
  EXPECT_EQ(bodies[0], bodies[1]);
  EXPECT_EQ(bodies[0], bodies[2]);
  EXPECT_EQ(server.handler.count("status peer"), 1);
}

TEST_F(ControlTest, TheLatest64RepliesAreRememberedAndOlderRequestsAreNeverHandledAgain) {
  ServerThread server(server_options(dir_.path()));
  auto link = connect();
  ASSERT_TRUE(link);
  constexpr int kRemembered = 64;
  std::vector<Envelope> requests;
  for (int i = 0; i <= kRemembered; ++i) {
    requests.push_back(request_of(MessageKind::kStatus, link->next_request()));
    ASSERT_TRUE(link->send(requests.back()).has_value());
    ASSERT_TRUE(wait_message(*link).has_value());
  }
  for (int i = kRemembered; i >= 1; --i) {
    ASSERT_TRUE(link->send(requests[static_cast<std::size_t>(i)]).has_value());
    const auto reply = wait_message(*link);
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(decode<StatusReply>(reply->body, "status")->json, std::to_string(i + 1));
  }
  EXPECT_EQ(server.handler.count("status peer"), kRemembered + 1);
  ASSERT_TRUE(link->send(requests.front()).has_value());
  const auto refused = wait_message(*link);
  ASSERT_TRUE(refused.has_value());
  ASSERT_TRUE(refused->error.has_value());
  EXPECT_EQ(refused->error->code, ErrorCode::kStaleEpoch);
  EXPECT_EQ(server.handler.count("status peer"), kRemembered + 1);
}

TEST_F(ControlTest, ARequestRepeatedOverANewLinkIsNotHandledAgain) {
  ServerThread server(server_options(dir_.path()));
  const ControlLink::Options options = link_options(dir_.path(), "peer");
  auto link = *ControlLink::connect(options, soon());
  const Envelope request = request_of(MessageKind::kStatus, link->next_request());
  ASSERT_TRUE(link->send(request).has_value());
  const auto first = wait_message(*link);
  ASSERT_TRUE(first.has_value());
  const Envelope unanswered = request_of(MessageKind::kClear, link->next_request());
  ASSERT_TRUE(link->send(unanswered).has_value());
  ASSERT_TRUE(server.handler.wait_for("clear peer"));
  link.reset();
  link = *ControlLink::connect(options, soon());
  ASSERT_TRUE(link->send(request).has_value());
  const auto again = wait_message(*link);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->request, request.request);
  EXPECT_EQ(again->body, first->body);
  ASSERT_TRUE(link->send(unanswered).has_value());
  ASSERT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
  EXPECT_EQ(server.handler.count("clear peer"), 1) << "it is being handled";
  EXPECT_EQ(server.handler.count("status peer"), 2);
}

TEST_F(ControlTest, AnIncarnationMayBeginWithZeroBytes) {
  ServerThread server(server_options(dir_.path()));
  ControlLink::Options options = link_options(dir_.path(), "peer");
  options.incarnation = Digest::from_words(0, 1);
  auto link = ControlLink::connect(options, soon());
  ASSERT_TRUE(link.has_value()) << link.error().to_string();
  EXPECT_TRUE((*link)->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
  options.incarnation = Digest();
  EXPECT_EQ(ControlLink::connect(options, soon()).error().code, ErrorCode::kInvalidArgument);
}

TEST_F(ControlTest, RequestsFromManyThreadsOfOwnLinksAreAllAnswered) {
  ServerThread server(server_options(dir_.path()));
  constexpr int kThreads = 4;
  constexpr int kCalls = 300;
  std::atomic<int> answered{0};
  {
    std::vector<std::jthread> threads;
    threads.reserve(kThreads);
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        auto link = ControlLink::connect(link_options(dir_.path(), std::to_string(t)), soon());
        for (int i = 0; link && i < kCalls; ++i) {
          if ((*link)->call<StatusReply>(MessageKind::kStatus, Empty{}, soon())) ++answered;
        }
      });
    }
  }
  EXPECT_EQ(answered, kThreads * kCalls);
}

TEST_F(ControlTest, ARequestThatIsBeingHandledIsNotHandledAgain) {
  ServerThread server(server_options(dir_.path()));
  auto link = connect();
  ASSERT_TRUE(link);
  const Envelope request = request_of(MessageKind::kClear, link->next_request());
  ASSERT_TRUE(link->send(request).has_value());
  ASSERT_TRUE(link->send(request).has_value());
  // Messages of one peer keep their order: after this reply both have arrived.
  ASSERT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
  EXPECT_EQ(server.handler.count("clear peer"), 1);
}

TEST_F(ControlTest, KeepsOtherMessagesWhileARequestWaits) {
  ServerThread* running = nullptr;
  ServerThread server(server_options(dir_.path()), [&](const Peer& peer, const Envelope& envelope) {
    if (envelope.kind != MessageKind::kStatus) return;
    for (std::uint64_t i = 1; i <= 3; ++i) {
      JobDone done;
      done.job = JobId{i};
      EXPECT_TRUE(running->server->notify(peer.id, MessageKind::kJobDone, done).has_value());
    }
  });
  running = &server;
  auto link = connect();
  ASSERT_TRUE(link);
  ASSERT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
  for (std::uint64_t i = 1; i <= 3; ++i) {
    pollfd entry{link->fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&entry, 1, 0), 1) << "kept messages must show";
    const auto event = link->try_receive();
    ASSERT_TRUE(event.has_value() && event->has_value());
    EXPECT_EQ(decode<JobDone>((*event)->body, "job")->job, JobId{i});
  }
  pollfd entry{link->fd(), POLLIN, 0};
  EXPECT_FALSE(link->try_receive()->has_value());
  EXPECT_EQ(::poll(&entry, 1, 0), 0);
}

TEST_F(ControlTest, ARequestTimesOutAndItsLateReplyIsDropped) {
  std::optional<std::pair<Peer, Envelope>> held;
  ServerThread server(server_options(dir_.path()), [&](const Peer& peer, const Envelope& envelope) {
    if (envelope.kind == MessageKind::kClear) held.emplace(peer, envelope);
  });
  auto link = connect();
  ASSERT_TRUE(link);
  const auto reply = link->request(MessageKind::kClear, encode(Empty{}),
                                   Deadline::after(std::chrono::milliseconds(20)));
  ASSERT_FALSE(reply.has_value());
  EXPECT_EQ(reply.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(reply.error().message, HasSubstr("clear"));
  ASSERT_TRUE(server.handler.wait_for("clear peer"));
  server.call([&] {
    EXPECT_TRUE(server.server->reply(held->first.id, held->second, Empty{}).has_value());
    EXPECT_TRUE(server.server->notify(held->first.id, MessageKind::kBye, Empty{}).has_value());
  });
  const auto next = wait_message(*link);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->kind, MessageKind::kBye);
}

TEST_F(ControlTest, AnErrorReplyIsTheRequestersError) {
  ServerThread* running = nullptr;
  ServerThread server(server_options(dir_.path()), [&](const Peer& peer, const Envelope& envelope) {
    if (envelope.kind == MessageKind::kClear) {
      EXPECT_TRUE(
          running->server->reply_error(peer.id, envelope, KVFERRY_ERROR(kStaleEpoch, "epoch {}", 3))
              .has_value());
    }
  });
  running = &server;
  auto link = connect();
  ASSERT_TRUE(link);
  const auto reply = link->request(MessageKind::kClear, encode(Empty{}), soon());
  ASSERT_FALSE(reply.has_value());
  EXPECT_EQ(reply.error().code, ErrorCode::kStaleEpoch);
  EXPECT_EQ(reply.error().message, "epoch 3");
}

TEST_F(ControlTest, MoversGetThePoolAndOthersDoNot) {
  constexpr std::size_t kPoolBytes = 1 << 20;
  const UniqueFd pool = *SharedMemory::create_pool("pool", kPoolBytes, true);
  ControlServer::Options options = server_options(dir_.path());
  options.pool_fd = pool.get();
  options.pool_bytes = kPoolBytes;
  ServerThread server(std::move(options));
  ControlLink::Options mover = link_options(dir_.path(), "mover");
  mover.kind = ProcessKind::kMover;
  auto link = *ControlLink::connect(mover, soon());
  EXPECT_EQ(link->welcome().pool_bytes, kPoolBytes);
  const UniqueFd received = link->take_memory_fd();
  ASSERT_TRUE(received.valid());
  EXPECT_FALSE(link->take_memory_fd().valid());
  const SharedMapping ours = *SharedMemory::map_pool(pool, kPoolBytes);
  const SharedMapping theirs = *SharedMemory::map_pool(received, kPoolBytes);
  ours.data()[kPoolBytes - 1] = std::byte{42};
  EXPECT_EQ(theirs.data()[kPoolBytes - 1], std::byte{42});
  EXPECT_FALSE(connect("engine")->take_memory_fd().valid());
}

TEST_F(ControlTest, NobodyListeningIsNoManager) {
  for (const bool stale : {false, true}) {
    if (stale) {
      // A socket file that nobody serves.
      const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      (dir_ / "registry").native().copy(&address.sun_path[0], sizeof(address.sun_path) - 1);
      ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
      ::close(fd);
    }
    const auto link = ControlLink::connect(link_options(dir_.path(), "peer"), soon());
    ASSERT_FALSE(link.has_value());
    EXPECT_EQ(link.error().code, ErrorCode::kNoManager);
  }
  ServerThread server(server_options(dir_.path()));
  EXPECT_TRUE(connect() != nullptr) << "a stale name is replaced";
}

TEST_F(ControlTest, ASecondServerIsRefusedAndTheFirstServesOn) {
  ServerThread server(server_options(dir_.path()));
  EventLoop loop;
  test::RecordingHandler handler;
  try {
    const ControlServer second(loop, server_options(dir_.path()), handler);
    FAIL() << "a second server on the path";
  } catch (const Exception& exception) {
    EXPECT_EQ(exception.error().code, ErrorCode::kAlreadyExists);
    EXPECT_THAT(exception.error().message, HasSubstr(std::to_string(::getpid())));
  }
  auto link = connect();
  ASSERT_TRUE(link);
  EXPECT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
}

TEST_F(ControlTest, TheEndOfTheServerIsSeenAndEndsRequests) {
  auto server = std::make_unique<ServerThread>(server_options(dir_.path()));
  auto link = connect();
  ASSERT_TRUE(link);
  server.reset();
  pollfd entry{link->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&entry, 1, 20'000), 1);
  EXPECT_TRUE(link->server_lost());
  const auto reply = link->request(MessageKind::kStatus, encode(Empty{}), soon());
  ASSERT_FALSE(reply.has_value());
  EXPECT_EQ(reply.error().code, ErrorCode::kPeerDied);
}

TEST_F(ControlTest, AClosedLinkOfALivingProcessIsSilenceAndMayComeAgain) {
  ServerThread server(server_options(dir_.path()));
  const ControlLink::Options options = link_options(dir_.path(), "peer");
  for (int i = 1; i <= 5; ++i) {
    auto link = ControlLink::connect(options, soon());
    ASSERT_TRUE(link.has_value()) << link.error().to_string();
    const auto status = (*link)->call<StatusReply>(MessageKind::kStatus, Empty{}, soon());
    ASSERT_TRUE(status.has_value()) << status.error().to_string();
    EXPECT_EQ(status->json, std::to_string(i)) << "never the reply of an earlier link";
  }
  EXPECT_TRUE(server.handler.wait_for("silent peer", 5));
  EXPECT_EQ(server.handler.count("died peer"), 0);
}

TEST_F(ControlTest, APeerThatSaidByeIsForgottenWhenItsConnectionIsClosed) {
  ServerThread server(server_options(dir_.path()));
  const auto is_known = [&server](const IncarnationId& id) {
    bool known = false;
    server.call([&] { known = server.server->process(id) != nullptr; });
    return known;
  };
  const ControlLink::Options options = link_options(dir_.path(), "peer");
  auto link = ControlLink::connect(options, soon());
  ASSERT_TRUE(link.has_value()) << link.error().to_string();
  Envelope bye;
  bye.kind = MessageKind::kBye;
  ASSERT_TRUE((*link)->send(bye).has_value());
  ASSERT_TRUE((*link)->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value())
      << "its connection still serves it";
  EXPECT_TRUE(is_known(options.incarnation));
  link->reset();
  ASSERT_TRUE(server.handler.wait_for("left peer"));
  EXPECT_FALSE(is_known(options.incarnation));
  EXPECT_EQ(server.handler.count("silent peer"), 0);
  EXPECT_EQ(server.handler.count("died peer"), 0);
  // The other order: what was taken for silence is told to have been a farewell.
  link = ControlLink::connect(options, soon());
  ASSERT_TRUE(link.has_value()) << link.error().to_string();
  ASSERT_TRUE((*link)->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
  link->reset();
  ASSERT_TRUE(server.handler.wait_for("silent peer"));
  EXPECT_TRUE(is_known(options.incarnation));
  server.call([&] { server.server->forget_when_closed(options.incarnation); });
  ASSERT_TRUE(server.handler.wait_for("left peer", 2));
  EXPECT_FALSE(is_known(options.incarnation));
  EXPECT_EQ(server.handler.count("died peer"), 0);
}

// One that waited in vain for a greeting comes back under another name, and would be kept for as
// long as it lives. Not so a mover: it was given the pool.
TEST_F(ControlTest, APeerThatHasSaidNothingIsForgottenWhenItsConnectionIsClosed) {
  ServerThread server(server_options(dir_.path()));
  const auto is_known = [&server](const IncarnationId& id) {
    bool known = false;
    server.call([&] { known = server.server->process(id) != nullptr; });
    return known;
  };
  ControlLink::Options options = link_options(dir_.path(), "engine");
  ASSERT_NE(options.kind, ProcessKind::kMover);
  auto link = ControlLink::connect(options, soon());
  ASSERT_TRUE(link.has_value()) << link.error().to_string();
  EXPECT_TRUE(is_known(options.incarnation));
  link->reset();
  ASSERT_TRUE(server.handler.wait_for("left engine"));
  EXPECT_FALSE(is_known(options.incarnation));
  EXPECT_EQ(server.handler.count("silent engine"), 0);
  ControlLink::Options mover = link_options(dir_.path(), "mover");
  mover.kind = ProcessKind::kMover;
  link = ControlLink::connect(mover, soon());
  ASSERT_TRUE(link.has_value()) << link.error().to_string();
  link->reset();
  ASSERT_TRUE(server.handler.wait_for("silent mover"));
  EXPECT_TRUE(is_known(mover.incarnation));
  EXPECT_EQ(server.handler.count("left mover"), 0);
}

// Such as an engine that makes a client for each round of its training, and goes on for weeks: more
// than are kept of one process, and of all.
TEST_F(ControlTest, AProcessThatSaysByeMayConnectWithoutEnd) {
  ServerThread server(server_options(dir_.path()));
  Envelope bye;
  bye.kind = MessageKind::kBye;
  for (int round = 0; round < 4500; ++round) {
    const auto link = connect(fmt::format("round {}", round));
    ASSERT_TRUE(link) << "round " << round;
    ASSERT_TRUE(link->send(bye).has_value());
  }
}

TEST_F(ControlTest, AProcessConnectsUnderNewNamesMoreOftenThanItMayBeConnectedAtOnce) {
  ServerThread server(server_options(dir_.path()));
  for (int round = 0; round < 300; ++round) {
    const auto link = connect(fmt::format("round {}", round));
    ASSERT_TRUE(link) << "round " << round;
  }
}

TEST_F(ControlTest, AnIncarnationThatIsConnectedIsRefusedASecondTime) {
  ServerThread server(server_options(dir_.path()));
  const ControlLink::Options options = link_options(dir_.path(), "peer");
  auto first = ControlLink::connect(options, soon());
  ASSERT_TRUE(first.has_value());
  const auto second = ControlLink::connect(options, soon());
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().code, ErrorCode::kAlreadyExists);
  EXPECT_TRUE((*first)->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
}

TEST_F(ControlTest, AFullQueueIsBusyAndDrainsInOrder) {
  ControlServer::Options options = server_options(dir_.path());
  options.max_queued_messages = 4;
  ServerThread server(std::move(options));
  ControlLink::Options peer = link_options(dir_.path(), "peer");
  auto connected = ControlLink::connect(peer, soon());
  ASSERT_TRUE(connected.has_value()) << connected.error().to_string();
  const auto link = std::move(connected).value();
  std::uint64_t sent = 0;
  server.call([&] {
    JobDone done;
    done.message.assign(1 << 20, 'x');
    for (;;) {
      done.job = JobId{sent + 1};
      const Status status = server.server->notify(peer.incarnation, MessageKind::kJobDone, done);
      if (!status) {
        EXPECT_EQ(status.error().code, ErrorCode::kBusy) << status.error().to_string();
        break;
      }
      // The peer's own queue takes 10000 before its server's fills.
      ASSERT_LT(++sent, 20'000U);
      if (sent == 12) done.message.clear();
    }
  });
  EXPECT_GE(sent, 1U);
  for (std::uint64_t i = 1; i <= sent; ++i) {
    const auto event = wait_message(*link);
    ASSERT_TRUE(event.has_value())
        << "message " << i << " of " << sent
        << (link->server_lost() ? ", the server is lost" : ", the server is there");
    EXPECT_EQ(decode<JobDone>(event->body, "job")->job, JobId{i});
  }
}

TEST_F(ControlTest, UnknownPeersAndOversizedMessagesAreRefused) {
  ServerThread server(server_options(dir_.path()));
  auto link = connect();
  ASSERT_TRUE(link);
  server.call([&] {
    const Status status = server.server->notify(Digest::random(), MessageKind::kBye, Empty{});
    ASSERT_FALSE(status.has_value());
    EXPECT_EQ(status.error().code, ErrorCode::kNotFound);
    EXPECT_EQ(server.server->process(Digest::random()), nullptr);
  });
  Envelope large;
  large.body.resize(kMaxWireBytes);
  const Status status = link->send(large);
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
  EXPECT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
}

TEST_F(ControlTest, GarbageOnTheRegistryLeavesTheServerServing) {
  ServerThread server(server_options(dir_.path()));
  RegistryHello other_version;
  other_version.version = kWireVersion + 1;
  other_version.incarnation = Digest::random();
  RegistryHello nobody;
  // The same, with the version written as a number of 64 bits.
  Bytes long_version = encode(other_version);
  long_version.erase(long_version.begin() + 1);
  const Bytes number{0xcf, 0, 0, 0, 0, 0, 0, 0, static_cast<std::uint8_t>(kWireVersion + 1)};
  long_version.insert(long_version.begin() + 1, number.begin(), number.end());
  const std::pair<Bytes, ErrorCode> cases[] = {
      {Bytes{0xc1}, ErrorCode::kProtocol},
      {Bytes(100'000, 0x91), ErrorCode::kProtocol},
      {encode(nobody), ErrorCode::kProtocol},
      {encode(other_version), ErrorCode::kVersionMismatch},
      {Bytes{0x91, 0x7f}, ErrorCode::kVersionMismatch},
      {long_version, ErrorCode::kVersionMismatch},
  };
  for (const auto& [bytes, code] : cases) {
    PacketSocket socket = *PacketSocket::connect(dir_ / "registry", soon());
    ASSERT_TRUE(socket.send(bytes).has_value());
    const auto packet = socket.receive(soon());
    ASSERT_TRUE(packet.has_value()) << packet.error().to_string();
    const auto welcome = decode<RegistryWelcome>(packet->bytes, "welcome");
    ASSERT_TRUE(welcome.has_value() && welcome->refused.has_value());
    EXPECT_EQ(welcome->refused->code, code);
    EXPECT_EQ(socket.receive(soon()).error().code, ErrorCode::kPeerDied);
  }
  std::vector<PacketSocket> silent;
  for (int i = 0; i < 10; ++i) silent.push_back(*PacketSocket::connect(dir_ / "registry", soon()));
  auto link = connect();
  ASSERT_TRUE(link);
  EXPECT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
  server.call([&] { EXPECT_GE(server.server->protocol_errors(), std::size(cases)); });
}

TEST_F(ControlTest, GarbageOnTheRouterLeavesTheServerServing) {
  ServerThread server(server_options(dir_.path()));
  auto link = connect();
  ASSERT_TRUE(link);
  zmq::context_t context;
  const std::string address = "ipc://" + (dir_ / "control").native();
  for (const std::string& id : {std::string("x"), std::string(16, 'u'), std::string()}) {
    zmq::socket_t stranger(context, zmq::socket_type::dealer);
    stranger.set(zmq::sockopt::linger, 1000);
    if (!id.empty()) stranger.set(zmq::sockopt::routing_id, id);
    stranger.connect(address);
    for (int i = 0; i < 100; ++i) {
      (void)stranger.send(zmq::str_buffer(""), zmq::send_flags::sndmore);
      (void)stranger.send(zmq::str_buffer("\xc1garbage"), zmq::send_flags::none);
      (void)stranger.send(zmq::str_buffer("\x96\x01"), zmq::send_flags::none);
    }
  }
  context.close();  // after everything was delivered, or a second
  EXPECT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
  EXPECT_EQ(server.handler.count("peer peer"), 1);
}

TEST_F(ControlTest, MalformedEnvelopesOfAPeerAreCountedAndAnotherVersionIsAnswered) {
  ServerThread server(server_options(dir_.path()));
  auto link = connect();
  ASSERT_TRUE(link);
  Envelope other = request_of(MessageKind::kStatus, link->next_request());
  other.version = kWireVersion + 1;
  ASSERT_TRUE(link->send(other).has_value());
  const auto reply = wait_message(*link);
  ASSERT_TRUE(reply.has_value() && reply->error.has_value());
  EXPECT_EQ(reply->error->code, ErrorCode::kVersionMismatch);
  EXPECT_EQ(reply->request, other.request);
  EXPECT_EQ(server.handler.count("status peer"), 0);
  server.call([&] { EXPECT_EQ(server.server->protocol_errors(), 1U); });
}

}  // namespace
}  // namespace kvferry::ipc
