// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/stream_arguments.hpp"

#include "kvferry/ipc/base/size.hpp"

#include <cstddef>

namespace kvferry::ipc {
namespace {

constexpr std::uint64_t kModelWordBytes = sizeof(std::uint64_t);

/// An array that kernels index: all of it addressable, and each element aligned.
template <typename T>
Status check_array(std::string_view device,
                   std::string_view what,
                   const T* items,
                   std::uint64_t count) {
  const auto address = reinterpret_cast<std::uintptr_t>(items);
  if (count == 0) return ok();
  if (!valid_range(address, count * sizeof(T)) || address % alignof(T) != 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: {}: {} of {} bytes at {:#x}; needs {}-byte addresses", device, what,
                         count, sizeof(T), address, alignof(T));
  }
  return ok();
}

/// Rows that neither overlap nor leave the address space.
bool valid_rows(std::uintptr_t address,
                std::uint64_t pitch,
                std::uint64_t row_bytes,
                std::uint64_t rows) {
  std::uint64_t last = 0;
  std::uint64_t span = 0;
  if (rows > 1 && pitch < row_bytes) return false;
  return checked_mul(rows - 1, rows > 1 ? pitch : 0, last) && checked_add(last, row_bytes, span) &&
         valid_range(address, span);
}

bool overlap(DevicePtr a, std::uint64_t a_bytes, DevicePtr b, std::uint64_t b_bytes) {
  return a.address < b.address + b_bytes && b.address < a.address + a_bytes;
}

}  // namespace

bool valid_range(std::uintptr_t address, std::uint64_t size_bytes) {
  std::uint64_t end = 0;
  return address != 0 && checked_add(address, size_bytes, end);
}

Status check_direction(std::string_view device, CopyDirection direction) {
  if (direction == CopyDirection::kDeviceToHost || direction == CopyDirection::kHostToDevice) {
    return ok();
  }
  return KVFERRY_ERROR(kInvalidArgument, "{}: copy direction {} does not exist", device,
                       static_cast<unsigned>(direction));
}

Status check_rows(std::string_view device,
                  CopyDirection direction,
                  std::span<const RowCopyOp> ops) {
  KVFERRY_TRY(check_direction(device, direction));
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const RowCopyOp& op = ops[i];
    if (op.rows == 0 || op.row_bytes == 0) continue;
    const auto host = reinterpret_cast<std::uintptr_t>(op.host);
    if (!valid_rows(host, op.host_pitch, op.row_bytes, op.rows) ||
        !valid_rows(op.device.address, op.device_pitch, op.row_bytes, op.rows)) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "{}: copy {} of {}: {} rows of {} bytes, host {:#x} every {} bytes, "
                           "device {:#x} every {}; needs rows apart from each other",
                           device, i, ops.size(), op.rows, op.row_bytes, host, op.host_pitch,
                           op.device.address, op.device_pitch);
    }
  }
  return ok();
}

Status check_decode(std::string_view device, const kernels::DecodePass& pass) {
  if (pass.tokens_per_block == 0 || pass.tokens_per_block > kernels::kMaxTokensPerBlock) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: decode: {} tokens per block; 1 to {} are possible",
                         device, pass.tokens_per_block, kernels::kMaxTokensPerBlock);
  }
  KVFERRY_TRY(check_array(device, "decode: counts", pass.counts, 2));
  KVFERRY_TRY(check_array(device, "decode: writes", pass.writes, pass.max_writes));
  KVFERRY_TRY(check_array(device, "decode: reads", pass.reads, pass.max_reads));
  KVFERRY_TRY(check_array(device, "decode: model", pass.model, 2ULL * kernels::kModelWords));
  return check_array(device, "decode: outputs", pass.outputs, pass.max_sequences);
}

Status check_fold(std::string_view device,
                  DevicePtr source,
                  std::uint64_t size_bytes,
                  DevicePtr sums) {
  constexpr std::uint64_t kSumsBytes = kernels::kModelWords * kModelWordBytes;
  if (!valid_range(source.address, size_bytes) || !valid_range(sums.address, kSumsBytes) ||
      sums.address % kModelWordBytes != 0 || overlap(source, size_bytes, sums, kSumsBytes)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: fold {} bytes at {:#x} into {} bytes at {:#x}; the sums need 8-byte "
                         "addresses apart from the bytes",
                         device, size_bytes, source.address, kSumsBytes, sums.address);
  }
  return ok();
}

Status check_copy(std::string_view device,
                  DevicePtr source,
                  DevicePtr target,
                  std::uint64_t size_bytes) {
  if (valid_range(source.address, size_bytes) && valid_range(target.address, size_bytes) &&
      !overlap(source, size_bytes, target, size_bytes)) {
    return ok();
  }
  return KVFERRY_ERROR(kInvalidArgument,
                       "{}: copy {} bytes at {:#x} to {:#x}; needs a target apart from them",
                       device, size_bytes, source.address, target.address);
}

Status check_word(std::string_view device, const StreamWord& word) {
  if (word && reinterpret_cast<std::uintptr_t>(word.address()) % sizeof(std::uint32_t) == 0) {
    return ok();
  }
  return KVFERRY_ERROR(kInvalidArgument,
                       "{}: a stream's word at {}; it lies in a PinnedBuffer, on a multiple of 4",
                       device, static_cast<const void*>(word.address()));
}

Status check_expand(std::string_view device,
                    DevicePtr source,
                    std::uint64_t source_bytes,
                    DevicePtr target,
                    std::uint64_t target_bytes) {
  if (source_bytes == 0 || !valid_range(source.address, source_bytes) ||
      !valid_range(target.address, target_bytes) ||
      overlap(source, source_bytes, target, target_bytes)) {
    return KVFERRY_ERROR(
        kInvalidArgument,
        "{}: expand {} bytes at {:#x} to {} bytes at {:#x}; needs bytes to expand, "
        "and a target apart from them",
        device, source_bytes, source.address, target_bytes, target.address);
  }
  return ok();
}

Error not_recordable(std::string_view device, std::string_view call) {
  return KVFERRY_ERROR(kInvalidArgument,
                       "{}: {} is not recorded: call it on a stream that runs the recorded work",
                       device, call);
}

}  // namespace kvferry::ipc
