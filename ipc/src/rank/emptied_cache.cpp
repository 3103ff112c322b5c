// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/emptied_cache.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <exception>

namespace kvferry::ipc {

std::string_view to_string(EmptyReason reason) noexcept {
  switch (reason) {
    case EmptyReason::kClear: return "clear";
    case EmptyReason::kFlush: return "flush";
    case EmptyReason::kContinue: return "continue";
    case EmptyReason::kUpdate: return "update";
    case EmptyReason::kComponent: return "component";
    case EmptyReason::kFailure: return "failure";
    case EmptyReason::kIdle: return "idle";
    case EmptyReason::kRelease: return "release";
  }
  return "invalid";
}

namespace {

/// It is an engine's code.
Result<EmptiedCache> empty_safely(const EmptyAllocator& empty, EmptyReason reason) {
  try {
    return empty(reason);
  } catch (const std::exception& error) {
    return KVFERRY_ERROR(kSystem, "the engine's allocator could not be emptied: {}", error.what());
  }
}

}  // namespace

Result<EmptiedCache> empty_or_warn(const EmptyAllocator& empty, EmptyReason reason) {
  auto emptied = empty_safely(empty, reason);
  if (!emptied) {
    log_warn("{}: the allocator was not emptied: {}", to_string(reason),
             emptied.error().to_string());
  }
  return emptied;
}

}  // namespace kvferry::ipc
