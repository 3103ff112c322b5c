// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Peers that stall: killed and proven dead where they are ours to end, else quarantine.
#include "multiproc/lease_fixture.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <sstream>

namespace kvferry::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class LeaseQuarantineTest : public LeaseEveryWay {
 protected:
  LeaseQuarantineTest() { common_ = {{"revoke", "400"}, {"drain", "200"}, {"settle", "300"}}; }

  // For an owner that nobody keeps waiting: a busy machine does not take that long.
  [[nodiscard]] static Arguments patient() { return {{"revoke", "20000"}}; }
  // For one that is kept waiting once, and then let go of in time.
  [[nodiscard]] static Arguments less_patient() { return {{"revoke", "2000"}}; }

  [[nodiscard]] bool attacher_is_mover() const { return owner_ == "worker"; }

  // The child that a peer forked: ended by its pidfd, whatever becomes of the test.
  class Keeper {
   public:
    explicit Keeper(const std::string& reply) {
      std::istringstream in(reply);
      std::string verb;
      pid_t pid = 0;
      in >> verb >> pid;
      auto found = ipc::ProcessRef::of_pid(pid);
      if (found) process_ = std::move(found).value();
    }
    Keeper(const Keeper&) = delete;
    Keeper& operator=(const Keeper&) = delete;
    ~Keeper() { end(); }
    [[nodiscard]] pid_t pid() const { return process_.pid(); }
    bool end() {
      return process_.valid() && (process_.signal(SIGKILL) || process_.has_died()) &&
             process_.wait_death(soon());
    }

   private:
    ipc::ProcessRef process_;
  };
};
INSTANTIATE_TEST_SUITE_P(EveryWay, LeaseQuarantineTest, kEveryWay, way_name);

// What happens only to a worker: a mover in its place is killed.
class LeaseStalledWorkerTest : public LeaseQuarantineTest {};
INSTANTIATE_TEST_SUITE_P(EveryKind,
                         LeaseStalledWorkerTest,
                         ::testing::Values(std::pair{"mover", "vmm"}, std::pair{"mover", "legacy"}),
                         way_name);

// What happens only to an owning worker: a mover that cannot drain exits.
class LeaseBusyWorkerTest : public LeaseQuarantineTest {};
INSTANTIATE_TEST_SUITE_P(EveryKind,
                         LeaseBusyWorkerTest,
                         ::testing::Values(std::pair{"worker", "vmm"},
                                           std::pair{"worker", "legacy"}),
                         way_name);

TEST_P(LeaseQuarantineTest, StoppedAttacherNeverHoldsUpAClear) {
  auto owner = start_owner(attacher_is_mover() ? Arguments{} : less_patient());
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  attacher->stop();
  const std::string outcome = owner->ask("clear 1 20000", "clear");
  if (attacher_is_mover()) {
    EXPECT_THAT(outcome, StartsWith("clear cleared_peer_dead 0"));
    EXPECT_EQ(attacher->process().wait(soon()), ChildExit::killed_by(SIGKILL));
    EXPECT_EQ(used_bytes_after_death(), 0U);
  } else {
    EXPECT_THAT(outcome, AllOf(StartsWith("clear quarantined"), HasSubstr("worker pid"),
                               HasSubstr(std::to_string(attacher->process().pid()))));
    EXPECT_GT(owner->view().quarantined, 0U);
    EXPECT_GT(used_bytes(), 0U) << "freed under a living mapping";
    // Re-init is allowed while memory suffices, and the stalled one comes back to it.
    ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
    attacher->resume();
    (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
    attacher->expect_mapped(2);
    EXPECT_THAT(owner->ask("clear 2 20000", "clear"), StartsWith("clear cleared 0"));
    EXPECT_EQ(used_bytes_after_death(), 0U);
    attacher->quit();
  }
  owner->quit();
}

TEST_P(LeaseStalledWorkerTest, QuarantineEndsWithTheDeathOfItsHolder) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  attacher->stop();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  attacher->kill_and_reap();
  (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  EXPECT_EQ(used_bytes_after_death(), 0U);
  owner->quit();
}

TEST_P(LeaseStalledWorkerTest, InitSaysThatQuarantineIsWhyThereIsNoMemory) {
  capacity_mib_ = 3;  // room for one arena only
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  attacher->stop();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  EXPECT_THAT(owner->ask("init 20000", "init"),
              AllOf(StartsWith("init error quarantined"), HasSubstr("worker pid")));
  attacher->resume();
  (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  attacher->expect_mapped(2);
  attacher->quit();
  owner->quit();
}

TEST_P(LeaseQuarantineTest, AttacherThatCannotDrainDiesIfItIsAMoverAndSaysSoIfNot) {
  // Time to exit by itself, before the owner loses patience.
  auto owner = start_owner({{"revoke", attacher_is_mover() ? "10000" : "400"}});
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)attacher->ask("close quiesce", "closed");
  const std::string outcome = owner->ask("clear 1 20000", "clear");
  if (attacher_is_mover()) {
    EXPECT_THAT(outcome, StartsWith("clear cleared_peer_dead 0"));
    EXPECT_EQ(attacher->process().wait(soon()), ChildExit::exited(ipc::kCannotDrainExit));
  } else {
    EXPECT_THAT(outcome, StartsWith("clear quarantined"));
    (void)attacher->expect_view("says so", [](const SeenView& v) {
      return v.mapped && v.note.find("stays mapped") != std::string::npos;
    });
    (void)attacher->ask("open quiesce", "opened");  // its work ended after all
    (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
    EXPECT_EQ(used_bytes_after_death(), 0U);
    attacher->quit();
  }
  owner->quit();
}

// What it has open is not the epoch that its owner serves by now.
TEST_P(LeaseStalledWorkerTest, WhoHoldsAnEarlierEpochHasNotMappedTheNextOne) {
  auto owner = start_owner(less_patient());
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)attacher->ask("close quiesce", "closed");
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  const SeenView seen = attacher->expect_view(
      "sees epoch 2", [](const SeenView& v) { return v.epoch == 2 && v.phase == "ready"; });
  EXPECT_FALSE(seen.mapped);
  EXPECT_THAT(attacher->ask("wait 2 300", "wait "), StartsWith("wait error timeout"));
  (void)attacher->ask("open quiesce", "opened");
  attacher->expect_mapped(2);
  EXPECT_THAT(owner->ask("clear 2 20000", "clear"), StartsWith("clear cleared 0"));
  EXPECT_EQ(used_bytes_after_death(), 0U);
  attacher->quit();
  owner->quit();
}

TEST_P(LeaseQuarantineTest, OwnerThatCannotDrainDiesIfItIsAMoverAndQuarantinesIfNot) {
  auto owner = start_owner(patient());
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)owner->ask("close quiesce", "closed");
  if (owner_ == "mover") {
    owner->tell("clear 1 20000");
    EXPECT_EQ(owner->process().wait(soon()), ChildExit::exited(ipc::kCannotDrainExit));
    (void)attacher->expect_view("unmapped", [](const SeenView& v) { return !v.mapped; });
    EXPECT_EQ(used_bytes_after_death(), 0U);
    owner = start_owner();
  } else {
    EXPECT_THAT(owner->ask("clear 1 20000", "clear"),
                AllOf(StartsWith("clear quarantined"), HasSubstr("this worker's own work")));
    EXPECT_EQ(owner->view().phase, "quarantined");
    EXPECT_FALSE(owner->view().mapped);
    EXPECT_GT(owner->view().quarantined, 0U);
    EXPECT_GT(used_bytes(), 0U) << "freed under its own work";
    // Its peer was asked to let go all the same, and the outcome stands.
    (void)attacher->expect_view("unmapped", [](const SeenView& v) { return !v.mapped; });
    EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
    EXPECT_THAT(owner->ask("init 20000", "init"),
                AllOf(StartsWith("init error quarantined"), HasSubstr("own work")));
    (void)owner->ask("open quiesce", "opened");
    (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
    EXPECT_EQ(used_bytes_after_death(), 0U);
    ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
    attacher->expect_mapped(2);
    EXPECT_THAT(owner->ask("clear 2 20000", "clear"), StartsWith("clear cleared 0"));
    EXPECT_EQ(used_bytes_after_death(), 0U);
  }
  owner->quit();
  attacher->quit();
}

TEST_P(LeaseBusyWorkerTest, OwnersWorkThatEndsWhileItsPeerDrainsIsAnOrdinaryClear) {
  auto owner = start_owner({{"revoke", "60000"}});
  auto attacher = start_attacher({{"drain", "60000"}});
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)owner->ask("close quiesce", "closed");
  (void)attacher->ask("close quiesce", "closed");
  owner->tell("clear 1 60000");
  (void)attacher->expect("at quiesce 1");
  (void)owner->ask("open quiesce", "opened");
  (void)attacher->ask("open quiesce", "opened");
  EXPECT_THAT(owner->expect("clear"), StartsWith("clear cleared 0"));
  EXPECT_EQ(used_bytes_after_death(), 0U);
  owner->quit();
  attacher->quit();
}

TEST_P(LeaseBusyWorkerTest, OwnerEndsWhileItsOwnWorkDoesNot) {
  auto owner = start_owner(patient());
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  (void)owner->ask("close quiesce", "closed");
  owner->quit();  // which clears
  (void)attacher->expect_view("unmapped", [](const SeenView& v) { return !v.mapped; });
  EXPECT_EQ(used_bytes_after_death(), 0U);
  attacher->quit();
}

TEST_P(LeaseQuarantineTest, ForkedChildThatKeepsTheMappingIsNamed) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  Keeper child(attacher->ask("fork", "forked"));
  ASSERT_GT(child.pid(), 0);
  attacher->kill_and_reap();
  // Its pidfd is readable, its lease is over, and yet the memory is held.
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"),
              AllOf(StartsWith("clear quarantined"), HasSubstr("child of dead"),
                    HasSubstr(fmt::format("process {}", child.pid()))));
  EXPECT_GT(used_bytes(), 0U);
  ASSERT_TRUE(child.end());
  (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  EXPECT_EQ(used_bytes_after_death(), 0U);
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  owner->quit();
}

TEST_P(LeaseQuarantineTest, OthersAllocationsHideNoReturn) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  Keeper child(attacher->ask("fork", "forked"));
  ASSERT_GT(child.pid(), 0);
  attacher->kill_and_reap();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  // Somebody else of the same device takes as much as is about to come back, and keeps it.
  const ShortTempDir elsewhere;
  auto neighbour = start_owner({{"dir", elsewhere.path().native()}});
  ASSERT_EQ(neighbour->ask("init 20000", "init"), "init ok 1");
  ASSERT_TRUE(child.end());
  (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  neighbour->quit();
  EXPECT_EQ(used_bytes_after_death(), 0U);
  owner->quit();
}

TEST_P(LeaseQuarantineTest, OthersFreesFeignNoReturn) {
  const ShortTempDir elsewhere;
  auto neighbour = start_owner({{"dir", elsewhere.path().native()}});
  ASSERT_EQ(neighbour->ask("init 20000", "init"), "init ok 1");
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  Keeper child(attacher->ask("fork", "forked"));
  ASSERT_GT(child.pid(), 0);
  attacher->kill_and_reap();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  neighbour->quit();
  // Each of these lets the owner look at its quarantine.
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  EXPECT_THAT(owner->ask("clear 2 20000", "clear"), StartsWith("clear cleared 0"));
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 3");
  EXPECT_GT(owner->view().quarantined, 0U) << "what came back was the neighbour's";
  ASSERT_TRUE(child.end());
  (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  EXPECT_THAT(owner->ask("clear 3 20000", "clear"), StartsWith("clear cleared 0"));
  owner->quit();
}

TEST_P(LeaseStalledWorkerTest, TwoLivingAttachersOneQuarantinedOneServed) {
  auto owner = start_owner(less_patient());
  auto stalled = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  stalled->expect_mapped(1);
  stalled->stop();
  // A worker that may still write keeps every other one out of the epoch: that one is told why.
  auto replacement = start_attacher();
  (void)owner->expect_view("told why", [&](const SeenView& v) {
    return v.note.find(fmt::format("held by worker pid {}", stalled->process().pid())) !=
           std::string::npos;
  });
  for (int epoch = 1; epoch <= 5; ++epoch) {
    const std::string outcome = owner->ask(fmt::format("clear {} 20000", epoch), "clear");
    EXPECT_THAT(outcome, StartsWith(epoch == 1 ? "clear quarantined" : "clear cleared"));
    ASSERT_EQ(owner->ask("init 20000", "init"), fmt::format("init ok {}", epoch + 1));
    replacement->expect_mapped(static_cast<std::uint64_t>(epoch) + 1);
    EXPECT_GT(owner->view().quarantined, 0U);
  }
  EXPECT_EQ(stalled->view().epoch, 1U);
  stalled->resume();
  (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  replacement->quit();
  stalled->expect_mapped(6);
  owner->quit();
  stalled->quit();
}

TEST_P(LeaseStalledWorkerTest, OwnerKilledWithMemoryInQuarantine) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  attacher->stop();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  owner->kill_and_reap();
  EXPECT_GT(used_bytes(), 0U) << "the stalled attacher pins it";
  auto next = start_owner(patient());
  ASSERT_EQ(next->ask("init 20000", "init"), "init ok 1");
  attacher->resume();
  // The next owner's epoch has the same number: first it lets go of the dead one's.
  (void)attacher->expect_view("let go", [](const SeenView& v) { return !v.mapped; });
  attacher->expect_mapped(1);
  EXPECT_THAT(next->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  EXPECT_EQ(used_bytes_after_death(), 0U);
  attacher->quit();
  next->quit();
}

TEST_P(LeaseQuarantineTest, StoppedOwnerHoldsUpNoDetach) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  owner->stop();
  EXPECT_THAT(attacher->ask("detach 1 20000", "detach"), StartsWith("detach cleared"));
  EXPECT_FALSE(attacher->view().mapped);
  owner->resume();
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  owner->quit();
  attacher->quit();
}

}  // namespace
}  // namespace kvferry::test
