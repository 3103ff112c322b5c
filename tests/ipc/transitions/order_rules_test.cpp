// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/transitions/transition_trace.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvferry::ipc {
namespace {

using T = Transition;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::uint64_t kSession = 77;
constexpr std::uint64_t kBytes = 4096;
enum Who : std::size_t { kManager, kWorker, kMover };

std::uint64_t incarnation(std::size_t writer) { return 100 + writer; }

/// A manager, a worker that owns and its mover.
class OrderStory {
 public:
  OrderStory() {
    for (const char* role : {"manager", "worker", "mover"}) {
      TransitionTrace::Writer writer;
      writer.who.role = role;
      writer.who.incarnation = Digest::from_words(0, incarnation(trace_.writers.size()));
      trace_.writers.push_back(writer);
    }
    tell(kWorker, T::kHelloListen).tell(kMover, T::kHelloSay);
    tell(kWorker, T::kHelloWelcome, 0, incarnation(kMover)).tell(kMover, T::kHelloWelcomed);
  }

  OrderStory& tell(std::size_t writer,
                   Transition transition,
                   std::uint64_t epoch = 0,
                   std::uint64_t peer = 0,
                   std::uint64_t lease = 0,
                   std::uint64_t detail = 0) {
    TransitionRecord record;
    record.time = std::chrono::nanoseconds(trace_.records.size());
    record.writer = writer;
    record.transition = transition;
    record.session = kSession;
    record.epoch = Epoch{epoch};
    record.lease = LeaseId{lease};
    record.peer = peer;
    record.detail = detail;
    trace_.records.push_back(record);
    return *this;
  }
  OrderStory& manager(Transition transition,
                      std::size_t about,
                      std::uint64_t epoch = 1,
                      std::uint64_t detail = 0) {
    return tell(kManager, transition, epoch, incarnation(about), operation_, detail);
  }

  /// Tells it to clear or to make the epoch; all depends on the owner.
  OrderStory& told(Transition transition, std::size_t whom, std::uint64_t epoch = 1) {
    return manager(transition, whom, epoch, whom == kWorker ? 1 : 0);
  }
  /// All that it was told to do is done, as the manager says.
  OrderStory& tells(Transition transition) { return manager(transition, kMover, 0); }
  /// The manager's next clear or re-init.
  OrderStory& next() {
    ++operation_;
    return *this;
  }

  OrderStory& registers(std::size_t who) {
    return manager(T::kManagerRegister, who, 0)
        .tell(who, T::kPeerRegister)
        .tell(who, T::kPeerRegistered, 0, incarnation(kManager));
  }
  OrderStory& owner_makes(std::uint64_t epoch) {
    return tell(kWorker, T::kOwnerAllocate, epoch)
        .tell(kWorker, T::kOwnerReady, epoch)
        .tell(kWorker, T::kOwnerPublished, epoch);
  }
  OrderStory& mover_maps(std::uint64_t epoch) {
    const std::uint64_t mover = incarnation(kMover);
    return tell(kMover, T::kAttacherAsk, epoch)
        .tell(kWorker, T::kOwnerRecord, epoch, mover, epoch)
        .tell(kWorker, T::kOwnerSend, epoch, mover, epoch)
        .tell(kWorker, T::kOwnerGranted, epoch, mover, epoch)
        .tell(kMover, T::kAttacherGrant, epoch, 0, epoch)
        .tell(kMover, T::kAttacherImport, epoch, 0, epoch)
        .tell(kMover, T::kAttacherMapped, epoch, 0, epoch);
  }
  OrderStory& mover_lets_go(std::uint64_t epoch) {
    for (const T step : {T::kAttacherDrain, T::kAttacherDrained, T::kAttacherUnmap,
                         T::kAttacherUnmapped, T::kAttacherRelease, T::kAttacherReleased}) {
      tell(kMover, step, epoch, 0, epoch);
    }
    return tell(kWorker, T::kOwnerSeesRelease, epoch, incarnation(kMover), epoch);
  }
  OrderStory& owner_revokes(std::uint64_t epoch) {
    for (const T step : {T::kOwnerDrain, T::kOwnerDrained, T::kOwnerRevoke, T::kOwnerPublished}) {
      tell(kWorker, step, epoch);
    }
    return *this;
  }
  OrderStory& owner_clears(std::uint64_t epoch) {
    for (const T step : {T::kOwnerFree, T::kOwnerFreed, T::kOwnerCleared, T::kOwnerPublished}) {
      tell(kWorker, step, epoch);
    }
    return *this;
  }
  OrderStory& owner_quarantines(std::uint64_t epoch) {
    for (const T step : {T::kOwnerKeep, T::kOwnerQuarantined, T::kOwnerPublished}) {
      tell(kWorker, step, epoch);
    }
    return *this;
  }
  /// The writer's first records after its hellos are overwritten, and these.
  OrderStory& losing(std::size_t writer, std::size_t count) {
    trace_.writers[writer].lost = count;
    for (auto record = trace_.records.begin(); record != trace_.records.end() && count > 0;) {
      if (record->writer == writer) {
        if (record->transition > T::kHelloGivesUp) --count;
        record = trace_.records.erase(record);
      } else {
        ++record;
      }
    }
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
  TransitionTrace trace_;
  std::uint64_t operation_ = 1;
};

/// Both have epoch 1, made on the manager's word.
OrderStory made() {
  OrderStory story;
  story.registers(kWorker).registers(kMover);
  story.told(T::kManagerReinit, kWorker).owner_makes(1).manager(T::kManagerSeesReady, kWorker);
  story.told(T::kManagerReinit, kMover).mover_maps(1).manager(T::kManagerSeesReady, kMover);
  story.tells(T::kManagerTellsReady).next();
  return story;
}

/// Both were told to clear it.
OrderStory told_to_clear() {
  OrderStory story = made();
  story.told(T::kManagerClear, kWorker).told(T::kManagerClear, kMover).owner_revokes(1);
  return story;
}

TEST(OrderRulesTest, ReinitAndClearOfARankAreAllowed) {
  OrderStory story = told_to_clear();
  story.mover_lets_go(1).manager(T::kManagerSeesCleared, kMover);
  story.owner_clears(1).manager(T::kManagerSeesCleared, kWorker);
  story.tells(T::kManagerTellsCleared).next().told(T::kManagerReinit, kWorker, 2).owner_makes(2);
  story.manager(T::kManagerSeesReady, kWorker, 2);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(OrderRulesTest, AClearIsRepeatedWithTheSameAnswer) {
  OrderStory story = told_to_clear();
  story.mover_lets_go(1).owner_clears(1).manager(T::kManagerSeesCleared, kWorker);
  story.manager(T::kManagerGivesUp, kMover).tells(T::kManagerTellsCleared);
  story.next().told(T::kManagerClear, kWorker).manager(T::kManagerSeesCleared, kWorker);
  story.tells(T::kManagerTellsCleared);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(OrderRulesTest, ToldAsClearedBeforeItsOwnerHasPublishedThat) {
  OrderStory story = told_to_clear();
  story.mover_lets_go(1).manager(T::kManagerSeesCleared, kWorker).owner_clears(1);
  EXPECT_THAT(story.breaches(), ElementsAre("ClearedAsPublished"));
}

TEST(OrderRulesTest, ToldAsClearedByAnAttacherThatHasItMapped) {
  OrderStory story = told_to_clear();
  story.manager(T::kManagerSeesCleared, kMover);
  EXPECT_THAT(story.breaches(), ElementsAre("ClearedAsPublished"));
}

TEST(OrderRulesTest, ToldAsClearedThoughAnotherEpochWas) {
  OrderStory story = told_to_clear();
  story.mover_lets_go(1).owner_clears(1).manager(T::kManagerSeesCleared, kWorker, 2);
  EXPECT_THAT(story.breaches(), ElementsAre("ClearedAsPublished"));
}

TEST(OrderRulesTest, QuarantineIsToldAsThat) {
  OrderStory story = told_to_clear();
  story.owner_quarantines(1).manager(T::kManagerSeesCleared, kWorker, 1, kBytes);
  EXPECT_THAT(story.breaches(), IsEmpty());
  OrderStory hidden = told_to_clear();
  hidden.owner_quarantines(1).manager(T::kManagerSeesCleared, kWorker);
  EXPECT_THAT(hidden.breaches(), ElementsAre("ClearedAsPublished"));
}

TEST(OrderRulesTest, ToldAsReadyBeforeItsOwnerHasPublishedThat) {
  OrderStory first;
  first.registers(kWorker).told(T::kManagerReinit, kWorker);
  first.manager(T::kManagerSeesReady, kWorker);
  EXPECT_THAT(first.breaches(), ElementsAre("ReadyAsPublished"));
  OrderStory later = told_to_clear();
  later.mover_lets_go(1).owner_clears(1).manager(T::kManagerSeesCleared, kWorker);
  later.told(T::kManagerReinit, kWorker, 2).manager(T::kManagerSeesReady, kWorker, 2);
  EXPECT_THAT(later.breaches(), ElementsAre("ReadyAsPublished"));
}

TEST(OrderRulesTest, ToldAsReadyByAnAttacherThatHasNotMappedIt) {
  OrderStory story;
  story.registers(kWorker).registers(kMover);
  story.told(T::kManagerReinit, kWorker).owner_makes(1).manager(T::kManagerSeesReady, kWorker);
  story.told(T::kManagerReinit, kMover).manager(T::kManagerSeesReady, kMover);
  EXPECT_THAT(story.breaches(), ElementsAre("ReadyAsPublished"));
}

TEST(OrderRulesTest, AllIsToldAsClearedThoughAnOwnerIsNot) {
  OrderStory waits = told_to_clear();
  waits.tells(T::kManagerTellsCleared);
  EXPECT_THAT(waits.breaches(), ElementsAre("AllClearedMeansEvery", "AllClearedMeansEvery"));
  OrderStory gives_up = told_to_clear();
  gives_up.manager(T::kManagerGivesUp, kWorker).manager(T::kManagerGivesUp, kMover);
  gives_up.tells(T::kManagerTellsCleared);
  EXPECT_THAT(gives_up.breaches(), ElementsAre("AllClearedMeansEvery"));
}

TEST(OrderRulesTest, AllIsToldAsReadyThoughAnOwnerIsNot) {
  OrderStory story = told_to_clear();
  story.mover_lets_go(1).owner_clears(1).manager(T::kManagerSeesCleared, kWorker);
  story.next().told(T::kManagerReinit, kWorker, 2).manager(T::kManagerGivesUp, kWorker, 2);
  story.tells(T::kManagerTellsReady);
  EXPECT_THAT(story.breaches(), ElementsAre("AllReadyMeansEvery"));
}

TEST(OrderRulesTest, AllIsToldAsReadyThoughAnOwnerNeverBegan) {
  OrderStory story;
  story.registers(kWorker).told(T::kManagerReinit, kWorker).manager(T::kManagerGivesUp, kWorker);
  story.tells(T::kManagerTellsReady);
  EXPECT_THAT(story.breaches(), ElementsAre("AllReadyMeansEvery"));
}

TEST(OrderRulesTest, ToldAsClearedByAnAttacherThatHasAnEarlierEpochMapped) {
  OrderStory story = told_to_clear();
  story.owner_quarantines(1).manager(T::kManagerSeesCleared, kWorker, 1, kBytes);
  story.manager(T::kManagerGivesUp, kMover).owner_makes(2);
  story.next().told(T::kManagerClear, kMover, 2).manager(T::kManagerSeesCleared, kMover, 2);
  EXPECT_THAT(story.breaches(), ElementsAre("ClearedAsPublished"));
}

TEST(OrderRulesTest, ToldAsReadyByAnAttacherThatHasLetGoBefore) {
  OrderStory story = made();
  story.owner_revokes(1).mover_lets_go(1).told(T::kManagerReinit, kMover);
  story.manager(T::kManagerSeesReady, kMover);
  EXPECT_THAT(story.breaches(), ElementsAre("ReadyAsPublished"));
  OrderStory meanwhile = made();
  meanwhile.told(T::kManagerReinit, kMover).owner_revokes(1).mover_lets_go(1);
  meanwhile.manager(T::kManagerSeesReady, kMover);
  EXPECT_THAT(meanwhile.breaches(), IsEmpty()) << "it had it when it answered";
}

TEST(OrderRulesTest, OneOrderAtATime) {
  OrderStory story = told_to_clear();
  story.told(T::kManagerReinit, kWorker, 2);
  EXPECT_THAT(story.breaches(), ElementsAre("OrderRelation"));
}

TEST(OrderRulesTest, AnAnswerThatNobodyWaitsForIsNotTaken) {
  OrderStory story = told_to_clear();
  story.manager(T::kManagerGivesUp, kMover).mover_lets_go(1);
  story.manager(T::kManagerSeesCleared, kMover);
  EXPECT_THAT(story.breaches(), ElementsAre("OrderRelation"));
}

TEST(OrderRulesTest, WhoIsRegisteredIsKnownToTheManager) {
  OrderStory story;
  story.tell(kWorker, T::kPeerRegister);
  story.tell(kWorker, T::kPeerRegistered, 0, incarnation(kManager));
  EXPECT_THAT(story.breaches(), ElementsAre("RegisteredMeansKnown"));
}

TEST(OrderRulesTest, RegisteredOnceForEachTimeItAsked) {
  OrderStory story;
  story.registers(kWorker).tell(kWorker, T::kPeerRegistered, 0, incarnation(kManager));
  EXPECT_THAT(story.breaches(), ElementsAre("RegistrationRelation", "RegisteredMeansKnown"));
}

TEST(OrderRulesTest, WhatIsLostIsNoBreach) {
  OrderStory story = told_to_clear();
  story.mover_lets_go(1).owner_clears(1).manager(T::kManagerSeesCleared, kWorker);
  story.manager(T::kManagerSeesCleared, kMover);
  for (const std::size_t writer : {kManager, kWorker, kMover}) {
    for (std::size_t count = 1; count < 12; ++count) {
      OrderStory shorter = story;
      EXPECT_THAT(shorter.losing(writer, count).breaches(), IsEmpty()) << writer << ' ' << count;
    }
  }
}

}  // namespace
}  // namespace kvferry::ipc
