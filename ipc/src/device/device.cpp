// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/device/device.hpp"

#include "device/cuda_device.hpp"
#include "device/host_device.hpp"
#include "device/host_ledger.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr int kMaxOrdinal = 1023;

Result<DeviceSpec> parse_cuda(std::string_view text, std::string_view ordinal) {
  int value = -1;
  const bool digits = !ordinal.empty() && std::all_of(ordinal.begin(), ordinal.end(),
                                                      [](char c) { return c >= '0' && c <= '9'; });
  if (digits) std::from_chars(ordinal.data(), ordinal.data() + ordinal.size(), value);
  if (value < 0 || value > kMaxOrdinal) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "device '{}': '{}' is not a CUDA ordinal of 0 to {}; write e.g. cuda:0",
                         text, ordinal, kMaxOrdinal);
  }
  DeviceSpec spec;
  spec.kind = DeviceKind::kCuda;
  spec.ordinal = value;
  return spec;
}

Result<DeviceSpec> parse_host(std::string_view text, std::string_view rest) {
  const std::size_t colon = rest.find(':');
  if (colon == std::string_view::npos) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "device '{}' has no size; write host:NAME:SIZE, e.g. host:demo-0:2GiB",
                         text);
  }
  DeviceSpec spec;
  spec.kind = DeviceKind::kHost;
  spec.host_name = std::string(rest.substr(0, colon));
  KVFERRY_TRY(check_host_name(spec.host_name));
  auto size = parse_size(rest.substr(colon + 1));
  if (!size.has_value()) {
    return KVFERRY_ERROR(kInvalidArgument, "device '{}': {}", text, size.error().message);
  }
  spec.host_capacity_bytes = *size;
  if (spec.host_capacity_bytes > kMaxHostCapacity) {
    return KVFERRY_ERROR(kInvalidArgument, "device '{}': {} is above the largest capacity of {}",
                         text, format_size(spec.host_capacity_bytes),
                         format_size(kMaxHostCapacity));
  }
  return spec;
}

/// In the largest unit that divides it, so that parsing gives the same number again.
std::string exact_size(std::uint64_t size_bytes) {
  constexpr std::array<std::pair<unsigned, std::string_view>, 4> kBinary = {
      {{40, "TiB"}, {30, "GiB"}, {20, "MiB"}, {10, "KiB"}}};
  for (const auto& [shift, name] : kBinary) {
    const std::uint64_t unit = 1ULL << shift;
    if (size_bytes != 0 && size_bytes % unit == 0) {
      return fmt::format("{}{}", size_bytes >> shift, name);
    }
  }
  return fmt::format("{}", size_bytes);
}

}  // namespace

std::string_view to_string(DeviceKind kind) noexcept {
  switch (kind) {
    case DeviceKind::kHost: return "host";
    case DeviceKind::kCuda: return "cuda";
  }
  return "invalid";
}

std::string_view to_string(HandleKind kind) noexcept {
  switch (kind) {
    case HandleKind::kLegacy: return "legacy";
    case HandleKind::kVmm: return "vmm";
  }
  return "invalid";
}

Result<DeviceSpec> DeviceSpec::parse(std::string_view text) {
  constexpr std::string_view kCudaPrefix = "cuda:";
  constexpr std::string_view kHostPrefix = "host:";
  if (text.starts_with(kCudaPrefix)) return parse_cuda(text, text.substr(kCudaPrefix.size()));
  if (text.starts_with(kHostPrefix)) return parse_host(text, text.substr(kHostPrefix.size()));
  return KVFERRY_ERROR(kInvalidArgument,
                       "device '{}' is neither cuda:ORDINAL nor host:NAME:SIZE; write e.g. cuda:0 "
                       "or host:demo-0:2GiB",
                       text);
}

std::string DeviceSpec::to_string() const {
  if (kind == DeviceKind::kCuda) return fmt::format("cuda:{}", ordinal);
  return fmt::format("host:{}:{}", host_name, exact_size(host_capacity_bytes));
}

Result<std::unique_ptr<MatrixProduct>> Device::make_product(const MatrixShape& shape) {
  return KVFERRY_ERROR(kNotFound,
                       "{} computes no product of {} x {} x {}: that takes a CUDA device", name(),
                       shape.m, shape.n, shape.k);
}

Result<BroadcastPort> Device::broadcast_port() {
  return KVFERRY_ERROR(kNotFound, "{} has no broadcasts", name());
}

Result<std::unique_ptr<BroadcastRoot>> Device::open_broadcast() {
  return KVFERRY_ERROR(kNotFound, "{} has no broadcasts", name());
}

Result<std::unique_ptr<BroadcastGroup>> Device::join_broadcast(const BroadcastSeat& seat,
                                                               const BroadcastWait& /*wait*/) {
  return KVFERRY_ERROR(kNotFound, "{} has no broadcasts that rank {} could join", name(),
                       seat.rank);
}

std::unique_ptr<Device> open_device(const DeviceSpec& spec) {
  // A spec can be filled in by hand, so its text must stand the same checks as a user's.
  if (auto checked = DeviceSpec::parse(spec.to_string()); !checked.has_value()) {
    throw Exception(std::move(checked).error());
  }
  if (spec.kind == DeviceKind::kCuda) return make_cuda_device(spec);
  return std::make_unique<HostDevice>(spec);
}

Result<std::uint64_t> host_device_used_bytes(std::string_view host_name) {
  KVFERRY_TRY(check_host_name(host_name));
  KVFERRY_ASSIGN(const HostLedgerView view, read_host_ledger(host_name));
  return view.used_bytes();
}

}  // namespace kvferry::ipc
