// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace kvferry::test {

/// Of what /proc/PID/fd/N points to: "socket:[4711]" -> "socket", "/memfd:kvferry-x (deleted)" ->
/// "memfd", a device -> its path, any other path -> "file" or "deleted file".
[[nodiscard]] std::string descriptor_kind(std::string_view target);

/// How many descriptors of each kind a process has.
using DescriptorKinds = std::map<std::string, std::size_t>;
[[nodiscard]] DescriptorKinds descriptor_kinds(pid_t pid);

}  // namespace kvferry::test
