// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/process.hpp"

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace kvferry::cli {

/// What is given to posix_spawn.
struct ChildStart {
  std::filesystem::path program;
  std::vector<std::string> arguments;    ///< Without argv[0].
  std::vector<std::string> environment;  ///< NAME=VALUE, beside ours and before it.
  std::filesystem::path log_file;        ///< Gets stdout and stderr, appended.
  int inherited_fd = -1;                 ///< Becomes kInheritedFd in the child.
};
inline constexpr int kInheritedFd = 3;

/// Starts a child in a process group of its own (a Ctrl-C at the terminal is ours alone to handle),
/// with default signal handling.
[[nodiscard]] ipc::Result<ipc::ProcessRef> start_child(const ChildStart& start);

/// How a child ended.
struct ChildEnd {
  int exit_code = -1;  ///< -1: killed by a signal.
  std::string text;    ///< "exit code 1", "killed by signal 9 (Killed)".
};
/// Reaps a child that has ended: known by its pidfd, or by having been killed just now.
[[nodiscard]] ChildEnd reap_child(pid_t pid);

/// The last lines of a text file, each indented.
[[nodiscard]] std::string tail_of(const std::filesystem::path& file, std::size_t lines);

}  // namespace kvferry::cli
