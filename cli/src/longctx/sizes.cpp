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
constexpr std::uint64_t kSlabSlack = 64ULL << 20;

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

Status check_host(const LongctxConfig& config,
                  const LongctxSizes& sizes,
                  std::uint64_t host_available) {
  if (sizes.host_bytes < sizes.host_needed) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} sequences of {} tokens need {} of host memory to be swapped out, "
                         "--host-memory gives {}: give more, or less --context or --sequences",
                         config.sequences, config.context + config.steps,
                         ipc::format_size(sizes.host_needed), ipc::format_size(sizes.host_bytes));
  }
  if (host_available == 0) return ipc::ok();
  // Simulated devices lie there, too, with room for two epochs; the larger one counts.
  std::uint64_t arena = 0;
  if (config.devices.kind == ipc::DeviceKind::kHost) {
    const std::uint64_t blocks = config.check ? sizes.all_blocks : sizes.gpu_blocks;
    arena = blocks * device_bytes_per_block(config.geometry) * config.geometry.ranks;
  }
  const std::uint64_t swapping =
      sizes.host_bytes + (arena == 0 ? 0
                                     : sizes.gpu_blocks * device_bytes_per_block(config.geometry) *
                                           config.geometry.ranks);
  const std::uint64_t needed = std::max(arena, swapping);
  if (needed <= host_available) return ipc::ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "{} of host memory are needed for what is swapped out and for simulated "
                       "devices, this host has {} available: give less --context or --sequences{}",
                       ipc::format_size(needed), ipc::format_size(host_available),
                       arena > swapping ? ", or --no-check" : "");
}

Status check_device(const LongctxConfig& config,
                    const LongctxSizes& sizes,
                    std::uint64_t device_free) {
  if (device_free == 0) return ipc::ok();
  const std::uint64_t per_device =
      device_bytes_per_block(config.geometry) * config.devices.ranks_on_each(config.geometry.ranks);
  const std::uint64_t small = sizes.gpu_blocks * per_device;
  if (small > device_free) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} blocks take {} of a device, where {} are free: give less --gpu-blocks",
                         sizes.gpu_blocks, ipc::format_size(small), ipc::format_size(device_free));
  }
  const std::uint64_t large = sizes.all_blocks * per_device;
  if (!config.check || large <= device_free) return ipc::ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "all sequences at once, to compare with, take {} of a device, where {} are "
                       "free: give --no-check, or less --context or --sequences",
                       ipc::format_size(large), ipc::format_size(device_free));
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
  if (sizes.gpu_blocks < sizes.sequence_blocks) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "a sequence of {} tokens has {} blocks, --gpu-blocks gives {}: give at "
                         "least as many as one sequence has, and twice as many for look-ahead",
                         config.context + config.steps, sizes.sequence_blocks, sizes.gpu_blocks);
  }
  sizes.active_blocks = std::max(1U, static_cast<std::uint32_t>(config.active * sizes.gpu_blocks));
  sizes.block_bytes = host_bytes_per_block(config.geometry);
  sizes.host_needed =
      TurnScheduler::host_blocks_of(sizes.sequence_blocks) * config.sequences * sizes.block_bytes;
  sizes.host_bytes = config.host_memory.value_or(sizes.host_needed + kSlabSlack);
  KVFERRY_TRY(check_host(config, sizes, host_available));
  KVFERRY_TRY(check_device(config, sizes, device_free));
  return sizes;
}

}  // namespace kvferry::cli
