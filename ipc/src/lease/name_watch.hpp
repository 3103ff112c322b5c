// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <filesystem>
#include <string>

namespace kvferry::ipc::lease {

/// Readable when a name appears in a directory (inotify), so that waiting for a listener needs no
/// polling. @threading one at a time.
class NameWatch {
 public:
  [[nodiscard]] static Result<NameWatch> open(const std::filesystem::path& path);
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// Empties the queue; true when the name was among the events (or events were lost).
  bool drain();

 private:
  NameWatch(UniqueFd fd, std::string name) : fd_(std::move(fd)), name_(std::move(name)) {}
  UniqueFd fd_;
  std::string name_;
};

}  // namespace kvferry::ipc::lease
