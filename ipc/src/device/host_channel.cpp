// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_channel.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::uint64_t kPacketBytes = PacketSocket::kMaxPacketBytes / 2;

}  // namespace

void HostChannel::transfer(DevicePtr memory, std::uint64_t size_bytes, Deadline deadline) {
  if (!state()) return;
  auto* const bytes = static_cast<std::byte*>(memory.raw());
  const Status done =
      rank_ == 0 ? send(bytes, size_bytes, deadline) : receive(bytes, size_bytes, deadline);
  if (done) return;
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!error_) error_ = done.error();
}

void HostChannel::end() noexcept { ended_.signal(); }

Status HostChannel::state() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return error_ ? Status(*error_) : ok();
}

Status HostChannel::send(std::byte* from, std::uint64_t size_bytes, Deadline deadline) {
  for (std::uint64_t done = 0; done < size_bytes; done += kPacketBytes) {
    const std::span<const std::uint8_t> packet(
        reinterpret_cast<const std::uint8_t*>(from + done),
        static_cast<std::size_t>(std::min(kPacketBytes, size_bytes - done)));
    for (PacketSocket& peer : peers_) {
      for (Status sent = peer.send(packet); !sent; sent = peer.send(packet)) {
        if (sent.error().code != ErrorCode::kBusy) return sent;
        KVFERRY_TRY(await(peer, POLLOUT, deadline));
      }
    }
  }
  return ok();
}

Status HostChannel::receive(std::byte* to, std::uint64_t size_bytes, Deadline deadline) {
  PacketSocket& root = peers_.front();
  for (std::uint64_t done = 0; done < size_bytes;) {
    KVFERRY_ASSIGN(const auto packet, root.try_receive());
    if (!packet) {
      KVFERRY_TRY(await(root, POLLIN, deadline));
      continue;
    }
    if (packet->bytes.size() > size_bytes - done) {
      return KVFERRY_ERROR(kProtocol,
                           "rank 0 broadcasts a packet of {} bytes, rank {} waits for {}: the "
                           "ranks do not broadcast the same",
                           packet->bytes.size(), rank_, size_bytes - done);
    }
    std::memcpy(to + done, packet->bytes.data(), packet->bytes.size());
    done += packet->bytes.size();
  }
  return ok();
}

Status HostChannel::await(const PacketSocket& peer, short events, Deadline deadline) const {
  std::array<pollfd, 2> entries{pollfd{peer.fd(), events, 0}, pollfd{ended_.fd(), POLLIN, 0}};
  // wait: the other rank's end of a broadcast; deadline, of who enqueued it; its end, or end()
  const int ready = ::poll(entries.data(), entries.size(), deadline.poll_timeout_ms());
  if (ready < 0 && errno != EINTR) return KVFERRY_ERRNO("poll for a broadcast");
  if (ready > 0 && entries[1].revents != 0) {
    return KVFERRY_ERROR(kCancelled, "rank {} has left the broadcast", rank_);
  }
  if (deadline.expired()) {
    return KVFERRY_ERROR(kTimeout, "a broadcast did not end at rank {} in time: another rank hangs",
                         rank_);
  }
  return ok();
}

}  // namespace kvferry::ipc
