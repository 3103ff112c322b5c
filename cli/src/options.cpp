// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include "help_formatter.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "print.hpp"
#include "toml_config.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

namespace kvferry::cli {
namespace {

using ipc::Result;

std::string environment_name(const std::string& option) {
  std::string name = "KVFERRY_";
  for (const char c : option) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

Result<ipc::LogLevel> parse_level(std::string_view text) {
  ipc::LogLevel level = ipc::LogLevel::kInfo;
  if (ipc::parse_log_level(text, level)) return level;
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of debug|info|warn|error|off", text);
}

/// RuntimeDir's rule, held at once so that a slip is a usage error.
Result<std::string> parse_instance(std::string_view text) {
  constexpr std::size_t kMaxChars = 32;
  const bool good = !text.empty() && text.size() <= kMaxChars && text != "." && text != ".." &&
                    std::all_of(text.begin(), text.end(), [](unsigned char c) {
                      return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
                    });
  if (good) return std::string(text);
  return KVFERRY_ERROR(kInvalidArgument,
                       "'{}' is no name of 1 to {} letters, digits, '.', '_', '-'", text,
                       kMaxChars);
}

Result<std::chrono::milliseconds> parse_milliseconds(std::string_view text) {
  struct Unit {
    std::string_view name;
    std::int64_t milliseconds;
  };
  constexpr std::array kUnits = {Unit{"ms", 1}, Unit{"s", 1000}, Unit{"min", 60'000},
                                 Unit{"h", 3'600'000}};
  constexpr std::int64_t kMax = 7LL * 24 * 3'600'000;
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc{}) {
    const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
    for (const Unit& known : kUnits) {
      if (known.name != unit) continue;
      if (number < 1 || number > kMax / known.milliseconds) break;
      return std::chrono::milliseconds(number * known.milliseconds);
    }
  }
  return KVFERRY_ERROR(kInvalidArgument,
                       "'{}' is no time between 1ms and 7 days; write e.g. 500ms, 30s or 2min",
                       text);
}

Result<std::chrono::milliseconds> parse_seconds(std::string_view text) {
  constexpr double kMaxSeconds = 7.0 * 24 * 3600;
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc{} && end == text.data() + text.size()) {
    if (number >= 0 && number <= kMaxSeconds) {
      return std::chrono::round<std::chrono::milliseconds>(std::chrono::duration<double>(number));
    }
    return KVFERRY_ERROR(kInvalidArgument, "'{}' is no number of seconds from 0 to {}", text,
                         kMaxSeconds);
  }
  return parse_milliseconds(text);
}

bool is_given(const Arguments& arguments, const std::string& option) {
  return std::any_of(arguments.begin(), arguments.end(), [&](const std::string& argument) {
    return argument == option || argument.starts_with(option + "=");
  });
}

/// What is wrong with an option, with where it says so when that is the environment.
std::string with_origin(const CLI::App& app, const Arguments& arguments, std::string message) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name();
    if (!message.starts_with(name + ": ") || is_given(arguments, name)) continue;
    if (ipc::environment(option->get_envname().c_str()).empty()) continue;
    return fmt::format("{} from the environment's {}{}", name, option->get_envname(),
                       message.substr(name.size()));
  }
  return message;
}

}  // namespace

std::string_view level_name(ipc::LogLevel level) noexcept {
  switch (level) {
    case ipc::LogLevel::kDebug: return "debug";
    case ipc::LogLevel::kInfo: return "info";
    case ipc::LogLevel::kWarn: return "warn";
    case ipc::LogLevel::kError: return "error";
    case ipc::LogLevel::kOff: return "off";
  }
  return "info";
}

Result<std::vector<std::string>> split_lists(const std::vector<std::string>& lists) {
  std::vector<std::string> parts;
  for (const std::string& list : lists) {
    for (std::size_t begin = 0; begin <= list.size();) {
      const std::size_t end = std::min(list.find(',', begin), list.size());
      const std::size_t first = std::min(list.find_first_not_of(" \t", begin), end);
      if (first == end) {
        return KVFERRY_ERROR(kInvalidArgument,
                             "'{}' has nothing where an element should be: write it, or leave the "
                             "comma out",
                             list);
      }
      const std::size_t last = list.find_last_not_of(" \t", end - 1);
      parts.push_back(list.substr(first, last - first + 1));
      begin = end + 1;
    }
  }
  return parts;
}

void refuse_again(const std::string& name, const std::string& text, const std::string& before) {
  throw CLI::ValidationError(
      name, text == before ? fmt::format("'{}' is in the list twice: name it once", text)
                           : fmt::format("'{}' is the same as '{}' before it: name one of them",
                                         text, before));
}

Result<std::uint64_t> parse_count(std::string_view text, std::uint64_t most) {
  std::uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc{} && last == end && value >= 1 && value <= most) return value;
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is no count between 1 and {}", text, most);
}

CLI::Option* add_names(CLI::App& app,
                       const std::string& name,
                       std::vector<std::string>& target,
                       const std::string& help) {
  return add_list<std::string>(
      app, name, target,
      [](std::string_view text) -> Result<std::string> { return std::string(text); }, help);
}

CLI::Option* add_size(CLI::App& app,
                      const std::string& name,
                      std::optional<std::uint64_t>& target,
                      const std::string& help) {
  CLI::Option* option = add_parsed<std::optional<std::uint64_t>>(
      app, name, target,
      [](std::string_view text) -> Result<std::optional<std::uint64_t>> {
        KVFERRY_ASSIGN(const std::uint64_t size, ipc::parse_size(text));
        return std::optional<std::uint64_t>(size);
      },
      help);
  option->type_name("SIZE");
  if (target) option->default_str(ipc::format_size(*target));
  return option;
}

// CLI::Range takes what is no number: that is neither below nor above it.
CLI::Option* add_number(CLI::App& app,
                        const std::string& name,
                        double& target,
                        double least,
                        double most,
                        const std::string& help) {
  return add_parsed<double>(
      app, name, target,
      [least, most](std::string_view text) -> Result<double> {
        double value = 0;
        const char* const end = text.data() + text.size();
        const auto [last, error] = std::from_chars(text.data(), end, value);
        if (error == std::errc{} && last == end && value >= least && value <= most) return value;
        return KVFERRY_ERROR(kInvalidArgument, "'{}' is no number between {} and {}", text, least,
                             most);
      },
      help);
}

CLI::Option* add_milliseconds(CLI::App& app,
                              const std::string& name,
                              std::chrono::milliseconds& target,
                              const std::string& help) {
  CLI::Option* option =
      add_parsed<std::chrono::milliseconds>(app, name, target, parse_milliseconds, help);
  return option->type_name("TIME")->default_str(fmt::format("{}ms", target.count()));
}

CLI::Option* add_seconds(CLI::App& app,
                         const std::string& name,
                         std::chrono::milliseconds& target,
                         const std::string& help) {
  CLI::Option* option =
      add_parsed<std::chrono::milliseconds>(app, name, target, parse_seconds, help);
  return option->type_name("SECONDS")->default_str(
      fmt::format("{}", static_cast<double>(target.count()) / 1000.0));
}

std::unique_ptr<CLI::App> make_app(std::string_view command,
                                   const std::string& description,
                                   const std::string& example,
                                   CommonOptions& common) {
  auto app = std::make_unique<CLI::App>(description, fmt::format("kvferry {}", command));
  app->footer(example);
  app->formatter(std::make_shared<HelpFormatter>());
  app->option_defaults()->always_capture_default(false);
  add_parsed<std::string>(*app, "--instance", common.instance, parse_instance,
                          "Which installation on this host: a name of letters, digits and . _ -")
      ->type_name("NAME")
      ->default_str(common.instance);
  app->add_option("--runtime-dir", common.runtime_dir,
                  "Where sockets and locks live [$XDG_RUNTIME_DIR/kvferry, else /tmp/kvferry-UID]")
      ->type_name("DIR");
  add_parsed<ipc::LogLevel>(*app, "--log-level", common.log_level, parse_level,
                            "Least important lines to log: debug, info, warn, error or off")
      ->type_name("LEVEL")
      ->default_str(std::string(level_name(common.log_level)));
  app->set_config("--config", "", "TOML file with options; [COMMAND] tables are for one command")
      ->type_name("FILE");
  app->config_formatter(std::make_shared<TomlConfig>(*app, std::string(command)));
  return app;
}

std::optional<int> parse_arguments(CLI::App& app, const Arguments& arguments) {
  for (CLI::Option* option : app.get_options()) {
    // Given twice, the later one counts: scripts append to what others wrote.
    if (option->get_items_expected_max() > 0) {
      option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
    for (const std::string& name : option->get_lnames()) {
      if (name != "help" && name != "config" && name != "parent-fd") {
        option->envname(environment_name(name));
      }
    }
  }
  Arguments given = arguments;
  const auto names_config = [](const std::string& argument) {
    return argument == "--config" || argument.starts_with("--config=");
  };
  const std::string from_environment = ipc::environment("KVFERRY_CONFIG");
  if (!from_environment.empty() && std::none_of(given.begin(), given.end(), names_config)) {
    given.push_back("--config=" + from_environment);
  }
  std::reverse(given.begin(), given.end());  // What CLI11 wants of a vector.
  try {
    app.parse(std::move(given));
    return std::nullopt;
  } catch (const CLI::CallForHelp&) {
    (void)write_out(app.help());
    return kExitDone;
  } catch (const CLI::ConfigError& error) {
    print_err("{}: configuration file {}: {}\n'{} --help' lists the options\n", app.get_name(),
              app.get_config_ptr()->as<std::string>(), error.what(), app.get_name());
    return kExitUsage;
  } catch (const CLI::ParseError& error) {
    print_err("{}: {}\n'{} --help' lists the options\n", app.get_name(),
              with_origin(app, arguments, error.what()), app.get_name());
    return kExitUsage;
  }
}

ipc::Status check_uses(const CLI::App& app,
                       const Arguments& arguments,
                       const std::vector<OptionUse>& uses) {
  for (const OptionUse& use : uses) {
    if (use.counts || app.count(use.name) == 0) continue;
    if (is_given(arguments, use.name)) {
      return KVFERRY_ERROR(kInvalidArgument, "{} is for {}: choose that, or leave {} out", use.name,
                           use.purpose, use.name);
    }
    ipc::log_warn(
        "{} is for {}: what the environment or the configuration file says of it does "
        "not count",
        use.name, use.purpose);
  }
  return ipc::ok();
}

int usage_error(const CLI::App& app, const ipc::Error& error) {
  print_err("{}: {}\n", app.get_name(), error.message);
  return kExitUsage;
}

int failure(std::string_view command, const ipc::Error& error) {
  print_err("kvferry {}: {}\n", command, error.to_string());
  return error.code == ipc::ErrorCode::kNoManager ? kExitNoManager : kExitFailed;
}

}  // namespace kvferry::cli
