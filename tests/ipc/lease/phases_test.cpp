// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The model that scripts/model.sh checks and the code have one transition relation: this test reads
// the model's own table.
#include "kvferry/ipc/lease/words.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace kvferry::ipc {
namespace {

struct ModelPhase {
  LeasePhase phase;
  std::uint64_t value;
};

struct ModelMove {
  LeasePhase from;
  LeasePhase to;
  std::uint64_t epoch_step;
};

const std::vector<ModelPhase>& model_phases() {
  static const std::vector<ModelPhase> kPhases{
#define PHASE(name, value) {LeasePhase::k##name, value},
#include "phases.inc"
  };
  return kPhases;
}

const std::vector<ModelMove>& model_moves() {
  static const std::vector<ModelMove> kMoves{
#define MOVE(from, to, epoch_step) {LeasePhase::k##from, LeasePhase::k##to, epoch_step},
#include "phases.inc"
  };
  return kMoves;
}

bool model_can_move(words::OwnerState from, words::OwnerState to) {
  for (const ModelMove& move : model_moves()) {
    if (move.from == from.phase && move.to == to.phase &&
        to.epoch.value == from.epoch.value + move.epoch_step) {
      return true;
    }
  }
  return false;
}

TEST(LeasePhasesTest, ModelAndCodeNumberTheSamePhases) {
  for (const ModelPhase& known : model_phases()) {
    EXPECT_EQ(static_cast<std::uint64_t>(known.phase), known.value) << to_string(known.phase);
  }
  // The code reads one phase more than the last one as a protocol error.
  words::OwnerState state;
  EXPECT_TRUE(words::unpack(model_phases().size() - 1, state));
  EXPECT_FALSE(words::unpack(model_phases().size(), state));
}

TEST(LeasePhasesTest, ModelAndCodeAllowTheSameMovesBetweenAllPairsOfWords) {
  constexpr std::uint64_t kEpoch = 5;
  for (const ModelPhase& from : model_phases()) {
    for (const ModelPhase& to : model_phases()) {
      for (std::uint64_t epoch = kEpoch - 1; epoch <= kEpoch + 2; ++epoch) {
        const words::OwnerState before{Epoch{kEpoch}, from.phase};
        const words::OwnerState after{Epoch{epoch}, to.phase};
        EXPECT_EQ(words::can_move(before, after), model_can_move(before, after))
            << to_string(from.phase) << " -> epoch " << epoch << " " << to_string(to.phase);
      }
    }
  }
}

}  // namespace
}  // namespace kvferry::ipc
