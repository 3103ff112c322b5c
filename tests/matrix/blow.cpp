// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "matrix/blow.hpp"

#include "kvferry/ipc/os/process.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>

namespace kvferry::test {

const char* to_string(Blow blow) noexcept {
  switch (blow) {
    case Blow::kKill: return "kill";
    case Blow::kStop: return "stop";
    case Blow::kStopForGood: return "stop_for_good";
    case Blow::kDelay: return "delay";
    case Blow::kFail: return "fail";
    case Blow::kOrphan: return "orphan";
  }
  return "unknown";
}

ipc::Status end_orphan(pid_t orphan) {
  constexpr std::chrono::seconds kDies{20};
  if (orphan <= 0) return KVFERRY_ERROR(kInvalidArgument, "the victim left no child");
  KVFERRY_ASSIGN(const ipc::ProcessRef process, ipc::ProcessRef::of_pid(orphan));
  KVFERRY_TRY(process.signal(SIGKILL));
  if (process.wait_death(ipc::Deadline::after(kDies))) return ipc::ok();
  return KVFERRY_ERROR(kTimeout, "process {} was killed and is not dead after {} s", orphan,
                       kDies.count());
}

std::string plan_of(ipc::Transition point, int occurrence, Blow blow) {
  const char* kind = blow == Blow::kStopForGood ? "stop" : to_string(blow);
  return fmt::format("{}#{}={}{}", ipc::to_string(point), occurrence, kind,
                     blow == Blow::kDelay ? ":300" : "");
}

std::string name_of(ipc::Transition point, int occurrence, Blow blow) {
  std::string text = fmt::format("{}_{}_{}", ipc::to_string(point), occurrence, to_string(blow));
  std::replace(text.begin(), text.end(), '.', '_');
  return text;
}

}  // namespace kvferry::test
