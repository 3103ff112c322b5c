// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Stories of hellos: what may be, and for each rule one that breaks it.
#include "kvferry/ipc/base/error.hpp"
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

enum Who : std::size_t { kOwner, kAttacher, kOther };
// The last two bits tell who owns.
constexpr std::uint64_t kSame = 9;
constexpr std::uint64_t kDifferent = 10;
constexpr std::uint64_t kOfAnotherKind = 5;

constexpr std::uint64_t code(ErrorCode error) { return static_cast<std::uint64_t>(error); }
constexpr std::uint64_t kMismatch = code(ErrorCode::kGeometryMismatch);
constexpr std::uint64_t kBusy = code(ErrorCode::kBusy);

std::uint64_t incarnation(std::size_t writer) { return 100 + writer; }
std::uint64_t session_of(std::size_t writer) { return 70 + writer; }

/// An owner, an attacher, and a third one that is either.
class HelloStory {
 public:
  HelloStory() {
    for (const char* role : {"worker", "mover", "worker"}) {
      TransitionTrace::Writer writer;
      writer.who.role = role;
      writer.who.incarnation = Digest::from_words(0, incarnation(trace_.writers.size()));
      trace_.writers.push_back(writer);
    }
  }

  HelloStory& tell(Who who,
                   Transition transition,
                   std::uint64_t session = 0,
                   std::uint64_t peer = 0,
                   std::uint64_t detail = 0) {
    TransitionRecord record;
    record.time = std::chrono::nanoseconds(trace_.records.size());
    record.writer = who;
    record.transition = transition;
    record.session = session;
    record.peer = peer;
    record.detail = detail;
    if (transition == T::kOwnerAllocate || transition == T::kAttacherAsk) record.epoch = Epoch{1};
    trace_.records.push_back(record);
    return *this;
  }

  HelloStory& listens(Who who, std::uint64_t compares = kSame) {
    return tell(who, T::kHelloListen, session_of(who), 0, compares);
  }
  HelloStory& says(Who who, std::uint64_t compares = kSame) {
    return tell(who, T::kHelloSay, 0, 0, compares);
  }
  HelloStory& welcomes(Who owner, Who whom) {
    return tell(owner, T::kHelloWelcome, session_of(owner), incarnation(whom));
  }
  HelloStory& refuses(Who owner, Who whom, std::uint64_t error) {
    return tell(owner, T::kHelloRefuse, session_of(owner), incarnation(whom), error);
  }
  HelloStory& is_welcome(Who who, Who at) { return tell(who, T::kHelloWelcomed, session_of(at)); }
  HelloStory& allocates(Who who) { return tell(who, T::kOwnerAllocate, session_of(who)); }
  HelloStory& asks(Who who, Who of) { return tell(who, T::kAttacherAsk, session_of(of)); }
  HelloStory& of_rank(Who who, std::uint32_t rank) {
    trace_.writers[who].who.rank = Rank{rank};
    return *this;
  }
  /// Its first records are overwritten.
  HelloStory& losing(Who who, std::size_t count) {
    trace_.writers[who].lost = count;
    std::erase_if(trace_.records, [&](const TransitionRecord& record) {
      return record.writer == who && count > 0 && count-- > 0;
    });
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
};

HelloStory welcomed() {
  HelloStory story;
  return story.listens(kOwner)
      .says(kAttacher)
      .welcomes(kOwner, kAttacher)
      .is_welcome(kAttacher, kOwner);
}

TEST(HelloRulesTest, WhoIsWelcomeAsks) {
  EXPECT_THAT(welcomed().allocates(kOwner).asks(kAttacher, kOwner).breaches(), IsEmpty());
}

TEST(HelloRulesTest, HelloIsSaidAgainOnTheNextConnection) {
  HelloStory story = welcomed();
  story.says(kAttacher).says(kAttacher).tell(kAttacher, T::kHelloTurnedAway, 0, 0, kBusy);
  story.says(kAttacher).welcomes(kOwner, kAttacher).is_welcome(kAttacher, kOwner);
  EXPECT_THAT(story.asks(kAttacher, kOwner).breaches(), IsEmpty());
}

TEST(HelloRulesTest, WhatDiffersIsRefusedAndGivesUp) {
  HelloStory story;
  story.listens(kOwner).says(kAttacher, kDifferent).refuses(kOwner, kAttacher, kMismatch);
  story.tell(kAttacher, T::kHelloRefused, 0, 0, kMismatch);
  story.tell(kAttacher, T::kHelloGivesUp, 0, 0, kMismatch);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(HelloRulesTest, AnAttacherRefusesAnother) {
  HelloStory story;
  story.tell(kOther, T::kHelloMeet, 0, 0, kSame).says(kAttacher, kDifferent);
  story.tell(kOther, T::kHelloRefuse, 0, incarnation(kAttacher), code(ErrorCode::kRoleConflict));
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(HelloRulesTest, AnAttacherRefusesOneThatTakesTheSameForTheOwner) {
  HelloStory story;
  story.tell(kOther, T::kHelloMeet, 0, 0, kSame).says(kAttacher, kOfAnotherKind);
  story.tell(kOther, T::kHelloRefuse, 0, incarnation(kAttacher), code(ErrorCode::kRoleConflict));
  EXPECT_THAT(story.breaches(), ElementsAre("RefusedMeansDifferent"));
}

TEST(HelloRulesTest, SaysHelloAfterARefusalForGood) {
  HelloStory story;
  story.listens(kOwner).says(kAttacher, kDifferent).refuses(kOwner, kAttacher, kMismatch);
  story.tell(kAttacher, T::kHelloRefused, 0, 0, kMismatch).says(kAttacher, kDifferent);
  EXPECT_THAT(story.breaches(), ElementsAre("HelloRelation"));
}

TEST(HelloRulesTest, WelcomesWhatDiffers) {
  HelloStory story;
  story.listens(kOwner).says(kAttacher, kDifferent).welcomes(kOwner, kAttacher);
  EXPECT_THAT(story.breaches(), ElementsAre("WelcomeMeansAlike"));
}

TEST(HelloRulesTest, RefusesWhatIsAlike) {
  HelloStory story;
  story.listens(kOwner).says(kAttacher).refuses(kOwner, kAttacher, kMismatch);
  EXPECT_THAT(story.breaches(), ElementsAre("RefusedMeansDifferent"));
}

TEST(HelloRulesTest, WhatIsAlikeMayBeTurnedAway) {
  HelloStory story;
  story.listens(kOwner).says(kAttacher).refuses(kOwner, kAttacher, kBusy);
  story.tell(kAttacher, T::kHelloTurnedAway, 0, 0, kBusy);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(HelloRulesTest, IsWelcomeAtAnOwnerThatDidNotWelcomeIt) {
  HelloStory story;
  story.listens(kOwner).says(kAttacher).is_welcome(kAttacher, kOwner);
  EXPECT_THAT(story.breaches(), ElementsAre("WelcomedMeansWelcome"));
}

TEST(HelloRulesTest, AsksBeforeItIsWelcome) {
  HelloStory story;
  story.listens(kOwner).says(kAttacher).asks(kAttacher, kOwner);
  EXPECT_THAT(story.breaches(), ElementsAre("AsksOnceWelcomed"));
}

TEST(HelloRulesTest, AsksAnotherOwnerThanTheOneThatWelcomedIt) {
  EXPECT_THAT(welcomed().listens(kOther).asks(kAttacher, kOther).breaches(),
              ElementsAre("AsksOnceWelcomed"));
}

TEST(HelloRulesTest, AsksWhenItHasSaidHelloAgain) {
  EXPECT_THAT(welcomed().says(kAttacher).asks(kAttacher, kOwner).breaches(),
              ElementsAre("AsksOnceWelcomed"));
}

TEST(HelloRulesTest, AllocatesBeforeItListens) {
  HelloStory story;
  EXPECT_THAT(story.allocates(kOwner).breaches(), ElementsAre("AllocatesAsListener"));
}

TEST(HelloRulesTest, TheNextOwnerOfARankTakesOver) {
  EXPECT_THAT(welcomed().allocates(kOwner).listens(kOther).allocates(kOther).breaches(), IsEmpty());
}

TEST(HelloRulesTest, TwoOwnersOfOneRank) {
  EXPECT_THAT(welcomed().listens(kOther).allocates(kOwner).breaches(), ElementsAre("OneOwner"));
  EXPECT_THAT(welcomed().listens(kOther).says(kAttacher).welcomes(kOwner, kAttacher).breaches(),
              ElementsAre("OneOwner"));
}

TEST(HelloRulesTest, TheNextOwnerOfARankHasLostItsBeginning) {
  HelloStory story = welcomed();
  story.allocates(kOwner).listens(kOther).allocates(kOther).losing(kOther, 1);
  EXPECT_THAT(story.breaches(), IsEmpty());
  EXPECT_THAT(story.allocates(kOwner).breaches(), testing::Contains("OneOwner"));
}

TEST(HelloRulesTest, TheOwnerBeforeHasLostItsBeginning) {
  HelloStory story = welcomed();
  story.allocates(kOwner).listens(kOther).allocates(kOther).losing(kOwner, 1);
  EXPECT_THAT(story.breaches(), IsEmpty());
  EXPECT_THAT(story.tell(kOwner, T::kOwnerReap, session_of(kOwner)).breaches(),
              testing::Contains("OneOwner"));
}

TEST(HelloRulesTest, OwnersOfTwoRanks) {
  HelloStory story = welcomed();
  story.of_rank(kOther, 1).listens(kOther).allocates(kOwner).allocates(kOther);
  EXPECT_THAT(story.breaches(), IsEmpty());
}

TEST(HelloRulesTest, WhatIsLostIsNotHeldAgainstAnybody) {
  EXPECT_THAT(welcomed().allocates(kOwner).asks(kAttacher, kOwner).losing(kAttacher, 1).breaches(),
              IsEmpty());
  EXPECT_THAT(welcomed().allocates(kOwner).asks(kAttacher, kOwner).losing(kAttacher, 2).breaches(),
              IsEmpty());
  EXPECT_THAT(welcomed().allocates(kOwner).losing(kOwner, 1).breaches(), IsEmpty());
  EXPECT_THAT(welcomed().allocates(kOwner).losing(kOwner, 2).breaches(), IsEmpty());
}

}  // namespace
}  // namespace kvferry::ipc
