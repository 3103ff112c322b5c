// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

namespace kvferry::ipc {

/// Why the world said no. Every value names a cause that the caller can act on.
enum class ErrorCode : std::uint8_t {
  kInvalidArgument = 1,  ///< A value from outside is malformed or out of range; mend the input.
  kNotFound,             ///< The named thing does not exist (file, engine, geometry, sequence).
  kNoManager,            ///< No manager answers on this instance; start one or name another.
  kAlreadyExists,        ///< A second one of a thing that may exist once (manager, owner, engine).
  kPermission,           ///< The kernel or the uid check refused; see the message for the path.
  kVersionMismatch,      ///< The peer speaks another protocol version; update the older side.
  kGeometryMismatch,     ///< Fingerprints differ; both sides must be started with one geometry.
  kRoleConflict,         ///< Both sides are owner or both attacher; fix --cache-owner.
  kProtocol,             ///< A message or shared byte violates the protocol; its sender is dropped.
  kBusy,                 ///< A bounded queue is full or such a command already runs; retry later.
  kTimeout,              ///< The deadline passed; the thing may still happen unless stated.
  kPeerDied,             ///< The kernel proved the peer dead.
  kRevoked,              ///< The epoch was revoked before the work was done; nothing lands later.
  kStaleEpoch,           ///< It names a session, epoch or request that is no longer current.
  kNotReady,             ///< The cache is cleared, clearing or not yet attached; wait for Ready.
  kNoDeviceMemory,       ///< The device refused an allocation.
  kNoHostMemory,         ///< The host pool or the kernel refused memory.
  kQuarantined,          ///< Done, but memory is held until a named peer lets go of it.
  kCancelled,            ///< The caller, or a shutdown, cancelled it.
  kSystem,               ///< A system call failed; native_code is errno.
  kCuda,                 ///< A CUDA call failed; native_code is the CUDA error.
  kNotIdle,              ///< Requests hold blocks or copies run; end or retract them, or wait.
  kNotPaused,            ///< Only a paused engine can be continued.
  kNotReleased,          ///< Only memory that was released can be resumed.
  kCorrupt,              ///< Contents do not have their checksum: they are dropped.
};

/// Stable lower-case name such as "stale_epoch": used in logs, JSON and on the wire.
[[nodiscard]] std::string_view to_string(ErrorCode code) noexcept;

/// One decided error. The message names the object, both values and the remedy.
struct Error {
  ErrorCode code = ErrorCode::kInvalidArgument;
  std::string message;
  int native_code = 0;    ///< errno or cudaError_t, 0 when neither applies.
  const char* file = "";  ///< Source file of the decision.
  int line = 0;           ///< Source line of the decision.

  /// "stale_epoch: job 7 names epoch 3, current is 4".
  [[nodiscard]] std::string to_string() const;
};

/// Thrown by constructors and set-up only: something cannot be built.
class Exception : public std::exception {
 public:
  explicit Exception(Error error);
  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }
  [[nodiscard]] const Error& error() const noexcept { return error_; }

 private:
  Error error_;
  std::string text_;
};

namespace detail {
[[nodiscard]] Error make_error(ErrorCode code, std::string message, const char* file, int line);
[[nodiscard]] Error make_errno_error(int errno_value, std::string what, const char* file, int line);
}  // namespace detail

}  // namespace kvferry::ipc

/// Builds an Error with the source position: KVFERRY_ERROR(kBusy, "queue of {} is full", name).
/// clang 14 with libstdc++ 12 lacks std::source_location, hence the macro.
#define KVFERRY_ERROR(code_, ...)                                                                  \
  ::kvferry::ipc::detail::make_error(::kvferry::ipc::ErrorCode::code_, ::fmt::format(__VA_ARGS__), \
                                     __FILE__, __LINE__)

/// Builds an Error from errno; maps EACCES/EPERM/EROFS, ENOMEM and ENOENT to their own codes. Not
/// ENOSPC: a full file system is kSystem; where shared memory is meant, its maker says so.
#define KVFERRY_ERRNO(...) \
  ::kvferry::ipc::detail::make_errno_error(errno, ::fmt::format(__VA_ARGS__), __FILE__, __LINE__)
