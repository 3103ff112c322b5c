// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_log.hpp"
#include "matrix/blow.hpp"

#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {

/// One cell: a blow at a point of a job's way, or of what is around it, at one of the four
/// processes of an instance.
struct JobCell {
  std::string victim;  ///< "manager", "worker", "mover" or "engine".
  ipc::Transition point = ipc::Transition::kNone;
  int occurrence = 1;
  Blow blow = Blow::kKill;
  std::string owner;    ///< "worker" or "mover".
  std::string handles;  ///< "vmm" or "legacy".
  /// What leads to the point: faults of another process, by its name.
  std::pair<std::string, std::string> other;
  bool can_fail = false;
  bool by_layers = false;  ///< What the engine does until the blow, and at first after it.

  [[nodiscard]] std::string name() const;
  /// Why there is no such cell.
  [[nodiscard]] std::optional<std::string> inapplicable() const;
};
std::ostream& operator<<(std::ostream& out, const JobCell& cell);

/// All of them, those that do not apply included.
[[nodiscard]] std::vector<JobCell> job_cells();

}  // namespace kvferry::test
