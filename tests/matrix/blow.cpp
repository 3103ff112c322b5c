// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "matrix/blow.hpp"

#include <fmt/format.h>

#include <algorithm>

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
