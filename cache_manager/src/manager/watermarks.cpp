// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/watermarks.hpp"

#include <charconv>
#include <cmath>
#include <optional>

namespace kvferry::cache_manager {
namespace {

constexpr double kPermilleInPercent = 10;

/// In thousandths.
std::optional<std::uint32_t> parse_percent(std::string_view text) {
  if (text.ends_with('%')) text.remove_suffix(1);
  double percent = 0;
  const char* const end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data(), end, percent);
  if (error != std::errc{} || last != end || !(percent >= 0) || percent > 100) return std::nullopt;
  return static_cast<std::uint32_t>(std::lround(percent * kPermilleInPercent));
}

}  // namespace

ipc::Status Watermarks::check() const {
  const bool is_off = low_permille == 0 && high_permille == 0;
  if (is_off || (low_permille > 0 && low_permille <= high_permille && high_permille <= kMost)) {
    return ipc::ok();
  }
  return KVFERRY_ERROR(kInvalidArgument,
                       "watermarks of {} % and {} %: give a low one of at least 0.1 and a high one "
                       "that is no lower, and at most {}; or 0:0 for none",
                       low_permille / kPermilleInPercent, high_permille / kPermilleInPercent,
                       kMost / kPermilleInPercent);
}

ipc::Result<Watermarks> parse_watermarks(std::string_view text) {
  const std::size_t colon = text.find(':');
  const auto low = parse_percent(text.substr(0, colon));
  const auto high =
      colon == std::string_view::npos ? std::nullopt : parse_percent(text.substr(colon + 1));
  if (!low || !high) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "watermarks '{}': give two percentages of the host pool, as in 1:2", text);
  }
  const Watermarks watermarks{*low, *high};
  KVFERRY_TRY(watermarks.check());
  return watermarks;
}

}  // namespace kvferry::cache_manager
