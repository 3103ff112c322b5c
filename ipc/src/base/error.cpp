// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/error.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace kvferry::ipc {

std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid_argument";
    case ErrorCode::kNotFound: return "not_found";
    case ErrorCode::kNoManager: return "no_manager";
    case ErrorCode::kAlreadyExists: return "already_exists";
    case ErrorCode::kPermission: return "permission";
    case ErrorCode::kVersionMismatch: return "version_mismatch";
    case ErrorCode::kGeometryMismatch: return "geometry_mismatch";
    case ErrorCode::kRoleConflict: return "role_conflict";
    case ErrorCode::kProtocol: return "protocol";
    case ErrorCode::kBusy: return "busy";
    case ErrorCode::kTimeout: return "timeout";
    case ErrorCode::kPeerDied: return "peer_died";
    case ErrorCode::kRevoked: return "revoked";
    case ErrorCode::kStaleEpoch: return "stale_epoch";
    case ErrorCode::kNotReady: return "not_ready";
    case ErrorCode::kNoDeviceMemory: return "no_device_memory";
    case ErrorCode::kNoHostMemory: return "no_host_memory";
    case ErrorCode::kQuarantined: return "quarantined";
    case ErrorCode::kCancelled: return "cancelled";
    case ErrorCode::kSystem: return "system";
    case ErrorCode::kCuda: return "cuda";
    case ErrorCode::kNotIdle: return "not_idle";
    case ErrorCode::kNotPaused: return "not_paused";
    case ErrorCode::kNotReleased: return "not_released";
    case ErrorCode::kCorrupt: return "corrupt";
  }
  return "invalid";
}

std::string Error::to_string() const {
  return fmt::format("{}: {}", ipc::to_string(code), message);
}

Exception::Exception(Error error) : error_(std::move(error)), text_(error_.to_string()) {}

namespace detail {

Error make_error(ErrorCode code, std::string message, const char* file, int line) {
  return Error{code, std::move(message), 0, file, line};
}

Error make_errno_error(int errno_value, std::string what, const char* file, int line) {
  ErrorCode code = ErrorCode::kSystem;
  switch (errno_value) {
    case EACCES:
    case EPERM:
    case EROFS: code = ErrorCode::kPermission; break;
    case ENOMEM: code = ErrorCode::kNoHostMemory; break;
    case ENOENT: code = ErrorCode::kNotFound; break;
    default: break;
  }
  return Error{code, fmt::format("{}: {}", what, std::generic_category().message(errno_value)),
               errno_value, file, line};
}

}  // namespace detail
}  // namespace kvferry::ipc
