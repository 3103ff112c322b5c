// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/eviction_order.hpp"

#include "kvferry/ipc/base/check.hpp"

namespace kvferry::cache_manager {
namespace {

/// Retentions that are ended at a time: as each block that is made room for does so, they never lag
/// by more than the blocks of a moment.
constexpr std::size_t kMostEnded = 64;

}  // namespace

Kept Kept::from(const ipc::Retention& retention, ipc::TimePoint now) {
  const bool has_end = retention.duration.count() > 0;
  return {retention.priority, has_end ? now + retention.duration : kNoEnd};
}

Kept Kept::stronger(const Kept& had, const Kept& given, ipc::TimePoint now) {
  const std::uint8_t priority = had.until > now ? had.priority : ipc::Retention::kOrdinary;
  if (given.priority != priority) return given.priority > priority ? given : had;
  return given.until > had.until ? given : had;
}

EvictionOrder::EvictionOrder(std::string_view policy) : policy_(policy) {
  if (const auto known = make_eviction_policy(policy_, 1); !known) {
    throw ipc::Exception(known.error());
  }
}

void EvictionOrder::enter(EntryId id, std::uint32_t partition, std::size_t capacity) {
  Part& part = parts_[partition];
  if (part.policy == nullptr) {
    auto made = make_eviction_policy(policy_, capacity);
    if (!made) throw ipc::Exception(made.error());
    part.policy = std::move(made).value();
  }
  places_.grow(std::size_t{id} + 1);
  Place& place = at(id);
  KVFERRY_CHECK(place.part == nullptr, "a block enters the order of eviction twice");
  place.part = &part;
  place.kept = {};
  if (part.free_places.empty()) {
    place.place = static_cast<EntryId>(part.entries.size());
    part.entries.add(id);
  } else {
    place.place = part.free_places.back();
    part.free_places.pop_back();
    part.entries[place.place] = id;
  }
}

void EvictionOrder::leave(EntryId id) {
  Place& place = at(id);
  KVFERRY_CHECK(place.part != nullptr, "a block leaves that has not entered");
  stop_retaining(id, place);
  Part& part = *place.part;
  if (part.policy->has(place.place)) part.policy->erase(place.place);  // else it chose the block
  part.free_places.push_back(place.place);
  place = {};
}

void EvictionOrder::use(std::span<const BlockUse> path, EntryId above) {
  // Blocks of one prefix may be charged to several, where there were too many namespaces for some.
  for (std::size_t first = 0; first < path.size();) {
    Part* const part = at(path[first].id).part;
    path_.clear();
    std::size_t next = first;
    for (; next < path.size() && at(path[next].id).part == part; ++next) {
      path_.push_back({at(path[next].id).place, path[next].key});
    }
    const bool is_known = above != kNoEntry && at(above).part == part;
    part->policy->use(path_, is_known ? at(above).place : kNoEntry);
    first = next;
    above = kNoEntry;
  }
}

void EvictionOrder::continue_from(EntryId id, EntryId above) {
  const Place& below = at(id);
  if (below.part == at(above).part) below.part->policy->continue_from(below.place, at(above).place);
}

void EvictionOrder::hold(EntryId id) { at(id).part->policy->hold(at(id).place); }

void EvictionOrder::let_go(EntryId id) { at(id).part->policy->let_go(at(id).place); }

std::optional<EntryId> EvictionOrder::evict(std::uint32_t partition,
                                            const EvictionPolicy::MayEvict& may_evict) {
  const auto known = parts_.find(partition);
  if (known == parts_.end()) return std::nullopt;
  Part& part = known->second;
  const std::optional<EntryId> chosen =
      part.policy->evict([&](EntryId place) { return may_evict(part.entries[place]); });
  if (!chosen) return std::nullopt;
  return part.entries[*chosen];
}

void EvictionOrder::visit_evictable(std::uint32_t partition,
                                    const EvictionPolicy::MayEvict& may_evict,
                                    const EvictionPolicy::Visit& visit,
                                    std::size_t& looks) const {
  const auto known = parts_.find(partition);
  if (known == parts_.end()) return;
  const Part& part = known->second;
  part.policy->visit_evictable([&](EntryId place) { return may_evict(part.entries[place]); },
                               [&](EntryId place) { return visit(part.entries[place]); }, looks);
}

void EvictionOrder::retain(EntryId id, const Kept& kept) {
  Place& place = at(id);
  stop_retaining(id, place);
  place.kept = kept;
  place.part->policy->set_priority(place.place, kept.priority);
  if (kept.priority == ipc::Retention::kOrdinary) return;
  ++retained_;
  if (kept.until != Kept::kNoEnd) ends_.emplace(kept.until, id);
}

void EvictionOrder::stop_retaining(EntryId id, Place& place) {
  if (place.kept.priority == ipc::Retention::kOrdinary) return;
  --retained_;
  ends_.erase({place.kept.until, id});
  place.kept = {};
}

void EvictionOrder::end_retentions(ipc::TimePoint now) {
  for (std::size_t ended = 0; ended < kMostEnded && !ends_.empty(); ++ended) {
    if (ends_.begin()->first > now) return;
    const EntryId id = ends_.begin()->second;
    retain(id, {});
  }
}

}  // namespace kvferry::cache_manager
