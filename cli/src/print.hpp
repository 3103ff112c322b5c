// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

/// What a command tells people. A full disk or a reader that went away is an answer, not an
/// exception: nothing here throws for it or raises SIGPIPE.
namespace kvferry::cli {

/// Once, before anything else: ignores SIGPIPE, and fills standard descriptors that are closed, so
/// that no file opened later takes their numbers and gets our messages.
void prepare_streams() noexcept;

/// All of the text, or false: errno says why.
[[nodiscard]] bool write_out(std::string_view text) noexcept;
bool write_err(std::string_view text) noexcept;

/// Some write to stderr found that its reader is gone: nobody watches any more.
[[nodiscard]] bool stderr_reader_gone() noexcept;
/// Every write to stdout so far went through; else says on stderr what did not. For exit codes.
[[nodiscard]] bool stdout_complete(std::string_view command) noexcept;

template <typename... Args> void print_out(fmt::format_string<Args...> format, Args&&... args) {
  (void)write_out(fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args> void print_err(fmt::format_string<Args...> format, Args&&... args) {
  write_err(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace kvferry::cli
