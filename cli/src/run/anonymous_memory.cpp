// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/anonymous_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

namespace kvferry::cli {

std::optional<std::uint64_t> parse_anonymous_kib(std::string_view status) {
  // A name of the process, which the file begins with, has no line breaks of its own.
  constexpr std::string_view kField = "\nRssAnon:";
  const std::size_t found = status.find(kField);
  if (found == std::string_view::npos) return std::nullopt;
  std::string_view value = status.substr(found + kField.size());
  value.remove_prefix(std::min(value.size(), value.find_first_not_of(" \t")));
  std::uint64_t kib = 0;
  const char* const end = value.data() + value.size();
  const auto [last, error] = std::from_chars(value.data(), end, kib);
  if (error != std::errc{} || !std::string_view(last, end).starts_with(" kB\n")) {
    return std::nullopt;
  }
  return kib;
}

std::optional<std::uint64_t> anonymous_kib(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/status", pid));
  return parse_anonymous_kib(std::string(std::istreambuf_iterator<char>(file), {}));
}

}  // namespace kvferry::cli
