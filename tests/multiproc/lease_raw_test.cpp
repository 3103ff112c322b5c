// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Peers that break the protocol of the unlink handshake: this process speaks it by hand.
#include "multiproc/lease_raw_fixture.hpp"
#include "support/processor_time.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <optional>
#include <utility>

namespace kvferry::test {
namespace {

using namespace ipc;
using namespace ipc::lease;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
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
  auto owner = start_owner({{"hello", "300"}});
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
  auto owner = start_owner({{"revoke", "300"}});
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
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
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
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
  auto owner = start_owner({{"revoke", "300"}});
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
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
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
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
      std::optional<PacketSocket> socket = accept(*listener);
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
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
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

TEST_F(LeaseRawTest, OwnerThatGrantsAReleasedLeaseAgainIsDropped) {
  const auto instance = RuntimeDir::open(dir_.path().native(), "test");
  ASSERT_TRUE(instance);
  auto listener = PacketListener::listen(dir_ / "test/chat.0.lease");
  ASSERT_TRUE(listener.has_value()) << listener.error().to_string();
  auto attacher = start_attacher();
  std::optional<PacketSocket> socket = accept(*listener);
  ASSERT_TRUE(socket.has_value());
  EXPECT_EQ(receive(*socket).message, LeaseMessage::kHello);

  WelcomeBody welcome;
  welcome.owner.identity = identity_;
  welcome.owner.identity.self = ProcessKind::kMover;
  welcome.session = Digest::random();
  auto words = OwnerWords::create(welcome.session);
  ASSERT_TRUE(words.has_value());
  words->move({Epoch{1}, LeasePhase::kReady});
  const int words_fd = words->fd();
  ASSERT_TRUE(send(*socket, LeaseMessage::kWelcome, welcome, {&words_fd, 1}));

  // Memory that is none of the device: it is not opened, and the lease given back.
  const UniqueFd nothing(::memfd_create("nothing", MFD_CLOEXEC));
  const int handle_fd = nothing.get();
  GrantBody grant;
  grant.epoch = Epoch{1};
  grant.lease = LeaseId{5};
  grant.total = 1;
  grant.layout = small_layout(small_geometry(2, 1), ArenaOrder::kLayerFirst);
  ASSERT_EQ(grant.layout->segment_bytes.size(), 1U);
  grant.handles = {{HandleKind::kVmm, grant.layout->segment_bytes[0], {}, true}};
  EXPECT_EQ(receive(*socket).message, LeaseMessage::kAttach);
  ASSERT_TRUE(send(*socket, LeaseMessage::kGrant, grant, {&handle_fd, 1}));
  EXPECT_EQ(receive(*socket).message, LeaseMessage::kReleased);
  EXPECT_EQ(receive(*socket).message, LeaseMessage::kAttach);
  ASSERT_TRUE(send(*socket, LeaseMessage::kGrant, grant, {&handle_fd, 1}));
  expect_closed(*socket);
  attacher->quit();
}

// Past what the product's own side can send.
bool send_oversized(const PacketSocket& socket) {
  const std::vector<std::uint8_t> bytes(PacketSocket::kMaxPacketBytes + 1, 1);
  const int room = 4 * static_cast<int>(PacketSocket::kMaxPacketBytes);
  (void)::setsockopt(socket.fd(), SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
  return ::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

TEST_F(LeaseRawTest, OversizedPacketsEndTheirConnectionAndNothingElse) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  PacketSocket stranger = connect();
  ASSERT_TRUE(send_oversized(stranger));
  expect_closed(stranger);
  PacketSocket known = connect();
  AttacherWords words = make_words();
  (void)greet(known, words);
  const LeaseId lease = take_grant(known);
  ASSERT_TRUE(send_oversized(known));
  expect_closed(known);
  (void)owner->expect_view("still held", [](const SeenView& v) { return v.leases == 1; });
  words.release_up_to(lease);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  expect_serves(*owner, 2);
  owner->quit();
}

// It asks and asks, and reads no answer: the owner neither waits for it nor keeps the answers.
TEST_F(LeaseRawTest, AttacherThatNeverReadsIsDroppedAndTheOthersAreServed) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  PacketSocket deaf = connect();
  const AttacherWords words = make_words();
  (void)greet(deaf, words);
  const Deadline deadline = soon();
  ErrorCode end = ErrorCode::kBusy;
  while (end == ErrorCode::kBusy && !deadline.expired()) {
    const Status sent = send(deaf, LeaseMessage::kBye, LeaseBody{LeaseId{0}});
    if (sent) continue;
    end = sent.error().code;
    pollfd room{deaf.fd(), POLLOUT, 0};
    if (end == ErrorCode::kBusy) ::poll(&room, 1, deadline.poll_timeout_ms());
  }
  EXPECT_EQ(end, ErrorCode::kPeerDied) << "the connection";
  expect_serves(*owner, 1);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  EXPECT_THAT(owner->process().stderr_text(), HasSubstr("does not read"));
  owner->quit();
}

// A connection waits at a listener that cannot be accepted: the owner's, and the meeting place of
// attachers that look for one.
TEST_F(LeaseRawTest, WithoutDescriptorsNeitherSideSpinsAndBothRecover) {
  const auto starve = [this](LeasePeer& peer, const std::string& name) {
    rlimit before{};
    ASSERT_EQ(::prlimit(peer.process().pid(), RLIMIT_NOFILE, nullptr, &before), 0);
    const rlimit none{3, before.rlim_max};
    ASSERT_EQ(::prlimit(peer.process().pid(), RLIMIT_NOFILE, &none, nullptr), 0);
    const auto used = processor_time(peer.process().pid());
    const auto waiting = PacketSocket::connect(dir_ / "test" / name, soon());
    ASSERT_TRUE(waiting.has_value()) << waiting.error().to_string();
    EXPECT_FALSE(peer.process().wait_zombie(Deadline::after(std::chrono::milliseconds(800))));
    EXPECT_LT(processor_time(peer.process().pid()) - used, std::chrono::milliseconds(400)) << name;
    ASSERT_EQ(::prlimit(peer.process().pid(), RLIMIT_NOFILE, &before, nullptr), 0);
  };
  auto attacher = start_attacher();
  (void)attacher->expect_view("looking", [](const SeenView& v) { return v.note != "-"; });
  ASSERT_NO_FATAL_FAILURE(starve(*attacher, "chat.0.seek"));
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  ASSERT_NO_FATAL_FAILURE(starve(*owner, "chat.0.lease"));
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  owner->quit();
  attacher->quit();
}

// Silent connections of one process fill its own share of the table.
TEST_F(LeaseRawTest, SilentConnectionsOfOneProcessKeepNobodyElseOut) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  std::vector<PacketSocket> silent;
  for (int i = 0; i < 8; ++i) silent.push_back(connect());
  PacketSocket surplus = connect();
  EXPECT_EQ(refusal(surplus), ErrorCode::kBusy);
  expect_serves(*owner, 1);
  owner->quit();
}

}  // namespace
}  // namespace kvferry::test
