// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::ipc {

/// What a component of a worker's process does with its device memory between two uses.
enum class ComponentStrategy : std::uint8_t {
  kResident = 1,  ///< Keeps it.
  kOffloaded,     ///< Gives all of it up at once, and takes it again when it is used.
  kLayerwise      ///< Has a part of it on the device at a time, also while it is used.
};
constexpr std::uint64_t wire_max(ComponentStrategy) {
  return static_cast<std::uint64_t>(ComponentStrategy::kLayerwise);
}
/// "resident", "offloaded", "layerwise".
[[nodiscard]] std::string_view to_string(ComponentStrategy strategy) noexcept;

/// 1 to kLongestComponentName of a-z, 0-9, '_', '-' and '.'; not "all", which means all of them.
inline constexpr std::size_t kLongestComponentName = 64;
[[nodiscard]] bool is_component_name(std::string_view name) noexcept;

/// A component of a worker's process beside the arena: weights, a draft model's cache, buffers of
/// recorded work.
struct ComponentState {
  std::string name;
  ComponentStrategy strategy = ComponentStrategy::kResident;
  bool memory_intensive = false;   ///< Large enough for its release to be worth an emptying.
  std::uint64_t device_bytes = 0;  ///< What it has on the device now.
  template <typename V> void visit(V& v) { v(name, strategy, memory_intensive, device_bytes); }
};

/// What the release of one came to.
struct ComponentRelease {
  ComponentState component;  ///< Afterwards.
  std::uint64_t device_bytes_before = 0;
  bool emptied = false;               ///< The caching allocator, by the rule for large releases.
  std::uint64_t reserved_before = 0;  ///< Its memory around that; zero without.
  std::uint64_t reserved_after = 0;
  template <typename V> void visit(V& v) {
    v(component, device_bytes_before, emptied, reserved_before, reserved_after);
  }
};

/// The components of a worker's process, as operators and engines reach them.
/// @lifetime outlives the worker's registration.
class ComponentUser {
 public:
  ComponentUser() = default;
  ComponentUser(const ComponentUser&) = delete;
  ComponentUser& operator=(const ComponentUser&) = delete;
  virtual ~ComponentUser() = default;

  /// A pure observation, in the order of their registration. @threading any; does not wait
  [[nodiscard]] virtual std::vector<ComponentState> components() const = 0;
  /// Ends a component's use: it gives up what its strategy gives up. Of what is given up already:
  /// nothing, and no error. kNotFound for an unknown name; after another error it may have anything
  /// between all and nothing left. Steps may run meanwhile.
  /// @threading one call at a time, on the thread that MemoryUser is called on
  [[nodiscard]] virtual Result<ComponentRelease> release(std::string_view name,
                                                         Deadline deadline) = 0;
};

}  // namespace kvferry::ipc
