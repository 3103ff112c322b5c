// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "support/instance_checks.hpp"

#include "kvferry/ipc/transitions/transition_trace.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::test {

std::vector<std::string> find_breaches(const ipc::RuntimeDir& instance) {
  constexpr std::size_t kStory = 24;
  const auto trace = ipc::read_transitions(instance);
  if (!trace) return {trace.error().to_string()};
  std::vector<std::string> found;
  for (const ipc::TransitionBreach& breach : ipc::check_transitions(*trace)) {
    std::string text = fmt::format("{}: {}\n", breach.rule, breach.what);
    const std::size_t first = breach.record - std::min(breach.record, kStory);
    for (std::size_t i = first; i <= breach.record; ++i) {
      text += "  " + ipc::describe(*trace, trace->records[i]) + "\n";
    }
    found.push_back(std::move(text));
  }
  return found;
}

std::vector<std::string> names_below(const std::filesystem::path& folder) {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_directory() || entry.path().parent_path().filename() == "transitions") continue;
    found.push_back(entry.path().filename().native());
  }
  return found;
}

}  // namespace kvferry::test
