// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The unlink handshake when nobody dies.
#include "multiproc/lease_fixture.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <sstream>

namespace kvferry::test {
namespace {

using ::testing::StartsWith;

// The mappings without a file that a process may gain in 200 lives of its peer. The heaps of a
// sanitizer split the address space that they reserved at every first allocation of a size (two
// mappings at its start, two at its end) and map what they keep for themselves; a mapping that
// leaks with each life, or with each killed one, is 100 or more.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kHeapMayGrow = 40;
#else
constexpr int kHeapMayGrow = 8;
#endif

class LeaseCyclesTest : public LeaseEveryWay {
 protected:
  /// It waits for the epoch by now: it says so in its log, and then begins.
  static void expect_waiting(LeasePeer& attacher, int epoch) {
    const std::string said = fmt::format("for epoch {} or later", epoch);
    const auto begins = [&] {
      return attacher.process().stderr_text().find(said) != std::string::npos;
    };
    const ipc::Deadline deadline = soon();
    while (!begins() && !deadline.expired()) (void)attacher.ask("peek", "peeked");
    EXPECT_TRUE(begins()) << attacher.process().stderr_text();
    for (int turn = 0; turn < 20; ++turn) (void)attacher.ask("peek", "peeked");
  }
};
INSTANTIATE_TEST_SUITE_P(EveryWay, LeaseCyclesTest, kEveryWay, way_name);

TEST_P(LeaseCyclesTest, BothSidesMapTheSameMemory) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)owner->ask("poke 77", "poked");
  EXPECT_EQ(attacher->ask("peek", "peeked"), "peeked 77");
  (void)attacher->ask("poke 78", "poked");
  EXPECT_EQ(owner->ask("peek", "peeked"), "peeked 78");
  EXPECT_GT(used_bytes(), 0U);
  owner->quit();
  attacher->quit();
}

TEST_P(LeaseCyclesTest, HundredClearsEachGiveEverythingBack) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  for (int epoch = 1; epoch <= 100; ++epoch) {
    ASSERT_EQ(owner->ask("init 20000", "init"), fmt::format("init ok {}", epoch));
    attacher->expect_mapped(static_cast<std::uint64_t>(epoch));
    ASSERT_THAT(owner->ask(fmt::format("clear {} 20000", epoch), "clear"),
                StartsWith("clear cleared 0"));
    ASSERT_EQ(used_bytes(), 0U);
  }
  owner->quit();
  attacher->quit();
}

TEST_P(LeaseCyclesTest, ClearIsIdempotentAndUnknownEpochsAreRefused) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  EXPECT_THAT(owner->ask("init 20000", "init"), StartsWith("init error busy"));
  EXPECT_THAT(owner->ask("clear 2 20000", "clear"), StartsWith("clear error stale_epoch"));
  EXPECT_THAT(owner->ask("clear 0 20000", "clear"), StartsWith("clear error stale_epoch"));
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared"));
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared"));
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared"));
  EXPECT_EQ(owner->view().phase, "ready") << "a late clear must not end the next epoch";
  owner->quit();
}

TEST_P(LeaseCyclesTest, SecondClearOfARunningOneEndsWithIt) {
  auto owner = start_owner({{"revoke", "60000"}});
  auto attacher = start_attacher({{"drain", "60000"}});
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)attacher->ask("close quiesce", "closed");
  owner->tell("clear 1 20000");
  (void)attacher->expect("at quiesce 1");
  owner->tell("clear 1 20000");
  EXPECT_THAT(owner->ask("init 20000", "init"), StartsWith("init error busy"));
  (void)attacher->ask("open quiesce", "opened");
  EXPECT_THAT(owner->expect("clear"), StartsWith("clear cleared 0"));
  EXPECT_THAT(owner->expect("clear"), StartsWith("clear cleared 0"));
  owner->quit();
  attacher->quit();
}

TEST_P(LeaseCyclesTest, CallerInAHurryEndsNobody) {
  auto owner = start_owner({{"revoke", "60000"}});
  auto attacher = start_attacher({{"drain", "60000"}});
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)attacher->ask("close quiesce", "closed");
  EXPECT_THAT(owner->ask("clear 1 1", "clear"), StartsWith("clear error timeout"));
  (void)attacher->expect("at quiesce 1");
  EXPECT_THAT(attacher->ask("detach 1 1", "detach"), StartsWith("detach error timeout"));
  EXPECT_THAT(owner->ask("clear 1 1", "clear"), StartsWith("clear error timeout"));
  (void)attacher->ask("open quiesce", "opened");
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  EXPECT_EQ(used_bytes(), 0U);
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  attacher->expect_mapped(2);
  // The other side may be in a hurry, too.
  (void)attacher->ask("close quiesce", "closed");
  attacher->tell("detach 2 1");
  (void)attacher->expect("at quiesce 2");
  (void)attacher->ask("open quiesce", "opened");
  EXPECT_FALSE(attacher->ask("detach 2 20000", "detach cleared").empty());
  EXPECT_THAT(owner->ask("clear 2 20000", "clear"), StartsWith("clear cleared 0"));
  owner->quit();
  attacher->quit();
}

using LeaseDeadlineTest = LeaseFixture;

TEST_F(LeaseDeadlineTest, OwnersDrainTakesNothingFromTheAttachers) {
  auto owner = start_owner({{"drain", "60000"}, {"revoke", "4000"}});
  auto attacher = start_attacher({{"drain", "60000"}});
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)owner->ask("close quiesce", "closed");
  (void)attacher->ask("close quiesce", "closed");
  owner->tell("clear 1 60000");
  (void)owner->expect("at quiesce 1");
  // The owner's own work takes longer than its peers are given.
  EXPECT_THAT(attacher->ask("wait 2 4500", "wait "), StartsWith("wait error timeout"));
  (void)owner->ask("open quiesce", "opened");
  (void)attacher->expect("at quiesce 1");
  (void)attacher->ask("open quiesce", "opened");
  EXPECT_THAT(owner->expect("clear"), StartsWith("clear cleared 0"));
  owner->quit();
  attacher->quit();
}

TEST_P(LeaseCyclesTest, EachSideEmptiesItsDeviceBeforeItSaysThatItLetGo) {
  auto owner = start_owner({{"revoke", "60000"}});
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)owner->ask("close freed", "closed");
  (void)attacher->ask("close freed", "closed");
  owner->tell("clear 1 20000");
  (void)attacher->expect("at freed 1");
  EXPECT_GT(used_bytes(), 0U) << "freed before the attacher said that it let go";
  (void)attacher->ask("open freed", "opened");
  (void)owner->expect("at freed 1");
  EXPECT_EQ(used_bytes(), 0U);
  (void)owner->expect_view("revokes", [](const SeenView& v) { return v.phase == "revoking"; });
  EXPECT_NE(attacher->view().phase, "cleared");
  // A clear may take longer than two looks of the attacher at the words.
  EXPECT_FALSE(owner->process().wait(ipc::Deadline::after(std::chrono::milliseconds(600))));
  (void)owner->ask("open freed", "opened");
  EXPECT_THAT(owner->expect("clear"), StartsWith("clear cleared 0"));
  (void)attacher->expect_view("told", [](const SeenView& v) { return v.phase == "cleared"; });
  owner->quit();
  attacher->quit();
}

TEST_P(LeaseCyclesTest, AttacherThatStartsFirstOrLateGetsTheEpoch) {
  auto early = start_attacher();
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  early->expect_mapped(1);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared"));
  (void)early->expect_view("unmapped", [](const SeenView& v) { return !v.mapped; });
  EXPECT_EQ(used_bytes(), 0U);
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  early->expect_mapped(2);
  early->quit();
  auto late = start_attacher();
  late->expect_mapped(2);
  owner->quit();
  late->quit();
}

TEST_P(LeaseCyclesTest, DetachOfOneSideLetsTheOwnersEpochLiveOn) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  EXPECT_THAT(attacher->ask("detach 1 20000", "detach"), StartsWith("detach cleared"));
  EXPECT_FALSE(attacher->view().mapped);
  EXPECT_THAT(attacher->ask("detach 1 20000", "detach"), StartsWith("detach cleared"));
  (void)owner->expect_view("free of leases",
                           [](const SeenView& v) { return v.leases == 0 && v.mapped; });
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared"));
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  attacher->expect_mapped(2);
  owner->quit();
  attacher->quit();
}

TEST_P(LeaseCyclesTest, RefusedEpochIsLetGoAndTriedAgain) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  (void)attacher->ask("fail mapped 3", "failing");
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared"));
  owner->quit();
  attacher->quit();
}

TEST_P(LeaseCyclesTest, FailedInitFreesAndTheEpochCanBeTriedAgain) {
  auto owner = start_owner();
  (void)owner->ask("fail mapped 1", "failing");
  EXPECT_THAT(owner->ask("init 20000", "init"), StartsWith("init error no_device_memory"));
  EXPECT_EQ(used_bytes(), 0U);
  EXPECT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  owner->quit();
}

TEST_P(LeaseCyclesTest, WaitMappedEndsOnRevokeAndDeath) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  EXPECT_THAT(attacher->ask("wait 9 50", "wait "), StartsWith("wait error timeout"));
  (void)attacher->ask("close mapped", "closed");
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  (void)attacher->expect("at mapped 1");
  attacher->tell("wait 1 20000");
  expect_waiting(*attacher, 1);
  owner->tell("clear 1 20000");
  (void)owner->expect_view("revoking", [](const SeenView& v) { return v.phase == "revoking"; });
  attacher->tell("open mapped");
  (void)owner->expect("clear cleared");
  EXPECT_THAT(attacher->expect("wait "), StartsWith("wait error revoked"));
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  EXPECT_EQ(attacher->ask("wait 2 20000", "wait "), "wait ok");
  attacher->tell("wait 3 20000");
  expect_waiting(*attacher, 3);
  owner->kill_and_reap();
  EXPECT_THAT(attacher->expect("wait "), StartsWith("wait error peer_died"));
  attacher->quit();
  std::filesystem::remove(dir_ / "test/chat.0.lease");  // of the owner that was killed
  std::filesystem::remove(dir_ / "test/chat.0.lease.lock");
}

TEST_P(LeaseCyclesTest, TwoHundredAttacherLivesLeaveNothingInTheOwner) {
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  const auto live_once = [&](int life) {
    auto attacher = start_attacher();
    attacher->expect_mapped(1);
    if (life % 2 == 0) {
      attacher->quit();
    } else {
      attacher->kill_and_reap();
    }
    (void)owner->expect_view("free of leases", [](const SeenView& v) { return v.leases == 0; });
  };
  struct Resources {
    int fds{0};
    int objects{0};    // mappings of files and memory objects
    int anonymous{0};  // other mappings
  };
  const auto resources = [&] {
    std::istringstream in(owner->ask("resources", "resources"));
    std::string verb;
    Resources now;
    in >> verb >> now.fds >> now.objects >> now.anonymous;
    return now;
  };
  const Resources alone = resources();
  ASSERT_GT(alone.objects, 0);
  for (int life = 0; life < 4; ++life) live_once(life);
  const Resources warm = resources();
  for (int life = 0; life < 200; ++life) live_once(life);
  // A lease ends with the word; the slot, its descriptors and what it mapped of its attacher a
  // moment later, with the pidfd.
  Resources after = resources();
  const auto holds_more = [&] { return after.fds > alone.fds || after.objects > alone.objects; };
  const ipc::Deadline deadline = soon();
  while (holds_more() && !deadline.expired()) after = resources();
  EXPECT_EQ(after.fds, alone.fds) << "descriptors";
  EXPECT_EQ(after.objects, alone.objects) << "mappings of files and memory objects";
  EXPECT_LE(after.anonymous, warm.anonymous + kHeapMayGrow) << "other mappings";
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared"));
  owner->quit();
}

TEST_P(LeaseCyclesTest, ManySegmentsTravelInSeveralParts) {
  capacity_mib_ = 512;
  common_ = {{"layers", "34"}, {"many", "yes"}};  // 68 segments: more than one packet's descriptors
  auto owner = start_owner();
  auto attacher = start_attacher();
  for (int epoch = 1; epoch <= 3; ++epoch) {
    ASSERT_EQ(owner->ask("init 40000", "init"), fmt::format("init ok {}", epoch));
    attacher->expect_mapped(static_cast<std::uint64_t>(epoch));
    EXPECT_THAT(owner->ask(fmt::format("clear {} 20000", epoch), "clear"),
                StartsWith("clear cleared"));
    EXPECT_EQ(used_bytes(), 0U);
  }
  owner->quit();
  attacher->quit();
}

class LeaseAddressTest : public LeaseFixture {};

TEST_F(LeaseAddressTest, VmmMemoryComesBackAtTheSameAddressesOnBothSides) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  const std::string owners = owner->ask("address", "address");
  const std::string attachers = attacher->ask("address", "address");
  EXPECT_NE(owners, "address 0x0");
  for (int epoch = 1; epoch <= 5; ++epoch) {
    ASSERT_THAT(owner->ask(fmt::format("clear {} 20000", epoch), "clear"),
                StartsWith("clear cleared"));
    EXPECT_EQ(owner->ask("address", "address"), "address 0x0");
    ASSERT_EQ(owner->ask("init 20000", "init"), fmt::format("init ok {}", epoch + 1));
    attacher->expect_mapped(static_cast<std::uint64_t>(epoch) + 1);
    EXPECT_EQ(owner->ask("address", "address"), owners);
    EXPECT_EQ(attacher->ask("address", "address"), attachers);
  }
  owner->quit();
  attacher->quit();
}

}  // namespace
}  // namespace kvferry::test
