// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/lenders.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/rank/weights_user.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;

/// Tensors lie at multiples of the first in one allocation, which devices round up to the second.
constexpr std::uint64_t kPlaceBytes = 512;
constexpr std::uint64_t kAllocationBytes = 2ULL << 20;
/// Of a process that has no room for one more connection at the moment.
constexpr ipc::Duration kGreetTime = 1ms;

bool on_one_device(const std::vector<ipc::DeviceSpec>& devices) {
  return std::all_of(devices.begin(), devices.end(), [&devices](const ipc::DeviceSpec& device) {
    return device.to_string() == devices.front().to_string();
  });
}

}  // namespace

std::vector<LenderPlan> plan_lenders(std::vector<WeightsVersion>& weights,
                                     const std::vector<ipc::DeviceSpec>& devices) {
  const bool shared = on_one_device(devices);
  std::vector<LenderPlan> lenders;
  for (std::size_t version = 0; version < weights.size(); ++version) {
    weights[version].lender = fmt::format("v{}{}", version, shared ? "" : "-r{rank}");
    for (std::uint32_t rank = 0; rank < (shared ? 1 : devices.size()); ++rank) {
      lenders.push_back(
          {ipc::lender_of(weights[version].lender, rank), weights[version].file, devices[rank]});
    }
  }
  return lenders;
}

std::uint64_t lenders_on_fullest(const std::vector<ipc::DeviceSpec>& devices) {
  if (on_one_device(devices)) return kWeightsVersions;
  std::map<std::string, std::uint64_t> ranks;
  std::uint64_t most = 0;
  for (const ipc::DeviceSpec& device : devices) most = std::max(most, ++ranks[device.to_string()]);
  return most * kWeightsVersions;
}

std::uint64_t lent_bytes(std::uint64_t weights_bytes, std::uint32_t ranks) {
  std::uint64_t total = 0;
  for (const TensorShape& tensor : model_tensors(weights_bytes, ranks)) {
    total += ipc::align_up(tensor.size_bytes(), kPlaceBytes);
  }
  return ipc::align_up(total, kAllocationBytes);
}

std::vector<std::string> missing_lenders(const ipc::RuntimeDir& dir,
                                         const std::vector<std::string>& names) {
  std::vector<std::string> missing;
  for (const std::string& name : names) {
    const auto socket = dir.weights_socket(name);
    const ipc::Deadline deadline = ipc::Deadline::after(kGreetTime);
    // Connected and closed: a lender forgets who has taken nothing.
    if (!socket || !ipc::PacketSocket::connect(*socket, deadline)) missing.push_back(name);
  }
  return missing;
}

}  // namespace kvferry::cli
