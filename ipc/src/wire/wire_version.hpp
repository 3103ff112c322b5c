// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace kvferry::ipc {

/// The version of a RegistryHello, RegistryWelcome or Envelope of any protocol version: all of them
/// are arrays that start with it. Nothing when the bytes are none of these.
[[nodiscard]] std::optional<std::uint32_t> peek_wire_version(
    std::span<const std::uint8_t> bytes) noexcept;

/// kVersionMismatch unless both speak the same; speaker names who sent it.
[[nodiscard]] Status check_wire_version(std::uint32_t version, std::string_view speaker);

/// Decodes one of these messages. kVersionMismatch before kProtocol, since bytes of another version
/// are rarely well-formed; and again afterwards, since a number can be written in ways that
/// peek_wire_version() does not know.
template <typename T>
[[nodiscard]] Result<T> decode_versioned(std::span<const std::uint8_t> bytes,
                                         std::string_view message_name,
                                         std::string_view speaker) {
  if (const auto version = peek_wire_version(bytes)) {
    KVFERRY_TRY(check_wire_version(*version, speaker));
  }
  KVFERRY_ASSIGN(T message, decode<T>(bytes, message_name));
  KVFERRY_TRY(check_wire_version(message.version, speaker));
  return message;
}

}  // namespace kvferry::ipc
