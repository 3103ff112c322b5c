// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A peer that passed its hello writes garbage into everything that it may write, while another,
// honest peer works: it is dropped, and speaks for nobody but itself.
#include "multiproc/lease_fixture.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <chrono>
#include <utility>

namespace kvferry::test {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int kFill = 77;

class LeaseHostileTest : public LeaseEveryWay {
 protected:
  /// Takes the attacher's part unless it is the owner's kind. lives: connections, each with garbage
  /// of its own.
  ChildProcess start_hostile(const std::string& self, int lives, Arguments extra = {}) {
    extra.merge(Arguments{{"lives", std::to_string(lives)}, {"seed", std::to_string(++seed_)}});
    return ChildProcess({.program = sibling_program("kvferry_hostile_peer"),
                         .arguments = peer_arguments(self, std::move(extra))});
  }
  /// Everything that it says up to the line.
  static std::string read_until(ChildProcess& child, const std::string& last) {
    std::string said;
    // Garbage is much work where a sanitizer looks at it.
    const ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(60));
    while (auto line = child.read_line(deadline)) {
      said += *line + "\n";
      if (*line == last) return said;
    }
    ADD_FAILURE() << "never \"" << last << "\", but\n" << said << child.stderr_text();
    return said;
  }
  static int count(const std::string& text, const std::string& what) {
    int found = 0;
    for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) {
      ++found;
    }
    return found;
  }
  static void expect_alive(LeasePeer& peer) {
    EXPECT_FALSE(peer.process().wait_zombie(ipc::Deadline::after({})))
        << peer.process().stderr_text();
  }
  /// Takes what it has said already. False when a line begins with the text.
  static bool has_not_said(LeasePeer& peer, const std::string& beginning) {
    while (const auto line = peer.process().read_line(ipc::Deadline::after({}))) {
      if (line->starts_with("view ")) peer.remember(*line);
      if (line->starts_with(beginning)) return false;
    }
    return true;
  }

  std::uint64_t seed_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Ways, LeaseHostileTest, kEveryWay, way_name);

// Epoch after epoch: an honest attacher maps, works and lets go in its own time, and hostile ones
// write all along.
TEST_P(LeaseHostileTest, GarbageInAnAttachersWordsEndsNobodyElsesLease) {
  common_ = {{"drain", "60000"}, {"revoke", "80000"}, {"settle", "300"}};
  auto owner = start_owner();
  auto honest = start_attacher();
  // Where a mover owns, one worker at a time has a lease: there the hostile one asks for none.
  const Arguments wants{{"lease", owner_ == "worker" ? "yes" : "no"}};
  for (std::uint64_t epoch = 1; epoch <= 3; ++epoch) {
    ASSERT_EQ(owner->ask("init 20000", "init"), fmt::format("init ok {}", epoch));
    honest->expect_mapped(epoch);
    EXPECT_EQ(honest->ask(fmt::format("fill {}", kFill), "filled"), "filled");
    ChildProcess hostile = start_hostile(other_kind(), 8, wants);
    EXPECT_TRUE(hostile.wait_line("dropped", soon())) << "the first of its lives";
    (void)honest->ask("close quiesce", "closed");
    owner->tell(fmt::format("clear {} 90000", epoch));
    EXPECT_EQ(honest->expect("at quiesce"), fmt::format("at quiesce {}", epoch));

    const std::string said = read_until(hostile, "spent");
    EXPECT_GE(count(said, "dropped\n"), 1) << said;
    EXPECT_THAT(said, Not(HasSubstr("BREACH")));
    expect_alive(*owner);
    hostile.kill();
    ASSERT_TRUE(hostile.wait(soon()).has_value());
    // The honest one has not let go: whatever was written, its lease stands and its bytes are
    // there.
    EXPECT_EQ(honest->ask(fmt::format("others {}", kFill), "others"), "others 0");
    EXPECT_TRUE(has_not_said(*owner, "clear")) << owner->process().stderr_text();
    (void)honest->ask("open quiesce", "opened");
    EXPECT_THAT(owner->expect("clear"),
                AnyOf(StartsWith("clear cleared 0"), StartsWith("clear cleared_peer_dead 0")));
  }
  EXPECT_THAT(owner->process().stderr_text(),
              AnyOf(HasSubstr("forged its words"), HasSubstr("a word names a lease above")));
  owner->quit();
  honest->quit();
}

// Its own lease is all that it can hold on to, and that with its life: a mover is ended, a worker's
// memory is in quarantine until it has.
TEST_P(LeaseHostileTest, HostileHolderKeepsItsOwnLeaseAtMost) {
  common_ = {{"revoke", "2000"}, {"settle", "300"}, {"kill", "20000"}};
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  ChildProcess hostile = start_hostile(other_kind(), 1, {{"lease", "yes"}, {"garbage", "any"}});
  const std::string said = read_until(hostile, "spent");
  EXPECT_THAT(said, Not(HasSubstr("BREACH")));
  const std::string outcome = owner->ask("clear 1 40000", "clear");
  if (owner_ == "worker") {
    EXPECT_THAT(outcome, StartsWith("clear cleared_peer_dead 0"));
    EXPECT_EQ(hostile.wait(soon()), ChildExit::killed_by(SIGKILL)) << "by the owner";
  } else {
    EXPECT_THAT(outcome,
                AllOf(StartsWith("clear quarantined"), HasSubstr(std::to_string(hostile.pid()))));
    EXPECT_FALSE(hostile.wait_zombie(ipc::Deadline::after({}))) << "a worker is never ended";
    hostile.kill();
    ASSERT_TRUE(hostile.wait(soon()).has_value());
    (void)owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
  }
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 2");
  auto honest = start_attacher();
  honest->expect_mapped(2);
  EXPECT_THAT(owner->ask("clear 2 40000", "clear"), StartsWith("clear cleared 0"));
  owner->quit();
  honest->quit();
}

// The owner lies: its word, its messages and its ring. The attacher lets go and looks on, with all
// that it opened closed again, and finds the honest owner that comes next.
TEST_P(LeaseHostileTest, AttacherOutlivesAnOwnerThatWritesGarbage) {
  common_ = {{"hello", "2000"}};
  auto honest = start_attacher();
  const std::string before = honest->ask("resources", "resources");
  {
    ChildProcess hostile = start_hostile(owner_, 8);
    const std::string said = read_until(hostile, "spent");
    EXPECT_GE(count(said, "granted\n"), 3) << said;
    EXPECT_GE(count(said, "mapped\n"), 1) << said;
    EXPECT_THAT(said, Not(HasSubstr("BREACH")));
    expect_alive(*honest);
    hostile.kill();
    ASSERT_TRUE(hostile.wait(soon()).has_value());
  }
  auto owner = start_owner();
  ASSERT_EQ(owner->ask("init 20000", "init"), "init ok 1");
  (void)owner->expect_view("granted", [](const SeenView& v) { return v.leases == 1; });
  EXPECT_EQ(honest->ask("wait 1 20000", "wait "), "wait ok");
  EXPECT_EQ(honest->ask(fmt::format("fill {}", kFill), "filled"), "filled");
  EXPECT_EQ(owner->ask("peek", "peeked"), fmt::format("peeked {}", kFill));
  EXPECT_THAT(owner->ask("clear 1 40000", "clear"), StartsWith("clear cleared 0"));
  owner->quit();
  const std::string after = honest->ask("resources", "resources");
  int fds_before = 0;
  int fds_after = 0;
  ASSERT_EQ(std::sscanf(before.c_str(), "resources %d", &fds_before), 1);
  ASSERT_EQ(std::sscanf(after.c_str(), "resources %d", &fds_after), 1);
  EXPECT_LE(fds_after, fds_before + 4) << "a descriptor is left of each of eight owners";
  honest->quit();
}

}  // namespace
}  // namespace kvferry::test
