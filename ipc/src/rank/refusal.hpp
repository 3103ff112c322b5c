// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"

namespace kvferry::ipc {

/// Whether the manager or the rank's other side said something that stays as it is.
inline bool no_retry_can_mend(ErrorCode code) noexcept {
  return code == ErrorCode::kRoleConflict || code == ErrorCode::kGeometryMismatch ||
         code == ErrorCode::kVersionMismatch || code == ErrorCode::kInvalidArgument ||
         code == ErrorCode::kPermission;  // Another user, or another pid namespace.
}

}  // namespace kvferry::ipc
