// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"

#include "base/stderr_sink.hpp"

#include <spdlog/spdlog.h>

#include <array>
#include <memory>

namespace kvferry::ipc {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) noexcept {
  switch (level) {
    case LogLevel::kDebug: return spdlog::level::debug;
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarn: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
    case LogLevel::kOff: return spdlog::level::off;
  }
  return spdlog::level::info;
}

// Built on first use and never destroyed: destructors that run after main may still log.
spdlog::logger& logger() {
  // NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): thread-safe sink
  static spdlog::logger& instance =
      // lint-allow(new): must outlive every static object
      *new spdlog::logger("kvferry", std::make_shared<StderrSink>());
  return instance;
}

}  // namespace

bool parse_log_level(std::string_view text, LogLevel& level) noexcept {
  constexpr auto kNames =
      std::to_array<std::pair<std::string_view, LogLevel>>({{"debug", LogLevel::kDebug},
                                                            {"info", LogLevel::kInfo},
                                                            {"warn", LogLevel::kWarn},
                                                            {"error", LogLevel::kError},
                                                            {"off", LogLevel::kOff}});
  for (const auto& [name, value] : kNames) {
    if (name == text) {
      level = value;
      return true;
    }
  }
  return false;
}

void init_logging(std::string process_name, LogLevel level) {
  logger().set_level(to_spdlog(level));
  logger().set_pattern(fmt::format("%H:%M:%S.%e %L {} %v", process_name));
}

namespace detail {

bool log_enabled(LogLevel level) noexcept { return logger().should_log(to_spdlog(level)); }

void write_log(LogLevel level, std::string_view text) noexcept {
  logger().log(to_spdlog(level), spdlog::string_view_t(text.data(), text.size()));
}

}  // namespace detail
}  // namespace kvferry::ipc
