// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/model/layer_ticket.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// What movers and the staging agent of a worker say to each other (SEQPACKET). Part of what
/// kWireVersion counts.
namespace kvferry::ipc {

/// First message of a staging connection; answered by a StageReply with id 0. Request ids start
/// at 1, and no request may come before that answer.
///
/// An agent serves one connection per lane: a hello ends the earlier ones, and is answered only
/// when nothing that was asked over them is queued or running any more. So the answer proves that
/// the lane's ring slots, and the blocks of whatever was not answered, are touched by nobody.
struct AgentHello {
  std::uint32_t version = kWireVersion;
  IncarnationId mover;
  std::string engine;
  Rank rank;
  std::uint32_t lane = 0;  ///< One per copy direction; each has ring slots of its own.
  template <typename V> void visit(V& v) { v(version, mover, engine, rank, lane); }
};
constexpr std::uint64_t wire_max(RegionSet) {
  return static_cast<std::uint64_t>(RegionSet::kReplicated);
}
/// kGather, kScatter: kernels between blocks and a ring slot. kPublish (the layers are there) and
/// kAwait (answered when they were computed): without kernels and blocks, with a ticket. kPool: of
/// which pool those after it on its connection are; its descriptor comes with it, and without one
/// there is none any more. kStore, kLoad: kernels between blocks and that pool.
enum class StageKind : std::uint8_t {
  kGather = 1,
  kScatter,
  kPublish,
  kAwait,
  kPool,
  kStore,
  kLoad
};
constexpr std::uint64_t wire_max(StageKind) { return static_cast<std::uint64_t>(StageKind::kLoad); }
/// Parts of blocks, of one kind, that follow each other in the pool.
struct StagePart {
  RegionSet set = RegionSet::kSharded;  ///< Or kReplicated.
  std::uint32_t first = 0;              ///< In the request's blocks.
  std::uint32_t count = 0;
  std::uint64_t pool_offset = 0;
  template <typename V> void visit(V& v) { v(set, first, count, pool_offset); }
};
/// A part of a job by layers. A gather begins, and kAwait is answered, once the worker has computed
/// the layers below `through`; with the end of a scatter, or kPublish, they count as loaded.
struct StageLayers {
  LayerTicket ticket;
  LayerRange range;           ///< What of the blocks is moved.
  std::uint32_t through = 0;  ///< At most the range's end.
  bool last = false;          ///< Of its job.
  template <typename V> void visit(V& v) { v(ticket, range, through, last); }
};
struct StageRequest {
  std::uint64_t id = 0;
  SessionId session;
  Epoch epoch;
  StageKind kind = StageKind::kGather;
  GroupId group;
  RegionSet set = RegionSet::kAll;
  std::uint32_t slot = 0;  ///< Packed blocks lie one after another from the slot's start.
  std::vector<std::uint32_t> blocks;
  std::optional<StageLayers> layers;
  std::vector<StagePart> parts;  ///< kStore, kLoad only.
  std::uint64_t pool_bytes = 0;  ///< kPool only.
  bool is_ahead = false;         ///< Of a load that nobody waits for yet.
  template <typename V> void visit(V& v) {
    v(id, session, epoch, kind, group, set, slot, blocks, layers, parts, pool_bytes, is_ahead);
  }
};
struct StageReply {
  std::uint64_t id = 0;
  std::optional<Error> error;
  template <typename V> void visit(V& v) { v(id, error); }
};

}  // namespace kvferry::ipc
