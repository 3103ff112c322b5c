// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Disagreements at hello, and peers that break the protocol: this process speaks it by hand.
#include "lease/lease_messages.hpp"
#include "lease/lease_words.hpp"
#include "multiproc/lease_fixture.hpp"
#include "support/lease_geometry.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <unistd.h>

#include <optional>
#include <utility>

namespace kvferry::test {
namespace {

using namespace ipc;
using namespace ipc::lease;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class LeaseHelloTest : public LeaseFixture {
 protected:
  static void expect_refused(LeasePeer& attacher, LeasePeer& owner, const std::string& code) {
    (void)attacher.expect_view("refused", [&](const SeenView& v) { return v.refused == code; });
    (void)owner.expect_view("told", [&](const SeenView& v) { return v.peer_refused == code; });
  }
};

TEST_F(LeaseHelloTest, OtherGeometryIsRefusedOnBothSides) {
  auto owner = start_owner();
  auto attacher = start_attacher({{"layers", "3"}});
  expect_refused(*attacher, *owner, "geometry_mismatch");
  attacher->quit();
  owner->quit();
}

TEST_F(LeaseHelloTest, OtherArenaOrderIsAnotherGeometry) {
  auto owner = start_owner();
  auto attacher = start_attacher({{"many", "yes"}});
  expect_refused(*attacher, *owner, "geometry_mismatch");
  attacher->quit();
  owner->quit();
}

TEST_F(LeaseHelloTest, OtherRankCountIsRefusedOnBothSides) {
  auto owner = start_owner();
  auto attacher = start_attacher({{"ranks", "2"}});
  expect_refused(*attacher, *owner, "geometry_mismatch");
  attacher->quit();
  owner->quit();
}

TEST_F(LeaseHelloTest, OtherHandlesAreRefusedOnBothSides) {
  auto owner = start_owner();
  auto attacher = start_attacher({{"handles", "legacy"}});
  expect_refused(*attacher, *owner, "invalid_argument");
  attacher->quit();
  owner->quit();
}

TEST_F(LeaseHelloTest, BothOwnersLearnOfTheRoleConflict) {
  auto worker = start("worker", {{"owner", "worker"}});
  (void)worker->expect("up");
  auto mover = start("mover", {{"owner", "mover"}});
  EXPECT_THAT(mover->expect("failed"), AllOf(StartsWith("failed role_conflict"),
                                             HasSubstr(std::to_string(worker->process().pid()))));
  (void)worker->expect_view("told",
                            [](const SeenView& v) { return v.peer_refused == "role_conflict"; });
  // The living owner serves on.
  EXPECT_EQ(worker->ask("init 5000", "init"), "init ok 1");
  worker->quit();
}

TEST_F(LeaseHelloTest, SecondOwnerOfOneKindIsRefusedWithThePidOfTheFirst) {
  auto first = start_owner();
  auto second = start(owner_);
  EXPECT_THAT(second->expect("failed"), AllOf(StartsWith("failed role_conflict"),
                                              HasSubstr(std::to_string(first->process().pid()))));
  EXPECT_EQ(first->ask("init 5000", "init"), "init ok 1");
  first->quit();
}

TEST_F(LeaseHelloTest, BothAttachersLearnOfTheRoleConflict) {
  auto mover = start("mover", {{"owner", "worker"}});
  auto worker = start("worker", {{"owner", "mover"}});
  const auto conflict = [](const SeenView& v) { return v.refused == "role_conflict"; };
  (void)mover->expect_view("refused", conflict);
  (void)worker->expect_view("refused", conflict);
  mover->quit();
  worker->quit();
}

TEST_F(LeaseHelloTest, AttachersThatAgreeWaitTogetherForTheOwner) {
  auto one = start_attacher();
  auto two = start_attacher();
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 5000", "init"), "init ok 1");
  one->expect_mapped(1);
  two->expect_mapped(1);
  owner->quit();
  one->quit();
  two->quit();
}

// An attacher of the worker's kind in this very process, packet by packet. The owner is a mover: a
// worker is never killed.
class LeaseRawTest : public LeaseFixture {
 protected:
  LeaseRawTest() {
    owner_ = "mover";
    common_ = {{"revoke", "300"}, {"settle", "300"}, {"hello", "300"}};
    identity_.instance = "test";
    identity_.engine = "chat";
    identity_.ranks = 1;
    identity_.self = ProcessKind::kWorker;
    identity_.cache_owner = CacheOwner::kMover;
    identity_.handles = HandleKind::kVmm;
    identity_.fingerprint = small_geometry(2, 1).fingerprint(ArenaOrder::kLayerFirst);
    identity_.incarnation = Digest::random();
  }

  PacketSocket connect() {
    auto socket = PacketSocket::connect(dir_ / "test/chat.0.lease", soon());
    EXPECT_TRUE(socket.has_value());
    return socket ? std::move(socket).value() : PacketSocket();
  }

  static Incoming receive(PacketSocket& socket) {
    auto packet = socket.receive(soon());
    EXPECT_TRUE(packet.has_value());
    if (!packet) return {};
    auto incoming = read_header(std::move(packet).value());
    EXPECT_TRUE(incoming.has_value());
    return incoming ? std::move(incoming).value() : Incoming{};
  }

  static void expect_closed(PacketSocket& socket) {
    const auto packet = socket.receive(soon());
    ASSERT_FALSE(packet.has_value());
    EXPECT_EQ(packet.error().code, ErrorCode::kPeerDied);
  }

  static ErrorCode refusal(PacketSocket& socket) {
    const Incoming incoming = receive(socket);
    EXPECT_EQ(incoming.message, LeaseMessage::kRefused);
    const auto body = read_body<RefusedBody>(incoming, "Refused");
    EXPECT_TRUE(body.has_value());
    return body ? body->error.code : ErrorCode::kCancelled;
  }

  AttacherWords make_words() const {
    auto words = AttacherWords::create(identity_.incarnation);
    if (!words) throw Exception(words.error());
    return std::move(words).value();
  }

  // Hello and welcome.
  WelcomeBody greet(PacketSocket& socket, const AttacherWords& words) {
    const int fd = words.fd();
    EXPECT_TRUE(send(socket, LeaseMessage::kHello, HelloBody{identity_}, {&fd, 1}));
    const Incoming incoming = receive(socket);
    EXPECT_EQ(incoming.message, LeaseMessage::kWelcome);
    const auto body = read_body<WelcomeBody>(incoming, "Welcome", 1);
    EXPECT_TRUE(body.has_value());
    return body ? *body : WelcomeBody{};
  }

  LeaseId take_grant(PacketSocket& socket) {
    EXPECT_TRUE(send(socket, LeaseMessage::kAttach, AttachBody{Epoch{1}}));
    Incoming incoming = receive(socket);
    EXPECT_EQ(incoming.message, LeaseMessage::kGrant);
    const auto body = read_body<GrantBody>(incoming, "Grant", 1);
    EXPECT_TRUE(body.has_value());
    return body ? body->lease : LeaseId{};
  }

  // Another attacher, an honest one, is served.
  void expect_serves(LeasePeer& owner, int epoch) {
    auto honest = start_attacher();
    honest->expect_mapped(static_cast<std::uint64_t>(epoch));
    honest->quit();
    (void)owner;
  }

  LeaseIdentity identity_;
};

TEST_F(LeaseRawTest, OtherVersionIsToldInWordsThatItCanRead) {
  auto owner = start_owner();
  PacketSocket socket = connect();
  const Bytes future{static_cast<std::uint8_t>(LeaseMessage::kHello), 0, 0, 0, 99, 0, 0, 0, 1, 2};
  ASSERT_TRUE(socket.send(future));
  EXPECT_EQ(refusal(socket), ErrorCode::kVersionMismatch);
  expect_closed(socket);
  (void)owner->expect_view("told",
                           [](const SeenView& v) { return v.peer_refused == "version_mismatch"; });
  owner->quit();
}

TEST_F(LeaseRawTest, GarbledHellosAreRefusedAndTheOwnerServesOn) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 5000", "init"), "init ok 1");
  const AttacherWords words = make_words();
  const int fd = words.fd();
  const Bytes body = encode(HelloBody{identity_});
  for (std::size_t size = 0; size < body.size(); size += 7) {
    PacketSocket socket = connect();
    const Bytes cut(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(size));
    ASSERT_TRUE(send_packet(socket, LeaseMessage::kHello, cut, {&fd, 1}));
    EXPECT_EQ(refusal(socket), ErrorCode::kProtocol);
  }
  PacketSocket without_words = connect();
  ASSERT_TRUE(send_packet(without_words, LeaseMessage::kHello, body));
  EXPECT_EQ(refusal(without_words), ErrorCode::kProtocol);
  PacketSocket out_of_turn = connect();
  ASSERT_TRUE(send(out_of_turn, LeaseMessage::kAttach, AttachBody{Epoch{1}}));
  EXPECT_EQ(refusal(out_of_turn), ErrorCode::kProtocol);
  expect_serves(*owner, 1);
  owner->quit();
}

TEST_F(LeaseRawTest, SilentConnectionIsClosedAfterTheHelloDeadline) {
  auto owner = start_owner();
  PacketSocket socket = connect();
  expect_closed(socket);
  owner->quit();
}

TEST_F(LeaseRawTest, OneProcessCannotTakeEverySlot) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  ErrorCode refused = ErrorCode::kCancelled;
  int lives = 0;
  for (; lives < 64; ++lives) {
    identity_.incarnation = Digest::random();
    const AttacherWords words = make_words();
    const int fd = words.fd();
    PacketSocket socket = connect();
    ASSERT_TRUE(send(socket, LeaseMessage::kHello, HelloBody{identity_}, {&fd, 1}));
    const Incoming incoming = receive(socket);
    if (incoming.message == LeaseMessage::kWelcome) continue;
    const auto body = read_body<RefusedBody>(incoming, "Refused");
    ASSERT_TRUE(body.has_value());
    refused = body->error.code;
    break;
  }
  EXPECT_EQ(lives, 16);
  EXPECT_EQ(refused, ErrorCode::kBusy);
  expect_serves(*owner, 1);
  owner->quit();
}

TEST_F(LeaseRawTest, ForgedReleaseWordEndsNoLease) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 5000", "init"), "init ok 1");
  PacketSocket socket = connect();
  AttacherWords words = make_words();
  (void)greet(socket, words);
  const LeaseId lease = take_grant(socket);
  ASSERT_EQ(lease, LeaseId{1});
  words.release_up_to(LeaseId{2});  // never granted
  ASSERT_TRUE(send(socket, LeaseMessage::kReleased, LeaseBody{lease}));
  expect_closed(socket);
  EXPECT_EQ(owner->ask("peek", "peeked"), "peeked 0");
  (void)owner->expect_view("still held", [](const SeenView& v) { return v.leases == 1; });
  // It may not come back before it has died.
  PacketSocket again = connect();
  const int fd = words.fd();
  ASSERT_TRUE(send(again, LeaseMessage::kHello, HelloBody{identity_}, {&fd, 1}));
  EXPECT_EQ(refusal(again), ErrorCode::kProtocol);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  expect_serves(*owner, 2);
  owner->quit();
}

TEST_F(LeaseRawTest, GrantLostWithItsConnectionIsAcknowledgedByTheNextOne) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 5000", "init"), "init ok 1");
  {
    PacketSocket socket = connect();
    const AttacherWords words = make_words();
    (void)greet(socket, words);
    ASSERT_TRUE(send(socket, LeaseMessage::kAttach, AttachBody{Epoch{1}}));
    (void)owner->expect_view("granted", [](const SeenView& v) { return v.leases == 1; });
  }
  PacketSocket socket = connect();
  AttacherWords words = make_words();
  const WelcomeBody welcome = greet(socket, words);
  EXPECT_EQ(welcome.last_lease, LeaseId{1});
  EXPECT_EQ(owner->view().leases, 1U) << "a closed socket is no proof";
  words.release_up_to(welcome.last_lease);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  owner->quit();
}

TEST_F(LeaseRawTest, ClosedSocketOfALivingHolderIsNoDeath) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 5000", "init"), "init ok 1");
  {
    PacketSocket socket = connect();
    const AttacherWords words = make_words();
    (void)greet(socket, words);
    EXPECT_EQ(take_grant(socket), LeaseId{1});
  }
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"),
              AllOf(StartsWith("clear quarantined"), HasSubstr(std::to_string(::getpid()))));
  owner->quit();
}

TEST_F(LeaseRawTest, RequestBeforeTheReleaseAndForeignMessagesAreDropped) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 5000", "init"), "init ok 1");
  AttacherWords words = make_words();
  {
    PacketSocket socket = connect();
    (void)greet(socket, words);
    EXPECT_EQ(take_grant(socket), LeaseId{1});
    ASSERT_TRUE(send(socket, LeaseMessage::kAttach, AttachBody{Epoch{1}}));
    expect_closed(socket);
  }
  PacketSocket socket = connect();
  words.release_up_to(greet(socket, words).last_lease);
  ASSERT_TRUE(send(socket, LeaseMessage::kRevoke, RevokeBody{Epoch{1}}));
  expect_closed(socket);
  PacketSocket zero = connect();
  (void)greet(zero, words);
  ASSERT_TRUE(send(zero, LeaseMessage::kAttach, AttachBody{Epoch{0}}));
  expect_closed(zero);
  expect_serves(*owner, 1);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  owner->quit();
}

TEST_F(LeaseRawTest, OwnerThatBreaksTheProtocolIsDroppedAndTheNextOneIsFound) {
  const auto instance = RuntimeDir::open(dir_.path().native(), "test");
  ASSERT_TRUE(instance);
  auto attacher = start_attacher();
  {
    auto listener = PacketListener::listen(dir_ / "test/chat.0.lease");
    ASSERT_TRUE(listener.has_value()) << listener.error().to_string();
    for (int round = 0; round < 3; ++round) {
      std::optional<PacketSocket> socket;
      const Deadline deadline = soon();
      while (!socket && !deadline.expired()) {
        pollfd waited{listener->fd(), POLLIN, 0};
        ASSERT_EQ(::poll(&waited, 1, deadline.poll_timeout_ms()), 1);
        auto accepted = listener->try_accept();
        ASSERT_TRUE(accepted.has_value());
        socket = std::move(accepted).value();
      }
      ASSERT_TRUE(socket.has_value());
      EXPECT_EQ(receive(*socket).message, LeaseMessage::kHello);
      if (round == 0) {
        ASSERT_TRUE(send(*socket, LeaseMessage::kGrant, GrantBody{}));
      } else if (round == 1) {
        ASSERT_TRUE(socket->send(Bytes{1, 2, 3}));
      } else {
        ASSERT_TRUE(send(*socket, LeaseMessage::kWelcome, WelcomeBody{}));  // without words
      }
      expect_closed(*socket);
    }
  }
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 5000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  owner->quit();
  attacher->quit();
}

// The owner here is this process: it grants, and stalls before it reads the goodbye.
TEST_F(LeaseRawTest, GrantThatMeetsAGoodbyeIsLetGoOfWithoutAnAnswer) {
  const auto instance = RuntimeDir::open(dir_.path().native(), "test");
  ASSERT_TRUE(instance);
  auto listener = PacketListener::listen(dir_ / "test/chat.0.lease");
  ASSERT_TRUE(listener.has_value()) << listener.error().to_string();
  auto attacher = start_attacher();
  pollfd waited{listener->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&waited, 1, soon().poll_timeout_ms()), 1);
  auto accepted = listener->try_accept();
  ASSERT_TRUE(accepted.has_value() && accepted->has_value());
  PacketSocket socket = std::move(**accepted);

  const Incoming incoming = receive(socket);
  const auto hello = read_body<HelloBody>(incoming, "Hello", 1);
  ASSERT_TRUE(hello.has_value()) << hello.error().to_string();
  const auto words =
      AttacherWordsView::map(incoming.packet.fds.front(), hello->identity.incarnation);
  ASSERT_TRUE(words.has_value()) << words.error().to_string();
  WelcomeBody welcome;
  welcome.owner.identity = hello->identity;
  welcome.owner.identity.self = ProcessKind::kMover;
  welcome.session = SessionId::random();
  auto own = OwnerWords::create(welcome.session);
  ASSERT_TRUE(own.has_value());
  const int fd = own->fd();
  ASSERT_TRUE(send(socket, LeaseMessage::kWelcome, welcome, {&fd, 1}));
  EXPECT_EQ(receive(socket).message, LeaseMessage::kAttach);

  attacher->tell("quit");
  EXPECT_EQ(receive(socket).message, LeaseMessage::kBye);
  GrantBody part;
  part.epoch = Epoch{1};
  part.lease = LeaseId{7};
  part.total = 2;
  ASSERT_TRUE(send(socket, LeaseMessage::kGrant, part));
  EXPECT_EQ(receive(socket).message, LeaseMessage::kReleased);
  EXPECT_EQ(words->released(), LeaseId{7});
  EXPECT_EQ(attacher->process().wait(soon()), ChildExit::exited(0));
}

}  // namespace
}  // namespace kvferry::test
