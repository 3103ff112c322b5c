// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/components.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using ipc::Result;
using ipc::Status;

namespace {

/// Which part of the rule decided.
std::string_view rule_of(const ipc::ComponentRelease& release, bool has_allocator) {
  const ipc::ComponentState& component = release.component;
  if (component.strategy == ComponentStrategy::kResident) return "resident: it keeps it";
  if (!component.memory_intensive) return "not memory-intensive: allocator not emptied";
  if (!has_allocator) return "there is no allocator to empty";
  if (component.strategy == ComponentStrategy::kLayerwise) {
    return "large release (layer by layer): allocator emptied";
  }
  if (release.device_bytes_before == 0) return "there was nothing: allocator not emptied";
  if (component.device_bytes > 0) return "some of it is still there: allocator not emptied";
  return "large release (its storage is gone): allocator emptied";
}

}  // namespace

Status ComponentRegistry::add(ComponentSpec spec, Component& component) {
  if (!ipc::is_component_name(spec.name)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "component '{}': a name has 1 to {} of a-z, 0-9, '_', '-' and '.', and is "
                         "not 'all'",
                         spec.name, ipc::kLongestComponentName);
  }
  const std::lock_guard lock(mutex_);
  const bool taken = std::any_of(entries_.begin(), entries_.end(),
                                 [&](const Entry& entry) { return entry.spec.name == spec.name; });
  if (taken) {
    return KVFERRY_ERROR(kAlreadyExists, "component '{}' is registered already: remove it first",
                         spec.name);
  }
  entries_.push_back({std::move(spec), &component});
  return ipc::ok();
}

void ComponentRegistry::remove(std::string_view name) {
  const std::lock_guard no_release(releasing_);
  const std::lock_guard lock(mutex_);
  entries_.remove_if([&](const Entry& entry) { return entry.spec.name == name; });
}

std::vector<ipc::ComponentState> ComponentRegistry::components() const {
  const std::lock_guard lock(mutex_);
  std::vector<ipc::ComponentState> states;
  states.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    states.push_back({entry.spec.name, entry.spec.strategy, entry.spec.memory_intensive,
                      entry.component->device_bytes()});
  }
  return states;
}

Result<ComponentRegistry::Entry> ComponentRegistry::find(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.spec.name == name; });
  if (found != entries_.end()) return *found;
  return KVFERRY_ERROR(kNotFound, "no component '{}' is registered: add it first", name);
}

Result<ipc::ComponentRelease> ComponentRegistry::release(std::string_view name,
                                                         ipc::Deadline deadline) {
  const std::lock_guard one_at_a_time(releasing_);
  if (deadline.expired()) {
    return KVFERRY_ERROR(kBusy, "component '{}': the release of another one runs: retry", name);
  }
  KVFERRY_ASSIGN(const Entry entry, find(name));
  ipc::ComponentRelease release;
  release.device_bytes_before = entry.component->device_bytes();
  release.component = {entry.spec.name, entry.spec.strategy, entry.spec.memory_intensive,
                       release.device_bytes_before};
  if (entry.spec.strategy != ComponentStrategy::kResident) {
    KVFERRY_ASSIGN(release.component.device_bytes, entry.component->give_up(deadline));
  }
  if (const Status emptied = empty_after(release); !emptied) {
    ipc::Error error = emptied.error();
    error.message = fmt::format("{} -> {} on the device, which stay cached: {}",
                                ipc::format_size(release.device_bytes_before),
                                ipc::format_size(release.component.device_bytes), error.message);
    return error;
  }
  ipc::log_info("component {} ({}): {} -> {} on the device; {}{}", entry.spec.name,
                to_string(entry.spec.strategy), ipc::format_size(release.device_bytes_before),
                ipc::format_size(release.component.device_bytes),
                rule_of(release, empty_ != nullptr),
                release.emptied
                    ? fmt::format(", reserved {} -> {}", ipc::format_size(release.reserved_before),
                                  ipc::format_size(release.reserved_after))
                    : "");
  return release;
}

Status ComponentRegistry::empty_after(ipc::ComponentRelease& release) const {
  const ipc::ComponentState& component = release.component;
  if (!empty_ || !should_empty_after(component.memory_intensive, component.strategy,
                                     release.device_bytes_before, component.device_bytes)) {
    return ipc::ok();
  }
  KVFERRY_ASSIGN(const ipc::EmptiedCache emptied,
                 ipc::empty_or_warn(empty_, ipc::EmptyReason::kComponent));
  release.emptied = true;
  release.reserved_before = emptied.reserved_before;
  release.reserved_after = emptied.reserved_after;
  return ipc::ok();
}

}  // namespace kvferry::worker
