// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>

namespace kvferry::fuzz {

/// A directory of this run alone, for readers that want a file. Goes with the process unless that
/// is ended by a finding.
class ScratchDir {
 public:
  ScratchDir() {
    std::string name = (std::filesystem::temp_directory_path() / "kvferry-fuzz-XXXXXX").string();
    KVFERRY_CHECK(::mkdtemp(name.data()) != nullptr, "no scratch directory at " + name);
    path_ = name;
  }
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;
  ~ScratchDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& path, std::string_view contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  file.close();
  KVFERRY_CHECK(!file.fail(), "cannot write " + path.string());
}

}  // namespace kvferry::fuzz
