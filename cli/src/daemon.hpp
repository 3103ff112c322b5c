// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/log.hpp"

#include <functional>
#include <string>

namespace kvferry::cli {

/// Runs a daemon until it is told to end, or until the end of the process that holds the other end
/// of parent_fd (-1: none); a set-up that fails is logged. What the process exits with.
int run_daemon(const std::string& name,
               ipc::LogLevel level,
               int parent_fd,
               const std::function<void()>& run);

}  // namespace kvferry::cli
