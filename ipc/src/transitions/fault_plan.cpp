// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/transitions/fault_plan.hpp"

#include "kvferry/ipc/transitions/transition_log.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr auto kKinds = std::to_array<std::pair<std::string_view, FaultKind>>({
    {"kill", FaultKind::kKill},
    {"stop", FaultKind::kStop},
    {"delay", FaultKind::kDelay},
    {"fail", FaultKind::kFail},
    {"orphan", FaultKind::kOrphan},
});
constexpr std::uint32_t kLongestDelayMs = 600'000;

/// "a<separator>b": cuts it off and returns b; nothing when there is no separator.
std::optional<std::string_view> cut(std::string_view& text, char separator) {
  const std::size_t at = text.find(separator);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view rest = text.substr(at + 1);
  text = text.substr(0, at);
  return rest;
}

std::optional<std::uint32_t> to_number(std::string_view text) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Result<Fault> parse_fault(std::string_view text) {
  const std::string_view whole = text;
  const auto wrong = [whole](std::string_view why) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "fault '{}': {}; write TRANSITION[#N]=kill|stop|delay:MS|fail|orphan",
                         whole, why);
  };
  std::optional<std::string_view> what = cut(text, '=');
  if (!what) return wrong("it has no '='");
  Fault fault;
  if (const auto occurrence = cut(text, '#')) {
    const auto number = to_number(*occurrence);
    if (!number || *number == 0) return wrong("after '#' comes a number from 1");
    fault.occurrence = *number;
  }
  const auto transition = parse_transition(text);
  if (!transition) return wrong("there is no such transition");
  fault.at = *transition;
  const auto delay = cut(*what, ':');
  const auto* kind = std::find_if(kKinds.begin(), kKinds.end(),
                                  [&](const auto& known) { return known.first == *what; });
  if (kind == kKinds.end()) return wrong("there is no such kind");
  fault.kind = kind->second;
  if ((fault.kind == FaultKind::kDelay) != delay.has_value()) {
    return wrong("a delay, and nothing else, has a time in milliseconds");
  }
  if (delay) {
    const auto number = to_number(*delay);
    if (!number || *number > kLongestDelayMs) return wrong("a delay is at most ten minutes");
    fault.delay = std::chrono::milliseconds(*number);
  }
  return fault;
}

}  // namespace

std::string_view to_string(FaultKind kind) noexcept {
  for (const auto& [name, known] : kKinds) {
    if (known == kind) return name;
  }
  return "unknown";
}

Result<FaultPlan> FaultPlan::parse(std::string_view text) {
  FaultPlan plan;
  while (!text.empty()) {
    const auto rest = cut(text, ',');
    KVFERRY_ASSIGN(const Fault fault, parse_fault(text));
    plan.faults.push_back(fault);
    text = rest.value_or(std::string_view());
  }
  if (!plan.faults.empty() && !is_supported()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} faults are planned, but this build has no fault points; build with "
                         "-DKVFERRY_FAULT_POINTS=ON",
                         plan.faults.size());
  }
  return plan;
}

bool FaultPlan::is_supported() noexcept {
#if defined(KVFERRY_FAULT_POINTS)
  return true;
#else
  return false;
#endif
}

}  // namespace kvferry::ipc
