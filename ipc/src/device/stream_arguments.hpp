// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <cstdint>
#include <span>
#include <string_view>

/// What the streams of all backends refuse alike: a kernel that is given such arguments would break
/// the whole context. Errors are kInvalidArgument and name the device.
namespace kvferry::ipc {

[[nodiscard]] bool valid_range(std::uintptr_t address, std::uint64_t size_bytes);

[[nodiscard]] Status check_direction(std::string_view device, CopyDirection direction);

/// Ops without bytes are valid: they copy nothing.
[[nodiscard]] Status check_rows(std::string_view device,
                                CopyDirection direction,
                                std::span<const RowCopyOp> ops);

[[nodiscard]] Status check_decode(std::string_view device, const kernels::DecodePass& pass);

[[nodiscard]] Status check_fold(std::string_view device,
                                DevicePtr source,
                                std::uint64_t size_bytes,
                                DevicePtr sums);

[[nodiscard]] Status check_copy(std::string_view device,
                                DevicePtr source,
                                DevicePtr target,
                                std::uint64_t size_bytes);
[[nodiscard]] Status check_expand(std::string_view device,
                                  DevicePtr source,
                                  std::uint64_t source_bytes,
                                  DevicePtr target,
                                  std::uint64_t target_bytes);

[[nodiscard]] Status check_word(std::string_view device, const StreamWord& word);

/// The error of what cannot be recorded.
[[nodiscard]] Error not_recordable(std::string_view device, std::string_view call);

}  // namespace kvferry::ipc
