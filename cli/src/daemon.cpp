// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "daemon.hpp"

#include "command.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "parent_watch.hpp"

#include <cerrno>

namespace kvferry::cli {
namespace {

/// Neither time nor another attempt changes it: the options, the build, the machine.
bool is_final(const ipc::Error& error) {
  switch (error.code) {
    case ipc::ErrorCode::kInvalidArgument:
    case ipc::ErrorCode::kGeometryMismatch:
    case ipc::ErrorCode::kRoleConflict:
    case ipc::ErrorCode::kVersionMismatch:
    case ipc::ErrorCode::kPermission:
    case ipc::ErrorCode::kNoHostMemory:
    case ipc::ErrorCode::kNoDeviceMemory: return true;
    // Whoever starts it again at once finds the file system as full.
    case ipc::ErrorCode::kSystem: return error.native_code == ENOSPC;
    default: return false;
  }
}

}  // namespace

int run_daemon(const std::string& name,
               ipc::LogLevel level,
               int parent_fd,
               const std::function<void()>& run) {
  ipc::init_logging(name, level);
  if (parent_fd >= 0) end_with_parent(parent_fd);
  try {
    run();
    return kExitDone;
  } catch (const ipc::Exception& error) {
    ipc::log_error("cannot run: {}", error.what());
    return is_final(error.error()) ? kExitCannotRun : kExitFailed;
  }
}

}  // namespace kvferry::cli
