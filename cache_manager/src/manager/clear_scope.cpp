// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/clear_scope.hpp"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <tuple>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// Reads "ENGINE.RANK.lease", the name that the owner of a rank's memory holds for life.
std::optional<UnknownOwner> parse_owner(const ipc::HeldName& held) {
  constexpr std::string_view kKind = ".lease";
  std::string_view rest = held.name;
  if (!rest.ends_with(kKind)) {
    return std::nullopt;
  }
  rest.remove_suffix(kKind.size());
  const std::size_t dot = rest.rfind('.');  // Engine names may have dots.
  if (dot == std::string_view::npos || dot == 0) {
    return std::nullopt;
  }
  const std::string_view digits = rest.substr(dot + 1);
  std::uint32_t rank = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error != std::errc{} || end != digits.data() + digits.size()) {
    return std::nullopt;
  }
  return UnknownOwner{std::string(rest.substr(0, dot)), ipc::Rank{rank}, held.pid};
}

}  // namespace

ipc::Result<ClearScope> find_scope(EngineDirectory& directory,
                                   const ipc::RuntimeDir& dir,
                                   const ipc::Peer& peer,
                                   const std::string& name) {
  ClearScope scope;
  // An engine's own client speaks for its engine alone.
  const ClientRecord* client = name.empty() ? directory.client(peer.id) : nullptr;
  EngineRecord* only = client != nullptr ? client->engine : directory.find(name);
  if (only != nullptr) {
    scope.engines.push_back(only);  // Nothing to look for: its ranks are known.
    return scope;
  }
  const auto is_meant = [&](const std::string& engine) { return name.empty() || engine == name; };
  for (const auto& [known, engine] : directory.engines()) {
    if (is_meant(known)) {
      scope.engines.push_back(engine.get());
    }
  }
  for (std::string& departed : directory.departed()) {
    if (is_meant(departed)) {
      scope.departed.push_back(std::move(departed));
    }
  }
  auto held = dir.held_names();
  if (!held) {
    scope.blind = std::move(held).error();
  } else {
    for (const ipc::HeldName& item : *held) {
      auto owner = parse_owner(item);
      if (owner && is_meant(owner->engine) && directory.find(owner->engine) == nullptr) {
        scope.unknown_owners.push_back(*std::move(owner));
      }
    }
  }
  std::sort(scope.unknown_owners.begin(), scope.unknown_owners.end(),
            [](const UnknownOwner& a, const UnknownOwner& b) {
              return std::tie(a.engine, a.rank.value) < std::tie(b.engine, b.rank.value);
            });
  if (!name.empty() && scope.engines.empty() && scope.departed.empty() &&
      scope.unknown_owners.empty() && !scope.blind) {
    return KVFERRY_ERROR(kNotFound, "instance {} has no engine {}: see status for the known ones",
                         dir.instance(), name);
  }
  return scope;
}

}  // namespace kvferry::cache_manager
