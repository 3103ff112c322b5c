// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/staging_client.hpp"

#include <poll.h>

#include <array>
#include <utility>

namespace kvferry::cache_manager {

ipc::Status StagingClient::ensure_connected(ipc::Deadline deadline, int wake_fd) {
  if (is_connected()) return ipc::ok();
  if (!socket_.valid()) KVFERRY_TRY(connect(deadline));
  ipc::Status greeted = wait_greeting(deadline, wake_fd);
  const bool over = !greeted && greeted.error().code != ipc::ErrorCode::kTimeout &&
                    greeted.error().code != ipc::ErrorCode::kCancelled;
  if (over) disconnect();
  return greeted;
}

bool StagingClient::is_connected() {
  if (greeted_ && unanswered_.empty()) drop_if_ended();
  return greeted_;
}

// A worker may have been replaced since the last job: its end of the connection is closed then.
void StagingClient::drop_if_ended() {
  const auto packet = socket_.try_receive();
  if (packet && !packet->has_value()) return;
  disconnect();  // Nothing was asked, so a packet can only be a mistake.
}

ipc::Status StagingClient::connect(ipc::Deadline deadline) {
  auto connected = ipc::PacketSocket::connect(options_.agent_path, deadline);
  if (!connected) {
    if (connected.error().code != ipc::ErrorCode::kNotFound) return connected.error();
    return KVFERRY_ERROR(kPeerDied, "the worker has gone: {}", connected.error().message);
  }
  ipc::PacketSocket socket = *std::move(connected);
  KVFERRY_ASSIGN(ipc::ProcessRef agent, socket.peer());
  if (in_debt() && (agent.pid() != agent_.pid() || agent.start_time() != agent_.start_time())) {
    return KVFERRY_ERROR(kBusy,
                         "the staging agent is process {} now, and process {}, which has not "
                         "answered everything, still lives",
                         agent.pid(), agent_.pid());
  }
  ipc::AgentHello hello;
  hello.mover = options_.mover;
  hello.engine = options_.engine;
  hello.rank = options_.rank;
  hello.lane = options_.lane;
  KVFERRY_TRY(socket.send(ipc::encode(hello)));
  socket_ = std::move(socket);
  agent_ = std::move(agent);
  return ipc::ok();
}

ipc::Status StagingClient::wait_greeting(ipc::Deadline deadline, int wake_fd) {
  for (;;) {
    KVFERRY_ASSIGN(const std::optional<ipc::Packet> packet, socket_.try_receive());
    if (packet) {
      KVFERRY_ASSIGN(ipc::StageReply reply,
                     ipc::decode<ipc::StageReply>(packet->bytes, "StageReply"));
      if (reply.error) return std::move(*reply.error);
      if (reply.id != 0) {
        return KVFERRY_ERROR(kProtocol, "staging agent (pid {}) answered a hello with reply {}",
                             agent_.pid(), reply.id);
      }
      if (packet->fds.size() != 1) {
        return KVFERRY_ERROR(kProtocol,
                             "staging agent (pid {}) greeted with {} descriptors, expected 1",
                             agent_.pid(), packet->fds.size());
      }
      KVFERRY_ASSIGN(auto activity, ipc::ComputeActivityView::map(packet->fds.front()));
      set_activity(std::move(activity));
      greeted_ = true;
      if (std::exchange(in_debt_, false)) {
        options_.transitions.record(ipc::Transition::kMoverProof, {.detail = options_.lane});
      }
      return ipc::ok();
    }
    if (agent_.has_died()) {
      return KVFERRY_ERROR(kPeerDied, "staging agent (pid {}) died before its greeting",
                           agent_.pid());
    }
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "staging agent (pid {}) has not greeted this mover yet",
                           agent_.pid());
    }
    std::array<pollfd, 3> waited{
        {{socket_.fd(), POLLIN, 0}, {agent_.pidfd(), POLLIN, 0}, {wake_fd, POLLIN, 0}}};
    // wait: the agent's greeting; deadline, of the job (kConnectDeadline) or round (kRound); the
    // worker's pidfd, cancel, revoke or new work of the lane
    ::poll(waited.data(), waited.size(), deadline.poll_timeout_ms());
    if (waited[2].revents != 0) {
      return KVFERRY_ERROR(kCancelled, "waiting for staging agent (pid {}) was interrupted",
                           agent_.pid());
    }
  }
}

void StagingClient::disconnect() noexcept {
  in_debt_ = in_debt_ || !unanswered_.empty();
  unanswered_.clear();
  greeted_ = false;
  set_activity(std::nullopt);
  lent_.reset();
  has_lent_ = false;
  refuses_pools_ = false;
  socket_ = ipc::PacketSocket();
}

std::optional<bool> StagingClient::is_mostly_computing() {
  if (!is_connected()) return std::nullopt;
  const std::lock_guard lock(activity_mutex_);
  if (!activity_) return std::nullopt;
  return activity_->is_mostly_computing(ipc::MonotonicClock::now());
}

std::optional<bool> StagingClient::was_computing() const {
  const std::lock_guard lock(activity_mutex_);
  if (!activity_) return std::nullopt;
  return activity_->is_computing(ipc::MonotonicClock::now());
}

void StagingClient::set_activity(std::optional<ipc::ComputeActivityView> activity) noexcept {
  const std::lock_guard lock(activity_mutex_);
  activity_ = std::move(activity);
}

bool StagingClient::in_debt() noexcept {
  if (in_debt_ && agent_.has_died()) {
    options_.transitions.record(ipc::Transition::kMoverSeesDeath,
                                {.detail = static_cast<std::uint64_t>(agent_.pid())});
    in_debt_ = false;
  }
  return in_debt_;
}

ipc::Status StagingClient::lend(const std::shared_ptr<const ipc::PoolMapping>& pool) {
  if (!has_lent_ && pool == nullptr) return ipc::ok();
  // Two that are gone are alike: nothing is of either.
  if (has_lent_ && pool != nullptr && lent_.lock() == pool) return ipc::ok();
  ipc::StageRequest request;
  request.kind = ipc::StageKind::kPool;
  std::vector<int> fds;
  if (pool != nullptr) {
    request.pool_bytes = pool->size_bytes();
    fds.push_back(pool->descriptor().get());
  }
  KVFERRY_TRY(send(std::move(request), fds));
  lent_ = pool;
  has_lent_ = pool != nullptr;
  return ipc::ok();
}

ipc::Result<std::uint64_t> StagingClient::request(ipc::StageRequest request) {
  KVFERRY_ASSIGN(const std::uint64_t id, send(std::move(request), {}));
  unanswered_.insert(id);
  return id;
}

ipc::Result<std::uint64_t> StagingClient::send(ipc::StageRequest request,
                                               std::span<const int> fds) {
  if (!greeted_) {
    return KVFERRY_ERROR(kPeerDied, "no connection to the staging agent at {}",
                         options_.agent_path.string());
  }
  request.id = std::exchange(next_id_, next_id_ + kLanes);
  KVFERRY_TRY(socket_.send(ipc::encode(request), fds));
  return request.id;
}

ipc::Result<std::optional<ipc::StageReply>> StagingClient::try_receive() {
  KVFERRY_ASSIGN(const std::optional<ipc::Packet> packet, socket_.try_receive());
  if (!packet) return std::optional<ipc::StageReply>();
  KVFERRY_ASSIGN(ipc::StageReply reply, ipc::decode<ipc::StageReply>(packet->bytes, "StageReply"));
  if (unanswered_.erase(reply.id) == 0) {
    return KVFERRY_ERROR(kProtocol, "staging agent (pid {}) answered request {}, which is not open",
                         agent_.pid(), reply.id);
  }
  return std::optional<ipc::StageReply>(std::move(reply));
}

}  // namespace kvferry::cache_manager
