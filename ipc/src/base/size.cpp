// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/size.hpp"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

namespace kvferry::ipc {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t factor;
};

constexpr std::array kUnits = {Unit{"", 1},
                               Unit{"b", 1},
                               Unit{"k", 1ULL << 10},
                               Unit{"kib", 1ULL << 10},
                               Unit{"m", 1ULL << 20},
                               Unit{"mib", 1ULL << 20},
                               Unit{"g", 1ULL << 30},
                               Unit{"gib", 1ULL << 30},
                               Unit{"t", 1ULL << 40},
                               Unit{"tib", 1ULL << 40},
                               Unit{"kb", 1000},
                               Unit{"mb", 1'000'000},
                               Unit{"gb", 1'000'000'000},
                               Unit{"tb", 1'000'000'000'000}};

}  // namespace

Result<std::uint64_t> parse_size(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) {
    return KVFERRY_ERROR(kInvalidArgument, "size '{}' is not a number; write e.g. 512MiB or 64GiB",
                         text);
  }
  std::string unit;
  for (const char c : std::string_view(end, text.data() + text.size())) {
    if (c != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  for (const Unit& known : kUnits) {
    if (known.name != unit) continue;
    const double size = number * static_cast<double>(known.factor);
    if (!(size >= 1.0) || size >= 9.2e18) {
      return KVFERRY_ERROR(kInvalidArgument, "size '{}' is not between 1 byte and 8 EiB", text);
    }
    return static_cast<std::uint64_t>(std::llround(size));
  }
  return KVFERRY_ERROR(
      kInvalidArgument,
      "size '{}' has the unknown unit '{}'; use KiB, MiB, GiB, TiB or KB, MB, GB, TB", text, unit);
}

std::string format_size(std::uint64_t size_bytes) {
  constexpr std::array<std::string_view, 5> kNames = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(size_bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kNames.size()) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", size_bytes)
                   : fmt::format("{:.{}f} {}", value, value < 10 ? 2 : 1, kNames[unit]);
}

}  // namespace kvferry::ipc
