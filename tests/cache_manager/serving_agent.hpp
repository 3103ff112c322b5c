// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/device/pool_mapping.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/rank/compute_activity.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"
#include "support/child_process.hpp"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// A worker's agent on a thread of its own: gathers and scatters, also straight from and to the
/// pool that it is lent, with a stream of the device that it is given, one request after another,
/// so that nothing runs when it greets. What the stream refuses is answered with the stream's
/// error, once what it took of it has ended.
class ServingAgent {
 public:
  ServingAgent(ipc::PacketListener& listener, const ipc::Arena& arena, ipc::Device& device)
      : listener_(listener),
        arena_(arena),
        device_(device),
        stream_(device.make_stream(ipc::StreamPriority::kHigh).value()),
        thread_("agent", ipc::OwnThread::Runs::kOurCode, [this] { serve(); }) {}
  ServingAgent(const ServingAgent&) = delete;
  ServingAgent& operator=(const ServingAgent&) = delete;
  ~ServingAgent() { ended_.signal(); }

  /// Answers the lane's next requests in batches of that size: each when so many are there at once,
  /// in as many slots, and not before.
  void want_batches(std::uint32_t lane, std::size_t size, std::size_t count) {
    const std::lock_guard lock(mutex_);
    wanted_.at(lane) = {size, count};
  }

 private:
  struct Batches {
    std::size_t size = 0;
    std::size_t count = 0;  ///< 0: answers what comes.
  };
  struct Connection {
    ipc::PacketSocket socket;
    std::uint32_t lane = 0;
    std::deque<ipc::StageRequest> queue;
    std::shared_ptr<ipc::PoolMapping> pool;
    bool is_over = false;
  };

  void serve() {
    const ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(100));
    while (!deadline.expired()) {
      std::vector<pollfd> waited{{ended_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
      for (const Connection& one : connections_) waited.push_back({one.socket.fd(), POLLIN, 0});
      ::poll(waited.data(), waited.size(), deadline.poll_timeout_ms());
      if (waited[0].revents != 0) return;
      for (Connection& one : connections_) read(one);
      for (Connection& one : connections_) work(one);
      connections_.remove_if([](const Connection& one) { return one.is_over; });
      if (waited[1].revents != 0) accept();
    }
    ADD_FAILURE() << "the agent was never told to end";
  }

  void accept() {
    auto accepted = listener_.try_accept();
    if (!accepted || !accepted->has_value()) return;
    Connection next;
    next.socket = std::move(**accepted);
    const auto packet = next.socket.receive(test::soon());
    if (!packet) return;
    const auto hello = ipc::decode<ipc::AgentHello>(packet->bytes, "AgentHello");
    ASSERT_TRUE(hello.has_value());
    next.lane = hello->lane;
    // With all that was sent over it and was not begun.
    connections_.remove_if([&](const Connection& one) { return one.lane == next.lane; });
    const int fd = activity_.fd().get();
    if (!next.socket.send(ipc::encode(ipc::StageReply{}), {&fd, 1})) return;
    connections_.push_back(std::move(next));
  }

  void read(Connection& from) {
    for (;;) {
      auto packet = from.socket.try_receive();
      from.is_over = !packet;
      if (!packet || !packet->has_value()) return;
      auto request = ipc::decode<ipc::StageRequest>((*packet)->bytes, "StageRequest");
      ASSERT_TRUE(request.has_value());
      if (request->kind == ipc::StageKind::kPool) {
        ASSERT_EQ((*packet)->fds.size(), 1U);
        from.pool =
            ipc::PoolMapping::map(device_, std::move((*packet)->fds[0]), request->pool_bytes)
                .value();
        continue;
      }
      from.queue.push_back(std::move(request).value());
    }
  }

  void work(Connection& from) {
    if (from.is_over || !may_begin(from)) return;
    for (; !from.queue.empty(); from.queue.pop_front()) {
      const ipc::StageRequest& request = from.queue.front();
      const ipc::Status done = run(from, request);
      ipc::StageReply reply{request.id, std::nullopt};
      if (!done) reply.error = done.error();
      if (!from.socket.send(ipc::encode(reply))) from.is_over = true;
      if (from.is_over) return;
    }
  }

  bool may_begin(const Connection& from) {
    const std::lock_guard lock(mutex_);
    Batches& wanted = wanted_.at(from.lane);
    if (wanted.count == 0) return true;
    if (from.queue.size() < wanted.size) return false;
    for (const ipc::StageRequest& one : from.queue) {
      EXPECT_EQ(std::count_if(from.queue.begin(), from.queue.end(),
                              [&](const auto& other) { return other.slot == one.slot; }),
                1);
    }
    --wanted.count;
    return true;
  }

  ipc::Status launch(const ipc::StageRequest& request,
                     ipc::RegionSet set,
                     std::span<const std::uint32_t> blocks,
                     ipc::DevicePtr packed) {
    KVFERRY_ASSIGN(std::shared_ptr<ipc::RegionTable> table,
                   device_.make_region_table(arena_.strided(request.group, set, ipc::Rank{0})));
    const std::uint64_t stride = arena_.packed_bytes(request.group, set);
    const bool gathers =
        request.kind == ipc::StageKind::kGather || request.kind == ipc::StageKind::kStore;
    tables_.push_back(table);
    return gathers ? stream_->gather(*table, blocks, packed, stride)
                   : stream_->scatter(*table, blocks, packed, stride);
  }
  ipc::Status launch_parts(const Connection& from, const ipc::StageRequest& request) {
    for (const ipc::StagePart& part : request.parts) {
      const std::uint64_t bytes = part.count * arena_.packed_bytes(request.group, part.set);
      KVFERRY_ASSIGN(void* host, from.pool->pinned_across(part.pool_offset, bytes));
      KVFERRY_TRY(launch(request, part.set,
                         std::span(request.blocks).subspan(part.first, part.count),
                         ipc::DevicePtr{reinterpret_cast<std::uintptr_t>(host)}));
    }
    return ipc::ok();
  }

  ipc::Status run(const Connection& from, const ipc::StageRequest& request) {
    tables_.clear();
    const ipc::Status launched =
        request.parts.empty()
            ? launch(request, request.set, request.blocks, arena_.staging_slot(request.slot))
            : launch_parts(from, request);
    const ipc::EventFd idle;
    KVFERRY_TRY(stream_->notify(idle.fd()));
    pollfd waited{idle.fd(), POLLIN, 0};
    if (::poll(&waited, 1, test::soon().poll_timeout_ms()) != 1) {
      return KVFERRY_ERROR(kTimeout, "the agent's stream does not end");
    }
    // The stream orders the memory, not the eventfd.
    KVFERRY_TRY(stream_->query());
    return launched;
  }

  ipc::PacketListener& listener_;
  const ipc::Arena& arena_;
  ipc::Device& device_;
  const ipc::ComputeActivity activity_;  ///< Which never tells anything.
  std::unique_ptr<ipc::Stream> stream_;
  std::list<Connection> connections_;
  std::vector<std::shared_ptr<ipc::RegionTable>> tables_;  ///< Of what runs.
  ipc::EventFd ended_;
  std::mutex mutex_;                 ///< Guards wanted_.
  std::array<Batches, 2> wanted_{};  ///< Of each lane.
  ipc::OwnThread thread_;            ///< Last: starts when all above exists.
};

}  // namespace kvferry::cache_manager
