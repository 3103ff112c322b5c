// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The handshake on memory that an engine lent: it gets its release() once, after everybody let go,
// and never earlier, whoever dies, stalls or fails.
#include "multiproc/lease_fixture.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <sstream>

namespace kvferry::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class LeaseSourceTest : public LeaseEveryWay {
 protected:
  // Nobody is late for this revoke on a busy machine; who is to be late is given less.
  LeaseSourceTest() { common_ = {{"revoke", "20000"}, {"drain", "200"}, {"settle", "300"}}; }

  std::unique_ptr<LeasePeer> start_engine(Arguments extra = {}) {
    extra["source"] = "yes";
    return start_owner(std::move(extra));
  }
  /// How often the engine was asked to release the epoch.
  static int releases(LeasePeer& engine, int epoch) {
    const std::string reply = engine.ask(fmt::format("source count {}", epoch), "released");
    int count = -1;
    std::istringstream(reply.substr(reply.rfind(' '))) >> count;
    return count;
  }
  static void expect_reaped(LeasePeer& engine) {
    (void)engine.expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  }
};
INSTANTIATE_TEST_SUITE_P(EveryKind,
                         LeaseSourceTest,
                         ::testing::Values(std::pair{"worker", "vmm"},
                                           std::pair{"worker", "legacy"}),
                         way_name);

TEST_P(LeaseSourceTest, ClearAsksForTheReleaseOnceAfterTheMoverLetGo) {
  auto engine = start_engine();
  auto mover = start_attacher({{"drain", "10000"}});
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  mover->expect_mapped(1);
  (void)mover->ask("close unmapped", "closed");
  engine->tell("clear 1 20000");
  (void)mover->expect("at unmapped 1");  // it maps the memory still
  EXPECT_EQ(releases(*engine, 1), 0);
  EXPECT_GT(used_bytes(), 0U);
  (void)mover->ask("open unmapped", "opened");
  EXPECT_THAT(engine->expect("clear"), StartsWith("clear cleared 0"));
  EXPECT_EQ(releases(*engine, 1), 1);
  EXPECT_EQ(used_bytes(), 0U);
  EXPECT_THAT(engine->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  EXPECT_EQ(releases(*engine, 1), 1) << "a repeated clear is answered, not done";
  engine->quit();
  mover->quit();
}

TEST_P(LeaseSourceTest, EpochsComeAndGoAtAddressesOfTheEngine) {
  auto engine = start_engine();
  auto mover = start_attacher();
  std::string last;
  for (int epoch = 1; epoch <= 5; ++epoch) {
    ASSERT_EQ(engine->ask("init 20000", "init"), fmt::format("init ok {}", epoch));
    mover->expect_mapped(static_cast<std::uint64_t>(epoch));
    (void)engine->ask(fmt::format("poke {}", 40 + epoch), "poked");
    EXPECT_EQ(mover->ask("peek", "peeked"), fmt::format("peeked {}", 40 + epoch));
    const std::string address = engine->ask("address", "address");
    EXPECT_NE(address, last);
    last = address;
    EXPECT_THAT(engine->ask(fmt::format("clear {} 20000", epoch), "clear"),
                StartsWith("clear cleared 0"));
    EXPECT_EQ(releases(*engine, epoch), 1);
  }
  engine->quit();
  mover->quit();
}

TEST_P(LeaseSourceTest, DeadMoverEndsItsLeaseAndTheReleaseFollows) {
  auto engine = start_engine();
  auto mover = start_attacher();
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  mover->expect_mapped(1);
  mover->kill_and_reap();
  EXPECT_THAT(engine->ask("clear 1 20000", "clear"), StartsWith("clear cleared_peer_dead 0"));
  EXPECT_EQ(releases(*engine, 1), 1);
  EXPECT_EQ(used_bytes(), 0U);
  engine->quit();
}

TEST_P(LeaseSourceTest, StoppedMoverIsKilledBeforeTheRelease) {
  auto engine = start_engine({{"revoke", "400"}});
  auto mover = start_attacher();
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  mover->expect_mapped(1);
  mover->stop();
  EXPECT_THAT(engine->ask("clear 1 20000", "clear"), StartsWith("clear cleared_peer_dead 0"));
  EXPECT_EQ(mover->process().wait(soon()), ChildExit::killed_by(SIGKILL));
  EXPECT_EQ(releases(*engine, 1), 1);
  EXPECT_EQ(used_bytes(), 0U);
  engine->quit();
}

// A process that is not ours to end.
TEST_P(LeaseSourceTest, StoppedForeignProcessKeepsTheMemoryFromItsEngineUntilItDies) {
  auto engine = start_engine({{"revoke", "2000"}});  // and a mover lets go in time
  auto foreign = start("engine");
  (void)foreign->expect("up");
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  foreign->expect_mapped(1);
  foreign->stop();
  EXPECT_THAT(engine->ask("clear 1 20000", "clear"),
              AllOf(StartsWith("clear quarantined"), HasSubstr("engine pid"),
                    HasSubstr(std::to_string(foreign->process().pid()))));
  EXPECT_EQ(releases(*engine, 1), 0) << "freed under a living mapping";
  EXPECT_GT(used_bytes(), 0U);
  // The engine goes on with other memory meanwhile.
  auto mover = start_attacher();
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 2");
  mover->expect_mapped(2);
  EXPECT_THAT(engine->ask("clear 2 20000", "clear"), StartsWith("clear cleared 0"));
  EXPECT_EQ(releases(*engine, 2), 1);
  EXPECT_EQ(releases(*engine, 1), 0);
  foreign->kill_and_reap();
  expect_reaped(*engine);
  EXPECT_EQ(releases(*engine, 1), 1);
  EXPECT_EQ(used_bytes(), 0U);
  engine->quit();
  mover->quit();
}

TEST_P(LeaseSourceTest, StoppedForeignProcessThatRunsAgainEndsTheQuarantine) {
  auto engine = start_engine({{"revoke", "400"}});
  auto foreign = start("engine");
  (void)foreign->expect("up");
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  foreign->expect_mapped(1);
  foreign->stop();
  EXPECT_THAT(engine->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  foreign->resume();
  expect_reaped(*engine);
  EXPECT_EQ(releases(*engine, 1), 1);
  EXPECT_EQ(used_bytes(), 0U);
  foreign->quit();
  engine->quit();
}

TEST_P(LeaseSourceTest, RegionsOfAQuarantinedEpochCannotBeLentAgain) {
  auto engine = start_engine({{"revoke", "400"}});
  auto foreign = start("engine");
  (void)foreign->expect("up");
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  foreign->expect_mapped(1);
  foreign->stop();
  EXPECT_THAT(engine->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  (void)engine->ask("source again", "again");
  EXPECT_THAT(engine->ask("init 20000", "init"),
              AllOf(StartsWith("init error quarantined"), HasSubstr("region 0 of epoch 2"),
                    HasSubstr("of epoch 1")));
  EXPECT_EQ(releases(*engine, 2), 1);
  EXPECT_EQ(releases(*engine, 1), 0);
  foreign->kill_and_reap();
  expect_reaped(*engine);
  engine->quit();
}

TEST_P(LeaseSourceTest, ForkedChildOfADeadMoverKeepsTheMemoryFromTheEngine) {
  auto engine = start_engine();
  auto mover = start_attacher();
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  mover->expect_mapped(1);
  std::istringstream reply(mover->ask("fork", "forked"));
  std::string verb;
  pid_t pid = 0;
  reply >> verb >> pid;
  auto child = ipc::ProcessRef::of_pid(pid);
  ASSERT_TRUE(child.has_value());
  mover->kill_and_reap();
  EXPECT_THAT(engine->ask("clear 1 20000", "clear"),
              AllOf(StartsWith("clear quarantined"), HasSubstr(fmt::format("process {}", pid))));
  EXPECT_EQ(releases(*engine, 1), 0);
  ASSERT_TRUE(child->signal(SIGKILL).has_value());
  expect_reaped(*engine);
  EXPECT_EQ(releases(*engine, 1), 1);
  EXPECT_EQ(used_bytes(), 0U);
  engine->quit();
}

class LeaseSourceFailureTest : public LeaseSourceTest {};
INSTANTIATE_TEST_SUITE_P(EveryKind,
                         LeaseSourceFailureTest,
                         ::testing::Values(std::pair{"worker", "vmm"},
                                           std::pair{"worker", "legacy"}),
                         way_name);

// What release() can do wrong: say no, throw, or leave the memory where it is.
TEST_P(LeaseSourceFailureTest, MemoryThatTheEngineDoesNotFreeIsQuarantinedByName) {
  auto engine = start_engine();
  auto mover = start_attacher();
  int epoch = 0;
  for (const auto& [mode, said] :
       {std::pair{"fail", "release() failed"}, std::pair{"throw", "threw: no such tensor"},
        std::pair{"keep", "release() was well"}}) {
    ++epoch;
    ASSERT_EQ(engine->ask("init 20000", "init"), fmt::format("init ok {}", epoch));
    mover->expect_mapped(static_cast<std::uint64_t>(epoch));
    (void)engine->ask(fmt::format("source {}", mode), mode);
    EXPECT_THAT(
        engine->ask(fmt::format("clear {} 20000", epoch), "clear"),
        AllOf(StartsWith("clear quarantined"), HasSubstr(said), HasSubstr("2 of 2 allocations")));
    EXPECT_EQ(engine->view().phase, "quarantined");
    EXPECT_EQ(releases(*engine, epoch), 1);
    (void)engine->ask("source free", "freed");
    expect_reaped(*engine);
    EXPECT_EQ(releases(*engine, epoch), 1) << "never asked twice";
    EXPECT_EQ(used_bytes(), 0U);
  }
  engine->quit();
  mover->quit();
}

TEST_P(LeaseSourceFailureTest, EpochThatNeverBecameReadyIsReleasedToo) {
  auto engine = start_engine();
  (void)engine->ask("fail mapped 1", "failing");
  EXPECT_THAT(engine->ask("init 20000", "init"), StartsWith("init error"));
  EXPECT_EQ(releases(*engine, 1), 1);
  EXPECT_EQ(used_bytes(), 0U);
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  EXPECT_THAT(engine->ask("clear 1 20000", "clear"), StartsWith("clear cleared 0"));
  EXPECT_EQ(releases(*engine, 1), 2);
  engine->quit();
}

TEST_P(LeaseSourceFailureTest, OwnWorkThatDoesNotEndKeepsTheMemory) {
  auto engine = start_engine();
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  (void)engine->ask("close quiesce", "closed");
  EXPECT_THAT(engine->ask("clear 1 20000", "clear"), StartsWith("clear quarantined"));
  EXPECT_EQ(releases(*engine, 1), 0);
  (void)engine->ask("open quiesce", "opened");
  expect_reaped(*engine);
  EXPECT_EQ(releases(*engine, 1), 1);
  engine->quit();
}

TEST_P(LeaseSourceFailureTest, EngineKilledWithTheEpochMappedLeavesNothing) {
  auto engine = start_engine();
  auto mover = start_attacher();
  ASSERT_EQ(engine->ask("init 20000", "init"), "init ok 1");
  mover->expect_mapped(1);
  engine->kill_and_reap();
  (void)mover->expect_view("let go", [](const SeenView& v) { return !v.mapped; });
  EXPECT_EQ(used_bytes(), 0U);
  auto next = start_engine();
  ASSERT_EQ(next->ask("init 20000", "init"), "init ok 1");
  mover->expect_mapped(1);
  next->quit();  // clears on its way out
  (void)mover->expect_view("let go", [](const SeenView& v) { return !v.mapped; });
  mover->quit();
}

TEST_P(LeaseSourceFailureTest, AMoverHasNoEngine) {
  auto peer = start("mover", {{"owner", "mover"}, {"source", "yes"}});
  EXPECT_THAT(peer->expect("failed"),
              AllOf(HasSubstr("invalid_argument"), HasSubstr("--cache-owner worker")));
  EXPECT_EQ(peer->process().wait(soon()), ChildExit::exited(3));
}

}  // namespace
}  // namespace kvferry::test
