// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "command.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Options of all commands: command line first, then environment, then the TOML file.
namespace kvferry::cli {

/// What every command has.
struct CommonOptions {
  std::string instance = "default";
  std::string runtime_dir;  ///< Empty: the default of RuntimeDir.
  ipc::LogLevel log_level = ipc::LogLevel::kInfo;
};

/// What --log-level calls it.
[[nodiscard]] std::string_view level_name(ipc::LogLevel level) noexcept;

/// Adds an option whose text is parsed by `parse`; its error becomes a usage error.
template <typename T>
CLI::Option* add_parsed(CLI::App& app,
                        const std::string& name,
                        T& target,
                        std::function<ipc::Result<T>(std::string_view)> parse,
                        const std::string& help) {
  return app.add_option_function<std::string>(
      name,
      [name, &target, parse = std::move(parse)](const std::string& text) {
        ipc::Result<T> parsed = parse(text);
        if (!parsed) throw CLI::ValidationError(name, parsed.error().message);
        target = std::move(parsed).value();
      },
      help);
}

/// Adds an option that takes one of a few words.
template <typename T>
CLI::Option* add_choice(CLI::App& app,
                        const std::string& name,
                        T& target,
                        std::initializer_list<std::pair<std::string_view, T>> choices,
                        const std::string& help) {
  const std::vector<std::pair<std::string_view, T>> known(choices);
  std::string words;
  std::string_view chosen;
  for (const auto& [word, value] : known) {
    words += fmt::format("{}{}", words.empty() ? "" : "|", word);
    if (value == target) chosen = word;
  }
  CLI::Option* option = add_parsed<T>(
      app, name, target,
      [known, words](std::string_view text) -> ipc::Result<T> {
        for (const auto& [word, value] : known) {
          if (word == text) return value;
        }
        return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of {}", text, words);
      },
      help);
  option->type_name(words);
  if (!chosen.empty()) option->default_str(std::string(chosen));
  return option;
}

/// What lists of an option have between commas, without blanks around it; kInvalidArgument where
/// that is nothing.
[[nodiscard]] ipc::Result<std::vector<std::string>> split_lists(
    const std::vector<std::string>& lists);

/// A usage error: a list has the value of `before` again.
[[noreturn]] void refuse_again(const std::string& name,
                               const std::string& text,
                               const std::string& before);

/// A whole number from 1 to most, for add_list() and add_parsed(); else kInvalidArgument.
[[nodiscard]] ipc::Result<std::uint64_t> parse_count(std::string_view text, std::uint64_t most);

/// Adds an option for a list of values, each parsed by `parse`, of which none may come twice; what
/// is given takes the default's place.
template <typename T>
CLI::Option* add_list(CLI::App& app,
                      const std::string& name,
                      std::vector<T>& target,
                      std::function<ipc::Result<T>(std::string_view)> parse,
                      const std::string& help) {
  return app
      .add_option_function<std::vector<std::string>>(
          name,
          [name, &target, parse = std::move(parse)](const std::vector<std::string>& lists) {
            const auto texts = split_lists(lists);
            if (!texts) throw CLI::ValidationError(name, texts.error().message);
            target.clear();
            for (const std::string& text : *texts) {
              auto parsed = parse(text);
              if (!parsed) throw CLI::ValidationError(name, parsed.error().message);
              const auto same = std::find(target.begin(), target.end(), *parsed);
              if (same != target.end()) {
                refuse_again(name, text, (*texts)[static_cast<std::size_t>(same - target.begin())]);
              }
              target.push_back(std::move(parsed).value());
            }
          },
          help)
      ->allow_extra_args(false);
}

/// The same, of names as they are written.
CLI::Option* add_names(CLI::App& app,
                       const std::string& name,
                       std::vector<std::string>& target,
                       const std::string& help);

/// Adds an option for a size such as 512MiB.
CLI::Option* add_size(CLI::App& app,
                      const std::string& name,
                      std::optional<std::uint64_t>& target,
                      const std::string& help);
/// Adds an option for a number from least to most.
CLI::Option* add_number(CLI::App& app,
                        const std::string& name,
                        double& target,
                        double least,
                        double most,
                        const std::string& help);
/// Adds an option for milliseconds, written as 500ms, 30s or 2min.
CLI::Option* add_milliseconds(CLI::App& app,
                              const std::string& name,
                              std::chrono::milliseconds& target,
                              const std::string& help);

/// The same, with 0 allowed and a bare number meaning seconds: 0, 5, 2.5 or any of those above.
CLI::Option* add_seconds(CLI::App& app,
                         const std::string& name,
                         std::chrono::milliseconds& target,
                         const std::string& help);

/// A command's parser with what all commands have in common. example is shown under the help.
[[nodiscard]] std::unique_ptr<CLI::App> make_app(std::string_view command,
                                                 const std::string& description,
                                                 const std::string& example,
                                                 CommonOptions& common);

/// Parses. Nothing when the command is to run; else what it exits with (help was printed, or why
/// the usage is wrong).
[[nodiscard]] std::optional<int> parse_arguments(CLI::App& app, const Arguments& arguments);

/// An option that counts only with some choice of another one.
struct OptionUse {
  std::string name;
  bool counts = false;  ///< With what was chosen.
  std::string purpose;  ///< "A choice, not what was chosen".
};
/// Where one was given that does not count: kInvalidArgument if on the command line. The
/// environment and files may be there for other runs, too: what they say is logged, and left out.
[[nodiscard]] ipc::Status check_uses(const CLI::App& app,
                                     const Arguments& arguments,
                                     const std::vector<OptionUse>& uses);

/// Says on stderr that the usage is wrong.
int usage_error(const CLI::App& app, const ipc::Error& error);
/// Says on stderr that the command failed.
int failure(std::string_view command, const ipc::Error& error);

}  // namespace kvferry::cli
