// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Moves of the relation (ipc/src/transitions/relation.inc) that no fault at a transition leads to:
// inits that fail half-way, and a connection that is lost between two processes that live on.
#include "multiproc/lease_fixture.hpp"

#include <gmock/gmock.h>

namespace kvferry::test {
namespace {

using ::testing::StartsWith;

class LeaseMovesTest : public LeaseEveryWay {
 protected:
  LeaseMovesTest() { common_ = {{"revoke", "20000"}, {"drain", "200"}, {"settle", "300"}}; }
};
INSTANTIATE_TEST_SUITE_P(EveryWay, LeaseMovesTest, kEveryWay, way_name);

TEST_P(LeaseMovesTest, ConnectionThatIsCutIsMadeAgain) {
  auto owner = start_owner();
  auto attacher = start_attacher();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  attacher->expect_mapped(1);
  EXPECT_EQ(attacher->ask("cut", "cut"), "cut 1");
  (void)attacher->expect_view("it let go", [](const SeenView& v) { return !v.mapped; });
  attacher->expect_mapped(1);
  EXPECT_THAT(owner->ask("clear 1 20000", "clear"), StartsWith("clear cleared"));
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  attacher->expect_mapped(2);
  attacher->quit();
  owner->quit();
}

TEST_P(LeaseMovesTest, OwnerEndsAfterAnInitThatFailed) {
  auto owner = start_owner();
  (void)owner->ask("fail mapped 1", "failing");
  EXPECT_THAT(owner->ask("init 20000", "init"), StartsWith("init error no_device_memory"));
  owner->quit();
}

using LeaseSourceMovesTest = LeaseMovesTest;
INSTANTIATE_TEST_SUITE_P(EveryKind,
                         LeaseSourceMovesTest,
                         ::testing::Values(std::pair{"worker", "vmm"},
                                           std::pair{"worker", "legacy"}),
                         way_name);

// A mover would exit here.
TEST_P(LeaseSourceMovesTest, EpochOfAnInitThatFailedIsKeptWhileOwnWorkUsesIt) {
  auto owner = start_owner();
  (void)owner->ask("fail mapped 1", "failing");
  (void)owner->ask("close quiesce", "closed");
  EXPECT_THAT(owner->ask("init 20000", "init"), StartsWith("init error no_device_memory"));
  (void)owner->expect_view("kept", [](const SeenView& v) { return v.quarantined > 0; });
  (void)owner->ask("open quiesce", "opened");
  (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  EXPECT_EQ(used_bytes(), 0U);
  EXPECT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  owner->quit();
}

TEST_P(LeaseSourceMovesTest, EpochOfAnInitThatFailedIsKeptWhileItsEngineDoesNotFreeIt) {
  auto engine = start_owner({{"source", "yes"}});
  (void)engine->ask("fail mapped 1", "failing");
  (void)engine->ask("source keep", "keep");
  EXPECT_THAT(engine->ask("init 20000", "init"), StartsWith("init error no_device_memory"));
  (void)engine->expect_view("kept", [](const SeenView& v) { return v.quarantined > 0; });
  (void)engine->ask("source free", "freed");
  (void)engine->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  EXPECT_EQ(used_bytes(), 0U);
  EXPECT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  engine->quit();
}

}  // namespace
}  // namespace kvferry::test
