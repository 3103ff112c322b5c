// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Mistakes built into manager, mover and worker: each is caught, and for its own reason. And the
// stories that lead to them: without a mistake nothing is found in them.
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "matrix/job_instance.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <string>

namespace kvferry::test {
namespace {

using ipc::Deadline;
using ipc::Transition;
using std::chrono::milliseconds;

/// Within it every story has come to its end, also on a busy machine.
constexpr milliseconds kStory{30'000};

/// What happens, by the faults that are planned for one process; the engine goes through rounds.
struct Story {
  const char* name;
  const char* owner;
  const char* handles;
  const char* whom = "";  ///< The process of the faults.
  const char* faults = "";
  Transition struck = Transition::kNone;  ///< The last fault's point.
  const char* then = "";                  ///< An operator's command, once it has struck.
  const char* killed = "";                ///< The process that is killed then.
  /// What the manager records in the end when nobody makes a mistake.
  Transition decided = Transition::kNone;
};

const Story kRounds{.name = "rounds", .owner = "worker", .handles = "vmm"};
const Story kCopyFails{.name = "copy_fails",
                       .owner = "worker",
                       .handles = "vmm",
                       .whom = "mover",
                       .faults = "mover.copy#1=fail",
                       .struck = Transition::kMoverCopy};
const Story kCopyHangs{.name = "copy_hangs",
                       .owner = "worker",
                       .handles = "vmm",
                       .whom = "mover",
                       .faults = "mover.copying#1=stop",
                       .struck = Transition::kMoverCopying};
const Story kCopyLasts{.name = "copy_lasts",
                       .owner = "worker",
                       .handles = "legacy",
                       .whom = "mover",
                       .faults = "mover.copying#1=delay:2000",
                       .struck = Transition::kMoverCopying,
                       .then = "clear"};
const Story kMoverDies{.name = "mover_dies",
                       .owner = "worker",
                       .handles = "vmm",
                       .whom = "worker",
                       .faults = "staging.launch#1=stop",
                       .struck = Transition::kStagingLaunch,
                       .killed = "mover"};
const Story kClearUnderStaging{.name = "clear_under_staging",
                               .owner = "mover",
                               .handles = "vmm",
                               .whom = "worker",
                               .faults = "staging.launch#1=stop",
                               .struck = Transition::kStagingLaunch,
                               .then = "clear"};
const Story kOwnerHangs{.name = "owner_hangs",
                        .owner = "worker",
                        .handles = "legacy",
                        .whom = "worker",
                        .faults = "owner.drain#1=stop",
                        .struck = Transition::kOwnerDrain,
                        .decided = Transition::kManagerGivesUp};
const Story kHolderHangs{.name = "holder_hangs",
                         .owner = "mover",
                         .handles = "legacy",
                         .whom = "worker",
                         .faults = "attacher.drain#1=stop",
                         .struck = Transition::kAttacherDrain};
const Story kAttacherHangs{.name = "attacher_hangs",
                           .owner = "mover",
                           .handles = "vmm",
                           .whom = "worker",
                           .faults = "attacher.import#2=stop",
                           .struck = Transition::kAttacherImport,
                           .decided = Transition::kManagerGivesUp};

struct Mutant {
  std::string name;
  std::string part;  ///< Which process makes the mistake; empty: none.
  Story story;
  std::string caught_by;
};

std::ostream& operator<<(std::ostream& out, const Mutant& mutant) { return out << mutant.name; }

class JobMutantsTest : public testing::TestWithParam<Mutant> {
 protected:
  JobMutantsTest() : instance_(story().owner, story().handles) {}

  static const Story& story() { return GetParam().story; }

  void start_all() {
    for (const std::string name : JobInstance::kNames) {
      JobInstance::Start how;
      if (name == story().whom) how.faults = story().faults;
      // Without a mistake all that could make one are the programs that do.
      const bool makes_none = GetParam().part.empty() && name != "engine";
      if (name == GetParam().part || makes_none) {
        how.program = sibling_program("kvferry_mutant");
        how.mutant = makes_none ? "none" : GetParam().name;
      }
      instance_.start(name, how);
    }
  }

  /// The rules that are broken, with one breach of each in words.
  std::map<std::string, std::string> broken() {
    std::map<std::string, std::string> rules;
    const auto trace = instance_.trace();
    if (!trace) return rules;
    for (const ipc::TransitionBreach& breach : ipc::check_transitions(*trace)) {
      rules.emplace(breach.rule, breach.what);
    }
    return rules;
  }

  bool has(Transition transition) {
    const auto trace = instance_.trace();
    return trace && std::any_of(trace->records.begin(), trace->records.end(),
                                [transition](const ipc::TransitionRecord& record) {
                                  return record.transition == transition;
                                });
  }

  /// True when the rounds came to that before the deadline.
  bool until(const Deadline& deadline, const std::function<bool()>& holds) {
    while (!holds()) {
      if (deadline.expired()) return false;
      instance_.begin_round();
      if (instance_.hear_engine()) ++rounds_;
    }
    return true;
  }

  void come_to_the_fault(const Deadline& deadline);

  JobInstance instance_;
  int rounds_ = 0;
  std::unique_ptr<ChildProcess> operator_;
};

void JobMutantsTest::come_to_the_fault(const Deadline& deadline) {
  if (story().struck == Transition::kNone) return;
  const pid_t pid = instance_.process(story().whom).pid();
  ASSERT_TRUE(until(deadline, [&] { return instance_.struck(pid, story().struck).has_value(); }))
      << instance_.stories();
  rounds_ = 0;
  if (*story().killed != '\0') instance_.process(story().killed).kill();
  if (*story().then != '\0') operator_ = instance_.start_operator({story().then});
}

TEST_P(JobMutantsTest, IsCaughtForItsOwnReason) {
  const Deadline deadline = Deadline::after(kStory);
  start_all();
  ASSERT_NO_FATAL_FAILURE(come_to_the_fault(deadline));
  const std::string& rule = GetParam().caught_by;
  if (!rule.empty()) {
    ASSERT_TRUE(until(deadline, [&] { return broken().contains(rule); }))
        << "found: " << testing::PrintToString(broken()) << "\n"
        << instance_.stories();
    std::cout << fmt::format("mutant {}: caught by {}\n", GetParam().name, rule);
    return;
  }
  const Transition decided = story().decided;
  ASSERT_TRUE(until(deadline, [&] { return decided == Transition::kNone || has(decided); }))
      << instance_.stories();
  // What follows from it is over after a round that began before it, and one after it.
  constexpr int kEnough = 2;
  rounds_ = 0;
  ASSERT_TRUE(until(deadline, [&] { return rounds_ >= kEnough; })) << instance_.stories();
  ASSERT_THAT(broken(), testing::IsEmpty()) << instance_.stories();
  std::cout << fmt::format("story {}: no rule is broken\n", story().name);
}

const auto kMutants = testing::Values(
    Mutant{"takes_failed_as_stored", "manager", kCopyFails, "VisibleMeansStoredEverywhere"},
    Mutant{"ends_jobs_at_their_deadline", "manager", kCopyHangs, "GivenOnMeansEnded"},
    Mutant{"writes_off_what_a_worker_runs", "manager", kMoverDies, "WrittenOffMeansEnded"},
    Mutant{"tells_cleared_without_an_owner", "manager", kOwnerHangs, "AllClearedMeansEvery"},
    Mutant{"takes_quarantined_as_cleared", "manager", kHolderHangs, "ClearedAsPublished"},
    Mutant{"tells_ready_without_a_worker", "manager", kAttacherHangs, "AllReadyMeansEvery"},
    Mutant{"answers_before_its_copies", "mover", kRounds, "AnsweredMeansEnded"},
    Mutant{"answers_what_it_abandoned", "mover", kClearUnderStaging, "AnsweredMeansEnded"},
    Mutant{"drains_without_waiting", "mover", kCopyLasts, "DrainedMeansIdle"},
    Mutant{"answers_at_the_launch", "worker", kRounds, "HandedOverMeansEnded"});

Mutant none(const Story& story) { return {fmt::format("none_{}", story.name), "", story, ""}; }
const auto kNoMistakes = testing::Values(none(kRounds),
                                         none(kCopyFails),
                                         none(kCopyHangs),
                                         none(kCopyLasts),
                                         none(kMoverDies),
                                         none(kClearUnderStaging),
                                         none(kOwnerHangs),
                                         none(kHolderHangs),
                                         none(kAttacherHangs));

const auto kName = [](const testing::TestParamInfo<Mutant>& shown) { return shown.param.name; };
INSTANTIATE_TEST_SUITE_P(Mistakes, JobMutantsTest, kMutants, kName);
INSTANTIATE_TEST_SUITE_P(WithoutOne, JobMutantsTest, kNoMistakes, kName);

}  // namespace
}  // namespace kvferry::test
