// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace kvferry::ipc {

/// The version of a RegistryHello, RegistryWelcome or Envelope of any protocol version: all of them
/// are arrays that start with it. Nothing when the bytes are none of these.
[[nodiscard]] std::optional<std::uint32_t> peek_wire_version(
    std::span<const std::uint8_t> bytes) noexcept;

}  // namespace kvferry::ipc
