// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/pool_mapping.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/rank/compute_activity.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>

namespace kvferry::cache_manager {

/// A lane's connection to the staging agent in the worker's process, which runs the gather and
/// scatter kernels. Requests carry blocks, replies say that the kernels have ended.
///
/// A connection that ends before its replies leaves a debt: kernels that may still run. It is paid
/// when the same process greets a later connection (which it does only once they have ended), or
/// when the kernel has proven that process dead. Until then nothing new is asked.
/// @threading one at a time.
class StagingClient {
 public:
  struct Options {
    std::filesystem::path agent_path;
    std::string engine;
    ipc::Rank rank;
    ipc::IncarnationId mover;
    std::uint32_t lane = 0;  ///< 0 or 1.
    ipc::TransitionLog transitions = {};
  };
  explicit StagingClient(Options options)
      : options_(std::move(options)), next_id_(kLanes + options_.lane) {}

  /// Connected, greeted by the agent and without a debt. kTimeout: not yet; a greeting that was
  /// asked for stays asked for, so call again. kCancelled: wake_fd became readable (it is not
  /// drained). Any other error: the attempt is over.
  [[nodiscard]] ipc::Status ensure_connected(ipc::Deadline deadline, int wake_fd);
  /// Whether that returns at once.
  [[nodiscard]] bool is_connected();
  void disconnect() noexcept;
  [[nodiscard]] int fd() const noexcept { return socket_.fd(); }

  /// Whether the agent's worker says that compute takes most of its time; nothing while it is not
  /// connected, or says nothing.
  [[nodiscard]] std::optional<bool> is_mostly_computing();
  /// Whether it computes or did lately, of the connection that there was last. @threading any
  [[nodiscard]] std::optional<bool> was_computing() const;

  /// Kernels asked over an ended connection may still run.
  [[nodiscard]] bool in_debt() noexcept;
  /// Whom the last requests went to; for poll(2) and log lines. Not valid before the first one.
  [[nodiscard]] const ipc::ProcessRef& agent() const noexcept { return agent_; }

  /// The id of the next request. Its last bit is the lane: ids are unique in a mover.
  [[nodiscard]] std::uint64_t next_id() const noexcept { return next_id_; }
  /// Of the pool that the requests after this are of; null: of none any more. It is not kept here.
  [[nodiscard]] ipc::Status lend(const std::shared_ptr<const ipc::PoolMapping>& pool);
  /// The agent has no use for a pool: it is not asked again before the next connection.
  void set_refuses_pools() noexcept { refuses_pools_ = true; }
  [[nodiscard]] bool refuses_pools() { return is_connected() && refuses_pools_; }
  /// Sends with a fresh id and returns it.
  [[nodiscard]] ipc::Result<std::uint64_t> request(ipc::StageRequest request);
  /// kPeerDied when the agent closed the connection, kProtocol for a reply to nothing.
  [[nodiscard]] ipc::Result<std::optional<ipc::StageReply>> try_receive();

 private:
  static constexpr std::uint64_t kLanes = 2;

  void drop_if_ended();
  void set_activity(std::optional<ipc::ComputeActivityView> activity) noexcept;
  [[nodiscard]] ipc::Result<std::uint64_t> send(ipc::StageRequest request,
                                                std::span<const int> fds);
  [[nodiscard]] ipc::Status connect(ipc::Deadline deadline);
  [[nodiscard]] ipc::Status wait_greeting(ipc::Deadline deadline, int wake_fd);

  Options options_;
  ipc::PacketSocket socket_;
  bool greeted_ = false;
  ipc::ProcessRef agent_;
  std::set<std::uint64_t> unanswered_;  ///< Requests of this connection.
  mutable std::mutex activity_mutex_;   ///< Guards the next one.
  std::optional<ipc::ComputeActivityView> activity_;
  std::weak_ptr<const ipc::PoolMapping> lent_;  ///< Over this connection.
  bool has_lent_ = false;
  bool refuses_pools_ = false;
  bool in_debt_ = false;
  std::uint64_t next_id_;
};

}  // namespace kvferry::cache_manager
