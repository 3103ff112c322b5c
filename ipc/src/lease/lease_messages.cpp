// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/lease_messages.hpp"

namespace kvferry::ipc::lease {

Result<Incoming> read_header(Packet packet) {
  if (packet.bytes.size() < kHeaderBytes) {
    return KVFERRY_ERROR(kProtocol, "packet of {} bytes, shorter than the header of {}",
                         packet.bytes.size(), kHeaderBytes);
  }
  const std::uint8_t message = packet.bytes[0];
  if (message < static_cast<std::uint8_t>(LeaseMessage::kHello) ||
      message > static_cast<std::uint8_t>(LeaseMessage::kPrepared)) {
    return KVFERRY_ERROR(kProtocol, "message {} is none of the lease protocol's", message);
  }
  Incoming incoming;
  incoming.message = static_cast<LeaseMessage>(message);
  for (unsigned i = 0; i < 4; ++i) {
    incoming.version |= std::uint32_t{packet.bytes[4 + i]} << (8 * i);
  }
  const bool any_version =
      incoming.message == LeaseMessage::kHello || incoming.message == LeaseMessage::kRefused;
  if (!any_version && incoming.version != kLeaseProtocolVersion) {
    return KVFERRY_ERROR(kProtocol,
                         "message {} of lease protocol {} on a connection of protocol {}", message,
                         incoming.version, kLeaseProtocolVersion);
  }
  incoming.packet = std::move(packet);
  return incoming;
}

Status send_packet(PacketSocket& socket,
                   LeaseMessage message,
                   const Bytes& body,
                   std::span<const int> fds) {
  Bytes bytes(kHeaderBytes);
  bytes.reserve(kHeaderBytes + body.size());
  bytes[0] = static_cast<std::uint8_t>(message);
  for (unsigned i = 0; i < 4; ++i) {
    bytes[4 + i] = static_cast<std::uint8_t>(kLeaseProtocolVersion >> (8 * i));
  }
  bytes.insert(bytes.end(), body.begin(), body.end());
  return socket.send(bytes, fds);
}

}  // namespace kvferry::ipc::lease
