// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/namespace_quota.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "manager/names.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

namespace kvferry::cache_manager {
namespace {

constexpr std::uint32_t kPermilleOfPercent = 10;
/// Blocks of models are larger: what is less is a size whose unit was forgotten.
constexpr std::uint64_t kLeastLimit = 4096;

ipc::Result<PoolPart> parse_part(std::string_view text, std::string_view whole) {
  if (text.ends_with('%')) {
    double percent = -1;
    const std::string_view number = text.substr(0, text.size() - 1);
    const char* const end = number.data() + number.size();
    const auto [last, error] = std::from_chars(number.data(), end, percent);
    if (error != std::errc{} || last != end || !(percent >= 0) || percent > 100) {
      return KVFERRY_ERROR(kInvalidArgument, "'{}' in '{}' is no percentage from 0% to 100%", text,
                           whole);
    }
    return PoolPart{0, static_cast<std::uint32_t>(std::lround(percent * kPermilleOfPercent))};
  }
  if (text == "0") return PoolPart{};
  auto bytes = ipc::parse_size(text);
  if (!bytes) {
    return KVFERRY_ERROR(kInvalidArgument, "'{}': {}, or a percentage as in 25%", whole,
                         bytes.error().message);
  }
  return PoolPart{*bytes, 0};
}

ipc::Status check_quota(std::string_view whose, const NamespaceQuota& quota, std::uint64_t pool) {
  const std::uint64_t soft = quota.soft.of(pool);
  const std::uint64_t hard = quota.hard.of(pool);
  if (hard == 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "the hard limit of {} is nothing: it could not store a block; give at "
                         "least what its blocks need",
                         whose);
  }
  if (hard < kLeastLimit) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "the hard limit of {} is {} bytes, below {}: it could not store a block; "
                         "give at least what its blocks need, with a unit, as in 0:16GiB",
                         whose, hard, kLeastLimit);
  }
  if (hard > pool || soft > pool) {
    return KVFERRY_ERROR(
        kInvalidArgument, "the quota of {} is {}:{}, the host pool has {}: give no more than that",
        whose, quota.soft.to_string(), quota.hard.to_string(), ipc::format_size(pool));
  }
  if (soft > hard) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "the soft share of {} is {}, above its hard limit of {}: give SOFT:HARD "
                         "with the smaller one first",
                         whose, quota.soft.to_string(), quota.hard.to_string());
  }
  return ipc::ok();
}

}  // namespace

std::uint64_t PoolPart::of(std::uint64_t pool_bytes) const noexcept {
  if (bytes > 0) return bytes;
  return pool_bytes / kWholePool * permille + pool_bytes % kWholePool * permille / kWholePool;
}

std::string PoolPart::to_string() const {
  if (bytes > 0) return ipc::format_size(bytes);
  return fmt::format("{:g}%", static_cast<double>(permille) / kPermilleOfPercent);
}

ipc::Status NamespaceQuotas::check(std::uint64_t pool_bytes) const {
  std::uint64_t shares = 0;
  for (const auto& [name, quota] : named) {
    KVFERRY_TRY(check_namespace(name));
    KVFERRY_TRY(check_quota(fmt::format("namespace {}", name), quota, pool_bytes));
    shares += quota.soft.of(pool_bytes);
  }
  if (others) KVFERRY_TRY(check_quota("namespaces that are not named", *others, pool_bytes));
  if (shares > pool_bytes) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "the soft shares of {} namespaces are {} together, the host pool has {}: "
                         "what all are to have at a time must fit",
                         named.size(), ipc::format_size(shares), ipc::format_size(pool_bytes));
  }
  return ipc::ok();
}

ipc::Result<NamespaceQuota> parse_namespace_quota(std::string_view text) {
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos || text.size() == 1) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "'{}' is no SOFT:HARD: give sizes or percentages, as in 25%:50% or "
                         "0:16GiB",
                         text);
  }
  NamespaceQuota quota;
  if (colon > 0) {
    KVFERRY_ASSIGN(quota.soft, parse_part(text.substr(0, colon), text));
  }
  if (colon + 1 < text.size()) {
    KVFERRY_ASSIGN(quota.hard, parse_part(text.substr(colon + 1), text));
  }
  return quota;
}

ipc::Result<std::pair<std::string, NamespaceQuota>> parse_named_quota(std::string_view text) {
  const std::size_t equals = text.rfind('=');
  if (equals == std::string_view::npos || equals == 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "'{}' is no NAME=SOFT:HARD: give the name of a namespace and its quota, "
                         "as in chat=25%:50%",
                         text);
  }
  KVFERRY_ASSIGN(const NamespaceQuota quota, parse_namespace_quota(text.substr(equals + 1)));
  return std::pair(std::string(text.substr(0, equals)), quota);
}

}  // namespace kvferry::cache_manager
