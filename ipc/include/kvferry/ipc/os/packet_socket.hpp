// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

namespace kvferry::ipc {

struct Packet {
  std::vector<std::uint8_t> bytes;
  std::vector<UniqueFd> fds;
};

/// One end of a Unix SEQPACKET connection that can carry descriptors. Never blocks.
/// @threading one at a time.
class PacketSocket {
 public:
  static constexpr std::size_t kMaxPacketBytes = std::size_t{128} * 1024;
  static constexpr std::size_t kMaxFds = 64;

  PacketSocket() = default;
  explicit PacketSocket(UniqueFd fd) : fd_(std::move(fd)) {}

  /// kNoManager-free: kNotFound when nothing listens there (no such name, or stale), kTimeout.
  /// Checks that the peer's uid is ours before returning.
  [[nodiscard]] static Result<PacketSocket> connect(const std::filesystem::path& path,
                                                    Deadline deadline);

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] bool valid() const noexcept { return fd_.valid(); }
  /// kBusy when the buffer is full, kPeerDied on a closed peer (closed, not proven dead).
  [[nodiscard]] Status send(std::span<const std::uint8_t> bytes, std::span<const int> fds = {});
  /// Nothing when no packet waits; kPeerDied at end of file; kProtocol for a cut packet.
  [[nodiscard]] Result<std::optional<Packet>> try_receive();
  /// Waits for a packet, the peer's end of file, or the deadline.
  [[nodiscard]] Result<Packet> receive(Deadline deadline);
  /// The peer has closed its end, whatever may still lie unread in ours.
  [[nodiscard]] bool peer_closed() const noexcept;
  [[nodiscard]] Result<ProcessRef> peer() const { return ProcessRef::of_peer(fd_.get()); }
  /// To count the connections of a process; 0 when it cannot be told. A pid alone proves nothing.
  [[nodiscard]] pid_t peer_pid() const noexcept;
  /// kPermission unless the peer runs under our uid.
  [[nodiscard]] Status check_peer_uid() const;

 private:
  UniqueFd fd_;
};

/// Listens on a path under its NameLock: a stale socket is replaced, a living one is refused with
/// kAlreadyExists. Removes its name when it ends.
class PacketListener {
 public:
  [[nodiscard]] static Result<PacketListener> listen(const std::filesystem::path& path);
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// The next connection, uid checked; nothing when none waits. Foreign uids are refused, logged.
  [[nodiscard]] Result<std::optional<PacketSocket>> try_accept();

 private:
  PacketListener(NameLock lock, UniqueFd fd) : lock_(std::move(lock)), fd_(std::move(fd)) {}
  NameLock lock_;
  UniqueFd fd_;
};

}  // namespace kvferry::ipc
