// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Mistakes built into the lease's own code: each is caught, and for its own reason. And the stories
// that lead to them: without a mistake nothing is found in them.
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "multiproc/lease_actor.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <iostream>
#include <set>

namespace kvferry::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRound{5};
constexpr milliseconds kPatience{20'000};
/// Drain, revoke, kill and settle of these peers, and some scheduling.
constexpr milliseconds kClearBound{5'000};

enum class Side { kNobody, kOwner, kAttacher };
enum class Story {
  kClear,        ///< An attacher maps the epoch, which is cleared.
  kStoppedPeer,  ///< The same, and the attacher is stopped before.
  kSecondLife,   ///< The first attacher is killed, the epoch cleared under the second.
  kTwoLives,     ///< The same, but both had mapped it.
  kLateComer,    ///< A second attacher comes while the first, stopped, holds up a clear.
  kLeavesStuck,  ///< The attacher closes its connection with its work, and its mapping, alive.
  kUserRefuses,  ///< The attacher's user does not take the epoch.
  kCannotDrain,  ///< The attacher's work does not end.
  kMisfit,       ///< The attacher has another geometry.
  kReturns       ///< The attacher loses its first connection.
};

struct Mutant {
  const char* name;
  Side side;
  Story story;
  const char* owner;
  const char* handles;
  std::set<std::string> caught_by;  ///< Any of them, and one at least.
};

std::ostream& operator<<(std::ostream& out, const Mutant& mutant) { return out << mutant.name; }

class LeaseMutantsTest : public LeaseFixture, public testing::WithParamInterface<Mutant> {
 protected:
  LeaseMutantsTest() {
    owner_ = GetParam().owner;
    handles_ = GetParam().handles;
    // Where somebody is stuck the clear goes on after the shortest time. Else who answers, comes
    // late or ends by itself is given more: under a sanitizer to start or to end takes a second.
    // And where nobody makes a mistake everybody answers at last.
    const Story story = GetParam().story;
    const bool is_stuck = story == Story::kStoppedPeer || story == Story::kLeavesStuck;
    const bool is_waited_out = is_stuck || story == Story::kLateComer;
    const bool has_lives = story == Story::kSecondLife || story == Story::kTwoLives;
    const char* revoke = is_stuck || has_lives ? "600" : "3000";
    if (makes_no_mistake() && !is_waited_out) revoke = "20000";
    common_ = {{"drain", "300"}, {"revoke", revoke}, {"kill", "2000"}, {"settle", "400"}};
  }
  static bool makes_no_mistake() { return GetParam().caught_by.empty(); }
  // What is wrong with memory and records is what this test looks for.
  void TearDown() override {}

  std::unique_ptr<Actor> begin(Side side, Arguments extra = {}) {
    const bool mutated = side == GetParam().side;
    return std::make_unique<Actor>(std::make_unique<LeasePeer>(
        peer_arguments(side == Side::kOwner ? owner_ : other_kind(), std::move(extra)),
        mutated ? "kvferry_lease_mutant_peer" : "kvferry_lease_peer",
        mutated ? std::vector<std::string>{fmt::format("KVFERRY_MUTANT={}", GetParam().name)}
                : std::vector<std::string>{}));
  }

  template <typename Condition> bool until(Condition holds, milliseconds time = kPatience) {
    const ipc::Deadline deadline = ipc::Deadline::after(time);
    for (;;) {
      for (Actor* actor : {owner_side_.get(), first_.get(), second_.get()}) {
        if (actor != nullptr) actor->hear(kRound);
      }
      if (holds()) return true;
      if (deadline.expired()) return false;
    }
  }

  /// How often this was recorded.
  std::size_t count(ipc::Transition transition) {
    const auto trace = ipc::read_transitions(*instance_);
    if (!trace) return 0;
    return static_cast<std::size_t>(std::count_if(
        trace->records.begin(), trace->records.end(),
        [transition](const ipc::TransitionRecord& r) { return r.transition == transition; }));
  }

  void tell_story();
  void clear();
  void look_at_records();

  std::unique_ptr<Actor> owner_side_;
  std::unique_ptr<Actor> first_;
  std::unique_ptr<Actor> second_;
  std::set<std::string> found_;
};

void LeaseMutantsTest::clear() {
  owner_side_->tell("clear 1 60000");
  const bool ended =
      until([this] { return owner_side_->said("clear ").has_value() || owner_side_->has_ended(); },
            makes_no_mistake() ? kPatience : kClearBound);
  if (!ended) found_.insert("TakesTooLong");
}

void LeaseMutantsTest::tell_story() {
  const Story story = GetParam().story;
  Arguments planned;
  if (story == Story::kUserRefuses) {
    // At another address each time: a mapping that was left behind is not in its own way.
    planned = {{"faults", "attacher.mapped=fail"}, {"stable", "no"}};
  }
  if (story == Story::kMisfit) planned = {{"layers", "3"}};
  if (story == Story::kReturns) planned = {{"faults", "attacher.ask=fail"}};
  owner_side_ = begin(Side::kOwner);
  first_ = begin(Side::kAttacher, planned);
  ASSERT_TRUE(until([this] { return owner_side_->said("up") && first_->said("up"); }));
  owner_side_->tell("init 8000");
  if (story == Story::kMisfit || story == Story::kReturns) {
    // Refused for good, or at it again.
    ASSERT_TRUE(until([this] {
      return first_->maps(1) || first_->view().refused != "-" ||
             count(ipc::Transition::kHelloSay) > 2;
    })) << first_->view().note;
    return clear();
  }
  ASSERT_TRUE(until([this] { return first_->maps(1); })) << first_->view().note;
  switch (story) {
    case Story::kClear: break;
    case Story::kStoppedPeer: first_->peer().stop(); break;
    case Story::kSecondLife:
      first_->signal(SIGKILL);
      second_ = begin(Side::kAttacher);
      ASSERT_TRUE(until([this] { return second_->maps(1); }));
      break;
    case Story::kTwoLives:
      second_ = begin(Side::kAttacher);
      ASSERT_TRUE(until([this] { return second_->maps(1); }));
      first_->signal(SIGKILL);
      ASSERT_TRUE(until([this] { return owner_side_->view().leases <= 1; }));
      break;
    case Story::kLateComer:
      first_->peer().stop();
      owner_side_->tell("clear 1 60000");
      ASSERT_TRUE(until([this] { return owner_side_->view().phase == "revoking"; }));
      second_ = begin(Side::kAttacher);
      ASSERT_TRUE(until(
          [this] { return owner_side_->said("clear ").has_value() || owner_side_->has_ended(); }));
      return;
    case Story::kLeavesStuck:
      first_->tell("close quiesce");
      first_->tell("leave");
      ASSERT_TRUE(until([this] { return first_->said("left").has_value(); }));
      break;
    case Story::kUserRefuses:
    case Story::kMisfit:
    case Story::kReturns: break;
    case Story::kCannotDrain:
      first_->tell("close quiesce");
      // The clear goes another way, and may come first.
      ASSERT_TRUE(until([this] { return first_->said("closed").has_value(); }));
      break;
  }
  clear();
}

void LeaseMutantsTest::look_at_records() {
  const auto trace = ipc::read_transitions(*instance_);
  ASSERT_TRUE(trace.has_value()) << trace.error().to_string();
  for (const ipc::TransitionBreach& breach : ipc::check_transitions(*trace)) {
    found_.emplace(breach.rule);
  }
}

TEST_P(LeaseMutantsTest, IsCaughtForItsOwnReason) {
  ASSERT_NO_FATAL_FAILURE(tell_story());
  const std::string answer = owner_side_->said("clear ").value_or("");
  const bool cleared = answer.starts_with("clear cleared");
  if (cleared && used_bytes() != 0) found_.insert("MemoryNotBack");
  switch (GetParam().story) {
    // Where everybody answers, nobody is ended and nothing is kept.
    case Story::kClear:
    case Story::kSecondLife:
    case Story::kTwoLives:
    case Story::kUserRefuses:
    case Story::kMisfit:
    case Story::kReturns:
      if (!cleared || (second_ ? second_ : first_)->has_ended())
        found_.insert("NotAnOrdinaryClear");
      break;
    case Story::kCannotDrain:
      if (first_->peer().process().wait(soon()) != ChildExit::exited(ipc::kCannotDrainExit)) {
        found_.insert("MoverWaitsToBeKilled");
      }
      break;
    case Story::kStoppedPeer:
    case Story::kLateComer:
    case Story::kLeavesStuck: break;
  }
  // What was stopped goes on, into whatever was done meanwhile.
  first_->signal(SIGCONT);
  first_->tell("open quiesce");
  if (GetParam().story != Story::kLeavesStuck) {
    (void)until([this] { return first_->has_ended() || !first_->view().mapped; }, kClearBound);
  }
  look_at_records();
  if (makes_no_mistake()) {
    ASSERT_THAT(found_, testing::IsEmpty());
    std::cout << fmt::format("story {}: no rule is broken\n", GetParam().name);
    return;
  }
  const auto& reasons = GetParam().caught_by;
  const auto reason = std::find_if(found_.begin(), found_.end(),
                                   [&](const std::string& rule) { return reasons.contains(rule); });
  ASSERT_NE(reason, found_.end()) << "found: " << testing::PrintToString(found_)
                                  << ", expected one of " << testing::PrintToString(reasons);
  std::cout << fmt::format("mutant {}: caught by {}\n", GetParam().name, *reason);
}

const auto kMutants = testing::Values(
    Mutant{"welcomes_what_differs",
           Side::kOwner,
           Story::kMisfit,
           "worker",
           "vmm",
           {"WelcomeMeansAlike"}},
    Mutant{"refuses_the_returning",
           Side::kOwner,
           Story::kReturns,
           "mover",
           "vmm",
           {"RefusedMeansDifferent"}},
    Mutant{
        "asks_unwelcomed", Side::kAttacher, Story::kReturns, "worker", "vmm", {"AsksOnceWelcomed"}},
    Mutant{"retries_when_refused",
           Side::kAttacher,
           Story::kMisfit,
           "worker",
           "vmm",
           {"HelloRelation"}},
    Mutant{"free_without_waiting",
           Side::kOwner,
           Story::kStoppedPeer,
           "worker",
           "vmm",
           {"FreedWhileMapped"}},
    Mutant{"free_at_the_deadline",
           Side::kOwner,
           Story::kStoppedPeer,
           "mover",
           "legacy",
           {"FreedWhileMapped"}},
    Mutant{"no_deadline", Side::kOwner, Story::kStoppedPeer, "worker", "vmm", {"TakesTooLong"}},
    Mutant{"eof_is_death", Side::kOwner, Story::kLeavesStuck, "mover", "vmm", {"FreedWhileMapped"}},
    Mutant{"death_of_an_earlier_life",
           Side::kOwner,
           Story::kTwoLives,
           "worker",
           "vmm",
           {"FreedWhileMapped", "DeadMeansDead"}},
    Mutant{"grant_while_revoking",
           Side::kOwner,
           Story::kLateComer,
           "worker",
           "vmm",
           {"NoGrantAfterRevoke"}},
    Mutant{"forgets_to_unmap",
           Side::kAttacher,
           Story::kClear,
           "worker",
           "vmm",
           {"ReleasedMeansUnmapped"}},
    Mutant{"half_import_leaks",
           Side::kAttacher,
           Story::kUserRefuses,
           "worker",
           "vmm",
           {"MemoryNotBack"}},
    Mutant{"release_before_drain",
           Side::kAttacher,
           Story::kClear,
           "worker",
           "vmm",
           {"ReleasedMeansUnmapped"}},
    Mutant{"release_by_epoch",
           Side::kAttacher,
           Story::kSecondLife,
           "worker",
           "vmm",
           {"NotAnOrdinaryClear"}},
    Mutant{
        "both_sides_wait", Side::kAttacher, Story::kClear, "worker", "vmm", {"NotAnOrdinaryClear"}},
    Mutant{"no_fail_stop",
           Side::kAttacher,
           Story::kCannotDrain,
           "worker",
           "vmm",
           {"MoverWaitsToBeKilled"}});

const auto kNoMistakes = testing::Values(
    Mutant{"none_clear", Side::kNobody, Story::kClear, "worker", "vmm", {}},
    Mutant{"none_stopped_peer", Side::kNobody, Story::kStoppedPeer, "mover", "legacy", {}},
    Mutant{"none_stopped_mover", Side::kNobody, Story::kStoppedPeer, "worker", "vmm", {}},
    Mutant{"none_second_life", Side::kNobody, Story::kSecondLife, "worker", "vmm", {}},
    Mutant{"none_two_lives", Side::kNobody, Story::kTwoLives, "worker", "vmm", {}},
    Mutant{"none_late_comer", Side::kNobody, Story::kLateComer, "worker", "vmm", {}},
    Mutant{"none_leaves_stuck", Side::kNobody, Story::kLeavesStuck, "mover", "vmm", {}},
    Mutant{"none_user_refuses", Side::kNobody, Story::kUserRefuses, "worker", "vmm", {}},
    Mutant{"none_cannot_drain", Side::kNobody, Story::kCannotDrain, "worker", "vmm", {}},
    Mutant{"none_misfit", Side::kNobody, Story::kMisfit, "worker", "vmm", {}},
    Mutant{"none_returns", Side::kNobody, Story::kReturns, "mover", "vmm", {}});

const auto kName = [](const testing::TestParamInfo<Mutant>& shown) {
  return std::string(shown.param.name);
};
INSTANTIATE_TEST_SUITE_P(Mistakes, LeaseMutantsTest, kMutants, kName);
INSTANTIATE_TEST_SUITE_P(WithoutOne, LeaseMutantsTest, kNoMistakes, kName);

}  // namespace
}  // namespace kvferry::test
