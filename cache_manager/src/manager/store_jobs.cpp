// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Stores that clients submit: which host blocks they fill.
#include "manager/job_service.hpp"

#include <map>
#include <utility>

namespace kvferry::cache_manager {

ipc::Result<JobService::Fills> JobService::check_slots(const ClientRecord& client,
                                                       const ipc::SubmitStore& store) const {
  Fills fills;
  for (const ipc::StoreItem& item : store.items) {
    const ipc::BlockKey* key = context_.index.reservation(client.peer.id, item.slot);
    const std::uint32_t parts = client.identity.unit_blocks;
    const std::uint64_t part = item.part < parts ? std::uint64_t{1} << item.part : 0;
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

}  // namespace kvferry::cache_manager
