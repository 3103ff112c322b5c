// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <string_view>

namespace kvferry::cli {

/// Help texts that fit a terminal: wrapped, defaults in brackets, without each option's environment
/// variable (their rule is told once).
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app,
                        std::string name,
                        CLI::AppFormatMode mode) const override;
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
};

/// Breaks lines at blanks; every line but the first gets the indent. Line breaks in the text stay.
[[nodiscard]] std::string wrap(std::string_view text, std::size_t width, std::size_t indent);

}  // namespace kvferry::cli
