// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace kvferry::cli {

/// RssAnon of /proc/PID/status, in KiB: what a process has for itself, without files and shared
/// memory such as the host pool. Nothing for one that has ended.
[[nodiscard]] std::optional<std::uint64_t> anonymous_kib(pid_t pid);
/// The same of such a file's text.
[[nodiscard]] std::optional<std::uint64_t> parse_anonymous_kib(std::string_view status);

}  // namespace kvferry::cli
