// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A mover's arena outlives its workers: it is zeroed exactly once, by one of them, and what was
// written since is there for the next.
#include "lease/lease_messages.hpp"
#include "lease/lease_words.hpp"
#include "multiproc/lease_fixture.hpp"
#include "support/lease_geometry.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <sstream>

namespace kvferry::test {
namespace {

using namespace ipc;
using namespace ipc::lease;
using ::testing::StartsWith;

constexpr int kDirt = 90;

class LeasePrepareTest : public LeaseFixture, public ::testing::WithParamInterface<const char*> {
 protected:
  LeasePrepareTest() {
    owner_ = "mover";
    handles_ = GetParam();
  }
  // An epoch whose memory is as a driver gives it out.
  [[nodiscard]] std::unique_ptr<LeasePeer> start_dirty_owner() {
    auto owner = start_owner({{"dirt", std::to_string(kDirt)}});
    EXPECT_EQ(owner->ask("init 20000", "init"), "init ok 1");
    return owner;
  }
  // A worker that is held at a gate of its first epoch.
  [[nodiscard]] std::unique_ptr<LeasePeer> start_held(const std::string& gate) {
    auto worker = start("worker", {{"hold", gate}});
    (void)worker->expect("at " + gate + " 1");
    return worker;
  }
  static void expect_zeroings(LeasePeer& worker, int count) {
    EXPECT_EQ(worker.ask("zeroings", "zeroings"), fmt::format("zeroings {}", count));
  }
  // Every byte is as said, in this process' own eyes.
  static void expect_bytes(LeasePeer& peer, int value) {
    EXPECT_EQ(peer.ask(fmt::format("others {}", value), "others"), "others 0");
  }
  static void expect_prepared(LeasePeer& peer, std::uint64_t lease) {
    (void)peer.expect_view(fmt::format("prepared by lease {}", lease).c_str(),
                           [lease](const SeenView& v) { return v.prepared_by == lease; });
  }
};
INSTANTIATE_TEST_SUITE_P(Handles,
                         LeasePrepareTest,
                         ::testing::Values("vmm", "legacy"),
                         [](const auto& handles) { return std::string(handles.param); });

TEST_P(LeasePrepareTest, EpochIsZeroedByItsFirstWorkerAndByNoOtherOne) {
  auto owner = start_dirty_owner();
  auto first = start_attacher();
  first->expect_mapped(1);
  expect_zeroings(*first, 1);
  expect_bytes(*owner, 0);
  expect_prepared(*owner, 1);
  (void)first->ask("fill 7", "filled");
  first->kill_and_reap();
  for (const std::uint64_t lease : {2U, 3U}) {
    auto next = start_attacher();
    next->expect_mapped(1);
    expect_zeroings(*next, 0);
    EXPECT_EQ(next->view().prepared_by, 1U) << "lease " << lease;
    expect_bytes(*next, 7);
    next->kill_and_reap();
  }
  auto last = start_attacher();
  last->expect_mapped(1);
  last->quit();
  expect_bytes(*owner, 7);
  owner->quit();
}

TEST_P(LeasePrepareTest, WorkerKilledBeforeItZeroedLeavesAllToTheNext) {
  auto owner = start_dirty_owner();
  auto first = start_held("mapped");
  first->kill_and_reap();
  expect_bytes(*owner, kDirt);
  auto next = start_attacher();
  next->expect_mapped(1);
  expect_zeroings(*next, 1);
  expect_bytes(*next, 0);
  expect_prepared(*owner, 2);
  next->quit();
  owner->quit();
}

TEST_P(LeasePrepareTest, WorkerKilledHalfWayThroughTheZeroingLeavesAllToTheNext) {
  auto owner = start_dirty_owner();
  auto first = start_held("zeroing");
  EXPECT_EQ(owner->ask("peek", "peeked"), "peeked 0") << "it had begun";
  first->kill_and_reap();
  EXPECT_NE(owner->ask("others 0", "others"), "others 0") << "and had not ended";
  EXPECT_EQ(owner->view().prepared_by, 0U);
  auto next = start_attacher();
  next->expect_mapped(1);
  expect_zeroings(*next, 1);
  expect_bytes(*next, 0);
  expect_prepared(*owner, 2);
  next->quit();
  owner->quit();
}

TEST_P(LeasePrepareTest, WorkerThatRefusedTheEpochPreparedNothing) {
  auto owner = start_dirty_owner();
  auto worker = start_held("mapped");
  (void)worker->ask("fail mapped 2", "failing");
  (void)worker->ask("open mapped", "opened");
  worker->expect_mapped(1);
  expect_zeroings(*worker, 1);
  expect_bytes(*worker, 0);
  worker->quit();
  owner->quit();
}

TEST_P(LeasePrepareTest, SecondWorkerWaitsWhileOneZeroesAndTakesWhatItLeft) {
  auto owner = start_dirty_owner();
  auto first = start_held("zeroing");
  auto second = start_attacher();
  (void)owner->expect_view("told why", [&](const SeenView& v) {
    return v.note.find(fmt::format("held by worker pid {}", first->process().pid())) !=
           std::string::npos;
  });
  (void)first->ask("open zeroing", "opened");
  first->expect_mapped(1);
  (void)first->ask("fill 9", "filled");
  EXPECT_FALSE(second->view().mapped);
  first->quit();
  second->expect_mapped(1);
  EXPECT_EQ(second->view().prepared_by, 1U);
  expect_bytes(*second, 9);
  second->quit();
  owner->quit();
}

TEST_P(LeasePrepareTest, WorkerThatLetGoLeavesItsBlocksToTheNext) {
  auto owner = start_dirty_owner();
  auto worker = start_attacher();
  worker->expect_mapped(1);
  (void)worker->ask("fill 11", "filled");
  EXPECT_THAT(worker->ask("detach 1 20000", "detach"), StartsWith("detach cleared"));
  auto next = start_attacher();
  next->expect_mapped(1);
  expect_bytes(*next, 11);
  next->quit();
  worker->quit();
  owner->quit();
}

TEST_P(LeasePrepareTest, NextEpochIsZeroedAnew) {
  auto owner = start_dirty_owner();
  auto worker = start_attacher();
  worker->expect_mapped(1);
  expect_zeroings(*worker, 1);
  for (int epoch = 1; epoch <= 3; ++epoch) {
    expect_prepared(*owner, static_cast<std::uint64_t>(epoch));
    (void)worker->ask("fill 5", "filled");
    ASSERT_THAT(owner->ask(fmt::format("clear {} 20000", epoch), "clear"),
                StartsWith("clear cleared 0"));
    EXPECT_EQ(owner->view().prepared_by, 0U);
    ASSERT_EQ(owner->ask("init 20000", "init"), fmt::format("init ok {}", epoch + 1));
    worker->expect_mapped(static_cast<std::uint64_t>(epoch) + 1);
    expect_zeroings(*worker, epoch + 1);
    expect_bytes(*worker, 0);
  }
  worker->quit();
  owner->quit();
}

TEST_P(LeasePrepareTest, KilledBetweenClearAndZeroingOfTheNextEpochPreparesNothing) {
  auto owner = start_dirty_owner();
  auto worker = start_attacher();
  worker->expect_mapped(1);
  (void)worker->ask("close zeroing", "closed");
  ASSERT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  (void)worker->expect("at zeroing 2");
  worker->kill_and_reap();
  auto next = start_attacher();
  next->expect_mapped(2);
  expect_zeroings(*next, 1);
  expect_bytes(*next, 0);
  next->quit();
  owner->quit();
}

TEST_P(LeasePrepareTest, MoverKilledAndTheNextOnesEpochIsZeroedAnew) {
  auto owner = start_dirty_owner();
  auto worker = start_attacher();
  worker->expect_mapped(1);
  expect_zeroings(*worker, 1);
  owner->kill_and_reap();
  (void)worker->expect_view("unmapped", [](const SeenView& v) { return !v.mapped; });
  auto next = start_dirty_owner();
  worker->expect_mapped(1);
  expect_zeroings(*worker, 2);
  expect_bytes(*worker, 0);
  worker->quit();
  next->quit();
}

TEST_P(LeasePrepareTest, ForkedChildOfADeadWorkerHoldsTheEpochUpUntilItEndsOrAClear) {
  common_ = {{"revoke", "400"}, {"settle", "300"}};
  auto owner = start_dirty_owner();
  auto worker = start_attacher();
  worker->expect_mapped(1);
  std::istringstream forked(worker->ask("fork", "forked"));
  std::string verb;
  pid_t pid = 0;
  forked >> verb >> pid;
  auto child = ProcessRef::of_pid(pid);
  ASSERT_TRUE(child.has_value());
  (void)worker->ask("fill 3", "filled");
  worker->kill_and_reap();
  auto next = start_attacher();
  (void)owner->expect_view("told why", [pid](const SeenView& v) {
    return v.note.find(fmt::format("process {} still maps it", pid)) != std::string::npos;
  });
  EXPECT_FALSE(next->view().mapped);
  ASSERT_TRUE(child->signal(SIGKILL));
  next->expect_mapped(1);  // found by the owner's own timer: nothing rings
  expect_bytes(*next, 3);
  EXPECT_EQ(owner->expect_view("content", [](const SeenView& v) { return v.note == "-"; }).leases,
            1U);
  next->quit();
  owner->quit();
}

// A worker in this very process, word by word.
class LeasePrepareRawTest : public LeaseFixture {
 protected:
  LeasePrepareRawTest() {
    owner_ = "mover";
    common_ = {{"revoke", "300"}, {"settle", "300"}};
    identity_.instance = "test";
    identity_.engine = "chat";
    identity_.self = ProcessKind::kWorker;
    identity_.cache_owner = CacheOwner::kMover;
    identity_.handles = HandleKind::kVmm;
    identity_.fingerprint = small_geometry(2, 1).fingerprint(ArenaOrder::kLayerFirst);
    identity_.incarnation = Digest::random();
  }
  static Incoming receive(PacketSocket& socket) {
    auto packet = socket.receive(soon());
    if (!packet) throw Exception(packet.error());
    auto incoming = read_header(std::move(packet).value());
    if (!incoming) throw Exception(incoming.error());
    return std::move(incoming).value();
  }
  [[nodiscard]] AttacherWords make_words() const {
    auto words = AttacherWords::create(identity_.incarnation);
    if (!words) throw Exception(words.error());
    return std::move(words).value();
  }
  PacketSocket greet(const AttacherWords& words) {
    auto socket = PacketSocket::connect(dir_ / "test/chat.0.lease", soon());
    if (!socket) throw Exception(socket.error());
    const int fd = words.fd();
    EXPECT_TRUE(send(*socket, LeaseMessage::kHello, HelloBody{identity_}, {&fd, 1}));
    EXPECT_EQ(receive(*socket).message, LeaseMessage::kWelcome);
    return std::move(socket).value();
  }
  static GrantBody take_grant(PacketSocket& socket) {
    EXPECT_TRUE(send(socket, LeaseMessage::kAttach, AttachBody{Epoch{1}}));
    const Incoming incoming = receive(socket);
    EXPECT_EQ(incoming.message, LeaseMessage::kGrant);
    auto body = read_body<GrantBody>(incoming, "Grant", 1);
    if (!body) throw Exception(body.error());
    return std::move(body).value();
  }

  LeaseIdentity identity_;
};

TEST_F(LeasePrepareRawTest, LostDoorbellDoesNotLoseTheMark) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  AttacherWords words = make_words();
  PacketSocket socket = greet(words);
  const GrantBody grant = take_grant(socket);
  EXPECT_EQ(grant.prepared, std::nullopt);
  words.set_prepared(grant.lease);
  (void)owner->expect_view("prepared", [](const SeenView& v) { return v.prepared_by == 1; });
  words.release_up_to(grant.lease);
  const GrantBody again = take_grant(socket);
  EXPECT_EQ(again.prepared, grant.lease);
  words.release_up_to(again.lease);
  owner->quit();
}

TEST_F(LeasePrepareRawTest, WordStoredJustBeforeTheReleaseCounts) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  owner->stop();  // so that it sees both at once
  AttacherWords words = make_words();
  owner->resume();
  PacketSocket socket = greet(words);
  const GrantBody grant = take_grant(socket);
  owner->stop();
  words.set_prepared(grant.lease);
  words.release_up_to(grant.lease);
  owner->resume();
  const GrantBody again = take_grant(socket);
  EXPECT_EQ(again.prepared, grant.lease);
  words.release_up_to(again.lease);
  owner->quit();
}

TEST_F(LeasePrepareRawTest, ReleaseWithoutTheWordPreparedNothing) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  AttacherWords words = make_words();
  PacketSocket socket = greet(words);
  const GrantBody grant = take_grant(socket);
  ASSERT_TRUE(send(socket, LeaseMessage::kPrepared, LeaseBody{grant.lease}));  // no word behind it
  words.release_up_to(grant.lease);
  const GrantBody again = take_grant(socket);
  EXPECT_EQ(again.prepared, std::nullopt);
  words.release_up_to(again.lease);
  owner->quit();
}

TEST_F(LeasePrepareRawTest, ForgedWordPreparesNothingAndDropsItsWriter) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  AttacherWords words = make_words();
  PacketSocket socket = greet(words);
  const GrantBody grant = take_grant(socket);
  words.set_prepared(LeaseId{grant.lease.value + 1});
  // An owner that has looked at the word by itself has closed the connection.
  (void)send(socket, LeaseMessage::kPrepared, LeaseBody{grant.lease});
  EXPECT_FALSE(socket.receive(soon()).has_value());
  const SeenView seen = owner->expect_view(
      "dropped", [](const SeenView& v) { return v.leases == 1 && v.note != "-"; });
  EXPECT_EQ(seen.prepared_by, 0U);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  owner->quit();
}

TEST_F(LeasePrepareRawTest, WordOfAnEarlierConnectionCounts) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  LeaseId lease;
  {
    AttacherWords words = make_words();
    PacketSocket socket = greet(words);
    lease = take_grant(socket).lease;
    owner->stop();
    words.set_prepared(lease);
    words.release_up_to(lease);
  }
  owner->resume();
  AttacherWords words = make_words();
  PacketSocket socket = greet(words);
  words.release_up_to(lease);
  const GrantBody again = take_grant(socket);
  EXPECT_EQ(again.prepared, lease);
  words.release_up_to(again.lease);
  owner->quit();
}

}  // namespace
}  // namespace kvferry::test
