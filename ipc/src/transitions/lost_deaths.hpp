// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_trace.hpp"

#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

namespace kvferry::ipc {

/// Deaths that somebody saw and whose record may be lost: rings of the handshake turn over sooner
/// than those of jobs, so that a job's story may outlive the proof that its mover is dead.
class LostDeaths {
 public:
  explicit LostDeaths(const TransitionTrace& trace);

  /// Whether the writer's death may have been seen before this record: the writer has recorded
  /// nothing since, and somebody has lost all that it recorded right after the writer's last word.
  [[nodiscard]] bool may_be_of(std::size_t writer, const TransitionRecord& before) const;

 private:
  std::vector<std::chrono::nanoseconds> last_;  ///< By writer: its last record of either ring.
  /// Of each writer that has lost records of the handshake, the first one kept.
  std::vector<std::pair<std::size_t, std::chrono::nanoseconds>> kept_since_;
};

}  // namespace kvferry::ipc
