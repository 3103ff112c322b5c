// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/transition_names.hpp"

#include <algorithm>
#include <array>

namespace kvferry::ipc {
namespace {

struct Names {
  std::string_view name;
  std::string_view words;
  bool of_jobs;
};

constexpr auto kNames = std::to_array<Names>({
#define KVFERRY_TRANSITION(identifier, name, words) {name, words, false},
#define KVFERRY_JOB_TRANSITION(identifier, name, words) {name, words, true},
#include "kvferry/ipc/transitions/transitions.inc"
});
static_assert(kNames.size() + 1 == static_cast<std::size_t>(Transition::kEnd));

const Names* find(Transition transition) noexcept {
  const auto index = static_cast<std::size_t>(transition);
  return index == 0 || index > kNames.size() ? nullptr : &kNames[index - 1];
}

}  // namespace

std::string_view to_string(Transition transition) noexcept {
  const Names* names = find(transition);
  return names == nullptr ? "unknown" : names->name;
}

std::optional<Transition> parse_transition(std::string_view name) noexcept {
  const auto* found = std::find_if(kNames.begin(), kNames.end(),
                                   [name](const Names& names) { return names.name == name; });
  if (found == kNames.end()) return std::nullopt;
  return static_cast<Transition>(found - kNames.begin() + 1);
}

bool is_of_jobs(Transition transition) noexcept {
  const Names* names = find(transition);
  return names != nullptr && names->of_jobs;
}

std::string_view transitions::words_of(Transition transition) noexcept {
  const Names* names = find(transition);
  return names == nullptr ? "takes a transition that this version does not know" : names->words;
}

}  // namespace kvferry::ipc
