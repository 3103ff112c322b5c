// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/rank/component_user.hpp"
#include "kvferry/ipc/rank/emptied_cache.hpp"

#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

/// Parts of a worker that have device memory beside the arena, and the one rule by which their
/// releases empty the caching allocator. The rule is the one of SGLang's change 24397: an emptying
/// synchronises the device, so only a release that is worth it is followed by one.
namespace kvferry::worker {

using ipc::ComponentStrategy;

/// Whether the release of a component is worth emptying the allocator: only of a memory-intensive
/// one whose device storage was there and is gone, or that is offloaded layer by layer (whose
/// storage comes and goes while it is used).
[[nodiscard]] constexpr bool should_empty_after(bool memory_intensive,
                                                ComponentStrategy strategy,
                                                std::uint64_t device_bytes_before,
                                                std::uint64_t device_bytes_after) noexcept {
  const bool storage_gone = device_bytes_before > 0 && device_bytes_after == 0;
  return memory_intensive && (storage_gone || strategy == ComponentStrategy::kLayerwise);
}

/// What a component does when its use ends; an engine's code.
class Component {
 public:
  Component() = default;
  Component(const Component&) = delete;
  Component& operator=(const Component&) = delete;
  virtual ~Component() = default;

  /// What it has on the device. A pure observation, that waits for nothing. @threading any
  [[nodiscard]] virtual std::uint64_t device_bytes() const = 0;
  /// Gives back to the caching allocator what its strategy does not keep, and returns how many
  /// bytes it still has then: a step that runs meanwhile may take it again at once. Not called of a
  /// resident one. All device work on what it gives back has been observed complete.
  /// @threading one call at a time; steps may run meanwhile
  [[nodiscard]] virtual ipc::Result<std::uint64_t> give_up(ipc::Deadline deadline) = 0;
};

struct ComponentSpec {
  std::string name;  ///< ipc::is_component_name(); once in a process.
  ComponentStrategy strategy = ComponentStrategy::kResident;
  bool memory_intensive = false;  ///< So large that memory kept of it is worth an emptying.
};

/// The components of a worker's process. An engine calls release() where a component's use ends;
/// operators reach it with `kvferry components` (WorkerHooks::components).
/// @threading any. @lifetime outlives the worker's registration; a component outlives remove(), or
/// the registry.
class ComponentRegistry final : public ipc::ComponentUser {
 public:
  /// empty: of the caching allocator that the components give their memory back to, called with
  /// EmptyReason::kComponent.
  explicit ComponentRegistry(ipc::EmptyAllocator empty) : empty_(std::move(empty)) {}

  /// kInvalidArgument for a name that is none, kAlreadyExists for one that is taken.
  [[nodiscard]] ipc::Status add(ComponentSpec spec, Component& component);
  /// Waits for a release that runs, to that one's deadline. Of an unknown name: nothing. Not from
  /// within give_up().
  void remove(std::string_view name);

  [[nodiscard]] std::vector<ipc::ComponentState> components() const override;
  /// Ends a component's use, empties the allocator where the rule says so, and logs component, rule
  /// and bytes. One at a time: others wait, or are kBusy at their deadline. Not from within
  /// give_up(). kNotFound; else what give_up() or the emptying failed
  /// with.
  [[nodiscard]] ipc::Result<ipc::ComponentRelease> release(std::string_view name,
                                                           ipc::Deadline deadline) override;

 private:
  struct Entry {
    ComponentSpec spec;
    Component* component = nullptr;
  };
  [[nodiscard]] ipc::Result<Entry> find(std::string_view name) const;
  [[nodiscard]] ipc::Status empty_after(ipc::ComponentRelease& release) const;

  const ipc::EmptyAllocator empty_;
  std::mutex releasing_;      ///< Held by the one release that runs. Before mutex_.
  mutable std::mutex mutex_;  ///< Guards entries_.
  std::list<Entry> entries_;  ///< In the order of their registration.
};

}  // namespace kvferry::worker
