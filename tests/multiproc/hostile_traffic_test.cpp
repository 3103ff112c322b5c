// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A hostile process beside a mover that copies: it holds a lease, writes garbage into all its words
// and sends it to the worker. The mover's jobs succeed and every byte is right.
#include "multiproc/mover_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

namespace kvferry::test {
namespace {

using ipc::MessageKind;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

class HostileTrafficTest : public MoverFixture {};

TEST_F(HostileTrafficTest, JobsSucceedBesideAHostileMoverWhichTheClearEnds) {
  ChildProcess hostile(
      {.program = sibling_program("kvferry_hostile_peer"),
       .arguments = {"dir=" + temp_.path().string(), "self=mover", "owner=worker", "handles=vmm",
                     "lives=6", "seed=7", "lease=yes", "worker=yes", "garbage=any"}});
  std::string said;
  std::uint64_t rounds = 0;
  while (said.find("spent") == std::string::npos && !HasFailure()) {
    const std::uint64_t seed = 100 * ++rounds;
    fill(seed);
    store();
    fill(seed + 1);
    load();
    EXPECT_THAT(verify(seed), Each(0U)) << "round " << rounds;
    while (const auto line = hostile.read_line(ipc::Deadline::after({}))) said += *line + "\n";
    ASSERT_FALSE(hostile.wait_zombie(ipc::Deadline::after({}))) << said << hostile.stderr_text();
  }
  EXPECT_THAT(said, HasSubstr("asked"));
  EXPECT_THAT(said, Not(HasSubstr("BREACH")));

  // Its leases end with it: the owner ends a mover that does not let go.
  const ipc::Envelope reply =
      ask(MessageKind::kRankClear, ipc::RankClear{arena_.session, arena_.epoch});
  ASSERT_FALSE(reply.error.has_value()) << reply.error->to_string();
  const auto cleared = ipc::decode<ipc::RankClearReply>(reply.body, "RankClearReply");
  ASSERT_TRUE(cleared.has_value());
  EXPECT_EQ(cleared->kind, ipc::ClearKind::kClearedPeerDead) << cleared->detail;
  EXPECT_EQ(hostile.wait(soon()), ChildExit::killed_by(SIGKILL));
  EXPECT_FALSE(mover_->wait_zombie(ipc::Deadline::after({}))) << "the honest one lives";
  EXPECT_EQ(device_used(), 0U);
}

}  // namespace
}  // namespace kvferry::test
