// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "model/geometry_plan.hpp"

#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <system_error>
#include <utility>

namespace kvferry::ipc::model {
namespace {

constexpr std::uintmax_t kMaxFileBytes = 1U << 20;

/// One table of the file with its place, so that every error names file, line, key and value.
class Table {
 public:
  Table(std::string file, std::string path, const toml::table& table)
      : file_(std::move(file)), path_(std::move(path)), table_(table) {}

  [[nodiscard]] std::string origin() const { return position(table_); }

  /// Refuses keys that nobody reads: a misspelt one must not silently mean its default.
  [[nodiscard]] Status only(std::initializer_list<std::string_view> keys) const {
    for (const auto& [key, value] : table_) {
      if (std::find(keys.begin(), keys.end(), key.str()) != keys.end()) continue;
      std::string known;
      for (const std::string_view name : keys) {
        known += fmt::format("{}{}", known.empty() ? "" : ", ", name);
      }
      return KVFERRY_ERROR(kInvalidArgument, "{}: {} is an unknown key; known here: {}",
                           position(value), name_of(key.str()), known);
    }
    return ok();
  }

  [[nodiscard]] bool has(std::string_view key) const { return table_.contains(key); }

  [[nodiscard]] Result<std::uint64_t> number(std::string_view key,
                                             std::uint64_t low,
                                             std::uint64_t high) const {
    KVFERRY_ASSIGN(const toml::node* node, required(key));
    const auto* integer = node->as_integer();
    if (integer == nullptr || integer->get() < 0 ||
        static_cast<std::uint64_t>(integer->get()) < low ||
        static_cast<std::uint64_t>(integer->get()) > high) {
      return KVFERRY_ERROR(kInvalidArgument, "{}: {} is {}, expected a whole number from {} to {}",
                           position(*node), name_of(key), shown(*node), low, high);
    }
    return static_cast<std::uint64_t>(integer->get());
  }
  [[nodiscard]] Result<std::uint32_t> number32(std::string_view key,
                                               std::uint32_t low,
                                               std::uint32_t high) const {
    KVFERRY_ASSIGN(const std::uint64_t value, number(key, low, high));
    return static_cast<std::uint32_t>(value);
  }
  [[nodiscard]] Result<std::uint32_t> number32_or(std::string_view key,
                                                  std::uint32_t low,
                                                  std::uint32_t high,
                                                  std::uint32_t fallback) const {
    return has(key) ? number32(key, low, high) : Result<std::uint32_t>(fallback);
  }

  [[nodiscard]] Result<std::string> text(std::string_view key) const {
    KVFERRY_ASSIGN(const toml::node* node, required(key));
    const auto* value = node->as_string();
    if (value == nullptr) {
      return KVFERRY_ERROR(kInvalidArgument, "{}: {} is {}, expected a text in quotes",
                           position(*node), name_of(key), shown(*node));
    }
    return value->get();
  }

  /// A text that parse() understands.
  template <typename T>
  [[nodiscard]] Result<T> choice(std::string_view key, Result<T> (*parse)(std::string_view)) const {
    KVFERRY_ASSIGN(const std::string value, text(key));
    Result<T> parsed = parse(value);
    if (parsed) return parsed;
    return KVFERRY_ERROR(kInvalidArgument, "{}: {}: {}", position(*table_.get(key)), name_of(key),
                         parsed.error().message);
  }

  [[nodiscard]] Result<bool> boolean(std::string_view key) const {
    KVFERRY_ASSIGN(const toml::node* node, required(key));
    const auto* value = node->as_boolean();
    if (value == nullptr) {
      return KVFERRY_ERROR(kInvalidArgument, "{}: {} is {}, expected true or false",
                           position(*node), name_of(key), shown(*node));
    }
    return value->get();
  }

  /// The tables of [[key]], at least one.
  [[nodiscard]] Result<std::vector<Table>> tables(std::string_view key, std::size_t most) const {
    KVFERRY_ASSIGN(const toml::node* node, required(key));
    const toml::array* array = node->as_array();
    if (array == nullptr || array->empty() || array->size() > most ||
        !array->is_homogeneous(toml::node_type::table)) {
      return KVFERRY_ERROR(kInvalidArgument, "{}: {} is {}, expected 1 to {} tables [[{}]]",
                           position(*node), name_of(key), shown(*node), most, name_of(key));
    }
    std::vector<Table> result;
    for (std::size_t i = 0; i < array->size(); ++i) {
      result.emplace_back(file_, fmt::format("{}[{}].", name_of(key), i),
                          *array->get(i)->as_table());
    }
    return result;
  }

  [[nodiscard]] std::string name_of(std::string_view key) const {
    return fmt::format("{}{}", path_, key);
  }
  [[nodiscard]] std::string position_of(std::string_view key) const {
    const toml::node* node = table_.get(key);
    return node == nullptr ? origin() : position(*node);
  }

 private:
  [[nodiscard]] std::string position(const toml::node& node) const {
    return fmt::format("{}:{}", file_, node.source().begin.line);
  }

  [[nodiscard]] Result<const toml::node*> required(std::string_view key) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) {
      return KVFERRY_ERROR(kInvalidArgument, "{}: {} is missing", origin(), name_of(key));
    }
    return node;
  }

  static std::string shown(const toml::node& node) {
    if (const auto* value = node.as_string()) return fmt::format("\"{}\"", value->get());
    if (const auto* value = node.as_integer()) return fmt::format("{}", value->get());
    if (const auto* value = node.as_floating_point()) return fmt::format("{}", value->get());
    if (const auto* value = node.as_boolean()) return fmt::format("{}", value->get());
    if (const auto* value = node.as_array()) {
      return fmt::format("an array of {} elements", value->size());
    }
    return node.is_table() ? "a table" : "a date or time";
  }

  std::string file_;
  std::string path_;
  const toml::table& table_;
};

Result<bool> parse_kv_order(std::string_view text) {
  if (text == "key-first") return true;
  if (text == "value-first") return false;
  return KVFERRY_ERROR(kInvalidArgument, "kv_order '{}' is unknown; use key-first or value-first",
                       text);
}

Status read_key_value(const Table& table, LayersPlan& plan) {
  KVFERRY_TRY(table.only(
      {"kind", "layers", "first_layer", "dtype", "kv_heads", "head_dim", "scale_dtype"}));
  KeyValuePlan kv;
  KVFERRY_ASSIGN(kv.heads, table.number32("kv_heads", 1, 65536));
  KVFERRY_ASSIGN(kv.head_dim, table.number32("head_dim", 1, 65536));
  if (table.has("scale_dtype")) {
    KVFERRY_ASSIGN(kv.scale_dtype, table.choice("scale_dtype", parse_data_type));
  }
  plan.key_value = kv;
  return ok();
}

Status read_plain(const Table& table, LayersPlan& plan) {
  // The kind first: it decides which keys are known.
  const Result<RegionKind> kind = table.choice("kind", parse_region_kind);
  if (!kind) {
    return KVFERRY_ERROR(kInvalidArgument, "{}, or key-value", kind.error().message);
  }
  plan.plain.kind = *kind;
  KVFERRY_TRY(table.only({"kind", "layers", "first_layer", "dtype", "replicated",
                          "elements_per_token", "bytes_per_block"}));
  KVFERRY_ASSIGN(plan.plain.replicated, table.boolean("replicated"));
  if (table.has("elements_per_token") == table.has("bytes_per_block")) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: give exactly one of {} and {}", table.origin(),
                         table.name_of("elements_per_token"), table.name_of("bytes_per_block"));
  }
  // Over all ranks, hence more than one rank's limit; shard() holds each rank's share to that.
  constexpr std::uint64_t kMost = kMaxRegionBlockBytes * kMaxRanks;
  if (table.has("elements_per_token")) {
    KVFERRY_ASSIGN(plan.plain.elements_per_token, table.number("elements_per_token", 1, kMost));
  } else {
    KVFERRY_ASSIGN(plan.plain.bytes_per_block, table.number("bytes_per_block", 1, kMost));
  }
  return ok();
}

Result<LayersPlan> read_layers(const Table& table) {
  LayersPlan plan;
  plan.origin = table.origin();
  KVFERRY_ASSIGN(const std::string kind, table.text("kind"));
  if (kind == "key-value") {
    KVFERRY_TRY(read_key_value(table, plan));
  } else {
    KVFERRY_TRY(read_plain(table, plan));
  }
  KVFERRY_ASSIGN(plan.layers, table.number32("layers", 1, kMaxLayers));
  KVFERRY_ASSIGN(plan.first_layer, table.number32_or("first_layer", 0, kMaxLayers - 1, 0));
  KVFERRY_ASSIGN(plan.dtype, table.choice("dtype", parse_data_type));
  return plan;
}

Result<GroupPlan> read_group(const Table& table) {
  KVFERRY_TRY(table.only({"name", "rule", "window_blocks", "blocks_percent", "regions"}));
  GroupPlan plan;
  KVFERRY_ASSIGN(plan.name, table.text("name"));
  if (table.has("rule")) {
    KVFERRY_ASSIGN(plan.rule, table.choice("rule", parse_hit_rule));
  }
  if (plan.rule == HitRule::kSlidingWindow) {
    KVFERRY_ASSIGN(plan.window_blocks, table.number32("window_blocks", 1, kMaxWindowBlocks));
  } else if (table.has("window_blocks")) {
    return KVFERRY_ERROR(
        kInvalidArgument, "{}: {} is given with rule {}; only sliding-window has one",
        table.position_of("window_blocks"), table.name_of("window_blocks"), to_string(plan.rule));
  }
  KVFERRY_ASSIGN(plan.blocks_percent,
                 table.number32_or("blocks_percent", 1, kMaxBlocksPercent, 100));
  KVFERRY_ASSIGN(const std::vector<Table> regions, table.tables("regions", kMaxRegionsPerGroup));
  for (const Table& region : regions) {
    KVFERRY_ASSIGN(LayersPlan layers, read_layers(region));
    plan.layers.push_back(std::move(layers));
  }
  return plan;
}

Result<GeometryPlan> read_geometry(const Table& table) {
  KVFERRY_TRY(table.only({"name", "tokens_per_block", "kv_order", "group"}));
  GeometryPlan plan;
  KVFERRY_ASSIGN(plan.name, table.text("name"));
  KVFERRY_ASSIGN(plan.tokens_per_block, table.number32("tokens_per_block", 1, kMaxTokensPerBlock));
  if (table.has("kv_order")) {
    KVFERRY_ASSIGN(plan.key_before_value, table.choice("kv_order", parse_kv_order));
  }
  KVFERRY_ASSIGN(const std::vector<Table> groups, table.tables("group", kMaxGroups));
  for (const Table& entry : groups) {
    KVFERRY_ASSIGN(GroupPlan group, read_group(entry));
    for (const GroupPlan& other : plan.groups) {
      if (other.name == group.name) {
        return KVFERRY_ERROR(kInvalidArgument,
                             "{}: {} is \"{}\", which names an earlier group, too",
                             entry.position_of("name"), entry.name_of("name"), group.name);
      }
    }
    plan.groups.push_back(std::move(group));
  }
  return plan;
}

Result<std::string> read_text(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) {
    errno = error ? error.value() : ENOENT;
    return KVFERRY_ERRNO("geometry file '{}'", path.string());
  }
  // Not of a pipe or device: opening one may block for ever.
  if (!std::filesystem::is_regular_file(status)) {
    return KVFERRY_ERROR(kInvalidArgument, "geometry file '{}' is no regular file", path.string());
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return KVFERRY_ERRNO("geometry file '{}'", path.string());
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMaxFileBytes) {
    return KVFERRY_ERROR(kInvalidArgument, "geometry file '{}' is larger than {} bytes",
                         path.string(), kMaxFileBytes);
  }
  return text;
}

}  // namespace

Result<GeometryPlan> read_geometry_file(const std::filesystem::path& path) {
  KVFERRY_ASSIGN(const std::string text, read_text(path));
  toml::table parsed;
  try {
    parsed = toml::parse(text, path.string());
  } catch (const toml::parse_error& error) {
    return KVFERRY_ERROR(kInvalidArgument, "{}:{}: no valid TOML: {}", path.string(),
                         error.source().begin.line, error.description());
  }
  return read_geometry(Table(path.string(), "", parsed));
}

}  // namespace kvferry::ipc::model
