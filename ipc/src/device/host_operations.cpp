// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_operations.hpp"

#include "device/stream_arguments.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::ipc {
namespace {

std::uint64_t packed_extent(std::span<const kernels::StridedRegion> regions) {
  std::uint64_t extent = 0;
  for (const kernels::StridedRegion& region : regions) {
    extent = std::max(extent, region.packed_offset + region.block_bytes);
  }
  return extent;
}

}  // namespace

Status HostOperations::copy(CopyDirection direction,
                            std::span<const CopyOp> ops,
                            CopyMode /*mode*/) {
  KVFERRY_TRY(check_direction(device_name_, direction));
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const CopyOp& op = ops[i];
    if (!valid_range(op.device.address, op.size_bytes) ||
        !valid_range(reinterpret_cast<std::uintptr_t>(op.host), op.size_bytes)) {
      return KVFERRY_ERROR(kInvalidArgument, "{}: copy {} of {}: {} bytes, host {}, device {:#x}",
                           device_name_, i, ops.size(), op.size_bytes, fmt::ptr(op.host),
                           op.device.address);
    }
  }
  if (ops.empty()) return ok();
  return take(host_work::Copy{direction, {ops.begin(), ops.end()}});
}

Status HostOperations::copy_rows(CopyDirection direction, std::span<const RowCopyOp> ops) {
  KVFERRY_TRY(check_rows(device_name_, direction, ops));
  if (ops.empty()) return ok();
  return take(host_work::CopyRows{direction, {ops.begin(), ops.end()}});
}

Status HostOperations::zero(DevicePtr target, std::uint64_t size_bytes) {
  if (!valid_range(target.address, size_bytes)) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: zero {} bytes at {:#x}", device_name_, size_bytes,
                         target.address);
  }
  return take(host_work::Zero{target, size_bytes});
}

Status HostOperations::copy_within(DevicePtr source, DevicePtr target, std::uint64_t size_bytes) {
  KVFERRY_TRY(check_copy(device_name_, source, target, size_bytes));
  return take(host_work::CopyWithin{source, target, size_bytes});
}

Status HostOperations::take_pack(bool gathers,
                                 const RegionTable& table,
                                 std::span<const std::uint32_t> ids,
                                 DevicePtr packed,
                                 std::uint64_t packed_stride) {
  if (ids.empty()) return ok();
  std::uint64_t total = 0;
  if (packed_stride < packed_extent(table.regions()) ||
      !checked_mul(packed_stride, ids.size(), total) || !valid_range(packed.address, total)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: {} packed blocks of {} bytes at {:#x}: the regions need {} bytes "
                         "per block",
                         device_name_, ids.size(), packed_stride, packed.address,
                         packed_extent(table.regions()));
  }
  return take(
      host_work::Pack{gathers, table.regions(), {ids.begin(), ids.end()}, packed, packed_stride});
}

Status HostOperations::gather(const RegionTable& table,
                              std::span<const std::uint32_t> ids,
                              DevicePtr packed,
                              std::uint64_t packed_stride) {
  return take_pack(true, table, ids, packed, packed_stride);
}

Status HostOperations::scatter(const RegionTable& table,
                               std::span<const std::uint32_t> ids,
                               DevicePtr packed,
                               std::uint64_t packed_stride) {
  return take_pack(false, table, ids, packed, packed_stride);
}

Status HostOperations::fill_pattern(const RegionTable& table,
                                    std::span<const kernels::SeededBlock> blocks) {
  if (blocks.empty()) return ok();
  return take(host_work::Pattern{table.regions(), {blocks.begin(), blocks.end()}, nullptr});
}

Status HostOperations::check_results(PinnedBuffer& results, std::size_t count) const {
  if (results.size_bytes() / sizeof(std::uint64_t) < count) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: a result buffer of {} bytes holds fewer than {} words", device_name_,
                         results.size_bytes(), count);
  }
  return ok();
}

Status HostOperations::verify_pattern(const RegionTable& table,
                                      std::span<const kernels::SeededBlock> blocks,
                                      PinnedBuffer& results) {
  if (blocks.empty()) return ok();
  KVFERRY_TRY(check_results(results, blocks.size()));
  return take(host_work::Pattern{table.regions(),
                                 {blocks.begin(), blocks.end()},
                                 reinterpret_cast<std::uint64_t*>(results.data())});
}

Status HostOperations::checksum(const RegionTable& table,
                                std::span<const std::uint32_t> ids,
                                PinnedBuffer& results) {
  if (ids.empty()) return ok();
  KVFERRY_TRY(check_results(results, ids.size()));
  return take(host_work::Checksum{
      table.regions(), {ids.begin(), ids.end()}, reinterpret_cast<std::uint64_t*>(results.data())});
}

Status HostOperations::decode(const RegionTable& table, const kernels::DecodePass& pass) {
  KVFERRY_TRY(check_decode(device_name_, pass));
  return take(host_work::Decode{table.regions(), pass});
}

Status HostOperations::fold(DevicePtr source,
                            std::uint64_t size_bytes,
                            std::uint64_t seed,
                            DevicePtr sums) {
  KVFERRY_TRY(check_fold(device_name_, source, size_bytes, sums));
  return take(host_work::Fold{source, size_bytes, seed, sums});
}

Status HostOperations::expand(DevicePtr source,
                              std::uint64_t source_bytes,
                              DevicePtr target,
                              std::uint64_t target_bytes) {
  KVFERRY_TRY(check_expand(device_name_, source, source_bytes, target, target_bytes));
  return take(host_work::Expand{source, source_bytes, target, target_bytes});
}

Status HostOperations::wait_word(const StreamWord& word, std::uint32_t at_least) {
  KVFERRY_TRY(check_word(device_name_, word));
  return take(host_work::WaitWord{word, at_least});
}

Status HostOperations::write_word(const StreamWord& word, std::uint32_t value) {
  KVFERRY_TRY(check_word(device_name_, word));
  return take(host_work::WriteWord{word, value});
}

}  // namespace kvferry::ipc
