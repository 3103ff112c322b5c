// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "matrix/job_cells.hpp"

#include <fmt/format.h>

#include <array>

namespace kvferry::test {
namespace {

using ipc::Transition;

struct Point {
  const char* victim;
  Transition transition;
  int occurrence = 1;
  bool can_fail = false;
  const char* other = "";  ///< Who else is struck,
  const char* plan = "";   ///< and by what.
};

// In a round of the engine the first job is a store (gather, copy), the second one a load (copy,
// scatter); later ones are of the same kinds.
constexpr auto kPoints = std::to_array<Point>({
    {"mover", Transition::kPeerRegister, 1, true},
    {"mover", Transition::kPeerRegistered},
    {"mover", Transition::kMoverAdmit, 1, true},
    {"mover", Transition::kMoverStart},
    {"mover", Transition::kMoverAsk, 1, true},
    {"mover", Transition::kMoverSeesHandOver},
    {"mover", Transition::kMoverCopy, 1, true},
    {"mover", Transition::kMoverCopying},
    {"mover", Transition::kMoverCopied},
    {"mover", Transition::kMoverAnswer},
    {"mover", Transition::kMoverCopy, 2, true},
    {"mover", Transition::kMoverCopying, 2},
    {"mover", Transition::kMoverCopied, 2},
    {"mover", Transition::kMoverAsk, 2, true},
    {"mover", Transition::kMoverSeesHandOver, 2},
    {"mover", Transition::kMoverAnswer, 2},
    {"mover", Transition::kMoverAbandon, 1, false, "worker", "staging.launch=kill"},
    {"mover", Transition::kMoverSeesDeath, 1, false, "worker", "staging.launch=kill"},
    // The last store of a round has the cache cleared under it: a mover that lets go meanwhile has
    // the worker's word over a new connection.
    {"mover", Transition::kMoverProof, 1, false, "worker", "staging.launch#6=delay:600"},
    {"worker", Transition::kPeerRegister, 1, true},
    {"worker", Transition::kPeerRegistered},
    {"worker", Transition::kStagingWelcome},
    {"worker", Transition::kStagingLaunch, 1, true},
    {"worker", Transition::kStagingEnded},
    {"worker", Transition::kStagingAnswer},
    {"worker", Transition::kStagingLaunch, 2, true},
    {"worker", Transition::kStagingEnded, 2},
    {"worker", Transition::kStagingAnswer, 2},
    {"worker", Transition::kStagingQuiesced, 1, false, "mover", "mover.copied=kill"},
    {"worker", Transition::kStagingSettled, 1, false, "mover", "mover.copied=kill"},
    {"manager", Transition::kManagerRegister},
    {"manager", Transition::kManagerRegister, 2},
    {"manager", Transition::kManagerRegister, 3},
    {"manager", Transition::kManagerTake},
    {"manager", Transition::kManagerSend, 1, true},
    {"manager", Transition::kManagerSent},
    {"manager", Transition::kManagerSeesEnd},
    {"manager", Transition::kManagerCommit},
    {"manager", Transition::kManagerEnd},
    {"manager", Transition::kManagerAnswer},
    {"manager", Transition::kManagerTake, 2},
    {"manager", Transition::kManagerSend, 2, true},
    {"manager", Transition::kManagerSeesEnd, 2},
    {"manager", Transition::kManagerEnd, 2},
    {"manager", Transition::kManagerAnswer, 2},
    {"manager", Transition::kManagerClear},
    {"manager", Transition::kManagerSeesCleared},
    {"manager", Transition::kManagerReinit},
    {"manager", Transition::kManagerSeesReady},
    {"manager", Transition::kManagerTellsCleared},
    {"manager", Transition::kManagerTellsReady},
    {"manager", Transition::kManagerGivesUp, 1, false, "mover",
     "owner.drain=kill,attacher.drain=kill"},
    {"manager", Transition::kManagerSeesDeath, 1, false, "mover", "mover.copy=kill"},
    {"manager", Transition::kManagerWritesOff, 1, false, "mover", "mover.copy=kill"},
    {"manager", Transition::kManagerKill, 1, false, "mover", "mover.copy=delay:4000"},
    {"engine", Transition::kPeerRegister, 1, true},
    {"engine", Transition::kPeerRegistered},
    {"engine", Transition::kEngineSubmit, 1, true},
    {"engine", Transition::kEngineSubmitted},
    {"engine", Transition::kEngineDone},
    {"engine", Transition::kEngineSubmit, 2, true},
    {"engine", Transition::kEngineSubmitted, 2},
    {"engine", Transition::kEngineDone, 2},
    // Of the handshake, which has a matrix of its own: here with jobs, a manager and a supervisor.
    {"owner", Transition::kOwnerAllocate, 2, true},
    {"owner", Transition::kOwnerReady},
    {"owner", Transition::kOwnerGranted},
    {"owner", Transition::kOwnerDrain, 1, true},
    {"owner", Transition::kOwnerRevoke},
    {"owner", Transition::kOwnerSeesRelease},
    {"owner", Transition::kOwnerFree, 1, true},
    {"owner", Transition::kOwnerCleared},
    {"attacher", Transition::kAttacherGrant},
    {"attacher", Transition::kAttacherImport, 1, true},
    {"attacher", Transition::kAttacherMapped, 1, true},
    {"attacher", Transition::kAttacherDrain, 1, true},
    {"attacher", Transition::kAttacherDrained},
    {"attacher", Transition::kAttacherUnmap, 1, true},
    {"attacher", Transition::kAttacherRelease},
    {"attacher", Transition::kAttacherReleased},
});

// Layer by layer a job has two hand-overs: the first layer, and the others. The first job is a
// store, the second one a load: here it goes wrong between the layers of the one or the other, or
// while nobody computes what is to be stored, or needs what is being loaded.
constexpr auto kPointsByLayers = std::to_array<Point>({
    {"mover", Transition::kMoverAsk, 2, true},
    {"mover", Transition::kMoverCopied},
    {"mover", Transition::kMoverSeesHandOver, 3},
    {"mover", Transition::kMoverAsk, 4, true},
    {"worker", Transition::kStagingLaunch, 2, true},
    {"worker", Transition::kStagingLaunch, 4, true},
    {"manager", Transition::kManagerSent},
    {"manager", Transition::kManagerSent, 2},
    {"engine", Transition::kEngineSubmitted},
    {"engine", Transition::kEngineSubmitted, 2},
});

/// Which process of an instance a point's victim is.
std::string resolve(const std::string& victim, const std::string& owner) {
  if (victim == "owner") return owner;
  if (victim == "attacher") return owner == "worker" ? "mover" : "worker";
  return victim;
}

void add_cells(std::vector<JobCell>& cells, const Point& point, bool by_layers) {
  for (const Blow blow : kBlows) {
    for (const char* owner : {"worker", "mover"}) {
      for (const char* handles : {"vmm", "legacy"}) {
        cells.push_back({resolve(point.victim, owner),
                         point.transition,
                         point.occurrence,
                         blow,
                         owner,
                         handles,
                         {point.other, point.plan},
                         point.can_fail,
                         by_layers});
      }
    }
  }
}

}  // namespace

std::string JobCell::name() const {
  return fmt::format("{}_{}{}_{}_owns_{}", victim, name_of(point, occurrence, blow),
                     by_layers ? "_by_layers" : "", owner, handles);
}

std::optional<std::string> JobCell::inapplicable() const {
  if (blow == Blow::kFail && !can_fail) return "nothing that can fail comes next";
  return std::nullopt;
}

std::ostream& operator<<(std::ostream& out, const JobCell& cell) { return out << cell.name(); }

std::vector<JobCell> job_cells() {
  std::vector<JobCell> cells;
  for (const Point& point : kPoints) add_cells(cells, point, /*by_layers=*/false);
  for (const Point& point : kPointsByLayers) add_cells(cells, point, /*by_layers=*/true);
  return cells;
}

}  // namespace kvferry::test
