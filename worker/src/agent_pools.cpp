// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What a StagingAgent copies straight between blocks and the pools that movers lend to it.
#include "staging_agent.hpp"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

namespace kvferry::worker {

using ipc::Packet;
using ipc::StageRequest;
using ipc::Status;

namespace {

/// Thread blocks of kernels that copy from and to host memory: they are there for as long as the
/// link needs, and these come to 95 % of it (stores), or 61 to 91 (loads).
constexpr std::uint32_t kStraightStoreBlocks = 4;
constexpr std::uint32_t kStraightLoadBlocks = 8;

}  // namespace

// Not answered: whatever is wrong with it is said to those that need it.
Status StagingAgent::on_pool(Connection& connection, const StageRequest& stage, Packet packet) {
  connection.pool = std::shared_ptr<ipc::PoolMapping>();
  if (packet.fds.empty() && stage.pool_bytes == 0) return ipc::ok();
  if (packet.fds.size() != 1) {
    return KVFERRY_ERROR(kProtocol, "a pool of {} bytes came with {} descriptors, expected 1",
                         stage.pool_bytes, packet.fds.size());
  }
  connection.pool = pools_.open(std::move(packet.fds.front()), stage.pool_bytes);
  if (!connection.pool) warn("no use for a pool: " + connection.pool.error().to_string());
  return ipc::ok();
}

// Not on this thread: the driver may take its time, or wait for the device, which may wait for us.
void StagingAgent::pin(Request request, const MappedArena& arena) {
  const GroupView& group = arena.groups[request.stage.group.value];
  const std::shared_ptr<ipc::PoolMapping> pool = request.pool.value();
  const std::uint64_t connection = request.connection;
  const std::uint64_t id = request.stage.id;
  const auto left = std::make_shared<std::size_t>(request.stage.parts.size());
  for (const ipc::StagePart& part : request.stage.parts) {
    pool->pin(part.pool_offset, part.count * group.packed(part.set),
              [this, connection, id, left, alive = std::weak_ptr<bool>(alive_)](Status status) {
                // One thread does them all, in their order.
                if (--*left > 0 && status) return;
                loop_.post([this, connection, id, alive, status = std::move(status)] {
                  if (!alive.expired()) on_pinned(connection, id, status);
                });
              });
  }
  request.is_pinning = true;
  queue_.push_back(std::move(request));
}

void StagingAgent::on_pinned(std::uint64_t connection, std::uint64_t id, const Status& status) {
  const auto request = std::find_if(queue_.begin(), queue_.end(), [&](const Request& queued) {
    return queued.is_pinning && queued.connection == connection && queued.stage.id == id;
  });
  if (request == queue_.end()) return;  // its connection or its epoch has ended, or a part failed
  request->is_pinning = false;
  if (!status) {
    queue_.erase(request);
    answer(connection, id, status.error());
  }
  start_queued();
}

bool StagingAgent::is_pinned(const Request& request,
                             const ipc::PoolMapping& pool,
                             const MappedArena& arena) {
  const GroupView& group = arena.groups[request.stage.group.value];
  return std::all_of(request.stage.parts.begin(), request.stage.parts.end(),
                     [&](const ipc::StagePart& part) {
                       return pool.is_pinned(part.pool_offset, part.count * group.packed(part.set));
                     });
}

// Pinned memory has the same address on the device.
Status StagingAgent::launch_straight(const StageRequest& stage, InFlight& work) {
  const GroupView& group = work.use.arena().groups[stage.group.value];
  const bool stores = stage.kind == ipc::StageKind::kStore;
  ipc::Stream& stream = stream_of(work).stream();
  stream.limit_thread_blocks(std::min(budget_.of(stores, stage.is_ahead),
                                      stores ? kStraightStoreBlocks : kStraightLoadBlocks));
  for (const ipc::StagePart& part : stage.parts) {
    const std::uint64_t stride = group.packed(part.set);
    KVFERRY_ASSIGN(void* host, work.pool->pinned_across(part.pool_offset, part.count * stride));
    const auto blocks = std::span(stage.blocks).subspan(part.first, part.count);
    const ipc::DevicePtr packed{reinterpret_cast<std::uintptr_t>(host)};
    const ipc::RegionTable& table = *group.table(part.set);
    KVFERRY_TRY(stores ? stream.gather(table, blocks, packed, stride)
                       : stream.scatter(table, blocks, packed, stride));
  }
  return ipc::ok();
}

}  // namespace kvferry::worker
