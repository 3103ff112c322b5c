// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/mover.hpp"

#include <array>
#include <string_view>
#include <utility>

namespace kvferry::cache_manager {
namespace {

constexpr std::array<std::pair<CopyStrategy, std::string_view>, 8> kStrategyNames{{
    {CopyStrategy::kAuto, "auto"},
    {CopyStrategy::kDirect, "direct"},
    {CopyStrategy::kStaged, "staged"},
    {CopyStrategy::kStrided, "strided"},
    {CopyStrategy::kBatch, "batch"},
    {CopyStrategy::kMemcpy, "memcpy"},
    {CopyStrategy::kKernel, "kernel"},
    {CopyStrategy::kAgent, "agent"},
}};

}  // namespace

std::string_view to_string(CopyStrategy strategy) noexcept {
  for (const auto& [value, name] : kStrategyNames) {
    if (value == strategy) return name;
  }
  return "invalid";
}

ipc::Result<CopyStrategy> parse_copy_strategy(std::string_view text) {
  for (const auto& [value, name] : kStrategyNames) {
    if (name == text) return value;
  }
  return KVFERRY_ERROR(kInvalidArgument,
                       "copy strategy '{}' is unknown; use auto, direct, staged, strided, "
                       "batch, memcpy, kernel or agent",
                       text);
}

}  // namespace kvferry::cache_manager
