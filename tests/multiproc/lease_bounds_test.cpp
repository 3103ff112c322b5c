// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// How long the waits of the unlink handshake take when a peer is dead, stopped, or does not drain,
// against what docs/reliability.md states. scripts/bounds.sh runs it with the deadlines as they are
// by default, and several times; here they are shorter, and once.
#include "kvferry/ipc/os/process.hpp"
#include "multiproc/lease_fixture.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <chrono>
#include <fstream>
#include <initializer_list>

namespace kvferry::test {
namespace {

using std::chrono::milliseconds;
using ::testing::StartsWith;

// What a machine under load may add to any of them.
constexpr milliseconds kSlack{5000};

class LeaseBoundsTest : public LeaseFixture, public ::testing::WithParamInterface<const char*> {
 protected:
  LeaseBoundsTest() {
    handles_ = GetParam();
    if (ipc::environment("KVFERRY_BOUNDS_DEFAULTS").empty()) {
      patient_ = "20000";
      times_.drain = milliseconds(200);
      times_.revoke = milliseconds(400);
      times_.settle = milliseconds(300);
    }
    common_ = {{"drain", std::to_string(times_.drain.count())},
               {"revoke", std::to_string(times_.revoke.count())},
               {"settle", std::to_string(times_.settle.count())}};
    const std::string rounds = ipc::environment("KVFERRY_BOUNDS_ROUNDS");
    if (!rounds.empty()) rounds_ = std::stoi(rounds);
  }

  /// Owner and attacher of an epoch that both have mapped.
  struct Pair {
    std::unique_ptr<LeasePeer> owner;
    std::unique_ptr<LeasePeer> attacher;
  };
  Pair mapped(const std::string& owner, const Arguments& extra = {}) {
    owner_ = owner;
    Pair pair{start_owner(extra), start_attacher(extra)};
    EXPECT_EQ(pair.owner->ask("init 20000", "init"), "init ok 1");
    pair.attacher->expect_mapped(1);
    return pair;
  }

  /// The memory may be back only after a death: looked at twice where handles are legacy.
  [[nodiscard]] milliseconds settles() const {
    return handles_ == "legacy" ? 2 * times_.settle : times_.settle;
  }

  /// For these deadlines, which nobody is to meet: on a busy machine who answers may be late for
  /// the short ones.
  [[nodiscard]] Arguments patient(std::initializer_list<const char*> deadlines) const {
    Arguments extra;
    for (const char* name : deadlines) {
      if (!patient_.empty()) extra[name] = patient_;
    }
    return extra;
  }

  /// Times what is done. wanted: the beginning of its answer.
  template <typename Act>
  void time(const std::string& row, milliseconds bound, const std::string& wanted, Act act) {
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    const std::string answer = act();
    const auto took =
        std::chrono::duration_cast<std::chrono::microseconds>(ipc::MonotonicClock::now() - start);
    EXPECT_THAT(answer, StartsWith(wanted)) << row;
    EXPECT_LE(took, bound + kSlack) << row << ": " << answer;
    const std::string report = ipc::environment("KVFERRY_BOUNDS_REPORT");
    if (report.empty()) return;
    std::ofstream(report, std::ios::app)
        << fmt::format(R"({{"row": "{}", "handles": "{}", "bound_ms": {}, "took_ms": {:.3f}}})",
                       row, handles_, bound.count(), static_cast<double>(took.count()) / 1000.0)
        << '\n';
  }
  static auto clear(LeasePeer& owner) {
    return [&owner] { return owner.ask("clear 1 60000", "clear"); };
  }

  ipc::LeaseTimeouts times_;
  std::string patient_;  ///< Milliseconds; empty: the deadlines are as they are by default.
  int rounds_ = 1;
};
INSTANTIATE_TEST_SUITE_P(Handles,
                         LeaseBoundsTest,
                         ::testing::Values("vmm", "legacy"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST_P(LeaseBoundsTest, ClearWhenEverybodyAnswers) {
  for (int round = 0; round < rounds_; ++round) {
    const Pair pair = mapped("worker", patient({"revoke"}));
    time("clear, everybody answers", times_.drain, "clear cleared 0", clear(*pair.owner));
    pair.attacher->quit();
    pair.owner->quit();
  }
}

TEST_P(LeaseBoundsTest, ClearAfterTheAttachersDeath) {
  for (int round = 0; round < rounds_; ++round) {
    for (const char* owner : {"worker", "mover"}) {
      const Pair pair = mapped(owner);
      pair.attacher->kill_and_reap();
      time("clear, attacher dead before it", settles(), "clear cleared_peer_dead",
           clear(*pair.owner));
      pair.owner->quit();
    }
  }
}

TEST_P(LeaseBoundsTest, ClearDuringWhichTheAttacherDies) {
  for (int round = 0; round < rounds_; ++round) {
    const Pair pair = mapped("worker", patient({"drain", "revoke"}));
    (void)pair.attacher->ask("close quiesce", "closed");
    pair.owner->tell("clear 1 60000");
    (void)pair.attacher->expect("at quiesce 1");
    time("clear, attacher killed during it", settles(), "clear cleared_peer_dead", [&pair] {
      pair.attacher->kill_and_reap();
      return pair.owner->expect("clear");
    });
    pair.owner->quit();
  }
}

TEST_P(LeaseBoundsTest, ClearWithAStoppedMover) {
  for (int round = 0; round < rounds_; ++round) {
    const Pair pair = mapped("worker");
    pair.attacher->stop();
    time("clear, mover stopped: killed", times_.revoke + times_.kill + settles(),
         "clear cleared_peer_dead", clear(*pair.owner));
    EXPECT_EQ(pair.attacher->process().wait(soon()), ChildExit::killed_by(SIGKILL));
    pair.owner->quit();
  }
}

TEST_P(LeaseBoundsTest, ClearWithAStoppedWorker) {
  for (int round = 0; round < rounds_; ++round) {
    const Pair pair = mapped("mover");
    pair.attacher->stop();
    time("clear, worker stopped: quarantine", times_.revoke, "clear quarantined",
         clear(*pair.owner));
    time("memory back, worker goes on", times_.drain, "back", [&pair] {
      pair.attacher->resume();
      (void)pair.owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
      return "back";
    });
    pair.attacher->quit();
    pair.owner->quit();
  }
}

TEST_P(LeaseBoundsTest, ClearWithAMoverThatDoesNotDrain) {
  for (int round = 0; round < rounds_; ++round) {
    const Pair pair = mapped("worker");
    (void)pair.attacher->ask("close quiesce", "closed");
    // It exits at drain, unless the owner, whose time is longer, is first.
    time("clear, mover's drain hangs: it exits", times_.revoke + times_.kill + settles(),
         "clear cleared_peer_dead", clear(*pair.owner));
    EXPECT_TRUE(pair.attacher->process().wait(soon()).has_value());
    pair.owner->quit();
  }
}

TEST_P(LeaseBoundsTest, ClearWithAWorkerThatDoesNotDrain) {
  for (int round = 0; round < rounds_; ++round) {
    const Pair pair = mapped("mover");
    (void)pair.attacher->ask("close quiesce", "closed");
    time("clear, worker's drain hangs: quarantine", times_.revoke, "clear quarantined",
         clear(*pair.owner));
    (void)pair.attacher->ask("open quiesce", "opened");
    (void)pair.owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
    pair.attacher->quit();
    pair.owner->quit();
  }
}

TEST_P(LeaseBoundsTest, ClearOfAnOwnerThatDoesNotDrainItself) {
  for (int round = 0; round < rounds_; ++round) {
    const Pair pair = mapped("worker", patient({"revoke"}));
    (void)pair.owner->ask("close quiesce", "closed");
    time("clear, the owning worker's own drain hangs: quarantine", times_.drain + times_.revoke,
         "clear quarantined", clear(*pair.owner));
    (void)pair.owner->ask("open quiesce", "opened");
    (void)pair.owner->expect_view("reaped", [](const SeenView& v) { return v.quarantined == 0; });
    pair.attacher->quit();
    pair.owner->quit();
  }
}

TEST_P(LeaseBoundsTest, AttacherWhoseOwnerDies) {
  for (int round = 0; round < rounds_; ++round) {
    for (const char* owner : {"worker", "mover"}) {
      const Pair pair = mapped(owner);
      time("attacher lets go, owner dead", times_.drain, "let go", [&pair] {
        pair.owner->kill_and_reap();
        (void)pair.attacher->expect_view("let go", [](const SeenView& v) { return !v.mapped; });
        return "let go";
      });
      pair.attacher->quit();
      start_owner()->quit();  // takes over the names of the dead one
    }
  }
}

TEST_P(LeaseBoundsTest, AttacherWhoseOwnerIsStopped) {
  for (int round = 0; round < rounds_; ++round) {
    const Pair pair = mapped("worker");
    pair.owner->stop();
    time("attacher detaches, owner stopped", times_.drain, "detach cleared",
         [&pair] { return pair.attacher->ask("detach 1 60000", "detach"); });
    // It says goodbye, and waits a second for an answer.
    time("attacher ends, owner stopped", times_.drain + milliseconds(1000), "ended", [&pair] {
      pair.attacher->quit();
      return "ended";
    });
    pair.owner->resume();
    pair.owner->quit();
  }
}

}  // namespace
}  // namespace kvferry::test
