// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>

namespace kvferry::test {

/// What happens to the victim at a point. kStopForGood: stopped, until an operator ends it.
enum class Blow : std::uint8_t { kKill, kStop, kStopForGood, kDelay, kFail, kOrphan };
[[nodiscard]] const char* to_string(Blow blow) noexcept;

inline constexpr auto kBlows = std::to_array(
    {Blow::kKill, Blow::kStop, Blow::kStopForGood, Blow::kDelay, Blow::kFail, Blow::kOrphan});

/// Ends the child that an orphaning victim left behind, and waits for its death: until then it
/// shares what its parent had open, the instance's directory included.
[[nodiscard]] ipc::Status end_orphan(pid_t orphan);

/// FaultPlan::parse() takes it.
[[nodiscard]] std::string plan_of(ipc::Transition point, int occurrence, Blow blow);
/// The point's name with its occurrence and the blow, as the name of a test can have it.
[[nodiscard]] std::string name_of(ipc::Transition point, int occurrence, Blow blow);

}  // namespace kvferry::test
