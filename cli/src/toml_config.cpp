// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "toml_config.hpp"

#include "command.hpp"
#include "kvferry/ipc/os/process.hpp"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <array>

namespace kvferry::cli {
namespace {

using namespace std::string_view_literals;

constexpr std::array kConfigurable = {"active"sv,
                                      "agent-swaps"sv,
                                      "ahead-ctas"sv,
                                      "arena"sv,
                                      "arena-memory"sv,
                                      "blocks"sv,
                                      "bytes"sv,
                                      "cache-dir"sv,
                                      "cache-owner"sv,
                                      "calibration"sv,
                                      "capacity"sv,
                                      "check"sv,
                                      "checksums"sv,
                                      "chunk-size"sv,
                                      "clear"sv,
                                      "clear-every"sv,
                                      "clear-host"sv,
                                      "context"sv,
                                      "copy-strategy"sv,
                                      "count"sv,
                                      "deadline"sv,
                                      "default-namespace-quota"sv,
                                      "decode-steps"sv,
                                      "device"sv,
                                      "direction"sv,
                                      "drain-deadline"sv,
                                      "empty-cache"sv,
                                      "endpoint"sv,
                                      "engine"sv,
                                      "entries"sv,
                                      "evict-ahead"sv,
                                      "eviction-policy"sv,
                                      "file"sv,
                                      "fresh"sv,
                                      "from"sv,
                                      "gather-ctas"sv,
                                      "gathered-percent"sv,
                                      "geometry"sv,
                                      "gpu-blocks"sv,
                                      "handles"sv,
                                      "host"sv,
                                      "host-memory"sv,
                                      "huge-pages"sv,
                                      "idle-trim"sv,
                                      "in-flight"sv,
                                      "instance"sv,
                                      "iterations"sv,
                                      "job-deadline"sv,
                                      "json"sv,
                                      "keep-logs"sv,
                                      "keep-pool"sv,
                                      "keep-pool-for"sv,
                                      "kill-deadline"sv,
                                      "kv-events"sv,
                                      "kv-events-encoding"sv,
                                      "kv-events-snapshot"sv,
                                      "last"sv,
                                      "list"sv,
                                      "load"sv,
                                      "load-rate"sv,
                                      "locality"sv,
                                      "log-dir"sv,
                                      "log-level"sv,
                                      "max-jobs"sv,
                                      "mode"sv,
                                      "name"sv,
                                      "namespace"sv,
                                      "namespace-key-file"sv,
                                      "namespace-quota"sv,
                                      "no-bare"sv,
                                      "no-check"sv,
                                      "numa-nodes"sv,
                                      "pairs"sv,
                                      "no-empty-cache"sv,
                                      "no-flush-cache"sv,
                                      "plot"sv,
                                      "policy"sv,
                                      "pool-size"sv,
                                      "prefetch"sv,
                                      "prefetch-requests"sv,
                                      "prefetch-timeout"sv,
                                      "prefill-rate"sv,
                                      "queue-deadline"sv,
                                      "rank"sv,
                                      "ranks"sv,
                                      "recompute"sv,
                                      "regions"sv,
                                      "release"sv,
                                      "repeats"sv,
                                      "report"sv,
                                      "requests"sv,
                                      "requests-per-iteration"sv,
                                      "revoke-deadline"sv,
                                      "runtime-dir"sv,
                                      "samples"sv,
                                      "scatter-ctas"sv,
                                      "seconds"sv,
                                      "seed"sv,
                                      "sequences"sv,
                                      "serve"sv,
                                      "settle-deadline"sv,
                                      "share"sv,
                                      "skip-bad"sv,
                                      "slice"sv,
                                      "snapshot"sv,
                                      "source"sv,
                                      "speed"sv,
                                      "staging-slot-bytes"sv,
                                      "staging-slots"sv,
                                      "stall-timeout"sv,
                                      "steps"sv,
                                      "store-queue"sv,
                                      "store-rate"sv,
                                      "strategy"sv,
                                      "tags"sv,
                                      "timeout"sv,
                                      "trace"sv,
                                      "unit-blocks"sv,
                                      "update"sv,
                                      "urgent-loads"sv,
                                      "verify"sv,
                                      "verify-loads"sv,
                                      "weights"sv,
                                      "weights-backup"sv,
                                      "weights-broadcast"sv,
                                      "weights-id"sv,
                                      "weights-size"sv,
                                      "weights-strategy"sv,
                                      "worker-environment"sv,
                                      "workload"sv,
                                      "write-back-wait"sv,
                                      "write-policy"sv,
                                      "write-uses"sv};

std::string text_of(const toml::node& value) {
  if (const auto* text = value.as_string()) return text->get();
  if (const auto* number = value.as_integer()) return std::to_string(number->get());
  if (const auto* number = value.as_floating_point()) return fmt::format("{}", number->get());
  if (const auto* truth = value.as_boolean()) return truth->get() ? "true" : "false";
  return {};
}

std::string place_of(const toml::node& node) {
  return fmt::format("line {}", node.source().begin.line);
}

/// Collects what the file says for one command's options.
class ItemReader {
 public:
  explicit ItemReader(const CLI::App& app) : app_(app) {}

  /// strict: the key must be an option of this command, not just of any.
  void take(const toml::key& key, const toml::node& value, bool strict) {
    std::string name(key.str());
    std::replace(name.begin(), name.end(), '_', '-');
    const CLI::Option* option = app_.get_option_no_throw("--" + name);
    const bool known =
        strict ? option != nullptr
               : std::find(kConfigurable.begin(), kConfigurable.end(), name) != kConfigurable.end();
    if (!known) {
      throw CLI::ConfigError(fmt::format("{}: there is no option '{}'{}", place_of(value), name,
                                         strict ? fmt::format(" of {}", app_.get_name()) : ""));
    }
    const bool takes_lists = option == nullptr || option->get_items_expected_max() > 1;
    std::vector<std::string> texts;
    if (const auto* list = value.as_array(); list != nullptr && takes_lists) {
      for (const toml::node& item : *list) texts.push_back(text_of(item));
    } else {
      texts.push_back(text_of(value));
    }
    if (std::find(texts.begin(), texts.end(), "") != texts.end()) {
      throw CLI::ConfigError(fmt::format("{}: '{}' is neither text, number nor true/false{}",
                                         place_of(value), name,
                                         takes_lists ? ", nor a list of them" : ""));
    }
    if (option == nullptr || is_in_environment(*option)) return;
    CLI::ConfigItem item;
    item.name = name;
    item.inputs = std::move(texts);
    // The command's own table comes second and wins.
    std::erase_if(items_, [&](const CLI::ConfigItem& other) { return other.name == name; });
    items_.push_back(std::move(item));
  }
  [[nodiscard]] std::vector<CLI::ConfigItem> result() && { return std::move(items_); }

 private:
  static bool is_in_environment(const CLI::Option& option) {
    const std::string name = option.get_envname();
    return !name.empty() && !ipc::environment(name.c_str()).empty();
  }

  const CLI::App& app_;
  std::vector<CLI::ConfigItem> items_;
};

void require_command(const toml::key& key, const toml::node& value) {
  if (std::find(kCommandNames.begin(), kCommandNames.end(), key.str()) != kCommandNames.end()) {
    return;
  }
  throw CLI::ConfigError(fmt::format("{}: there is no command [{}]", place_of(value), key.str()));
}

}  // namespace

std::span<const std::string_view> configurable_options() { return kConfigurable; }

TomlConfig::TomlConfig(const CLI::App& app, std::string command)
    : app_(app), command_(std::move(command)) {}

std::vector<CLI::ConfigItem> TomlConfig::from_config(std::istream& input) const {
  toml::table file;
  try {
    file = toml::parse(input);
  } catch (const toml::parse_error& error) {
    throw CLI::ConfigError(
        fmt::format("line {}: {}", error.source().begin.line, error.description()));
  }
  ItemReader reader(app_);
  for (const auto& [key, value] : file) {
    if (!value.is_table()) reader.take(key, value, false);
  }
  for (const auto& [key, value] : file) {
    const toml::table* table = value.as_table();
    if (table == nullptr) continue;
    require_command(key, value);
    if (key.str() != command_) continue;
    for (const auto& [inner_key, inner_value] : *table) reader.take(inner_key, inner_value, true);
  }
  return std::move(reader).result();
}

}  // namespace kvferry::cli
