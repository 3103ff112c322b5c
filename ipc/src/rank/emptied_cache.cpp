// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/emptied_cache.hpp"

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

}  // namespace kvferry::ipc
