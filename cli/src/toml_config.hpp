// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include <istream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// Reads --config files for CLI11. Keys are option names without "--". Keys outside any table are
/// for every command that has such an option; those in [COMMAND] for that command only. A key that
/// no command knows is an error that names it. The environment wins over the file.
class TomlConfig : public CLI::Config {
 public:
  TomlConfig(const CLI::App& app, std::string command);

  std::string to_config(const CLI::App*, bool, bool, std::string) const override { return {}; }
  /// Throws CLI::ConfigError.
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override;

 private:
  const CLI::App& app_;
  std::string command_;
};

/// Names of all options of all commands that a configuration file may hold, without "--".
[[nodiscard]] std::span<const std::string_view> configurable_options();

}  // namespace kvferry::cli
