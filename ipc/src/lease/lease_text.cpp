// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/lease/lease.hpp"

namespace kvferry::ipc {

std::string_view to_string(CacheOwner owner) noexcept {
  switch (owner) {
    case CacheOwner::kWorker: return "worker";
    case CacheOwner::kMover: return "mover";
  }
  return "invalid";
}

std::string_view to_string(ProcessKind kind) noexcept {
  switch (kind) {
    case ProcessKind::kWorker: return "worker";
    case ProcessKind::kMover: return "mover";
    case ProcessKind::kEngine: return "engine";
    case ProcessKind::kOperator: return "operator";
    case ProcessKind::kManager: return "manager";
  }
  return "invalid";
}

std::string_view to_string(LeasePhase phase) noexcept {
  switch (phase) {
    case LeasePhase::kVacant: return "vacant";
    case LeasePhase::kReady: return "ready";
    case LeasePhase::kRevoking: return "revoking";
    case LeasePhase::kCleared: return "cleared";
    case LeasePhase::kQuarantined: return "quarantined";
    case LeasePhase::kShutdown: return "shutdown";
  }
  return "invalid";
}

std::string_view to_string(ClearKind kind) noexcept {
  switch (kind) {
    case ClearKind::kCleared: return "cleared";
    case ClearKind::kClearedPeerDead: return "cleared_peer_dead";
    case ClearKind::kQuarantined: return "quarantined";
  }
  return "invalid";
}

}  // namespace kvferry::ipc
