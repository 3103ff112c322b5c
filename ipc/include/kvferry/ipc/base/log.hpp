// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::ipc {

enum class LogLevel : std::uint8_t { kDebug, kInfo, kWarn, kError, kOff };

/// Parses "debug", "info", "warn", "error" or "off"; anything else gives false.
[[nodiscard]] bool parse_log_level(std::string_view text, LogLevel& level) noexcept;

/// Names this process in every line (for example "mover/0") and sets the level. Lines go to stderr.
/// @threading once, before other threads log.
void init_logging(std::string process_name, LogLevel level);

namespace detail {
[[nodiscard]] bool log_enabled(LogLevel level) noexcept;
void write_log(LogLevel level, std::string_view text) noexcept;
}  // namespace detail

/// One line each; formatting is skipped below the level. @threading any.
template <typename... Args> void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  if (detail::log_enabled(LogLevel::kDebug)) {
    detail::write_log(LogLevel::kDebug, fmt::format(format, std::forward<Args>(args)...));
  }
}
template <typename... Args> void log_info(fmt::format_string<Args...> format, Args&&... args) {
  if (detail::log_enabled(LogLevel::kInfo)) {
    detail::write_log(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
  }
}
template <typename... Args> void log_warn(fmt::format_string<Args...> format, Args&&... args) {
  if (detail::log_enabled(LogLevel::kWarn)) {
    detail::write_log(LogLevel::kWarn, fmt::format(format, std::forward<Args>(args)...));
  }
}
template <typename... Args> void log_error(fmt::format_string<Args...> format, Args&&... args) {
  if (detail::log_enabled(LogLevel::kError)) {
    detail::write_log(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
  }
}

}  // namespace kvferry::ipc
