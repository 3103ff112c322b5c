// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Disagreements at hello.
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "multiproc/lease_fixture.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <csignal>

namespace kvferry::test {
namespace {

using ipc::Transition;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::chrono::milliseconds kRound{5};

class LeaseHelloTest : public LeaseFixture {
 protected:
  static void expect_refused(LeasePeer& attacher, LeasePeer& owner, const std::string& code) {
    (void)attacher.expect_view("refused", [&](const SeenView& v) { return v.refused == code; });
    (void)owner.expect_view("told", [&](const SeenView& v) { return v.peer_refused == code; });
  }
  static bool in_conflict(const SeenView& view) { return view.refused == "role_conflict"; }

  /// Waits until it has recorded that; false when it does not.
  bool recorded(Transition transition, LeasePeer& peer) {
    const ipc::Deadline deadline = soon();
    const auto is_it = [&](const ipc::TransitionTrace& trace, const ipc::TransitionRecord& record) {
      return record.transition == transition &&
             trace.writers[record.writer].who.pid == peer.process().pid();
    };
    while (!deadline.expired()) {
      const auto trace = ipc::read_transitions(*instance_);
      if (trace && std::any_of(trace->records.begin(), trace->records.end(),
                               [&](const auto& record) { return is_it(*trace, record); })) {
        return true;
      }
      (void)peer.process().read_line(ipc::Deadline::after(kRound));
    }
    return false;
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
  EXPECT_EQ(worker->ask("init 20000", "init"), "init ok 1");
  worker->quit();
}

TEST_F(LeaseHelloTest, SecondOwnerOfOneKindIsRefusedWithThePidOfTheFirst) {
  auto first = start_owner();
  auto second = start(owner_);
  EXPECT_THAT(second->expect("failed"), AllOf(StartsWith("failed role_conflict"),
                                              HasSubstr(std::to_string(first->process().pid()))));
  EXPECT_EQ(first->ask("init 20000", "init"), "init ok 1");
  first->quit();
}

TEST_F(LeaseHelloTest, BothAttachersLearnOfTheRoleConflict) {
  auto mover = start("mover", {{"owner", "worker"}});
  auto worker = start("worker", {{"owner", "mover"}});
  (void)mover->expect_view("refused", in_conflict);
  (void)worker->expect_view("refused", in_conflict);
  mover->quit();
  worker->quit();
}

TEST_F(LeaseHelloTest, WhoAgreedWithTheDeadLearnsOfTheConflictWithTheLiving) {
  auto first = start("mover", {{"owner", "worker"}});
  ASSERT_TRUE(recorded(Transition::kHelloMeet, *first));
  auto second = start("mover", {{"owner", "worker"}});
  ASSERT_TRUE(recorded(Transition::kHelloSay, *second));
  first->kill_and_reap();
  ASSERT_TRUE(recorded(Transition::kHelloMeet, *second))
      << "it waits there in the dead one's place";
  auto worker = start("worker", {{"owner", "mover"}});
  (void)second->expect_view("refused", in_conflict);
  (void)worker->expect_view("refused", in_conflict);
  second->quit();
  worker->quit();
}

TEST_F(LeaseHelloTest, OwnerThatComesBackAsAnAttacherIsToldSo) {
  auto worker = start("worker", {{"owner", "worker"}});
  (void)worker->expect("up");
  auto mover = start("mover", {{"owner", "worker"}});
  ASSERT_EQ(worker->ask("init 20000", "init"), "init ok 1");
  mover->expect_mapped(1);
  // Else it may say hello to what is left of the owner, whose listener goes last.
  mover->stop();
  worker->kill_and_reap();
  mover->process().signal(SIGCONT);
  ASSERT_TRUE(recorded(Transition::kHelloMeet, *mover));
  auto other = start("worker", {{"owner", "mover"}});
  (void)mover->expect_view("refused", in_conflict);
  (void)other->expect_view("refused", in_conflict);
  mover->quit();
  other->quit();
  // The dead owner's name is the next one's.
  start_owner()->quit();
}

TEST_F(LeaseHelloTest, AttachersThatAgreeWaitTogetherForTheOwner) {
  auto one = start_attacher();
  auto two = start_attacher();
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  one->expect_mapped(1);
  two->expect_mapped(1);
  owner->quit();
  one->quit();
  two->quit();
}

}  // namespace
}  // namespace kvferry::test
