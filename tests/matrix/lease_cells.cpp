// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "matrix/lease_cells.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace kvferry::test {
namespace {

using ipc::Transition;

struct Point {
  Transition transition;
  bool can_fail = false;
  int occurrence = 1;
  Scene scene = Scene::kClear;
  const char* before = "";
  const char* only_victim = "";   ///< "worker" or "mover"; "": both.
  const char* only_handles = "";  ///< "vmm" or "legacy"; "": both.
};

constexpr auto kOwnerPoints = std::to_array<Point>({
    {Transition::kHelloListen},
    {Transition::kHelloWelcome, true},
    {Transition::kHelloRefuse, false, 1, Scene::kMisfit},
    {Transition::kOwnerAllocate, true},
    {Transition::kOwnerReady},
    {Transition::kOwnerPublished, false, 1},
    {Transition::kOwnerRecord},
    {Transition::kOwnerSend, true},
    {Transition::kOwnerGranted},
    {Transition::kOwnerWithdraw, false, 1, Scene::kClear, "owner.send=fail"},
    {Transition::kOwnerDrain, true},
    {Transition::kOwnerDrained},
    {Transition::kOwnerStuck, false, 1, Scene::kClear, "owner.drain=fail", "worker"},
    {Transition::kOwnerRevoke},
    {Transition::kOwnerPublished, false, 2},
    {Transition::kOwnerSeesRelease},
    {Transition::kOwnerSeesDeath, false, 1, Scene::kPeerDies},
    {Transition::kOwnerKill, false, 1, Scene::kPeerStalls, "", "worker"},
    {Transition::kOwnerFree, true},
    {Transition::kOwnerFreed},
    {Transition::kOwnerCleared},
    {Transition::kOwnerPublished, false, 3},
    {Transition::kOwnerKeep, false, 1, Scene::kPeerStalls, "", "mover"},
    {Transition::kOwnerQuarantined, false, 1, Scene::kPeerStalls, "", "mover"},
    {Transition::kOwnerReap, false, 1, Scene::kPeerStalls, "", "mover", "legacy"},
    {Transition::kOwnerShutdown},
});

constexpr auto kAttacherPoints = std::to_array<Point>({
    {Transition::kHelloMeet, false, 1, Scene::kNoOwner},
    {Transition::kHelloSay, true},
    {Transition::kHelloWelcomed},
    {Transition::kHelloTurnedAway, false, 1, Scene::kTurnedAway},
    {Transition::kHelloRefused, false, 1, Scene::kMisfit},
    {Transition::kHelloGivesUp, false, 1, Scene::kMisfit},
    {Transition::kAttacherAsk, true},
    {Transition::kAttacherAsked},
    {Transition::kAttacherGrant},
    {Transition::kAttacherReturn, false, 1, Scene::kLateGrant, "attacher.grant=stop"},
    {Transition::kAttacherImport, true},
    {Transition::kAttacherFailed, false, 1, Scene::kClear, "attacher.import=fail"},
    {Transition::kAttacherMapped, true},
    {Transition::kAttacherDrain, true},
    {Transition::kAttacherDrained},
    {Transition::kAttacherStuck, false, 1, Scene::kClear, "attacher.drain=fail", "worker"},
    {Transition::kAttacherUnmap, true},
    {Transition::kAttacherUnmapped},
    {Transition::kAttacherRelease},
    {Transition::kAttacherReleased},
    {Transition::kAttacherSeesDeath, false, 1, Scene::kPeerDies},
});

const Point& point_of(const Cell& cell) {
  const auto find = [&cell](const auto& points) -> const Point& {
    return *std::find_if(points.begin(), points.end(), [&cell](const Point& point) {
      return point.transition == cell.point && point.occurrence == cell.occurrence;
    });
  };
  return cell.at_owner ? find(kOwnerPoints) : find(kAttacherPoints);
}

template <typename Points>
void add_cells(const Points& points, bool at_owner, std::vector<Cell>& cells) {
  for (const Point& point : points) {
    for (const Blow blow : kBlows) {
      for (const char* owner : {"worker", "mover"}) {
        for (const char* handles : {"vmm", "legacy"}) {
          cells.push_back({at_owner, point.transition, point.occurrence, blow, owner, handles,
                           point.scene, point.before});
        }
      }
    }
  }
}

}  // namespace

std::string Cell::victim_kind() const {
  if (at_owner) return owner;
  return owner == "worker" ? "mover" : "worker";
}

std::string Cell::plan() const {
  return fmt::format("{}{}{}", before, before.empty() ? "" : ",", plan_of(point, occurrence, blow));
}

std::string Cell::name() const {
  return fmt::format("{}_{}_owns_{}", name_of(point, occurrence, blow), owner, handles);
}

std::optional<std::string> Cell::inapplicable() const {
  const Point& known = point_of(*this);
  if (blow == Blow::kFail && !known.can_fail) return "nothing that can fail comes next";
  const std::string only = known.only_victim;
  if (!only.empty() && only != victim_kind()) {
    switch (point) {
      case Transition::kOwnerStuck:
      case Transition::kAttacherStuck: return "a mover that cannot drain exits instead";
      case Transition::kOwnerKill: return "a worker is never killed";
      default: return "a mover that does not let go is killed, so there is no quarantine";
    }
  }
  const std::string only_handles = known.only_handles;
  if (!only_handles.empty() && only_handles != handles) {
    return "reference-counted memory comes back by itself when its holder lets go";
  }
  return std::nullopt;
}

std::ostream& operator<<(std::ostream& out, const Cell& cell) { return out << cell.name(); }

std::vector<Cell> lease_cells() {
  std::vector<Cell> cells;
  add_cells(kOwnerPoints, true, cells);
  add_cells(kAttacherPoints, false, cells);
  return cells;
}

}  // namespace kvferry::test
