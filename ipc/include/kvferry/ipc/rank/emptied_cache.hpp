// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace kvferry::ipc {

/// Why the cache of a caching device allocator is emptied. Emptying synchronises the device, so it
/// happens for these reasons and no other; docs/lifecycle.md has them row by row.
enum class EmptyReason : std::uint8_t {
  kClear = 1,  ///< The arena's regions are gone.
  kFlush,      ///< The cache's contents were forgotten.
  kContinue,   ///< A pause ends.
  kUpdate,     ///< Weights were updated, and the caller asks for it.
  kComponent,  ///< A large component gave its device memory up.
  kFailure,    ///< A step failed.
  kIdle,       ///< No step has run for a while.
  kRelease     ///< Weights or scratch memory were released, without the cache.
};
inline constexpr std::size_t kEmptyReasons = 8;
constexpr std::uint64_t wire_max(EmptyReason) {
  return static_cast<std::uint64_t>(EmptyReason::kRelease);
}
/// "clear", "flush", "continue", "update", "component", "failure", "idle",
/// "release".
[[nodiscard]] std::string_view to_string(EmptyReason reason) noexcept;

/// A caching allocator around an emptying.
struct EmptiedCache {
  std::uint64_t reserved_before = 0;  ///< Bytes taken from the driver: used plus cached.
  std::uint64_t reserved_after = 0;
  std::uint64_t used_after = 0;  ///< Bytes lent out, which no emptying touches.
  [[nodiscard]] std::uint64_t freed() const noexcept {
    return reserved_before > reserved_after ? reserved_before - reserved_after : 0;
  }
};

/// Empties a caching allocator; an error says why it could not. May throw.
using EmptyAllocator = std::function<Result<EmptiedCache>(EmptyReason)>;
/// Calls it. What it throws is an error, too, and an error is logged, with the reason.
[[nodiscard]] Result<EmptiedCache> empty_or_warn(const EmptyAllocator& empty, EmptyReason reason);

}  // namespace kvferry::ipc
