// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/prepare_mark.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::ipc::lease {
namespace {

using State = PrepareMark::State;

constexpr LeaseId kOwn{5};
constexpr LeaseId kOther{6};

/// The mark in each state; preparing and prepared by kOwn.
PrepareMark mark_in(State state) {
  PrepareMark mark;
  if (state != State::kUnprepared) (void)mark.grant(kOwn);
  if (state == State::kPrepared) (void)mark.acknowledge(kOwn);
  EXPECT_EQ(mark.state(), state);
  return mark;
}

struct Move {
  std::string event;
  State from;
  std::function<bool(PrepareMark&)> apply;
  State to;
  bool changes;
};

// Every event in every state, but for a grant while somebody prepares (see the death test).
std::vector<Move> every_move() {
  std::vector<Move> moves;
  for (const State from : {State::kUnprepared, State::kPreparing, State::kPrepared}) {
    const bool preparing = from == State::kPreparing;
    const auto add = [&](std::string event, std::function<bool(PrepareMark&)> apply, State to,
                         bool changes) {
      moves.push_back({std::move(event), from, std::move(apply), to, changes});
    };
    add(
        "own says done", [](PrepareMark& m) { return m.acknowledge(kOwn); },
        preparing ? State::kPrepared : from, preparing);
    add(
        "another says done", [](PrepareMark& m) { return m.acknowledge(kOther); }, from, false);
    add(
        "nobody says done", [](PrepareMark& m) { return m.acknowledge(LeaseId{}); }, from, false);
    add(
        "own ends", [](PrepareMark& m) { return m.ended(kOwn); },
        preparing ? State::kUnprepared : from, preparing);
    add(
        "another ends", [](PrepareMark& m) { return m.ended(kOther); }, from, false);
    add(
        "a new epoch of a worker", [](PrepareMark& m) { return m.begin(true), true; },
        State::kPrepared, true);
    add(
        "a new epoch of a mover", [](PrepareMark& m) { return m.begin(false), true; },
        State::kUnprepared, true);
  }
  return moves;
}

TEST(PrepareMarkTest, MovesAsItsTableSaysAndInNoOtherWay) {
  for (const Move& move : every_move()) {
    PrepareMark mark = mark_in(move.from);
    EXPECT_EQ(move.apply(mark), move.changes) << move.event << static_cast<int>(move.from);
    EXPECT_EQ(mark.state(), move.to) << move.event << " from " << static_cast<int>(move.from);
  }
}

TEST(PrepareMarkTest, FirstGrantAsksForZeroingAndLaterOnesSayWhoDidIt) {
  PrepareMark mark;
  mark.begin(false);
  EXPECT_EQ(mark.grant(kOwn), std::nullopt);
  EXPECT_EQ(mark.prepared_by(), LeaseId{});
  ASSERT_TRUE(mark.acknowledge(kOwn));
  EXPECT_EQ(mark.prepared_by(), kOwn);
  EXPECT_FALSE(mark.ended(kOwn)) << "what was zeroed stays so";
  EXPECT_EQ(mark.grant(kOther), kOwn);
  EXPECT_FALSE(mark.ended(kOther));
  EXPECT_EQ(mark.grant(LeaseId{7}), kOwn);
}

TEST(PrepareMarkTest, HolderThatEndsBeforeItIsDoneLeavesAllToTheNext) {
  PrepareMark mark;
  EXPECT_EQ(mark.grant(kOwn), std::nullopt);
  EXPECT_TRUE(mark.ended(kOwn));
  EXPECT_EQ(mark.grant(kOther), std::nullopt);
  EXPECT_FALSE(mark.acknowledge(kOwn)) << "too late: another one has begun";
  EXPECT_TRUE(mark.acknowledge(kOther));
  EXPECT_EQ(mark.prepared_by(), kOther);
}

TEST(PrepareMarkTest, OwnersOwnZeroingIsLeaseZero) {
  PrepareMark mark;
  mark.begin(true);
  EXPECT_EQ(mark.grant(kOwn), LeaseId{});
  EXPECT_EQ(mark.prepared_by(), LeaseId{});
}

TEST(PrepareMarkTest, NextEpochIsAsUnpreparedAsTheFirst) {
  PrepareMark mark = mark_in(State::kPrepared);
  mark.begin(false);
  EXPECT_EQ(mark.prepared_by(), LeaseId{});
  EXPECT_EQ(mark.grant(kOther), std::nullopt);
}

TEST(PrepareMarkDeathTest, TwoNeverPrepareAtOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  PrepareMark mark = mark_in(State::kPreparing);
  EXPECT_DEATH((void)mark.grant(kOther), "two processes would zero one epoch");
}

}  // namespace
}  // namespace kvferry::ipc::lease
