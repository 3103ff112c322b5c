// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <filesystem>
#include <optional>
#include <string>

namespace kvferry::cache_manager {

/// A lane's connection to the staging agent in the worker's process, which runs the gather and
/// scatter kernels. Requests carry blocks, replies say that the kernels have ended.
/// @threading one at a time.
class StagingClient {
 public:
  struct Options {
    std::filesystem::path agent_path;
    std::string engine;
    ipc::Rank rank;
    ipc::IncarnationId mover;
    std::uint32_t lane = 0;
  };
  explicit StagingClient(Options options) : options_(std::move(options)) {}

  /// Connected and accepted by the agent; connects when it is not (any more). Ok proves that
  /// nothing runs any more that was asked through an earlier connection to the same agent.
  [[nodiscard]] ipc::Status ensure_connected(ipc::Deadline deadline);
  void disconnect() noexcept { socket_ = ipc::PacketSocket(); }
  [[nodiscard]] bool connected() const noexcept { return socket_.valid(); }
  [[nodiscard]] int fd() const noexcept { return socket_.fd(); }
  /// The worker whose agent was last connected to; outlasts the connection.
  [[nodiscard]] const ipc::ProcessRef& agent() const noexcept { return agent_; }

  /// Sends with a fresh id and returns it.
  [[nodiscard]] ipc::Result<std::uint64_t> request(ipc::StageRequest request);
  /// kPeerDied when the agent closed the connection.
  [[nodiscard]] ipc::Result<std::optional<ipc::StageReply>> try_receive();

 private:
  void drop_if_ended();

  Options options_;
  ipc::PacketSocket socket_;
  ipc::ProcessRef agent_;
  std::uint64_t next_id_ = 1;
};

}  // namespace kvferry::cache_manager
