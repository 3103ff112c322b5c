// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "help_formatter.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::cli {
namespace {

constexpr std::size_t kHelpWidth = 96;
constexpr std::size_t kOptionColumn = 4;

/// "N:UINT in [1 - 64]" -> "N": what a check adds is told when it fails.
std::string type_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.substr(0, type.find(":UINT in"));
}

}  // namespace

std::string wrap(std::string_view text, std::size_t width, std::size_t indent) {
  std::string out;
  std::size_t column = indent;
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find_first_of(" \n", at), text.size());
    const std::size_t word = end - at;
    const bool starts_line = out.empty() || out.back() == '\n' || column == indent;
    if (!starts_line && column + 1 + word > width) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    } else if (!starts_line) {
      out += ' ';
      ++column;
    }
    out += text.substr(at, word);
    column += word;
    at = end;
    while (at < text.size() && (text[at] == ' ' || text[at] == '\n')) {
      if (text[at] == '\n') {
        out += '\n' + std::string(indent, ' ');
        column = indent;
      }
      ++at;
    }
  }
  return out;
}

std::string HelpFormatter::make_help(const CLI::App* app,
                                     std::string /*name*/,
                                     CLI::AppFormatMode /*mode*/) const {
  std::string positionals;
  for (const CLI::Option* option : app->get_options()) {
    if (option->get_lnames().empty()) positionals += fmt::format(" [{}...]", option->get_name());
  }
  std::string text = fmt::format("usage: {}{} [OPTIONS]\n\n{}\n\noptions:\n", app->get_name(),
                                 positionals, wrap(app->get_description(), kHelpWidth, 0));
  for (const CLI::Option* option : app->get_options()) {
    if (!option->get_group().empty()) text += make_option(option, false);
  }
  return text + fmt::format(
                    "\nEach option can also be given as an environment variable (KVFERRY_LOG_LEVEL "
                    "for\n--log-level) or in the --config file; the command line counts most, the "
                    "file least.\n\n{}\n",
                    app->get_footer());
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool /*is_positional*/) const {
  const std::string indent(kOptionColumn, ' ');
  const bool is_named = !option->get_lnames().empty();
  std::string head = is_named ? "--" + option->get_lnames().front() : option->get_name();
  if (is_named && option->get_items_expected_max() > 0) head += " " + type_of(*option);
  std::string about = option->get_description();
  if (!option->get_default_str().empty()) about += fmt::format(" [{}]", option->get_default_str());
  return fmt::format("  {}\n{}{}\n", head, indent, wrap(about, kHelpWidth, kOptionColumn));
}

}  // namespace kvferry::cli
