// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace kvferry::ipc {

/// One rank's connections of a group of simulated devices: rank 0 has one to each of the others,
/// they have one to it. Shared by the group and the work that streams have of it. The first failure
/// stays, and what comes after it does nothing.
/// @threading transfer(): one at a time; the others: any.
class HostChannel {
 public:
  HostChannel(std::uint32_t rank, std::vector<PacketSocket> peers)
      : rank_(rank), peers_(std::move(peers)) {}

  /// Rank 0 sends what lies there to all, the others receive it there.
  void transfer(DevicePtr memory, std::uint64_t size_bytes, Deadline deadline);
  /// A transfer that waits, or comes, fails.
  void end() noexcept;
  [[nodiscard]] Status state() const;

 private:
  [[nodiscard]] Status send(std::byte* from, std::uint64_t size_bytes, Deadline deadline);
  [[nodiscard]] Status receive(std::byte* to, std::uint64_t size_bytes, Deadline deadline);
  [[nodiscard]] Status await(const PacketSocket& peer, short events, Deadline deadline) const;

  const std::uint32_t rank_;
  std::vector<PacketSocket> peers_;  ///< Of rank 0: by rank, without itself.
  EventFd ended_;
  mutable std::mutex mutex_;  ///< Guards what follows.
  std::optional<Error> error_;
};

}  // namespace kvferry::ipc
