// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/lease_slots.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::ipc::lease {
namespace {
constexpr std::size_t kNamesKept = 4;
}  // namespace

std::string Slot::name() const { return fmt::format("{} pid {}", to_string(kind), process.pid()); }

Slot* SlotTable::find(const IncarnationId& incarnation) {
  const auto found = slots_.find(incarnation);
  return found == slots_.end() ? nullptr : &found->second;
}

std::size_t SlotTable::count_of(const ProcessRef& process) const noexcept {
  return static_cast<std::size_t>(
      std::count_if(slots_.begin(), slots_.end(), [&process](const auto& entry) {
        const ProcessRef& known = entry.second.process;
        return known.pid() == process.pid() && known.start_time() == process.start_time();
      }));
}

Slot& SlotTable::add(const IncarnationId& incarnation, ProcessKind kind, ProcessRef process) {
  const auto [place, fresh] = slots_.try_emplace(incarnation);
  KVFERRY_CHECK(fresh, "a slot is reused only after its holder's proven death");
  place->second.incarnation = incarnation;
  place->second.kind = kind;
  place->second.process = std::move(process);
  return place->second;
}

Lease SlotTable::record_lease(Slot& slot, Epoch epoch) {
  KVFERRY_CHECK(!slot.lease, "an incarnation holds at most one living lease");
  slot.lease = Lease{LeaseId{++last_lease_}, epoch};
  slot.last_lease = slot.lease->id;
  return *slot.lease;
}

SlotTable::Release SlotTable::collect_release(Slot& slot) {
  if (slot.distrusted || !slot.words) return Release::kNone;
  const LeaseId released = slot.words->released();
  if (released > slot.last_lease || slot.words->prepared() > slot.last_lease) {
    slot.distrusted = true;
    return Release::kForged;
  }
  if (!slot.lease || released < slot.lease->id) return Release::kNone;
  slot.lease.reset();
  return Release::kEnded;
}

LeaseId SlotTable::prepared(const Slot& slot) noexcept {
  return slot.distrusted || !slot.words ? LeaseId{} : slot.words->prepared();
}

void SlotTable::remove_dead(const IncarnationId& incarnation) {
  const auto found = slots_.find(incarnation);
  KVFERRY_CHECK(found != slots_.end(), "removal of a slot that is not there");
  Slot& slot = found->second;
  KVFERRY_CHECK(slot.process.has_died(), "removal of a living incarnation");
  // It may have released just before it died: then its memory is let go in the usual way.
  (void)collect_release(slot);
  if (slot.lease) {
    Deaths& deaths = deaths_[slot.lease->epoch.value];
    ++deaths.count;
    if (deaths.names.size() == kNamesKept) deaths.names.erase(deaths.names.begin());
    deaths.names.push_back(slot.name());
  }
  slots_.erase(found);
}

void SlotTable::for_each(const std::function<void(Slot&)>& visit) {
  for (auto& [incarnation, slot] : slots_) visit(slot);
}

std::vector<Slot*> SlotTable::holding(Epoch epoch) {
  std::vector<Slot*> holders;
  for (auto& [incarnation, slot] : slots_) {
    if (slot.lease && slot.lease->epoch == epoch) holders.push_back(&slot);
  }
  return holders;
}

std::vector<IncarnationId> SlotTable::holders() const {
  std::vector<IncarnationId> holders;
  for (const auto& [incarnation, slot] : slots_) {
    if (slot.lease) holders.push_back(incarnation);
  }
  return holders;
}

const Deaths* SlotTable::deaths(Epoch epoch) const {
  const auto found = deaths_.find(epoch.value);
  return found == deaths_.end() ? nullptr : &found->second;
}

std::string describe(const std::vector<Slot*>& slots) {
  std::string text;
  for (const Slot* slot : slots) {
    text += fmt::format("{}{} (lease {})", text.empty() ? "" : ", ", slot->name(),
                        slot->lease ? slot->lease->id.value : 0);
  }
  return text;
}

std::string describe(const Deaths& deaths) {
  std::string text;
  for (const std::string& name : deaths.names) text += (text.empty() ? "" : ", ") + name;
  const std::uint64_t more = deaths.count - deaths.names.size();
  if (more > 0) text += fmt::format(" and {} before", more);
  return text;
}

}  // namespace kvferry::ipc::lease
