// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/geometry.hpp"
#include "model/geometry_plan.hpp"

#include <array>

namespace kvferry::ipc {
namespace {

constexpr std::array kDataTypes = {DataType::kFp32,    DataType::kFp16,    DataType::kBf16,
                                   DataType::kFp8E4m3, DataType::kFp8E5m2, DataType::kInt8,
                                   DataType::kUint8};
constexpr std::array kRegionKinds = {RegionKind::kKey,    RegionKind::kValue,   RegionKind::kScale,
                                     RegionKind::kLatent, RegionKind::kIndexer, RegionKind::kDraft,
                                     RegionKind::kState,  RegionKind::kOther};
constexpr std::array kHitRules = {HitRule::kFull, HitRule::kSlidingWindow, HitRule::kLastState};
constexpr std::array kArenaOrders = {ArenaOrder::kLayerFirst, ArenaOrder::kLayerFirstMany,
                                     ArenaOrder::kBlockFirst};

template <typename Values>
auto parse_name(std::string_view text, const Values& values, std::string_view what)
    -> Result<typename Values::value_type> {
  std::string known;
  for (const auto value : values) {
    if (to_string(value) == text) return value;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", to_string(value));
  }
  return KVFERRY_ERROR(kInvalidArgument, "{} '{}' is unknown; use one of {}", what, text, known);
}

}  // namespace

std::uint64_t element_bytes(DataType type) noexcept {
  switch (type) {
    case DataType::kFp32: return 4;
    case DataType::kFp16:
    case DataType::kBf16: return 2;
    case DataType::kFp8E4m3:
    case DataType::kFp8E5m2:
    case DataType::kInt8:
    case DataType::kUint8: return 1;
  }
  return 0;
}

std::string_view to_string(DataType type) noexcept {
  switch (type) {
    case DataType::kFp32: return "fp32";
    case DataType::kFp16: return "fp16";
    case DataType::kBf16: return "bf16";
    case DataType::kFp8E4m3: return "fp8-e4m3";
    case DataType::kFp8E5m2: return "fp8-e5m2";
    case DataType::kInt8: return "int8";
    case DataType::kUint8: return "uint8";
  }
  return "invalid";
}

std::string_view to_string(RegionKind kind) noexcept {
  switch (kind) {
    case RegionKind::kKey: return "key";
    case RegionKind::kValue: return "value";
    case RegionKind::kScale: return "scale";
    case RegionKind::kLatent: return "latent";
    case RegionKind::kIndexer: return "indexer";
    case RegionKind::kDraft: return "draft";
    case RegionKind::kState: return "state";
    case RegionKind::kOther: return "other";
  }
  return "invalid";
}

std::string_view to_string(HitRule rule) noexcept {
  switch (rule) {
    case HitRule::kFull: return "full";
    case HitRule::kSlidingWindow: return "sliding-window";
    case HitRule::kLastState: return "last-state";
  }
  return "invalid";
}

std::string_view to_string(ArenaOrder order) noexcept {
  switch (order) {
    case ArenaOrder::kLayerFirst: return "layer-first";
    case ArenaOrder::kLayerFirstMany: return "layer-first-many";
    case ArenaOrder::kBlockFirst: return "block-first";
  }
  return "invalid";
}

Result<ArenaOrder> parse_arena_order(std::string_view text) {
  return parse_name(text, kArenaOrders, "arena order");
}

namespace model {

Result<DataType> parse_data_type(std::string_view text) {
  return parse_name(text, kDataTypes, "dtype");
}

Result<RegionKind> parse_region_kind(std::string_view text) {
  return parse_name(text, kRegionKinds, "kind");
}

Result<HitRule> parse_hit_rule(std::string_view text) {
  return parse_name(text, kHitRules, "rule");
}

}  // namespace model
}  // namespace kvferry::ipc
