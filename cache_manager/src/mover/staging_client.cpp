// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/staging_client.hpp"

#include <utility>

namespace kvferry::cache_manager {

ipc::Status StagingClient::ensure_connected(ipc::Deadline deadline) {
  drop_if_ended();
  if (socket_.valid()) return ipc::ok();
  KVFERRY_ASSIGN(ipc::PacketSocket socket,
                 ipc::PacketSocket::connect(options_.agent_path, deadline));
  KVFERRY_ASSIGN(ipc::ProcessRef agent, socket.peer());
  ipc::AgentHello hello;
  hello.mover = options_.mover;
  hello.engine = options_.engine;
  hello.rank = options_.rank;
  hello.lane = options_.lane;
  KVFERRY_TRY(socket.send(ipc::encode(hello)));
  KVFERRY_ASSIGN(const ipc::Packet packet, socket.receive(deadline));
  KVFERRY_ASSIGN(ipc::StageReply reply, ipc::decode<ipc::StageReply>(packet.bytes, "StageReply"));
  if (reply.error) return std::move(*reply.error);
  socket_ = std::move(socket);
  agent_ = std::move(agent);
  return ipc::ok();
}

// A worker may have been replaced since the last job: its end of the connection is closed then.
void StagingClient::drop_if_ended() {
  while (socket_.valid()) {
    const auto packet = socket_.try_receive();
    if (packet && !packet->has_value()) return;
    if (!packet) disconnect();
  }
}

ipc::Result<std::uint64_t> StagingClient::request(ipc::StageRequest request) {
  if (!socket_.valid()) {
    return KVFERRY_ERROR(kPeerDied, "no connection to the staging agent at {}",
                         options_.agent_path.string());
  }
  request.id = next_id_++;
  KVFERRY_TRY(socket_.send(ipc::encode(request)));
  return request.id;
}

ipc::Result<std::optional<ipc::StageReply>> StagingClient::try_receive() {
  KVFERRY_ASSIGN(const std::optional<ipc::Packet> packet, socket_.try_receive());
  if (!packet) return std::optional<ipc::StageReply>();
  KVFERRY_ASSIGN(ipc::StageReply reply, ipc::decode<ipc::StageReply>(packet->bytes, "StageReply"));
  return std::optional<ipc::StageReply>(std::move(reply));
}

}  // namespace kvferry::cache_manager
