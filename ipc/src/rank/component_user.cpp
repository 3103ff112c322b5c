// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/component_user.hpp"

#include "kvferry/ipc/wire/component_messages.hpp"

#include <algorithm>

namespace kvferry::ipc {

std::string_view to_string(ComponentStrategy strategy) noexcept {
  switch (strategy) {
    case ComponentStrategy::kResident: return "resident";
    case ComponentStrategy::kOffloaded: return "offloaded";
    case ComponentStrategy::kLayerwise: return "layerwise";
  }
  return "invalid";
}

bool is_component_name(std::string_view name) noexcept {
  return !name.empty() && name.size() <= kLongestComponentName && name != "all" &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
                  c == '.';
         });
}

Status ComponentNames::check() const {
  if (names.size() > kMost) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} components are named, at most {} can be: ask again "
                         "for the others, or for all",
                         names.size(), kMost);
  }
  if (all && !names.empty()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "all components and {} by name: give one "
                         "of the two",
                         names.size());
  }
  for (const std::string& name : names) {
    if (is_component_name(name)) continue;
    return KVFERRY_ERROR(kInvalidArgument,
                         "a component's name of {} bytes: it has 1 to {} of a-z, 0-9, '_', '-' and "
                         "'.', and is not 'all'",
                         name.size(), kLongestComponentName);
  }
  return ok();
}

Status RankComponentsReply::check() const {
  const bool named = std::all_of(components.begin(), components.end(), [](const auto& one) {
    return is_component_name(one.outcome.component.name);
  });
  if (named && components.size() <= kMost) return ok();
  return KVFERRY_ERROR(kProtocol,
                       "a worker tells of {} components{}: at most {} with names of 1 to "
                       "{} bytes are taken",
                       components.size(), named ? "" : ", some without a name", kMost,
                       kLongestComponentName);
}

}  // namespace kvferry::ipc
