// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "longctx/longctx.hpp"
#include "longctx/turn_scheduler.hpp"
#include "replay/sizing.hpp"

#include <algorithm>

namespace kvferry::cli {
namespace {

using ipc::Result;
using ipc::Status;

constexpr std::uint32_t kOversubscription = 4;
/// Slabs of the host pool are not all full.
constexpr std::uint64_t kPoolSlack = 64ULL << 20;

Status check_groups(const LongctxConfig& config) {
  for (const ipc::GroupSpec& group : config.geometry.groups) {
    if (group.rule == ipc::HitRule::kFull && group.blocks_percent >= 100) continue;
    return KVFERRY_ERROR(kInvalidArgument,
                         "group '{}' of {} does not hold every token of a sequence: take a "
                         "--geometry of which all groups do",
                         group.name, config.geometry_name);
  }
  return ipc::ok();
}

Status check_pool(const LongctxConfig& config, const LongctxSizes& sizes) {
  if (sizes.host_bytes >= sizes.host_needed) return ipc::ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "{} sequences of {} tokens need {} of host memory to be swapped out, "
                       "--host-memory gives {}: give more, or less --context or --sequences",
                       config.sequences, config.context + config.steps,
                       ipc::format_size(sizes.host_needed), ipc::format_size(sizes.host_bytes));
}

/// Of an arena in one memory: a GPU's, or this host's, where all simulated devices lie.
std::uint64_t arena_bytes(const LongctxConfig& config, std::uint64_t blocks) {
  const std::uint32_t ranks = config.geometry.ranks;
  const bool cuda = config.devices.kind == ipc::DeviceKind::kCuda;
  return blocks * device_bytes_per_block(config.geometry) *
         (cuda ? config.devices.ranks_on_each(ranks) : ranks);
}

Status check_memory(const LongctxConfig& config,
                    LongctxSizes& sizes,
                    std::uint64_t host_available,
                    std::uint64_t device_free) {
  const bool cuda = config.devices.kind == ipc::DeviceKind::kCuda;
  const std::uint64_t small = arena_bytes(config, sizes.gpu_blocks);
  const std::uint64_t on_host = sizes.host_bytes + (cuda ? 0 : small);
  if (host_available > 0 && on_host > host_available) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} of host memory are needed for what is swapped out{}, this host has {} "
                         "available: give less --context or --sequences",
                         ipc::format_size(on_host), cuda ? "" : " and for simulated devices",
                         ipc::format_size(host_available));
  }
  if (cuda && device_free > 0 && small > device_free) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} blocks take {} of a device, where {} are free: give less --gpu-blocks",
                         sizes.gpu_blocks, ipc::format_size(small), ipc::format_size(device_free));
  }
  const std::uint64_t room = cuda ? device_free : host_available;
  const auto fits = [&](std::uint64_t blocks) {
    return room == 0 || arena_bytes(config, blocks) <= room;
  };
  const std::uint32_t one = std::max(sizes.gpu_blocks, sizes.sequence_blocks);
  if (fits(sizes.all_blocks)) {
    sizes.reference_blocks = static_cast<std::uint32_t>(sizes.all_blocks);
  } else {
    sizes.reference_blocks = fits(one) ? one : 0;
  }
  return ipc::ok();
}

}  // namespace

Result<LongctxSizes> decide_sizes(const LongctxConfig& config,
                                  std::uint64_t host_available,
                                  std::uint64_t device_free) {
  KVFERRY_TRY(check_groups(config));
  LongctxSizes sizes;
  sizes.sequence_blocks =
      TurnScheduler::blocks_of(config.context + config.steps, config.geometry.tokens_per_block);
  sizes.all_blocks = std::uint64_t{sizes.sequence_blocks} * config.sequences;
  if (sizes.all_blocks > ipc::kMaxDeviceBlocks) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} sequences of {} tokens have {} blocks, {} are possible: give less "
                         "--context or --sequences",
                         config.sequences, config.context + config.steps, sizes.all_blocks,
                         ipc::kMaxDeviceBlocks);
  }
  sizes.gpu_blocks = config.gpu_blocks.value_or(std::max(
      sizes.sequence_blocks, static_cast<std::uint32_t>(sizes.all_blocks / kOversubscription)));
  if (sizes.in_windows() && sizes.gpu_blocks < TurnScheduler::kLeastForWindows) {
    return KVFERRY_ERROR(
        kInvalidArgument,
        "a sequence of {} tokens has {} blocks, --gpu-blocks gives {}: give {} at "
        "least, to compute it in windows; as many as it has, and twice as many for "
        "look-ahead, to have it whole",
        config.context + config.steps, sizes.sequence_blocks, sizes.gpu_blocks,
        TurnScheduler::kLeastForWindows);
  }
  sizes.active_blocks = std::max(1U, static_cast<std::uint32_t>(config.active * sizes.gpu_blocks));
  sizes.block_bytes = host_bytes_per_block(config.geometry);
  sizes.host_needed =
      TurnScheduler::host_blocks_of(sizes.sequence_blocks) * config.sequences * sizes.block_bytes;
  // A page holds whole blocks: of large ones a part of each page is lost.
  sizes.host_bytes =
      config.host_memory.value_or(sizes.host_needed + sizes.host_needed / 8 + kPoolSlack);
  KVFERRY_TRY(check_pool(config, sizes));
  KVFERRY_TRY(check_memory(config, sizes, host_available, device_free));
  return sizes;
}

}  // namespace kvferry::cli
