// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/transitions/transition_trace.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace kvferry::ipc {
namespace {

using T = Transition;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::uint64_t kSession = 77;
enum Who : std::size_t { kWorker, kMover, kManager, kEngine };
constexpr std::uint64_t kJob = 5;        // the manager's number
constexpr std::uint64_t kClientJob = 1;  // the engine's
constexpr std::uint64_t kGather = 2;     // a hand-over on lane 0

std::uint64_t incarnation(std::size_t writer) { return 100 + writer; }

/// A worker that owns, its mover, a manager and an engine.
class JobStory {
 public:
  JobStory() {
    for (const char* role : {"worker", "mover", "manager", "engine"}) {
      TransitionTrace::Writer writer;
      writer.who.role = role;
      writer.who.pid = static_cast<pid_t>(1000 + trace_.writers.size());
      writer.who.incarnation = Digest::from_words(0, incarnation(trace_.writers.size()));
      trace_.writers.push_back(writer);
    }
    lease(kWorker, T::kHelloListen).lease(kMover, T::kHelloSay);
    about(kWorker, T::kHelloWelcome, kMover).lease(kMover, T::kHelloWelcomed);
    lease(kWorker, T::kOwnerAllocate).lease(kWorker, T::kOwnerReady);
    lease(kWorker, T::kOwnerPublished);
    lease(kMover, T::kAttacherAsk).lease(kWorker, T::kOwnerRecord, 1, kMover);
    lease(kWorker, T::kOwnerSend, 1, kMover);
    lease(kWorker, T::kOwnerGranted, 1, kMover).lease(kMover, T::kAttacherGrant, 1);
    lease(kMover, T::kAttacherImport, 1).lease(kMover, T::kAttacherMapped, 1);
  }

  JobStory& lease(Who who, Transition transition, std::uint64_t id = 0, Who peer = kWorker) {
    TransitionRecord record = begin(who, transition);
    record.lease = LeaseId{id};
    record.peer = id == 0 ? 0 : incarnation(peer);
    return end(record);
  }
  JobStory& about(Who who, Transition transition, Who peer) {
    TransitionRecord record = begin(who, transition);
    record.peer = incarnation(peer);
    return end(record);
  }
  JobStory& job(Who who, Transition transition, std::uint64_t detail = 0, Who peer = kWorker) {
    TransitionRecord record = begin(who, transition);
    record.job = JobId{who == kEngine || transition == T::kManagerAnswer ? kClientJob : kJob};
    record.peer = incarnation(peer);
    record.detail = detail;
    return end(record);
  }

  JobStory& sent() {
    return job(kEngine, T::kEngineSubmit, 4)
        .job(kEngine, T::kEngineSubmitted, 4)
        .job(kManager, T::kManagerTake, kClientJob, kEngine)
        .job(kManager, T::kManagerSend, 4, kMover)
        .job(kManager, T::kManagerSent, 4, kMover)
        .job(kMover, T::kMoverAdmit, 4)
        .job(kMover, T::kMoverStart);
  }
  JobStory& gathered() {
    return job(kMover, T::kMoverAsk, kGather)
        .job(kWorker, T::kStagingLaunch, kGather, kMover)
        .job(kWorker, T::kStagingEnded, kGather, kMover)
        .job(kWorker, T::kStagingAnswer, kGather, kMover)
        .job(kMover, T::kMoverSeesHandOver, kGather);
  }
  JobStory& copied() {
    return job(kMover, T::kMoverCopy).job(kMover, T::kMoverCopying).job(kMover, T::kMoverCopied);
  }
  JobStory& answered(std::uint64_t failed = 0) {
    return job(kMover, T::kMoverAnswer, failed).job(kManager, T::kManagerSeesEnd, failed, kMover);
  }
  JobStory& ended(std::uint64_t failed = 0) {
    return job(kManager, T::kManagerCommit, failed)
        .job(kManager, T::kManagerAnswer, failed, kEngine)
        .job(kManager, T::kManagerEnd, failed, kEngine)
        .job(kEngine, T::kEngineDone, failed);
  }
  JobStory& mover_dies() { return job(kManager, T::kManagerSeesDeath, 0, kMover); }

  JobStory& without(Transition transition) {
    std::erase_if(trace_.records,
                  [transition](const TransitionRecord& r) { return r.transition == transition; });
    return *this;
  }
  /// All that the process has recorded of the handshake so far is overwritten.
  JobStory& forgetting_leases(Who who) {
    trace_.writers[who].lost = 1;
    std::erase_if(trace_.records, [who](const TransitionRecord& r) {
      return r.writer == who && !is_of_jobs(r.transition);
    });
    return *this;
  }
  JobStory& losing(Who who) {
    trace_.writers[who].lost_jobs = 1;
    return *this;
  }

  [[nodiscard]] std::vector<std::string> breaches() const {
    std::vector<std::string> rules;
    for (const TransitionBreach& breach : check_transitions(trace_)) {
      rules.emplace_back(breach.rule);
    }
    return rules;
  }

 private:
  TransitionRecord begin(Who who, Transition transition) {
    TransitionRecord record;
    record.time = ++now_;
    record.writer = who;
    record.transition = transition;
    record.session = kSession;
    record.epoch = Epoch{1};
    return record;
  }
  JobStory& end(const TransitionRecord& record) {
    trace_.records.push_back(record);
    return *this;
  }

  TransitionTrace trace_;
  std::chrono::nanoseconds now_{};
};

JobStory store() { return JobStory().sent().gathered().copied().answered().ended(); }

TEST(JobRulesTest, AStoreIsAllowed) { EXPECT_THAT(store().breaches(), IsEmpty()); }

TEST(JobRulesTest, AFailedStoreThatShowsNothingIsAllowed) {
  EXPECT_THAT(JobStory().sent().gathered().copied().answered(4).ended(4).breaches(), IsEmpty());
}

TEST(JobRulesTest, AJobIsAdmittedWhileItsEpochIsMapped) {
  JobStory unmapped;
  unmapped.without(T::kAttacherMapped).without(T::kAttacherImport);
  EXPECT_THAT(unmapped.job(kMover, T::kMoverAdmit).breaches(), ElementsAre("AdmittedWhileMapped"));
  JobStory drained;
  drained.lease(kMover, T::kAttacherDrain, 1).lease(kMover, T::kAttacherDrained, 1);
  EXPECT_THAT(drained.job(kMover, T::kMoverAdmit).breaches(), ElementsAre("AdmittedWhileMapped"));
}

TEST(JobRulesTest, AHandOverIsLaunchedWhileItsEpochIsMapped) {
  JobStory drained;
  drained.lease(kWorker, T::kOwnerDrain).lease(kWorker, T::kOwnerDrained);
  drained.job(kWorker, T::kStagingLaunch, kGather, kMover);
  EXPECT_THAT(drained.breaches(), ElementsAre("LaunchedWhileMapped"));
}

TEST(JobRulesTest, DrainedMeansThatNoCopyAndNoLaunchRuns) {
  JobStory copying;
  copying.sent().job(kMover, T::kMoverCopy).lease(kMover, T::kAttacherDrain, 1);
  EXPECT_THAT(copying.lease(kMover, T::kAttacherDrained, 1).breaches(),
              ElementsAre("DrainedMeansIdle"));
  JobStory launched;
  launched.sent().job(kMover, T::kMoverAsk, kGather);
  launched.job(kWorker, T::kStagingLaunch, kGather, kMover).lease(kWorker, T::kOwnerDrain);
  EXPECT_THAT(launched.lease(kWorker, T::kOwnerDrained).breaches(),
              ElementsAre("DrainedMeansIdle"));
}

TEST(JobRulesTest, AnAnswerMeansThatTheCopiesHaveEnded) {
  JobStory early = JobStory().sent().gathered().job(kMover, T::kMoverCopy);
  EXPECT_THAT(early.job(kMover, T::kMoverAnswer).breaches(), ElementsAre("AnsweredMeansEnded"));
}

TEST(JobRulesTest, AnAnswerMeansThatWhatTheWorkerWasAskedHasEnded) {
  JobStory asked = JobStory().sent().job(kMover, T::kMoverAsk, kGather);
  JobStory early = asked;
  EXPECT_THAT(early.job(kMover, T::kMoverAnswer).breaches(), ElementsAre("AnsweredMeansEnded"));
  JobStory abandoned = asked;
  abandoned.job(kMover, T::kMoverAbandon, 0).job(kMover, T::kMoverAnswer, 4);
  EXPECT_THAT(abandoned.breaches(), ElementsAre("AnsweredMeansEnded"));
  JobStory proven = asked;
  proven.job(kMover, T::kMoverAbandon, 0).job(kMover, T::kMoverProof, 0);
  EXPECT_THAT(proven.job(kMover, T::kMoverAnswer, 4).breaches(), IsEmpty());
  JobStory other_lane = asked;
  other_lane.job(kMover, T::kMoverAbandon, 0).job(kMover, T::kMoverProof, 1);
  EXPECT_THAT(other_lane.job(kMover, T::kMoverAnswer, 4).breaches(),
              ElementsAre("AnsweredMeansEnded"));
}

TEST(JobRulesTest, TheDeathOfTheWorkerEndsWhatItWasAsked) {
  JobStory story = JobStory().sent().job(kMover, T::kMoverAsk, kGather);
  story.job(kWorker, T::kStagingLaunch, kGather, kMover).job(kMover, T::kMoverAbandon, 0);
  JobStory another = story;
  story.job(kMover, T::kMoverSeesDeath, 1000 + kWorker).job(kMover, T::kMoverAnswer, 4);
  EXPECT_THAT(story.breaches(), IsEmpty());
  another.job(kMover, T::kMoverSeesDeath, 999).job(kMover, T::kMoverAnswer, 4);
  EXPECT_THAT(another.breaches(), ElementsAre("AnsweredMeansEnded"));
}

TEST(JobRulesTest, AJobIsAnsweredOnce) {
  JobStory twice = JobStory().sent().job(kMover, T::kMoverAnswer).job(kMover, T::kMoverAnswer);
  EXPECT_THAT(twice.breaches(), ElementsAre("AnsweredOnce"));
}

TEST(JobRulesTest, TheWorkersAnswerAndWordsMeanThatItsLaunchesHaveEnded) {
  JobStory launched = JobStory().sent().job(kMover, T::kMoverAsk, kGather);
  launched.job(kWorker, T::kStagingLaunch, kGather, kMover);
  JobStory story = launched;
  EXPECT_THAT(story.job(kWorker, T::kStagingAnswer, kGather, kMover).breaches(),
              ElementsAre("HandedOverMeansEnded"));
  story = launched;
  EXPECT_THAT(story.job(kMover, T::kMoverSeesHandOver, kGather).breaches(),
              ElementsAre("HandedOverMeansEnded"));
  story = launched;
  EXPECT_THAT(story.job(kWorker, T::kStagingWelcome, 0, kMover).breaches(),
              ElementsAre("WelcomeMeansIdle"));
  story = launched;
  EXPECT_THAT(story.job(kWorker, T::kStagingWelcome, 1, kMover).breaches(), IsEmpty());
  story = launched;
  EXPECT_THAT(story.job(kWorker, T::kStagingQuiesced, 0, kMover).breaches(),
              ElementsAre("QuiescedMeansIdle"));
  story = launched;
  EXPECT_THAT(story.job(kWorker, T::kStagingSettled, 0, kMover).breaches(), IsEmpty());
  story = launched;
  EXPECT_THAT(story.job(kWorker, T::kStagingSettled, 0, kEngine).breaches(),
              ElementsAre("QuiescedMeansIdle"));
  story = launched;
  EXPECT_THAT(story.job(kMover, T::kMoverProof, 0).breaches(), ElementsAre("ProofMeansEnded"));
}

TEST(JobRulesTest, ThePartOfADeadMoverIsWrittenOffOnlyOnceItsLaunchesHaveEnded) {
  JobStory story = JobStory().sent().job(kMover, T::kMoverAsk, kGather);
  story.job(kWorker, T::kStagingLaunch, kGather, kMover).mover_dies();
  JobStory early = story;
  early.job(kManager, T::kManagerWritesOff, 0, kMover);
  EXPECT_THAT(early.breaches(), ElementsAre("WrittenOffMeansEnded"));
  story.job(kWorker, T::kStagingEnded, kGather, kMover);
  story.job(kWorker, T::kStagingQuiesced, 0, kMover);
  story.job(kManager, T::kManagerWritesOff, 0, kMover).ended(4);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(JobRulesTest, ThePartOfALivingMoverIsNotWrittenOffWhileItCopies) {
  JobStory story = JobStory().sent().job(kMover, T::kMoverCopy);
  JobStory dead = story;
  EXPECT_THAT(story.job(kManager, T::kManagerWritesOff, 0, kMover).breaches(),
              ElementsAre("WrittenOffMeansEnded"));
  dead.mover_dies().job(kManager, T::kManagerWritesOff, 0, kMover);
  EXPECT_THAT(dead.breaches(), IsEmpty());
}

TEST(JobRulesTest, TheManagerTakesWhatTheMoverAnswered) {
  JobStory invented = JobStory().sent().job(kManager, T::kManagerSeesEnd, 0, kMover);
  EXPECT_THAT(invented.breaches(), ElementsAre("EndedAsAnswered"));
  JobStory rosier = JobStory().sent().job(kMover, T::kMoverAnswer, 2);
  rosier.job(kManager, T::kManagerSeesEnd, 1, kMover);
  EXPECT_THAT(rosier.breaches(), ElementsAre("EndedAsAnswered"));
}

TEST(JobRulesTest, BlocksBecomeVisibleWhenEveryRankHasStoredThem) {
  JobStory early = JobStory().sent().job(kManager, T::kManagerCommit);
  EXPECT_THAT(early.breaches(), ElementsAre("VisibleMeansStoredEverywhere"));
  JobStory failed = JobStory().sent().gathered().copied().answered(2);
  EXPECT_THAT(failed.job(kManager, T::kManagerCommit, 1).breaches(),
              ElementsAre("VisibleMeansStoredEverywhere"));
  JobStory off = JobStory().sent().mover_dies().job(kManager, T::kManagerWritesOff, 0, kMover);
  EXPECT_THAT(off.job(kManager, T::kManagerCommit, 3).breaches(),
              ElementsAre("VisibleMeansStoredEverywhere"));
}

TEST(JobRulesTest, PlacesAreGivenOnWhenNothingTouchesThem) {
  JobStory open = JobStory().sent().job(kManager, T::kManagerEnd);
  EXPECT_THAT(open.breaches(), ElementsAre("GivenOnMeansEnded"));
  // The manager has heard an end, but a copy of the job runs.
  JobStory copying = JobStory().sent().answered().job(kMover, T::kMoverCopy);
  EXPECT_THAT(copying.job(kManager, T::kManagerEnd).breaches(), ElementsAre("GivenOnMeansEnded"));
  JobStory twice = JobStory().sent().answered().job(kManager, T::kManagerEnd);
  EXPECT_THAT(twice.job(kManager, T::kManagerEnd).breaches(), ElementsAre("EndedOnce"));
}

TEST(JobRulesTest, AnEngineIsToldOnlyWhatIsOver) {
  JobStory early = JobStory().sent().job(kMover, T::kMoverCopy).job(kEngine, T::kEngineDone);
  EXPECT_THAT(early.breaches(), ElementsAre("DoneMeansEnded"));
}

// With the manager dead, too, nobody else says so.
TEST(JobRulesTest, AnOwnersDeathThatItsAttacherSawEndsItsJobs) {
  const auto asked = [] {
    return JobStory()
        .sent()
        .job(kMover, T::kMoverAsk, kGather)
        .job(kWorker, T::kStagingLaunch, kGather, kMover);
  };
  EXPECT_THAT(asked().job(kEngine, T::kEngineDone).breaches(), ElementsAre("DoneMeansEnded"));
  EXPECT_THAT(asked().lease(kMover, T::kAttacherSeesDeath).job(kEngine, T::kEngineDone).breaches(),
              IsEmpty());
  EXPECT_THAT(asked()
                  .lease(kMover, T::kAttacherSeesDeath)
                  .job(kWorker, T::kStagingEnded, kGather, kMover)
                  .breaches(),
              ElementsAre("DeadMeansDead"));
}

// Rings of the handshake turn over sooner than those of jobs.
TEST(JobRulesTest, ADeathWhoseRecordIsLostMayHaveBeenSeen) {
  const auto copying = [] { return JobStory().sent().job(kMover, T::kMoverCopy); };
  EXPECT_THAT(copying().forgetting_leases(kWorker).job(kEngine, T::kEngineDone).breaches(),
              IsEmpty());
  // It lived on,
  JobStory living = copying().forgetting_leases(kWorker).job(kEngine, T::kEngineDone);
  EXPECT_THAT(living.job(kMover, T::kMoverCopied).breaches(), ElementsAre("DoneMeansEnded"));
  // or nothing of that time is lost.
  JobStory kept = JobStory().sent().forgetting_leases(kWorker).lease(kWorker, T::kOwnerDrain);
  kept.job(kMover, T::kMoverCopy).job(kEngine, T::kEngineDone);
  EXPECT_THAT(kept.breaches(), ElementsAre("DoneMeansEnded"));
}

TEST(JobRulesTest, WhatIsLostHasTheBenefitOfTheDoubt) {
  JobStory manager = JobStory().sent().without(T::kManagerTake).losing(kManager);
  EXPECT_THAT(manager.job(kManager, T::kManagerCommit).breaches(), IsEmpty());
  JobStory mover = JobStory().sent().losing(kMover);
  EXPECT_THAT(mover.job(kManager, T::kManagerSeesEnd, 0, kMover).breaches(), IsEmpty());
  // Its oldest steps are lost, so the job may be anywhere; but not in two places.
  JobStory late = JobStory().sent().without(T::kMoverAdmit).without(T::kMoverStart).losing(kMover);
  late.job(kMover, T::kMoverStart).job(kMover, T::kMoverCopied);
  EXPECT_THAT(late.breaches(), IsEmpty());
  EXPECT_THAT(late.job(kMover, T::kMoverStart).breaches(), ElementsAre("MoverJobRelation"));
}

TEST(JobRulesTest, NothingStartsThatAMoverAskedOfWhomTheWorkerSaidThatNothingRuns) {
  JobStory story = JobStory().sent().job(kMover, T::kMoverAsk, kGather).mover_dies();
  JobStory settled = story;
  story.job(kWorker, T::kStagingQuiesced, 0, kMover);
  EXPECT_THAT(story.job(kWorker, T::kStagingLaunch, kGather, kMover).breaches(),
              ElementsAre("NothingStartsAfterProof"));
  settled.job(kWorker, T::kStagingSettled, 0, kMover);  // about all others
  EXPECT_THAT(settled.job(kWorker, T::kStagingLaunch, kGather, kMover).breaches(), IsEmpty());
}

// Of each machine a step that its state does not allow.
TEST(JobRulesTest, StepsOfJobsAreMovesOfTheRelation) {
  EXPECT_THAT(JobStory().job(kEngine, T::kEngineDone).breaches(), ElementsAre("EngineJobRelation"));
  EXPECT_THAT(JobStory().job(kManager, T::kManagerCommit).breaches(), ElementsAre("JobRelation"));
  EXPECT_THAT(JobStory().job(kManager, T::kManagerSent, 4, kMover).breaches(),
              ElementsAre("PartRelation"));
  EXPECT_THAT(JobStory().job(kMover, T::kMoverStart).breaches(), ElementsAre("MoverJobRelation"));
  EXPECT_THAT(JobStory().sent().job(kMover, T::kMoverCopied).breaches(),
              ElementsAre("CopyRelation"));
  EXPECT_THAT(JobStory().sent().job(kMover, T::kMoverSeesHandOver, kGather).breaches(),
              ElementsAre("HandOverRelation"));
  EXPECT_THAT(JobStory().job(kWorker, T::kStagingEnded, kGather, kMover).breaches(),
              ElementsAre("LaunchRelation"));
}

TEST(JobRulesTest, AnAbandonedHandOverIsNotSeenToEnd) {
  JobStory asked = JobStory().sent().job(kMover, T::kMoverAsk, kGather);
  asked.job(kMover, T::kMoverAsk, kGather + 2);
  JobStory seen = asked;
  seen.job(kMover, T::kMoverSeesHandOver, kGather).job(kMover, T::kMoverAbandon, 0);
  EXPECT_THAT(seen.breaches(), IsEmpty());
  JobStory late = seen;
  EXPECT_THAT(late.job(kMover, T::kMoverSeesHandOver, kGather + 2).breaches(),
              ElementsAre("HandOverRelation"));
  // Proven or asked of the dead, it has ended; asked again it would be another one.
  seen.job(kMover, T::kMoverProof, 0).job(kMover, T::kMoverAsk, kGather + 2);
  EXPECT_THAT(seen.breaches(), ElementsAre("HandOverRelation"));
}

}  // namespace
}  // namespace kvferry::ipc
