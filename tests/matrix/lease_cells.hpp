// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_log.hpp"
#include "matrix/blow.hpp"

#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace kvferry::test {

/// How the point is reached.
enum class Scene {
  kClear,       ///< Init, map, clear, init again, end.
  kPeerDies,    ///< The other side is killed while the epoch is mapped.
  kPeerStalls,  ///< The other side is stopped while the epoch is mapped, then the epoch is cleared.
  kLateGrant,   ///< The attacher stops when its grant has come, and goes on when it is revoked.
  kNoOwner,     ///< The attacher comes first.
  kMisfit,      ///< The attacher has another geometry.
  kTurnedAway   ///< The owner cannot take it at first.
};

/// One cell of the matrix: a blow at a point of one side, in one of the four ways to share memory.
struct Cell {
  bool at_owner = false;
  ipc::Transition point = ipc::Transition::kNone;
  int occurrence = 1;
  Blow blow = Blow::kKill;
  std::string owner;    ///< "worker" or "mover".
  std::string handles;  ///< "vmm" or "legacy".
  Scene scene = Scene::kClear;
  std::string before;  ///< Planned faults that lead to the point.

  [[nodiscard]] std::string victim_kind() const;
  [[nodiscard]] std::string plan() const;
  [[nodiscard]] std::string name() const;
  /// Why there is no such cell.
  [[nodiscard]] std::optional<std::string> inapplicable() const;
};
std::ostream& operator<<(std::ostream& out, const Cell& cell);

/// All of them, those that do not apply included.
[[nodiscard]] std::vector<Cell> lease_cells();

}  // namespace kvferry::test
