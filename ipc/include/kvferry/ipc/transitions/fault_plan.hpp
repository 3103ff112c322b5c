// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <chrono>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kvferry::ipc {

enum class Transition : std::uint32_t;

/// What a fault does to the process that takes a transition.
enum class FaultKind : std::uint8_t {
  kKill = 1,  ///< SIGKILL.
  kStop,      ///< SIGSTOP: whoever planned it continues the process, or ends it.
  kDelay,     ///< Sleeps.
  kFail,      ///< What comes next fails. For transitions before something that can.
  kOrphan     ///< Forks a child that keeps all that is mapped and open, then SIGKILL.
};
[[nodiscard]] std::string_view to_string(FaultKind kind) noexcept;

/// One of them, at the n-th time that the process takes the transition.
struct Fault {
  Transition at;
  std::uint32_t occurrence = 1;
  FaultKind kind = FaultKind::kKill;
  std::chrono::milliseconds delay{};
};

/// The faults of one process. They strike right after the transition was recorded: before what it
/// publishes is published, after what it observes was observed.
struct FaultPlan {
  std::vector<Fault> faults;

  /// "attacher.import=kill,owner.free#2=delay:200". Kinds: kill, stop, delay:MS, fail, orphan.
  /// Times are milliseconds. Errors: kInvalidArgument names the part; also in a build without fault
  /// points.
  [[nodiscard]] static Result<FaultPlan> parse(std::string_view text);
  /// Whether this build has fault points (CMake option KVFERRY_FAULT_POINTS).
  [[nodiscard]] static bool is_supported() noexcept;
};

}  // namespace kvferry::ipc
