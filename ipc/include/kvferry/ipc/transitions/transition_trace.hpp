// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::ipc {

/// One recorded transition. Sessions and incarnations are told by their low 64 bits.
struct TransitionRecord {
  std::chrono::nanoseconds time{};  ///< CLOCK_MONOTONIC; far from overflow.
  std::size_t writer = 0;           ///< Index into TransitionTrace::writers.
  std::uint64_t number = 0;         ///< Counts the writer's transitions of its ring, from 1.
  std::uint32_t thread = 0;
  Transition transition = Transition::kNone;
  std::uint64_t session = 0;
  Epoch epoch;
  LeaseId lease;  ///< Of the handshake.
  JobId job;      ///< Of jobs.
  std::uint64_t peer = 0;
  std::uint64_t detail = 0;
};

/// The transitions of all processes of an instance in one order: causes before effects.
struct TransitionTrace {
  struct Writer {
    TransitionWriter who;
    /// Its oldest transitions, overwritten; and those torn by its death.
    std::uint64_t lost = 0;       ///< Of the handshake.
    std::uint64_t lost_jobs = 0;  ///< Of jobs.
  };
  std::vector<Writer> writers;
  std::vector<TransitionRecord> records;
};

/// Reads all rings of an instance, running processes' as well as ended ones'. A ring that is not
/// well-formed is left out with a warning: what is in there is never trusted. Errors: kNotFound
/// when the instance has no rings, kPermission, kSystem.
[[nodiscard]] Result<TransitionTrace> read_transitions(const RuntimeDir& dir);

/// "mover chat/0 pid 4711: has mapped epoch 3 under lease 7".
[[nodiscard]] std::string describe(const TransitionTrace& trace, const TransitionRecord& record);

/// A record that the handshake does not allow at its place.
struct TransitionBreach {
  std::string_view rule;   ///< For example "FreedWhileMapped"; docs/reliability.md lists them.
  std::size_t record = 0;  ///< Index into TransitionTrace::records.
  std::string what;
};

/// Holds a trace to the rules of the handshake. Where a writer's oldest transitions are lost, what
/// they may have said is given the benefit of the doubt.
[[nodiscard]] std::vector<TransitionBreach> check_transitions(const TransitionTrace& trace);

}  // namespace kvferry::ipc
