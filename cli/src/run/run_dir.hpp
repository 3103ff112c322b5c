// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// A private directory for one run of a command: the runtime directory of its processes, and their
/// logs. Removed by the destructor. What an earlier run of the same command left that was killed is
/// removed, too.
class RunDir {
 public:
  /// base: empty for the default of RuntimeDir. command: what its name begins with.
  [[nodiscard]] static ipc::Result<RunDir> create(const std::string& base,
                                                  std::string_view command = "replay");
  RunDir(RunDir&&) noexcept = default;
  RunDir& operator=(RunDir&&) = delete;
  ~RunDir();

  /// What --runtime-dir is for the processes.
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::filesystem::path logs() const { return path_ / "logs"; }
  /// Unique to this run: part of every name that it makes.
  [[nodiscard]] const std::string& token() const noexcept { return token_; }
  /// Removes the locks and sockets of processes that were killed: whose lock is free. Their
  /// successors would have; for when there is none. @pre the instance's processes have ended.
  void remove_stale_names(const std::string& instance) const;
  /// Names that the processes of the instance left behind. @pre they have ended.
  [[nodiscard]] std::vector<std::string> leftovers(const std::string& instance) const;

 private:
  RunDir(std::filesystem::path path, std::string token, ipc::NameLock lock)
      : path_(std::move(path)), token_(std::move(token)), lock_(std::move(lock)) {}

  std::filesystem::path path_;
  std::string token_;
  std::optional<ipc::NameLock> lock_;
};

}  // namespace kvferry::cli
