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

Status ComponentNames::check() const {
  if (names.size() > kMost) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} components are named, at most {} can be: ask again "
                         "for the others, or for all",
                         names.size(), kMost);
  }
  if (all && !names.empty()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "all components and {} by name ('{}' first): give one "
                         "of the two",
                         names.size(), names.front());
  }
  if (std::any_of(names.begin(), names.end(), [](const auto& name) { return name.empty(); })) {
    return KVFERRY_ERROR(kInvalidArgument, "a component without a name: leave it out");
  }
  return ok();
}

}  // namespace kvferry::ipc
