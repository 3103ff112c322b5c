// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/layer_ticket.hpp"
#include "kvferry/ipc/model/retention.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <optional>
#include <vector>

/// What an engine says of blocks that it stores, and what the manager answers. Part of what
/// kWireVersion counts.
namespace kvferry::ipc {

struct StoreKey {
  GroupId group;
  Digest block;
  Digest
      before{};  ///< The block that it continues; zero: it begins a prefix, or that is not known.
  std::optional<Retention> retention{};
  std::uint64_t parts = 0;  ///< That will be stored, a bit for each: a unit without them gives way.
  template <typename V> void visit(V& v) { v(group, block, before, retention, parts); }
};
/// kInUse: another store of it is under way, or it lacks parts and cannot give way now.
enum class ReserveOutcome : std::uint8_t { kReserved = 1, kAlreadyThere, kFull, kInUse };
constexpr std::uint64_t wire_max(ReserveOutcome) {
  return static_cast<std::uint64_t>(ReserveOutcome::kInUse);
}
struct ReserveStore {
  std::vector<StoreKey> keys;
  Digest weights;  ///< EngineState::weights, of those that the blocks were computed with.
  template <typename V> void visit(V& v) { v(keys, weights); }
};
struct ReservedSlot {
  ReserveOutcome outcome = ReserveOutcome::kFull;
  std::uint64_t slot = 0;  ///< Names the reservation, with kReserved only.
  template <typename V> void visit(V& v) { v(outcome, slot); }
};
struct ReserveStoreReply {
  std::vector<ReservedSlot> slots;
  template <typename V> void visit(V& v) { v(slots); }
};
struct AbandonStore {
  std::vector<std::uint64_t> slots;
  template <typename V> void visit(V& v) { v(slots); }
};

struct StoreItem {
  GroupId group;
  BlockId block;
  std::uint64_t slot = 0;
  std::uint32_t part = 0;  ///< Which device block of the store unit this is.
  template <typename V> void visit(V& v) { v(group, block, slot, part); }
};
/// The caller has observed the writes of these blocks complete, or, with layers, has begun the use
/// of that ticket on every rank and enqueued there what writes them.
struct SubmitStore {
  JobId job;  ///< Chosen by the client, growing in its life: a finished one is not taken again.
  std::uint64_t generation = 0;
  std::optional<LayerTicket> layers;
  std::vector<StoreItem> items;
  template <typename V> void visit(V& v) { v(job, generation, layers, items); }
};
/// Room and the store of what gets some, in one: of the others each item ends with what it is that
/// it got none (kAlreadyExists, kNoHostMemory, kNotIdle for what ReserveOutcome calls in use). Of
/// its items each names its key by the place among keys, instead of a slot.
struct OfferStore {
  SubmitStore store;
  std::vector<StoreKey> keys;  ///< Each named by an item.
  Digest weights;              ///< As ReserveStore's.
  template <typename V> void visit(V& v) { v(store, keys, weights); }
};

}  // namespace kvferry::ipc
