// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "support/instance_checks.hpp"

#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "transitions/relation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <set>

namespace kvferry::test {
namespace {

// Which moves of the relation the code makes, for scripts/matrix.sh.
void report(const std::set<const ipc::relation::Move*>& moves) {
  const std::string path = ipc::environment("KVFERRY_MOVES_REPORT");
  if (path.empty()) return;
  std::ofstream file(path, std::ios::app);
  for (const ipc::relation::Move* move : moves) {
    file << "move " << ipc::relation::describe(*move) << "\n";
  }
}

}  // namespace

std::vector<std::string> find_breaches(const ipc::RuntimeDir& instance) {
  constexpr std::size_t kStory = 24;
  const auto trace = ipc::read_transitions(instance);
  if (!trace) return {trace.error().to_string()};
  std::vector<std::string> found;
  std::set<const ipc::relation::Move*> taken;
  for (const ipc::TransitionBreach& breach : ipc::relation::check(*trace, taken)) {
    std::string text = fmt::format("{}: {}\n", breach.rule, breach.what);
    const std::size_t first = breach.record - std::min(breach.record, kStory);
    for (std::size_t i = first; i <= breach.record; ++i) {
      text += "  " + ipc::describe(*trace, trace->records[i]) + "\n";
    }
    found.push_back(std::move(text));
  }
  report(taken);
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
