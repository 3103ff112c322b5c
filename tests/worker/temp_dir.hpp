// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"

#include <fmt/format.h>
#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

namespace kvferry::test {

/// A fresh runtime directory with a path short enough for sockets; removed with all it holds.
class TempDir {
 public:
  TempDir() {
    std::string path = "/tmp/kvf-XXXXXX";
    if (::mkdtemp(path.data()) == nullptr) throw ipc::Exception(KVFERRY_ERRNO("mkdtemp {}", path));
    path_ = path;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace kvferry::test
