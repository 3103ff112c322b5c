// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Every blow at every point of the handshake: what survives reaches a stated result in a stated
// time, memory and names are back, and the next epoch works with the right data.
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "matrix/lease_cells.hpp"
#include "multiproc/lease_actor.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <fstream>
#include <memory>
#include <optional>
#include <string>

namespace kvferry::test {
namespace {

using ipc::Deadline;
using ipc::Transition;
using std::chrono::milliseconds;

// Short, so that hundreds of cells fit into minutes; the bound follows from them.
constexpr milliseconds kDrain{300};
constexpr milliseconds kRevoke{600};
constexpr milliseconds kKill{2000};
constexpr milliseconds kSettle{400};
/// docs/handshake.md: a whole clear. Twice the drain: the owner's own, then a stalled attacher's.
constexpr milliseconds kClearBound = 2 * kDrain + kRevoke + kKill + 2 * kSettle;
/// What the processes of a busy machine need on top of the handshake's own deadlines.
constexpr milliseconds kScheduling{4000};
constexpr milliseconds kRound{5};
constexpr unsigned kKindBits = 8;

class LeaseMatrix : public LeaseFixture, public testing::WithParamInterface<Cell> {
 protected:
  static void SetUpTestSuite() {
    bystander_ = std::make_unique<ChildProcess>(
        ChildOptions{.program = "/bin/sleep", .arguments = {"3600"}});
  }
  static void TearDownTestSuite() { bystander_.reset(); }

  void SetUp() override {
    if (const auto reason = cell().inapplicable()) GTEST_SKIP() << *reason;
    owner_ = cell().owner;
    handles_ = cell().handles;
    const auto ms = [](milliseconds time) { return std::to_string(time.count()); };
    common_ = {{"drain", ms(kDrain)},
               {"revoke", ms(kRevoke)},
               {"kill", ms(kKill)},
               {"settle", ms(kSettle)}};
  }

  void TearDown() override {
    if (IsSkipped()) return;
    EXPECT_FALSE(bystander_->wait_zombie(Deadline::after({}))) << "a process of nobody's was ended";
    owner_side_.reset();
    attacher_side_.reset();
    LeaseFixture::TearDown();
  }

  static const Cell& cell() { return GetParam(); }
  Actor& victim() { return cell().at_owner ? *owner_side_ : *attacher_side_; }
  Actor& other() { return cell().at_owner ? *attacher_side_ : *owner_side_; }

  void start_sides() {
    Arguments owner;
    Arguments attacher;
    (cell().at_owner ? owner : attacher).emplace("faults", cell().plan());
    if (cell().scene == Scene::kTurnedAway) owner.emplace("faults", "hello.welcome=fail");
    if (cell().scene == Scene::kMisfit) attacher.emplace("layers", "3");
    if (cell().scene == Scene::kNoOwner) start_attacher_alone(attacher);
    owner_side_ = std::make_unique<Actor>(start(owner_, owner));
    if (!attacher_side_) attacher_side_ = std::make_unique<Actor>(start(other_kind(), attacher));
    victim_pid_ = victim().pid();
  }
  void start_attacher_alone(const Arguments& arguments) {
    attacher_side_ = std::make_unique<Actor>(start(other_kind(), arguments));
    victim_pid_ = attacher_side_->pid();
    const Deadline deadline = Deadline::after(kScheduling);
    while (!struck() && !deadline.expired()) attacher_side_->hear(kRound);
  }

  /// Lets both sides talk until it holds; false at the deadline.
  template <typename Condition> bool until(Condition holds, milliseconds time) {
    const Deadline deadline = Deadline::after(time);
    for (;;) {
      owner_side_->hear(kRound);
      attacher_side_->hear(kRound);
      if (holds()) return true;
      if (deadline.expired()) return false;
    }
  }

  /// The record of the blow, once it has struck.
  std::optional<std::uint64_t> struck() { return struck_at(cell().point); }
  /// The victim's record of a planned fault at this point.
  std::optional<std::uint64_t> struck_at(Transition point) {
    const auto trace = ipc::read_transitions(*instance_);
    if (!trace) return std::nullopt;
    std::map<std::uint32_t, Transition> last;  // by thread of the victim
    for (const ipc::TransitionRecord& record : trace->records) {
      if (trace->writers[record.writer].who.pid != victim_pid_) continue;
      if (record.transition == Transition::kStruck && last[record.thread] == point) {
        return record.detail;
      }
      if (record.transition != Transition::kStruck) last[record.thread] = record.transition;
    }
    return std::nullopt;
  }

  [[nodiscard]] static bool is_dead() {
    return cell().blow == Blow::kKill || cell().blow == Blow::kOrphan;
  }

  void drive();
  void see_survivors();
  void mend();
  void next_epoch_works();
  void report(const std::string& outcome, milliseconds took) const;

  std::unique_ptr<Actor> owner_side_;
  std::unique_ptr<Actor> attacher_side_;
  pid_t victim_pid_ = 0;
  inline static std::unique_ptr<ChildProcess> bystander_;
};

// Up to the blow, wherever it comes.
void LeaseMatrix::drive() {
  const auto time = kClearBound + kScheduling;
  const auto hit_or = [this](auto condition) {
    return [this, condition] { return condition() || struck().has_value(); };
  };
  const auto mapped = [this](std::uint64_t epoch) {
    return [this, epoch] { return attacher_side_->maps(epoch); };
  };
  owner_side_->tell("init 8000");
  if (cell().scene == Scene::kLateGrant) {
    ASSERT_TRUE(until([this] { return struck_at(Transition::kAttacherGrant).has_value(); }, time));
    owner_side_->tell("clear 1 20000");
    ASSERT_TRUE(until([this] { return owner_side_->view().phase == "revoking"; }, time));
    victim().signal(SIGCONT);
    ASSERT_TRUE(until([this] { return struck().has_value(); }, time)) << "not reached";
    return;
  }
  ASSERT_TRUE(until(hit_or(mapped(1)), time)) << "never mapped";
  if (struck()) return;
  if (cell().scene == Scene::kPeerDies) {
    other().signal(SIGKILL);
    ASSERT_TRUE(until([this] { return struck().has_value(); }, time)) << "not reached";
    return;
  }
  if (cell().scene == Scene::kPeerStalls) other().peer().stop();
  owner_side_->tell("clear 1 20000");
  ASSERT_TRUE(until(hit_or([this] { return owner_side_->said("clear ").has_value(); }), time))
      << "the clear did not end";
  if (struck()) return;
  if (cell().scene == Scene::kPeerStalls) {
    other().signal(SIGCONT);
    ASSERT_TRUE(until([this] { return struck().has_value(); }, time)) << "not reached";
    return;
  }
  owner_side_->forget();
  owner_side_->tell("init 8000");
  ASSERT_TRUE(until(hit_or(mapped(2)), time)) << "not mapped again";
  if (struck()) return;
  owner_side_->tell("quit");
  ASSERT_TRUE(until([this] { return struck().has_value(); }, time)) << "not reached";
}

// What the other side reaches while the victim is as the blow left it.
void LeaseMatrix::see_survivors() {
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  const auto took = [start] {
    return std::chrono::duration_cast<milliseconds>(ipc::MonotonicClock::now() - start);
  };
  if (cell().scene == Scene::kPeerStalls) other().signal(SIGCONT);
  if (cell().at_owner) {
    if (!is_dead()) return report("victim_goes_on", took());
    if (attacher_side_->has_ended()) return report("both_dead", took());
    ASSERT_TRUE(until([this] { return !attacher_side_->view().mapped; }, kDrain + kScheduling))
        << "the attacher keeps a dead owner's memory";
    return report("let_go", took());
  }
  if (owner_side_->has_ended()) return report("both_dead", took());
  const auto phase = [this] { return owner_side_->view().phase; };
  ASSERT_TRUE(until([&] { return phase() != "vacant"; }, kScheduling)) << "the first init hangs";
  if (phase() == "ready") {
    owner_side_->tell(fmt::format("clear {} 20000", owner_side_->view().epoch));
  }
  ASSERT_TRUE(
      until([&] { return phase() != "ready" && phase() != "revoking"; }, kClearBound + kScheduling))
      << "the clear is not over: " << phase() << "\n"
      << owner_side_->peer().process().stderr_text();
  const std::string outcome = phase();
  EXPECT_THAT(outcome, testing::AnyOf("cleared", "quarantined"));
  if (cell().blow == Blow::kKill) {
    EXPECT_EQ(outcome, "cleared") << "its death was proven";
  }
  report(outcome, took());
}

// As an operator and a supervisor would: continue what is stopped, end what cannot go on.
void LeaseMatrix::mend() {
  const bool cannot_close =
      cell().blow == Blow::kFail && cell().point == Transition::kAttacherUnmap;
  if (cell().blow == Blow::kStop) victim().signal(SIGCONT);
  if (cell().blow == Blow::kStopForGood || cannot_close) victim().signal(SIGKILL);
  if (cell().scene == Scene::kMisfit) {
    if (cell().blow == Blow::kStop || cell().blow == Blow::kDelay) {
      EXPECT_TRUE(until([this] { return attacher_side_->view().refused == "geometry_mismatch"; },
                        kScheduling))
          << "it was not told";
    }
    // Its successor has the owner's geometry.
    attacher_side_->signal(SIGKILL);
  }
  if (cell().blow == Blow::kOrphan) {
    const ipc::Status ended = end_orphan(static_cast<pid_t>(struck().value_or(0) >> kKindBits));
    EXPECT_TRUE(ended) << ended.error().to_string();
  }
}

// Replaces what has ended, then clears and makes an epoch again.
void LeaseMatrix::next_epoch_works() {
  std::uint64_t fresh = 0;
  std::string pending;
  const auto step = [&] {
    if (owner_side_->has_ended()) {
      owner_side_ = std::make_unique<Actor>(start(owner_));
      pending.clear();
      fresh = 0;
    }
    if (attacher_side_->has_ended()) {
      attacher_side_ = std::make_unique<Actor>(start(other_kind()));
    }
    if (fresh != 0) {
      // With the lease: the attacher's last word may be about another session's epoch.
      return attacher_side_->maps(fresh) && owner_side_->view().leases == 1 &&
             owner_side_->view().quarantined == 0;
    }
    if (!pending.empty()) {
      const auto answer = owner_side_->said(pending);
      if (!answer) return false;
      if (answer->starts_with("init ok ")) fresh = std::stoull(answer->substr(8));
      pending.clear();
      return false;
    }
    if (owner_side_->view().phase == "shutdown") return false;  // it ends
    const bool standing =
        owner_side_->view().phase == "ready" || owner_side_->view().phase == "revoking";
    owner_side_->forget();
    pending = standing ? "clear " : "init ";
    owner_side_->tell(standing ? fmt::format("clear {} 20000", owner_side_->view().epoch)
                               : std::string("init 8000"));
    return false;
  };
  ASSERT_TRUE(until(step, 2 * kClearBound + 2 * kScheduling))
      << "no next epoch; owner: " << owner_side_->view().phase << " " << owner_side_->view().note
      << "\n"
      << owner_side_->peer().process().stderr_text() << "\nattacher:\n"
      << attacher_side_->peer().process().stderr_text();
  attacher_side_->peer().ask("poke 77", "poked");
  EXPECT_EQ(owner_side_->peer().ask("peek", "peeked"), "peeked 77");
  owner_side_->peer().ask("poke 78", "poked");
  EXPECT_EQ(attacher_side_->peer().ask("peek", "peeked"), "peeked 78");
}

TEST_P(LeaseMatrix, IsSurvived) {
  ASSERT_NO_FATAL_FAILURE(start_sides());
  ASSERT_NO_FATAL_FAILURE(drive());
  ASSERT_TRUE(struck()) << "the point was not reached";
  ASSERT_NO_FATAL_FAILURE(see_survivors());
  ASSERT_NO_FATAL_FAILURE(mend());
  ASSERT_NO_FATAL_FAILURE(next_epoch_works());
  owner_side_->peer().quit();
  attacher_side_->peer().quit();
}

void LeaseMatrix::report(const std::string& outcome, milliseconds took) const {
  const std::string path = ipc::environment("KVFERRY_MATRIX_REPORT");
  if (path.empty()) return;
  const nlohmann::json line = {{"point", ipc::to_string(cell().point)},
                               {"at_owner", cell().at_owner},
                               {"occurrence", cell().occurrence},
                               {"blow", to_string(cell().blow)},
                               {"owner", cell().owner},
                               {"handles", cell().handles},
                               {"outcome", outcome},
                               {"ms", took.count()}};
  std::ofstream(path, std::ios::app) << line.dump() + "\n";
}

INSTANTIATE_TEST_SUITE_P(Cells,
                         LeaseMatrix,
                         testing::ValuesIn(lease_cells()),
                         [](const auto& shown) { return shown.param.name(); });

}  // namespace
}  // namespace kvferry::test
