// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "support/descriptors.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

namespace kvferry::test {

std::string descriptor_kind(std::string_view target) {
  constexpr std::string_view kAnonymous = "anon_inode:";
  if (target.starts_with("/memfd:")) return "memfd";
  if (target.starts_with(kAnonymous)) return std::string(target.substr(kAnonymous.size()));
  if (target.starts_with("/dev/")) return std::string(target);
  if (target.starts_with("/")) return target.ends_with(" (deleted)") ? "deleted file" : "file";
  return std::string(target.substr(0, target.find(':')));
}

DescriptorKinds descriptor_kinds(pid_t pid) {
  DescriptorKinds kinds;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid), error)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), error);
    if (!error) ++kinds[descriptor_kind(target)];
  }
  return kinds;
}

}  // namespace kvferry::test
