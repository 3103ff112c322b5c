// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

/// Files with what this user's processes can make anew: kept over restarts, and nobody's loss.
namespace kvferry::ipc {

/// $XDG_CACHE_HOME/kvferry, else $HOME/.cache/kvferry; empty when neither is an absolute path.
[[nodiscard]] std::filesystem::path default_cache_dir();

/// All bytes of the file. kNotFound when there is none; kPermission when others could have written
/// it; kInvalidArgument when it is not a plain file or has more than most_bytes; kSystem.
[[nodiscard]] Result<std::string> read_cache_file(const std::filesystem::path& file,
                                                  std::uint64_t most_bytes);

/// Puts the text in the file's place, whole or not at all, also against another process that does
/// the same. Makes the directory.
[[nodiscard]] Status write_cache_file(const std::filesystem::path& file, std::string_view text);

/// One process at a time has a cache directory's lock: for work that others would disturb. The
/// kernel lets go of it with its holder. @threading one at a time.
class CacheLock {
 public:
  /// Empty: another process has it, look again. Makes the directory.
  [[nodiscard]] static Result<std::optional<CacheLock>> try_take(const std::filesystem::path& dir);

 private:
  explicit CacheLock(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace kvferry::ipc
