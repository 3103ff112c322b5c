// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Stores that clients submit: which host blocks they fill.
#include "manager/job_service.hpp"
#include "manager/store_room.hpp"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {
namespace {

/// Of an item that got no room; Client::offer_store() says the same.
ipc::ErrorCode left_out_as(ipc::ReserveOutcome outcome) {
  switch (outcome) {
    case ipc::ReserveOutcome::kAlreadyThere: return ipc::ErrorCode::kAlreadyExists;
    case ipc::ReserveOutcome::kInUse: return ipc::ErrorCode::kNotIdle;
    default: return ipc::ErrorCode::kNoHostMemory;
  }
}

/// The bit of the item's part in a unit of so many; 0: there is no such part.
std::uint64_t part_bit(const ipc::StoreItem& item, std::uint32_t parts) {
  return item.part < parts ? std::uint64_t{1} << item.part : 0;
}

}  // namespace

ipc::Result<JobService::Fills> JobService::check_slots(const ClientRecord& client,
                                                       const ipc::SubmitStore& store) const {
  Fills fills;
  for (const ipc::StoreItem& item : store.items) {
    const ipc::BlockKey* key = context_.index.reservation(client.peer.id, item.slot);
    const std::uint32_t parts = client.identity.unit_blocks;
    const std::uint64_t part = part_bit(item, parts);
    if (key == nullptr || key->group != item.group || part == 0 || (fills[item.slot] & part) != 0) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "job {}: slot {} is no reservation of this client in group {}, or its "
                           "part {} is named twice, or none of its {}: reserve it again",
                           store.job.value, item.slot, item.group.value, item.part, parts);
    }
    fills[item.slot] |= part;
  }
  return fills;
}

void JobService::submit_store(const ClientRecord& client, const ipc::Envelope& request) {
  const auto store = ipc::decode<ipc::SubmitStore>(request.body, "SubmitStore");
  if (!store) {
    context_.refuse(client.peer, request, store.error());
    return;
  }
  ipc::Status status = check(client, store->job, store->generation, store->items);
  Fills fills;
  if (status) {
    if (auto checked = check_slots(client, *store)) {
      fills = *std::move(checked);
    } else {
      status = std::move(checked).error();
    }
  }
  if (status) {
    status = admit(client);
  }
  if (!status) {
    ipc::Error error = status.error();
    // A reservation ends with its submit, refused or not.
    std::size_t ended = 0;
    for (const ipc::StoreItem& item : store->items) {
      if (context_.index.reservation(client.peer.id, item.slot) != nullptr) {
        context_.index.discard(item.slot);
        ++ended;
      }
    }
    if (ended > 0) {
      error.message += "; reserve its blocks again before: the reservations of a refused store end";
    }
    refuse(client, request, store->job, store->items.size(), error);
    if (store->layers) {
      tell_failed(client.engine->id(), *store->layers, error);
    }
    return;
  }
  Job job = begin(client, store->job, store->generation, JobKind::kStore);
  job.layers = store->layers;
  job.items.reserve(store->items.size());
  std::map<PrefixIndex::Token, HostBlockRef> filled;
  for (const auto& [slot, parts] : fills) {
    filled.emplace(slot, context_.index.begin_fill(client.peer.id, slot, parts));
  }
  for (const ipc::StoreItem& item : store->items) {
    JobItem taken;
    taken.group = item.group;
    taken.block = item.block;
    taken.token = item.slot;
    taken.part = item.part;
    taken.host = filled.at(item.slot);
    job.items.push_back(std::move(taken));
  }
  accept(client, request, std::move(job));
}

ipc::Result<JobService::Fills> JobService::check_places(const ClientRecord& client,
                                                        const ipc::OfferStore& offer) {
  Fills fills;
  const std::uint32_t parts = client.identity.unit_blocks;
  for (const ipc::StoreItem& item : offer.store.items) {
    const std::uint64_t part = part_bit(item, parts);
    if (item.slot >= offer.keys.size() || offer.keys[item.slot].group != item.group || part == 0 ||
        (fills[item.slot] & part) != 0) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "job {}: place {} is none of its {} keys in group {}, or its part {} is "
                           "named twice, or none of its {}",
                           offer.store.job.value, item.slot, offer.keys.size(), item.group.value,
                           item.part, parts);
    }
    fills[item.slot] |= part;
  }
  for (const auto& [place, filled] : fills) {
    const std::uint64_t promised = offer.keys[place].parts;
    if (promised == 0 || promised == filled) continue;
    // Whoever has those parts would give way to one without them.
    return KVFERRY_ERROR(kInvalidArgument, "job {}: parts {:#x} of a key for {:#x}: bring all",
                         offer.store.job.value, filled, promised);
  }
  if (fills.size() != offer.keys.size()) {
    return KVFERRY_ERROR(kInvalidArgument, "job {}: {} of its {} keys have a block: name others",
                         offer.store.job.value, fills.size(), offer.keys.size());
  }
  return fills;
}

void JobService::offer_store(const ClientRecord& client, const ipc::Envelope& request) {
  const auto offer = ipc::decode<ipc::OfferStore>(request.body, "OfferStore");
  if (!offer) {
    context_.refuse(client.peer, request, offer.error());
    return;
  }
  const ipc::SubmitStore& store = offer->store;
  ipc::Status status = check(client, store.job, store.generation, store.items);
  if (status) status = check_store_keys(client, offer->weights, offer->keys);
  Fills fills;
  if (status) {
    if (auto checked = check_places(client, *offer)) {
      fills = *std::move(checked);
    } else {
      status = std::move(checked).error();
    }
  }
  if (status) status = admit(client);
  if (!status) {
    refuse(client, request, store.job, store.items.size(), status.error());
    if (store.layers) tell_failed(client.engine->id(), *store.layers, status.error());
    return;
  }
  Job job = take_offer(client, *offer, fills);
  const bool is_empty = std::all_of(job.items.begin(), job.items.end(),
                                    [&job](const JobItem& item) { return job.left_out(item); });
  if (!is_empty) return accept(client, request, std::move(job));
  // Nothing to wait for in the queue of copies.
  context_.reply(client.peer, request, ipc::Empty{});
  context_.jobs.note_over(client.peer.id, store.job);
  ipc::JobDone done;
  done.job = store.job;
  for (const JobItem& item : job.items) done.results.push_back(item.result);
  send(client.peer.id, std::move(done));
}

Job JobService::take_offer(const ClientRecord& client,
                           const ipc::OfferStore& offer,
                           const Fills& fills) {
  const ipc::SubmitStore& store = offer.store;
  const std::vector<ipc::ReservedSlot> slots = reserve_keys(context_.index, client, offer.keys);
  Job job = begin(client, store.job, store.generation, JobKind::kStore);
  job.layers = store.layers;
  std::vector<HostBlockRef> filled(slots.size());
  for (const auto& [place, parts] : fills) {
    if (slots[place].outcome != ipc::ReserveOutcome::kReserved) continue;
    filled[place] = context_.index.begin_fill(client.peer.id, slots[place].slot, parts);
  }
  job.items.reserve(store.items.size());
  for (const ipc::StoreItem& item : store.items) {
    JobItem& taken = job.items.emplace_back();
    taken.group = item.group;
    taken.block = item.block;
    taken.part = item.part;
    taken.host = filled[item.slot];
    if (taken.host != nullptr) {
      taken.token = slots[item.slot].slot;
    } else {
      taken.result = static_cast<std::uint8_t>(left_out_as(slots[item.slot].outcome));
    }
  }
  return job;
}

}  // namespace kvferry::cache_manager
