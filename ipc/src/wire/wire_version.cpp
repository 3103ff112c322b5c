// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/wire_version.hpp"

namespace kvferry::ipc {

std::optional<std::uint32_t> peek_wire_version(std::span<const std::uint8_t> bytes) noexcept {
  constexpr std::uint8_t kFixarray = 0x90;
  constexpr std::uint8_t kPositiveFixintMax = 0x7f;
  constexpr std::uint8_t kUint8 = 0xcc;
  constexpr std::uint8_t kUint32 = 0xce;
  if (bytes.size() < 2 || (bytes[0] & 0xf0U) != kFixarray || bytes[0] == kFixarray) return {};
  const std::uint8_t head = bytes[1];
  if (head <= kPositiveFixintMax) return head;
  if (head < kUint8 || head > kUint32) return {};
  const std::size_t size = std::size_t{1} << (head - kUint8);
  if (bytes.size() < 2 + size) return {};
  std::uint32_t version = 0;
  for (const std::uint8_t byte : bytes.subspan(2, size)) version = version << 8U | byte;
  return version;
}

Status check_wire_version(std::uint32_t version, std::string_view speaker) {
  if (version == kWireVersion) return ok();
  return KVFERRY_ERROR(kVersionMismatch,
                       "{} speaks wire version {}, this process {}; update the older side", speaker,
                       version, kWireVersion);
}

}  // namespace kvferry::ipc
