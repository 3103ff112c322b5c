// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// SIGKILL of either side in every state that can be reached for certain.
#include "multiproc/lease_fixture.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

namespace kvferry::test {
namespace {

using ::testing::StartsWith;

class LeaseDeathsTest : public LeaseEveryWay {
 protected:
  void remove_names_of_the_killed() {
    for (const char* name : {"chat.0.lease", "chat.0.seek"}) {
      std::filesystem::remove(dir_ / "test" / name);
      std::filesystem::remove(dir_ / "test" / (std::string(name) + ".lock"));
    }
  }
  // The survivor serves on: the next attacher gets the next epoch.
  void expect_serves_on(LeasePeer& owner, int epoch) {
    ASSERT_EQ(owner.ask("init 20000", "init"), fmt::format("init ok {}", epoch));
    auto next = start_attacher();
    next->expect_mapped(static_cast<std::uint64_t>(epoch));
    EXPECT_THAT(owner.ask(fmt::format("clear {} 20000", epoch), "clear"),
                StartsWith("clear cleared"));
    EXPECT_EQ(used_bytes_after_death(), 0U);
    next->quit();
    owner.quit();
  }
};
INSTANTIATE_TEST_SUITE_P(EveryWay, LeaseDeathsTest, kEveryWay, way_name);

TEST_P(LeaseDeathsTest, AttacherKilledBeforeAnyGrant) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  (void)attacher->expect_view("connected", [](const SeenView& v) { return v.connected; });
  attacher->kill_and_reap();
  expect_serves_on(*owner, 1);
  remove_names_of_the_killed();
}

TEST_P(LeaseDeathsTest, AttacherKilledBetweenGrantAndImport) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  // Connected means that it has asked already.
  (void)attacher->expect_view("connected", [](const SeenView& v) { return v.connected; });
  attacher->stop();  // it will never read the grant
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  (void)owner->expect_view("granted", [](const SeenView& v) { return v.leases == 1; });
  attacher->kill_and_reap();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared_peer_dead 0"));
  EXPECT_EQ(used_bytes_after_death(), 0U);
  expect_serves_on(*owner, 2);
  remove_names_of_the_killed();
}

TEST_P(LeaseDeathsTest, AttacherKilledWhileItsUserPreparesTheEpoch) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  (void)attacher->ask("close mapped", "closed");
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  (void)attacher->expect("at mapped 1");
  attacher->kill_and_reap();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared_peer_dead 0"));
  EXPECT_EQ(used_bytes_after_death(), 0U);
  expect_serves_on(*owner, 2);
}

TEST_P(LeaseDeathsTest, AttacherKilledWhileMappedAndTheNextTakesTheSameEpoch) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)owner->ask("poke 5", "poked");
  attacher->kill_and_reap();
  auto next = start_attacher();
  next->expect_mapped(1);
  EXPECT_EQ(next->ask("peek", "peeked"), "peeked 5") << "the owner's memory outlives an attacher";
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared_peer_dead 0"));
  next->quit();
  EXPECT_EQ(used_bytes_after_death(), 0U);
  expect_serves_on(*owner, 2);
}

TEST_P(LeaseDeathsTest, AttacherKilledWhileDraining) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)attacher->ask("close quiesce", "closed");
  owner->tell("clear 1 20000");
  (void)attacher->expect("at quiesce 1");
  attacher->kill_and_reap();
  EXPECT_THAT(owner->expect("clear"), StartsWith("clear cleared_peer_dead 0"));
  EXPECT_EQ(used_bytes_after_death(), 0U);
  expect_serves_on(*owner, 2);
}

TEST_P(LeaseDeathsTest, AttacherKilledBetweenDrainAndUnmap) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)attacher->ask("close unmapped", "closed");
  owner->tell("clear 1 20000");
  (void)attacher->expect("at unmapped 1");
  attacher->kill_and_reap();
  EXPECT_THAT(owner->expect("clear"), StartsWith("clear cleared_peer_dead 0"));
  EXPECT_EQ(used_bytes_after_death(), 0U);
  expect_serves_on(*owner, 2);
}

TEST_P(LeaseDeathsTest, AttacherKilledAfterTheReleaseIsAnOrdinaryClear) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  EXPECT_THAT(attacher->ask("detach 1 20000", "detach"), StartsWith("detach cleared"));
  attacher->kill_and_reap();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  EXPECT_EQ(used_bytes_after_death(), 0U);
  expect_serves_on(*owner, 2);
}

TEST_P(LeaseDeathsTest, OwnerKilledBeforeReady) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  (void)owner->ask("close mapped", "closed");
  owner->tell("init 20000");
  (void)owner->expect("at mapped 1");
  owner->kill_and_reap();
  EXPECT_EQ(used_bytes_after_death(), 0U);
  auto next = start_owner();
  ASSERT_EQ(next->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  attacher->quit();
  next->quit();
}

TEST_P(LeaseDeathsTest, OwnerKilledWhileReadyAttacherLetsGoAndTakesTheNextSession) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  owner->kill_and_reap();
  // Closing is its first duty: what it maps pins the dead owner's memory.
  (void)attacher->expect_view("unmapped", [](const SeenView& v) { return !v.mapped; });
  EXPECT_EQ(used_bytes_after_death(), 0U);
  auto next = start_owner();
  ASSERT_EQ(next->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  EXPECT_THAT(next->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  attacher->quit();
  next->quit();
}

TEST_P(LeaseDeathsTest, OwnerKilledWhileRevoking) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)attacher->ask("close quiesce", "closed");
  owner->tell("clear 1 20000");
  (void)attacher->expect("at quiesce 1");
  owner->kill_and_reap();
  EXPECT_GT(used_bytes(), 0U) << "still mapped by the attacher";
  (void)attacher->ask("open quiesce", "opened");
  (void)attacher->expect_view("unmapped", [](const SeenView& v) { return !v.mapped; });
  EXPECT_EQ(used_bytes_after_death(), 0U);
  auto next = start_owner();
  ASSERT_EQ(next->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  attacher->quit();
  next->quit();
}

TEST_P(LeaseDeathsTest, OwnerKilledBetweenItsOwnDrainAndRevoking) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)owner->ask("close unmapped", "closed");
  owner->tell("clear 1 20000");
  (void)owner->expect("at unmapped 1");
  owner->kill_and_reap();
  (void)attacher->expect_view("unmapped", [](const SeenView& v) { return !v.mapped; });
  EXPECT_EQ(used_bytes_after_death(), 0U);
  auto next = start_owner();
  ASSERT_EQ(next->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  attacher->quit();
  next->quit();
}

TEST_P(LeaseDeathsTest, OwnerKilledAfterCleared) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  owner->kill_and_reap();
  EXPECT_EQ(used_bytes_after_death(), 0U);
  auto next = start_owner();
  ASSERT_EQ(next->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  attacher->quit();
  next->quit();
}

TEST_P(LeaseDeathsTest, BothKilledLeaveOnlyAStaleNameThatTheNextOwnerReplaces) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  owner->stop();  // so that neither sees the other's death
  attacher->stop();
  owner->kill_and_reap();
  attacher->kill_and_reap();
  EXPECT_EQ(used_bytes_after_death(), 0U);
  EXPECT_FALSE(names().empty());
  auto next = start_owner();
  expect_serves_on(*next, 1);
}

TEST_P(LeaseDeathsTest, WordsWorkWithoutSoPeerpidfd) {
  // Kernels before 6.5 know a peer by pid and start time only.
  ASSERT_EQ(::setenv("KVFERRY_FORCE_PIDFD_FALLBACK", "1", 1), 0);
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(::unsetenv("KVFERRY_FORCE_PIDFD_FALLBACK"), 0);
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  attacher->kill_and_reap();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared_peer_dead 0"));
  expect_serves_on(*owner, 2);
}

}  // namespace
}  // namespace kvferry::test
