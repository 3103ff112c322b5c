// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/calibration_file.hpp"

#include "kvferry/ipc/os/cache_file.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::Result;
using ipc::Status;
using nlohmann::json;

constexpr std::uint64_t kMostFileBytes = 1ULL << 20;
constexpr std::size_t kMostNameChars = 96;
constexpr const char* kVersionField = "kvferry_calibration";

json to_json(const GroupCurves& group) {
  json us = json::object();
  for (const StrategyCurve& curve : group.strategies) {
    us[std::string(to_string(curve.strategy))] = curve.us;
  }
  return {{"block_bytes", group.block_bytes},
          {"regions", group.regions},
          {"blocks", group.blocks},
          {"large_us", group.large_us},
          {"us", us}};
}

json to_json(const std::vector<GroupCurves>& way) {
  json groups = json::array();
  for (const GroupCurves& group : way) groups.push_back(to_json(group));
  return groups;
}

/// Reads fields of an object, and remembers the first one that is not as it should be. What lies
/// in a file is not trusted: every field is looked at before it is used.
class Fields {
 public:
  Fields(const json& object, std::optional<ipc::Error>& wrong) : object_(object), wrong_(wrong) {
    if (!object_.is_object()) refuse("a part", "an object");
  }

  [[nodiscard]] std::string text(const char* name) {
    const json* field = find(name);
    if (field != nullptr && field->is_string()) return field->get<std::string>();
    refuse(name, "a text");
    return {};
  }
  [[nodiscard]] std::uint64_t number(const char* name, std::uint64_t most) {
    const json* field = find(name);
    if (field != nullptr && field->is_number_unsigned() && field->get<std::uint64_t>() <= most) {
      return field->get<std::uint64_t>();
    }
    refuse(name, fmt::format("a whole number of at most {}", most));
    return 0;
  }
  [[nodiscard]] std::vector<double> figures(const char* name) {
    std::vector<double> all;
    for (const json& one : list(name)) {
      if (!one.is_number()) refuse(name, "a list of numbers");
      if (wrong_) return {};
      all.push_back(one.get<double>());
    }
    return all;
  }
  [[nodiscard]] std::vector<std::uint32_t> counts(const char* name) {
    constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
    std::vector<std::uint32_t> all;
    for (const json& one : list(name)) {
      if (!one.is_number_unsigned() || one.get<std::uint64_t>() > kMost) {
        refuse(name, "a list of counts");
        return {};
      }
      all.push_back(one.get<std::uint32_t>());
    }
    return all;
  }
  [[nodiscard]] const json& list(const char* name) {
    static const json kEmpty = json::array();
    const json* field = find(name);
    if (field != nullptr && field->is_array()) return *field;
    refuse(name, "a list");
    return kEmpty;
  }
  [[nodiscard]] const json& object(const char* name) {
    static const json kEmpty = json::object();
    const json* field = find(name);
    if (field != nullptr && field->is_object()) return *field;
    refuse(name, "an object");
    return kEmpty;
  }

  void refuse(std::string_view name, std::string_view expected) {
    if (wrong_) return;
    wrong_ = KVFERRY_ERROR(kProtocol, "calibration: {} is missing or not {}", name, expected);
  }

 private:
  [[nodiscard]] const json* find(const char* name) const {
    if (!object_.is_object()) return nullptr;
    const auto field = object_.find(name);
    return field == object_.end() ? nullptr : &*field;
  }

  const json& object_;
  std::optional<ipc::Error>& wrong_;
};

GroupCurves read_group(const json& from, std::optional<ipc::Error>& wrong) {
  Fields fields(from, wrong);
  GroupCurves group;
  group.block_bytes = fields.number("block_bytes", std::numeric_limits<std::uint64_t>::max());
  group.regions = static_cast<std::uint32_t>(fields.number("regions", ipc::kMaxRegionsPerGroup));
  group.blocks = fields.counts("blocks");
  group.large_us = fields.figures("large_us");
  Fields us(fields.object("us"), wrong);
  if (group.blocks.empty()) return group;
  for (const CopyStrategy strategy : kMeasuredStrategies) {
    group.strategies.push_back({strategy, us.figures(std::string(to_string(strategy)).c_str())});
  }
  return group;
}

std::vector<GroupCurves> read_way(const json& from, std::optional<ipc::Error>& wrong) {
  std::vector<GroupCurves> groups;
  for (const json& group : from) {
    groups.push_back(read_group(group, wrong));
    if (wrong) return {};
  }
  return groups;
}

}  // namespace

std::filesystem::path calibration_file(const std::filesystem::path& cache_dir,
                                       const CalibrationKey& key) {
  std::string name = key.device.uuid.substr(0, kMostNameChars);
  for (char& c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (!plain && c != '-') c = '_';
  }
  return cache_dir / fmt::format("calibration-{}-{}-{}.json", name, ipc::to_string(key.order),
                                 key.fingerprint.hex());
}

std::string to_text(const Calibration& calibration) {
  const CalibrationKey& key = calibration.key;
  const json document = {{kVersionField, key.version},
                         {"device",
                          {{"name", key.device.name},
                           {"uuid", key.device.uuid},
                           {"link", key.device.link},
                           {"driver", key.device.driver},
                           {"runtime", key.device.runtime}}},
                         {"arena", ipc::to_string(key.order)},
                         {"fingerprint", key.fingerprint.hex()},
                         {"d2h", to_json(calibration.to_host)},
                         {"h2d", to_json(calibration.to_device)}};
  // A name that is no UTF-8 must not end the mover.
  return document.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

Result<Calibration> parse_calibration(std::string_view text) {
  const json document = json::parse(text, nullptr, false);
  if (document.is_discarded()) {
    return KVFERRY_ERROR(kProtocol, "calibration: {} bytes that are no JSON", text.size());
  }
  std::optional<ipc::Error> wrong;
  Fields fields(document, wrong);
  Calibration calibration;
  CalibrationKey& key = calibration.key;
  key.version = static_cast<std::uint32_t>(
      fields.number(kVersionField, std::numeric_limits<std::uint32_t>::max()));
  if (wrong) return *wrong;
  if (key.version != kCalibrationVersion) {
    // What else it may hold is not known.
    return KVFERRY_ERROR(kVersionMismatch, "calibration of version {}, this is version {}",
                         key.version, kCalibrationVersion);
  }
  Fields device(fields.object("device"), wrong);
  key.device.name = device.text("name");
  key.device.uuid = device.text("uuid");
  key.device.link = device.text("link");
  key.device.driver = device.text("driver");
  key.device.runtime = device.text("runtime");
  const std::string arena = fields.text("arena");
  const std::string fingerprint = fields.text("fingerprint");
  calibration.to_host = read_way(fields.list("d2h"), wrong);
  calibration.to_device = read_way(fields.list("h2d"), wrong);
  if (wrong) return *wrong;
  const auto order = ipc::parse_arena_order(arena);
  const auto digest = ipc::Digest::from_hex(fingerprint);
  if (!order || !digest) {
    return KVFERRY_ERROR(kProtocol, "calibration: {}",
                         (order ? digest.error() : order.error()).message);
  }
  key.order = *order;
  key.fingerprint = *digest;
  KVFERRY_TRY(check_calibration(calibration));
  return calibration;
}

Result<Calibration> load_calibration(const std::filesystem::path& file, const CalibrationKey& key) {
  KVFERRY_ASSIGN(const std::string text, ipc::read_cache_file(file, kMostFileBytes));
  KVFERRY_ASSIGN(Calibration calibration, parse_calibration(text));
  if (calibration.key == key) return calibration;
  return KVFERRY_ERROR(kStaleEpoch, "{} is not of this device or geometry any more: {}",
                       file.native(), difference(key, calibration.key));
}

Status save_calibration(const std::filesystem::path& file, const Calibration& calibration) {
  return ipc::write_cache_file(file, to_text(calibration));
}

}  // namespace kvferry::cache_manager
