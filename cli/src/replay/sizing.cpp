// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/sizing.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "kvferry/worker/prefix_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace kvferry::cli {
namespace {

constexpr std::uint64_t kDeviceShare = 91;  ///< One in so many distinct blocks.
constexpr double kHostShare = 0.22;
/// Blocks of a request come back hundreds of requests later: below this the host tier would forget
/// everything in a short run.
constexpr std::uint64_t kLeastHostBlocks = 10'000;
constexpr std::uint64_t kPoolSlackBytes = 16ULL << 20;

/// Trace blocks that fit into so many blocks of a group with blocks_percent = 100.
std::uint64_t blocks_needed(const ipc::Geometry& geometry, std::uint32_t length) {
  std::uint64_t needed = 1;
  for (const ipc::GroupSpec& group : geometry.groups) {
    const std::uint64_t in_group =
        group.rule == ipc::HitRule::kFull ? length : worker::most_blocks_needed(group, length);
    const std::uint64_t percent = std::max<std::uint64_t>(1, group.blocks_percent);
    needed = std::max(needed, (in_group * 100 + percent - 1) / percent);
  }
  return needed;
}

/// All that the run will really take of the host, against what there is.
ipc::Status check_available(const ipc::Geometry& geometry,
                            const Sizing& sizing,
                            const SizingLimits& limits) {
  if (limits.host_available == 0) return ipc::ok();
  std::uint64_t arenas = 0;
  std::uint64_t needed = 0;
  const std::uint64_t per_rank = device_bytes_per_block(geometry);
  if (limits.devices_in_host_memory && (!ipc::checked_mul(per_rank, sizing.gpu_blocks, arenas) ||
                                        !ipc::checked_mul(arenas, geometry.ranks, arenas))) {
    arenas = UINT64_MAX;
  }
  if (!ipc::checked_add(arenas, sizing.host_bytes, needed)) needed = UINT64_MAX;
  if (needed <= limits.host_available) return ipc::ok();
  return KVFERRY_ERROR(
      kInvalidArgument,
      "{} of host memory for blocks{} do not fit into the {} that this host has available; give "
      "less --host-memory{}",
      ipc::format_size(sizing.host_bytes),
      arenas == 0 ? std::string()
                  : fmt::format(" and {} for the simulated devices ({} blocks on each of {})",
                                ipc::format_size(arenas), sizing.gpu_blocks, geometry.ranks),
      ipc::format_size(limits.host_available),
      arenas == 0 ? "" : " or --gpu-blocks, or leave out the trace's longest requests");
}

}  // namespace

std::uint64_t host_bytes_per_block(const ipc::Geometry& geometry) {
  std::uint64_t bytes = 0;
  for (std::uint32_t g = 0; g < geometry.groups.size(); ++g) {
    bytes += geometry.host_block_bytes(ipc::GroupId{g});
  }
  return bytes;
}

std::uint64_t device_bytes_per_block(const ipc::Geometry& geometry) {
  std::uint64_t bytes = 0;
  for (std::uint32_t g = 0; g < geometry.groups.size(); ++g) {
    const ipc::GroupId group{g};
    bytes += (geometry.replicated_bytes(group) + geometry.sharded_bytes(group)) *
             geometry.groups[g].blocks_percent / 100;
  }
  return std::max<std::uint64_t>(1, bytes);
}

std::uint64_t available_host_bytes() {
  std::ifstream in("/proc/meminfo");
  std::string name;
  std::uint64_t kib = 0;
  for (std::string unit; in >> name >> kib; std::getline(in, unit)) {
    if (name == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

ipc::Result<Sizing> choose_sizes(const ipc::Geometry& geometry,
                                 const TraceFacts& facts,
                                 std::optional<std::uint32_t> gpu_blocks,
                                 std::optional<std::uint64_t> host_bytes,
                                 const SizingLimits& limits) {
  const std::uint64_t longest = blocks_needed(geometry, facts.longest_request_blocks);
  std::uint64_t device_blocks = gpu_blocks.value_or(0);
  if (!gpu_blocks) {
    device_blocks = std::max(facts.distinct_blocks / kDeviceShare, longest + longest / 2);
    if (limits.device_bytes > 0) {
      device_blocks =
          std::min(device_blocks, limits.device_bytes / device_bytes_per_block(geometry));
    }
  }
  if (device_blocks < longest || device_blocks > UINT32_MAX) {
    return KVFERRY_ERROR(
        kInvalidArgument,
        "the longest request needs {} device blocks ({} on each rank), {} are {}; {}", longest,
        ipc::format_size(longest * device_bytes_per_block(geometry)), device_blocks,
        gpu_blocks ? "asked for by --gpu-blocks" : "free on the device",
        gpu_blocks ? "give more" : "take a smaller --geometry or more --ranks");
  }
  Sizing sizing;
  sizing.gpu_blocks = static_cast<std::uint32_t>(device_blocks);
  const std::uint64_t block_bytes = host_bytes_per_block(geometry);
  if (host_bytes) {
    sizing.host_bytes = *host_bytes;
  } else {
    const std::uint64_t blocks = std::max(
        static_cast<std::uint64_t>(kHostShare * static_cast<double>(facts.distinct_blocks)),
        std::min(kLeastHostBlocks, facts.distinct_blocks));
    sizing.host_bytes = blocks * block_bytes + kPoolSlackBytes;
    if (limits.host_bytes > 0) sizing.host_bytes = std::min(sizing.host_bytes, limits.host_bytes);
  }
  if (sizing.host_bytes < block_bytes) {
    return KVFERRY_ERROR(kInvalidArgument, "host memory of {} does not hold one block of {}",
                         ipc::format_size(sizing.host_bytes), ipc::format_size(block_bytes));
  }
  KVFERRY_TRY(check_available(geometry, sizing, limits));
  return sizing;
}

}  // namespace kvferry::cli
