// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/clear_memory.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <algorithm>

namespace kvferry::cli {
namespace {

std::uint64_t difference(std::uint64_t one, std::uint64_t other) {
  return std::max(one, other) - std::min(one, other);
}

}  // namespace

ClearMemoryLog::ClearMemoryLog(const DeviceProbe& probe,
                               const std::vector<ipc::DeviceSpec>& rank_devices,
                               std::uint64_t arena_bytes)
    : probe_(probe), arena_bytes_(arena_bytes) {
  for (const ipc::DeviceSpec& spec : rank_devices) rank_devices_.push_back(spec.to_string());
}

void ClearMemoryLog::before_clear() {
  before_.clear();
  disturbed_ = false;
  auto seen = probe_.free_now();
  if (seen) {
    before_ = *std::move(seen);
  } else {
    ipc::log_warn("free memory before a clear is not known: {}", seen.error().to_string());
  }
}

void ClearMemoryLog::after_clear(const ipc::ClearReply& reply, bool quarantined) {
  const auto seen = probe_.free_now();
  if (!seen || before_.size() != seen->size()) {
    if (!seen) {
      ipc::log_warn("free memory after a clear is not known: {}", seen.error().to_string());
    }
    return;
  }
  ClearMemory clear;
  clear.quarantined = quarantined;
  clear.disturbed = disturbed_;
  for (std::size_t d = 0; d < seen->size(); ++d) {
    DeviceClear device;
    device.device = (*seen)[d].device;
    device.seen_before = before_[d].free_bytes;
    device.seen_after = (*seen)[d].free_bytes;
    for (const ipc::RankOutcome& rank : reply.ranks) {
      const bool here =
          rank.rank.value < rank_devices_.size() && rank_devices_[rank.rank.value] == device.device;
      // A rank that had nothing mapped has nothing to report and to give back.
      if (!here || rank.error || rank.outcome.free_after == 0) continue;
      // Ranks of one device look at different moments: the first has freed nothing yet, the last
      // sees what all have freed.
      device.reported_before = device.arena_bytes == 0
                                   ? rank.outcome.free_before
                                   : std::min(device.reported_before, rank.outcome.free_before);
      device.reported_after = std::max(device.reported_after, rank.outcome.free_after);
      device.arena_bytes += arena_bytes_;
    }
    clear.devices.push_back(std::move(device));
  }
  clears_.push_back(std::move(clear));
}

ClearMemorySummary summarize_clears(const std::vector<ClearMemory>& clears) {
  ClearMemorySummary summary;
  for (const ClearMemory& clear : clears) {
    bool is_short = false;
    for (const DeviceClear& device : clear.devices) {
      if (device.arena_bytes == 0) continue;
      const std::uint64_t back =
          device.seen_after - std::min(device.seen_before, device.seen_after);
      summary.given_back += back;
      if (clear.disturbed) continue;
      summary.largest_difference = std::max({summary.largest_difference,
                                             difference(device.seen_before, device.reported_before),
                                             difference(device.seen_after, device.reported_after)});
      is_short = is_short || back + kDriverNoiseBytes < device.arena_bytes;
    }
    if (is_short && !clear.quarantined) ++summary.short_clears;
  }
  return summary;
}

}  // namespace kvferry::cli
