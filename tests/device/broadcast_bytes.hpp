// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvferry::test {

inline constexpr std::uint64_t kBroadcastBytes = 32ULL << 20;

/// What stands in a broadcast of that seed.
inline std::byte byte_at(std::uint64_t seed, std::uint64_t place) {
  return static_cast<std::byte>((place * 31 + seed * 17 + (place >> 13U)) & 0xFFU);
}

inline std::string hex_of(const ipc::BroadcastId& id) {
  std::string text;
  for (const std::uint8_t byte : id) text += fmt::format("{:02x}", byte);
  return text;
}

inline ipc::BroadcastId id_of(std::string_view hex) {
  ipc::BroadcastId id;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    id.push_back(static_cast<std::uint8_t>(std::stoul(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return id;
}

/// Waits for the stream, by the group's failure at the latest. "ok", or what went wrong.
inline std::string await_group(ipc::Stream& stream,
                               ipc::BroadcastGroup& group,
                               std::chrono::seconds patience = std::chrono::seconds(30)) {
  const ipc::EventFd done;
  if (!stream.notify(done.fd())) return "notify";
  for (const ipc::Deadline end = ipc::Deadline::after(patience);;) {
    if (const auto state = group.check(); !state) return state.error().to_string();
    const auto ended = stream.query();
    if (!ended) return ended.error().to_string();
    if (*ended) break;
    if (end.expired()) return "the stream has not ended";
    pollfd waited{done.fd(), POLLIN, 0};
    ::poll(&waited, 1, 20);
    (void)done.drain();
  }
  const auto state = group.check();
  return state ? "ok" : state.error().to_string();
}

/// "ok", or what is wrong with what a broadcast of that seed has brought.
inline std::string look_at(ipc::Stream& stream,
                           ipc::BroadcastGroup& group,
                           const ipc::DeviceMemory& memory,
                           ipc::PinnedBuffer& buffer,
                           std::uint64_t size,
                           std::uint64_t seed) {
  const ipc::CopyOp op{buffer.data(), memory.address(), size};
  if (!stream.copy(ipc::CopyDirection::kDeviceToHost, {&op, 1}, ipc::CopyMode::kEach))
    return "copy";
  if (const std::string ended = await_group(stream, group); ended != "ok") return ended;
  for (std::uint64_t i = 0; i < size; ++i) {
    if (buffer.data()[i] != byte_at(seed, i)) return fmt::format("byte {} is another", i);
  }
  return "ok";
}

}  // namespace kvferry::test
