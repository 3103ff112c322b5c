// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Disagreements at hello.
#include "multiproc/lease_fixture.hpp"

#include <gmock/gmock.h>

namespace kvferry::test {
namespace {

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

}  // namespace
}  // namespace kvferry::test
