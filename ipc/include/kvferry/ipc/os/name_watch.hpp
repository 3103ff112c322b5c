// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <filesystem>
#include <string>

namespace kvferry::ipc {

/// Readable when a name appears in a directory (inotify), so that waiting for a listener needs no
/// polling. Ends with the directory: after is_over() nothing is seen any more, open another one.
/// @threading one at a time.
class NameWatch {
 public:
  /// kNotFound without the directory.
  [[nodiscard]] static Result<NameWatch> open(const std::filesystem::path& path);
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// Empties the queue; true when the name was among the events (or events were lost).
  bool drain();
  /// The directory was removed or renamed.
  [[nodiscard]] bool is_over() const noexcept { return over_; }

 private:
  NameWatch(UniqueFd fd, std::string name) : fd_(std::move(fd)), name_(std::move(name)) {}
  UniqueFd fd_;
  std::string name_;
  bool over_ = false;
};

}  // namespace kvferry::ipc
