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

constexpr std::uint64_t kSession = 77;
constexpr std::size_t kOwner = 0;
constexpr std::size_t kFirst = 1;
constexpr std::size_t kSecond = 2;

std::uint64_t incarnation(std::size_t writer) { return 100 + writer; }

/// A story of one owner and two attachers, told transition by transition.
class Story {
 public:
  Story() {
    for (const std::size_t writer : {kOwner, kFirst, kSecond}) {
      TransitionTrace::Writer who;
      who.who.role = writer == kOwner ? "worker" : "mover";
      who.who.incarnation = Digest::from_words(0, incarnation(writer));
      trace_.writers.push_back(who);
    }
    hellos();
  }

  /// Everybody has what goes before.
  Story& hellos() {
    add(kOwner, Transition::kHelloListen, 0, 0, 0);
    for (const std::size_t who : {kFirst, kSecond}) {
      add(who, Transition::kHelloSay, 0, 0, 0);
      add(kOwner, Transition::kHelloWelcome, 0, 0, incarnation(who));
      add(who, Transition::kHelloWelcomed, 0, 0, 0);
    }
    return *this;
  }

  Story& owner(Transition transition, std::uint64_t epoch) {
    return add(kOwner, transition, epoch, 0, 0);
  }
  Story& lease(Transition transition, std::uint64_t epoch, std::uint64_t lease, std::size_t of) {
    return add(kOwner, transition, epoch, lease, incarnation(of));
  }
  Story& attacher(std::size_t who,
                  Transition transition,
                  std::uint64_t epoch,
                  std::uint64_t lease = 0) {
    return add(who, transition, epoch, lease, 0);
  }

  Story& ready(std::uint64_t epoch) {
    return owner(Transition::kOwnerAllocate, epoch).publishes(Transition::kOwnerReady, epoch);
  }
  Story& grants(std::uint64_t epoch, std::uint64_t id, std::size_t to) {
    return lease(Transition::kOwnerRecord, epoch, id, to)
        .lease(Transition::kOwnerSend, epoch, id, to)
        .lease(Transition::kOwnerGranted, epoch, id, to);
  }
  Story& maps(std::size_t who, std::uint64_t epoch, std::uint64_t lease) {
    return attacher(who, Transition::kAttacherAsk, epoch)
        .grants(epoch, lease, who)
        .attacher(who, Transition::kAttacherGrant, epoch, lease)
        .attacher(who, Transition::kAttacherImport, epoch, lease)
        .attacher(who, Transition::kAttacherMapped, epoch, lease);
  }
  Story& drains(std::size_t who, std::uint64_t epoch, std::uint64_t lease) {
    return attacher(who, Transition::kAttacherDrain, epoch, lease)
        .attacher(who, Transition::kAttacherDrained, epoch, lease);
  }
  Story& unmaps(std::size_t who, std::uint64_t epoch, std::uint64_t lease) {
    return attacher(who, Transition::kAttacherUnmap, epoch, lease)
        .attacher(who, Transition::kAttacherUnmapped, epoch, lease);
  }
  Story& releases(std::size_t who, std::uint64_t lease) {
    return attacher(who, Transition::kAttacherRelease, 0, lease)
        .attacher(who, Transition::kAttacherReleased, 0, lease);
  }
  Story& revokes(std::uint64_t epoch) {
    return owner(Transition::kOwnerDrain, epoch)
        .owner(Transition::kOwnerDrained, epoch)
        .publishes(Transition::kOwnerRevoke, epoch);
  }
  Story& frees(std::uint64_t epoch) {
    return owner(Transition::kOwnerFree, epoch).owner(Transition::kOwnerFreed, epoch);
  }
  Story& cleared(std::uint64_t epoch) { return publishes(Transition::kOwnerCleared, epoch); }
  Story& quarantined(std::uint64_t epoch) {
    return owner(Transition::kOwnerKeep, epoch).publishes(Transition::kOwnerQuarantined, epoch);
  }
  Story& publishes(Transition transition, std::uint64_t epoch) {
    return owner(transition, epoch).owner(Transition::kOwnerPublished, epoch);
  }

  /// What is told from here on.
  Story& of_session(std::uint64_t session) {
    session_ = session;
    return hellos();
  }
  /// The attachers are workers.
  Story& of_workers() {
    for (auto& writer : trace_.writers) writer.who.role = "worker";
    trace_.writers[kOwner].who.role = "mover";
    return *this;
  }
  Story& without(Transition transition) {
    std::erase_if(trace_.records,
                  [transition](const TransitionRecord& r) { return r.transition == transition; });
    return *this;
  }
  /// The writer's first records after its hellos are overwritten, and these.
  Story& losing(std::size_t writer, std::size_t count) {
    trace_.writers[writer].lost = count;
    for (auto record = trace_.records.begin(); record != trace_.records.end() && count > 0;) {
      if (record->writer == writer) {
        if (record->transition > Transition::kHelloGivesUp) --count;
        record = trace_.records.erase(record);
      } else {
        ++record;
      }
    }
    return *this;
  }

  [[nodiscard]] std::vector<std::string> breaches() const {
    std::vector<std::string> rules;
    for (const TransitionBreach& breach : check_transitions(trace_))
      rules.emplace_back(breach.rule);
    return rules;
  }

 private:
  Story& add(std::size_t writer,
             Transition transition,
             std::uint64_t epoch,
             std::uint64_t lease,
             std::uint64_t peer) {
    TransitionRecord record;
    record.time = std::chrono::nanoseconds(trace_.records.size());
    record.writer = writer;
    record.transition = transition;
    record.session = session_;
    record.epoch = Epoch{epoch};
    record.lease = LeaseId{lease};
    record.peer = peer;
    trace_.records.push_back(record);
    return *this;
  }

  TransitionTrace trace_;
  std::uint64_t session_ = kSession;
};

using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;

Story one_clear() {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).revokes(1).drains(kFirst, 1, 1).unmaps(kFirst, 1, 1);
  story.releases(kFirst, 1).lease(Transition::kOwnerSeesRelease, 1, 1, kFirst);
  story.frees(1).cleared(1);
  return story;
}

TEST(CheckTransitionsTest, AnOrdinaryClearIsAllowed) {
  Story story = one_clear();
  story.ready(2).maps(kSecond, 2, 2);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(CheckTransitionsTest, ADeathEndsALease) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).lease(Transition::kOwnerSeesDeath, 1, 1, kFirst);
  story.maps(kSecond, 1, 2).revokes(1).drains(kSecond, 1, 2).unmaps(kSecond, 1, 2);
  story.releases(kSecond, 2).lease(Transition::kOwnerSeesRelease, 1, 2, kSecond);
  story.frees(1).cleared(1);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(CheckTransitionsTest, QuarantineEndsWhenItsHolderLetsGo) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).revokes(1).quarantined(1).ready(2);
  story.drains(kFirst, 1, 1).unmaps(kFirst, 1, 1).releases(kFirst, 1);
  story.lease(Transition::kOwnerSeesRelease, 1, 1, kFirst).owner(Transition::kOwnerReap, 1);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(CheckTransitionsTest, AGrantThatNeverCameIsReturned) {
  Story story;
  story.ready(1).attacher(kFirst, Transition::kAttacherAsk, 1).grants(1, 1, kFirst).revokes(1);
  story.attacher(kFirst, Transition::kAttacherReturn, 0, 1).releases(kFirst, 1);
  story.lease(Transition::kOwnerSeesRelease, 1, 1, kFirst).frees(1).cleared(1);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(CheckTransitionsTest, FreeingWithoutWaiting) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).revokes(1).frees(1).cleared(1);
  EXPECT_THAT(story.breaches(), Contains("FreedWhileMapped"));
  EXPECT_THAT(story.breaches(), Contains("FreedWhileLeased"));
  EXPECT_THAT(story.breaches(), Contains("ClearedMeansEnded"));
}

// The owner believes that the lease has ended: only the two sides' records together show it.
TEST(CheckTransitionsTest, FreeingUnderAMappingThatWasReleasedTooEarly) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).revokes(1).releases(kFirst, 1);
  EXPECT_THAT(story.breaches(), Contains("ReleasedMeansUnmapped"));
}

TEST(CheckTransitionsTest, TakingALivingProcessForDead) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).lease(Transition::kOwnerSeesDeath, 1, 1, kFirst);
  story.revokes(1).frees(1).cleared(1);
  EXPECT_THAT(story.breaches(), IsEmpty()) << "so far nothing shows that it lives";
  story.drains(kFirst, 1, 1);
  EXPECT_THAT(story.breaches(), Contains("DeadMeansDead"));
}

TEST(CheckTransitionsTest, ReleasingForSomebodyElse) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).revokes(1);
  story.lease(Transition::kOwnerSeesRelease, 1, 1, kFirst);
  EXPECT_THAT(story.breaches(), Contains("ReleasedByItsHolder"));
}

TEST(CheckTransitionsTest, GrantingAfterTheRevoke) {
  Story story = one_clear();
  story.grants(1, 2, kSecond);
  EXPECT_THAT(story.breaches(), Contains("NoGrantAfterRevoke"));
}

TEST(CheckTransitionsTest, GrantingALeaseTwice) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).grants(1, 1, kSecond);
  EXPECT_THAT(story.breaches(), Contains("LeasesGrow"));
}

TEST(CheckTransitionsTest, SendingBeforeRecording) {
  Story story = one_clear();
  EXPECT_THAT(story.without(Transition::kOwnerRecord).breaches(), Contains("RecordedBeforeSent"));
}

TEST(CheckTransitionsTest, OpeningAnotherEpochThanGranted) {
  Story story;
  story.ready(1).attacher(kFirst, Transition::kAttacherAsk, 1).grants(1, 1, kFirst);
  story.attacher(kFirst, Transition::kAttacherGrant, 1, 1);
  story.attacher(kFirst, Transition::kAttacherImport, 2, 1);
  EXPECT_THAT(story.breaches(), Contains("OpenedAsGranted"));
}

TEST(CheckTransitionsTest, OpeningWithoutAGrant) {
  Story story;
  story.ready(1).attacher(kFirst, Transition::kAttacherAsk, 1);
  story.attacher(kFirst, Transition::kAttacherImport, 1, 1);
  EXPECT_THAT(story.breaches(), Contains("AttacherRelation"));
  EXPECT_THAT(story.breaches(), Contains("OpenedAsGranted"));
}

TEST(CheckTransitionsTest, ClosingBeforeTheDrain) {
  Story story = one_clear();
  EXPECT_THAT(story.without(Transition::kAttacherDrained).breaches(),
              Contains("UnmappedMeansDrained"));
}

TEST(CheckTransitionsTest, FreeingBeforeItsOwnDrain) {
  Story story = one_clear();
  EXPECT_THAT(story.without(Transition::kOwnerDrained).breaches(), Contains("FreedMeansDrained"));
}

TEST(CheckTransitionsTest, FreeingTwice) {
  Story story = one_clear();
  story.frees(1);
  EXPECT_THAT(story.breaches(), Contains("FreedOnce"));
}

TEST(CheckTransitionsTest, SayingClearedAboutMemoryThatIsKept) {
  Story story = one_clear();
  EXPECT_THAT(story.without(Transition::kOwnerFree).breaches(), Contains("ClearedMeansFreed"));
}

TEST(CheckTransitionsTest, SayingQuarantinedWithNothingInQuarantine) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).revokes(1).owner(Transition::kOwnerQuarantined, 1);
  EXPECT_THAT(story.breaches(), Contains("QuarantinedMeansKept"));
}

TEST(CheckTransitionsTest, ReapingUnderALivingMapping) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).revokes(1).quarantined(1);
  story.owner(Transition::kOwnerReap, 1);
  EXPECT_THAT(story.breaches(), Contains("FreedWhileMapped"));
}

TEST(CheckTransitionsTest, SkippingAPhase) {
  Story story = one_clear();
  EXPECT_THAT(story.without(Transition::kOwnerRevoke).breaches(), Contains("PhaseRelation"));
}

TEST(CheckTransitionsTest, TwoOwnersOfOneSession) {
  Story story;
  story.ready(1).attacher(kFirst, Transition::kOwnerReady, 2);
  EXPECT_THAT(story.breaches(), Contains("OneWriter"));
}

TEST(CheckTransitionsTest, AskingUnderALease) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).attacher(kFirst, Transition::kAttacherAsk, 1);
  EXPECT_THAT(story.breaches(), Contains("AsksWithNoLease"));
}

TEST(CheckTransitionsTest, AskingTheNextOwnerBeforeLettingGo) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).of_session(kSession + 1);
  story.attacher(kFirst, Transition::kAttacherAsk, 1);
  EXPECT_THAT(story.breaches(), ElementsAre("HoldsNothingWhileSearching"));
}

TEST(CheckTransitionsTest, KillingAWorker) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).revokes(1).lease(Transition::kOwnerKill, 1, 1, kFirst);
  EXPECT_THAT(story.breaches(), IsEmpty()) << "it is a mover";
  EXPECT_THAT(story.of_workers().breaches(), ElementsAre("WorkersNeverKilled"));
}

TEST(CheckTransitionsTest, TwoWorkersAtOnce) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).maps(kSecond, 1, 2);
  EXPECT_THAT(story.breaches(), IsEmpty()) << "they are movers";
  EXPECT_THAT(story.of_workers().breaches(), ElementsAre("OneWorkerAtATime"));
}

TEST(CheckTransitionsTest, AnInitThatFailedIsAllowed) {
  Story story;
  story.owner(Transition::kOwnerAllocate, 1).owner(Transition::kOwnerAllocate, 1);
  story.owner(Transition::kOwnerDrain, 1).owner(Transition::kOwnerDrained, 1).ready(1);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(CheckTransitionsTest, AnEpochOfNoAllocation) {
  Story story = one_clear();
  story.publishes(Transition::kOwnerReady, 2);
  EXPECT_THAT(story.breaches(), Contains("OwnerRelation"));
}

TEST(CheckTransitionsTest, FreeingBeforeTheRevokeIsPublished) {
  Story story;
  story.ready(1).owner(Transition::kOwnerDrain, 1).owner(Transition::kOwnerDrained, 1);
  story.owner(Transition::kOwnerRevoke, 1).frees(1);
  EXPECT_THAT(story.breaches(), Contains("OwnerRelation"));
}

TEST(CheckTransitionsTest, EndingALeaseTwice) {
  Story story = one_clear();
  story.lease(Transition::kOwnerSeesDeath, 1, 1, kFirst);
  EXPECT_THAT(story.breaches(), Contains("LeaseRelation"));
}

// A worker that cannot let go keeps the session of its dead owner.
TEST(CheckTransitionsTest, SeeingAnOwnersDeathIsNoTransitionOfTheOwner) {
  Story story;
  story.ready(1).maps(kFirst, 1, 1).attacher(kFirst, Transition::kAttacherDrain, 1, 1);
  story.attacher(kFirst, Transition::kAttacherStuck, 1, 1);
  story.attacher(kFirst, Transition::kAttacherSeesDeath, 0);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(CheckTransitionsTest, LostBeginningsAreGivenTheBenefitOfTheDoubt) {
  for (std::size_t count = 1; count <= 12; ++count) {
    EXPECT_THAT(one_clear().losing(kOwner, count).breaches(), IsEmpty())
        << count << " of the owner";
    EXPECT_THAT(one_clear().losing(kFirst, count).breaches(), IsEmpty())
        << count << " of the attacher";
  }
}

TEST(CheckTransitionsTest, ADeathThatTheOwnerHasLostCountsAmongItsLostBeginnings) {
  const auto one_dies = [] {
    Story story;
    story.ready(1).maps(kFirst, 1, 1).lease(Transition::kOwnerSeesDeath, 1, 1, kFirst);
    story.maps(kSecond, 1, 2).revokes(1).drains(kSecond, 1, 2).unmaps(kSecond, 1, 2);
    story.releases(kSecond, 2).lease(Transition::kOwnerSeesRelease, 1, 2, kSecond);
    story.frees(1).cleared(1);
    return story;
  };
  EXPECT_THAT(one_dies().breaches(), IsEmpty());
  constexpr std::size_t kUpToTheDeath = 7;
  EXPECT_THAT(one_dies().losing(kOwner, kUpToTheDeath).breaches(), IsEmpty());
  // An owner that never saw it is told, also when what came before the lease is lost.
  EXPECT_THAT(one_dies().without(Transition::kOwnerSeesDeath).breaches(),
              Contains("FreedWhileMapped"));
  EXPECT_THAT(one_dies().without(Transition::kOwnerSeesDeath).losing(kOwner, 1).breaches(),
              Contains("FreedWhileMapped"));
}

}  // namespace
}  // namespace kvferry::ipc
