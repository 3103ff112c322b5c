// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/transitions/fault_plan.hpp"

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

/// What the processes of an instance did, step by step, for people and for the checker: every
/// process writes its transitions to a ring in DIR/INSTANCE/transitions, which outlives it.
namespace kvferry::ipc {

enum class Transition : std::uint32_t {
  kNone = 0,
#define KVFERRY_TRANSITION(identifier, name, words) k##identifier,
#include "kvferry/ipc/transitions/transitions.inc"
  kEnd
};

/// Of the number that a hello tells of what it compares: who owns. That is all that attachers
/// compare with each other.
inline constexpr std::uint64_t kComparedRole = 3;

/// "owner.ready"; "unknown" for anything that is no transition.
[[nodiscard]] std::string_view to_string(Transition transition) noexcept;
[[nodiscard]] std::optional<Transition> parse_transition(std::string_view name) noexcept;
/// Whether it is a step of a job (TransitionFields::job), not one of the handshake.
[[nodiscard]] bool is_of_jobs(Transition transition) noexcept;

/// What a transition is about. Zero: says nothing.
struct TransitionFields {
  SessionId session = {};
  Epoch epoch = {};
  LeaseId lease = {};  ///< Of the handshake; a manager's: the number of its clear or re-init.
  JobId job = {};      ///< Of jobs.
  IncarnationId peer = {};
  std::uint64_t detail = 0;
};

/// Who writes a ring.
struct TransitionWriter {
  std::string role;  ///< "worker", "mover", "manager", "client".
  std::string engine = {};
  Rank rank = {};
  IncarnationId incarnation = {};
  pid_t pid = 0;       ///< Filled in by TransitionLog::create.
  bool ended = false;  ///< Read only: the process is gone.
};

/// The rings of one process, one for the handshake and one for jobs; copies write to the same ones.
/// Recording takes tens of nanoseconds, never waits and never fails. When a ring is full, its
/// oldest transitions are overwritten.
/// @threading record() from any thread. @lifetime the ring's file stays when the last copy goes, as
/// it does when the process is killed: later processes of the instance remove old ones, the last
/// one to leave the instance removes all.
class TransitionLog {
 public:
  static constexpr std::size_t kDefaultRecords = 4096;  ///< Of the handshake.
  static constexpr std::size_t kJobRecordsEach = 2;     ///< Of jobs, for each of the handshake.
  /// Rings of ended processes that are kept for a look at what happened.
  static constexpr std::size_t kEndedKept = 32;

  TransitionLog() = default;  ///< Records nothing.
  /// Errors: kInvalidArgument for a number of records that is no power of two; kSystem, kPermission
  /// as the file system says (a full one is found here, not at a later write).
  /// faults: what is to go wrong on the way, in tests.
  [[nodiscard]] static Result<TransitionLog> create(const RuntimeDir& dir,
                                                    TransitionWriter writer,
                                                    std::size_t records = kDefaultRecords,
                                                    FaultPlan faults = {});
  /// As create(); a process that cannot have a ring warns and works without. In a build with fault
  /// points, the environment's KVFERRY_FAULTS plans those of the process's first log
  /// (FaultPlan::parse).
  [[nodiscard]] static TransitionLog create_or_warn(const RuntimeDir& dir, TransitionWriter writer);

  void record(Transition transition, const TransitionFields& fields) const noexcept;
  /// For transitions before something that can fail: the failure that is planned here, else ok.
  [[nodiscard]] Status attempt(Transition transition, const TransitionFields& fields) const;

 private:
  class Ring;
  std::shared_ptr<Ring> ring_;
};

}  // namespace kvferry::ipc
