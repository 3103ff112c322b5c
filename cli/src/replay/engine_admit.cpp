// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "replay/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace kvferry::cli {
namespace {

using ipc::BlockId;
using ipc::Digest;
using ipc::GroupId;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using worker::LoadPins;

/// A manager that does not answer within it serves no load either, whatever its table shows. Asked
/// once in kManagerLook.
constexpr ipc::Duration kManagerTime = 1s;
constexpr ipc::Duration kManagerLook = 1s;
constexpr ipc::Duration kBusyRetry = 5ms;
constexpr std::uint32_t kMaxBusyRetries = 400;
/// At what host memory has of a prefix, while what was found keeps going.
constexpr std::uint32_t kMostLooks = 3;

std::uint32_t output_blocks_of(const TraceRequest& request) {
  return request.output_length / kTraceBlockTokens;
}

/// Blocks that the group holds for a request: outputs grow full groups only.
std::uint32_t most_needed(const ipc::GroupSpec& group,
                          std::uint32_t length,
                          std::uint32_t outputs) {
  return worker::most_blocks_needed(group, length) +
         (group.rule == ipc::HitRule::kFull ? outputs : 0);
}

/// An answer that is too short says nothing of what it leaves out: not done.
std::uint8_t result_of(const worker::Completion& completion, std::size_t item) {
  if (item < completion.results.size()) return completion.results[item];
  return static_cast<std::uint8_t>(ipc::ErrorCode::kProtocol);
}

/// Output blocks are private: a hash of their own that nobody looks up.
Digest output_hash(const Digest& last, std::uint32_t number) {
  return ipc::chain_block_hash(last, &number, sizeof(number));
}

}  // namespace

const std::vector<Digest>& Engine::hashes_of(std::size_t request) {
  const auto [found, fresh] = hashes_.try_emplace(request);
  if (fresh) {
    Digest parent;
    found->second.reserve(requests_[request].hash_ids.size());
    for (const std::uint64_t id : requests_[request].hash_ids) {
      parent = ipc::chain_block_hash(parent, &id, sizeof(id));
      found->second.push_back(parent);
    }
  }
  return found->second;
}

ipc::TimePoint Engine::due_at(std::size_t request) const {
  if (options_.speed <= 0) return started_at_;
  const double first = requests_[0].timestamp_ms;
  const double at = std::max(requests_[request].timestamp_ms, first);
  return started_at_ +
         std::chrono::duration_cast<ipc::Duration>(
             std::chrono::duration<double, std::milli>((at - first) / options_.speed));
}

Engine::Admission Engine::try_admit(std::size_t request) {
  const TraceRequest& trace = requests_[request];
  const ipc::TimePoint due = due_at(request);
  if (ipc::MonotonicClock::now() < due) {
    loop_.cancel(due_timer_);
    due_timer_ = loop_.at(due, [this] { pump_later(); });
    return Admission::kNotDue;
  }
  const std::vector<Digest>& hashes = hashes_of(request);
  const auto length = static_cast<std::uint32_t>(hashes.size());
  const std::uint32_t outputs = output_blocks_of(trace);
  for (std::uint32_t g = 0; g < index_.size(); ++g) {
    const std::uint32_t needed = most_needed(options_.geometry.groups[g], length, outputs);
    if (needed <= index_[g].block_count()) continue;
    hooks_.say(fmt::format("request {} needs {} blocks of group '{}', the device has {}: left out",
                           request + 1, needed, options_.geometry.groups[g].name,
                           index_[g].block_count()));
    ++counters_.rejected;
    end_prefetch(request, nullptr);
    hashes_.erase(request);
    begun_.erase(request);
    return Admission::kTooLong;
  }
  if (!may_fit(request, hashes)) return Admission::kNoRoom;
  // Its turn is when there is room for it: until then more of its prefix comes.
  if (!prefetch_lets_start(request)) return Admission::kConflict;
  if (has_pending_block(hashes)) return Admission::kConflict;
  const std::uint64_t era = era_;
  const std::uint64_t generation = generation_;
  const Digest weights = weights_;
  ask_whether_manager_serves(hashes);
  look_at_state();
  if (era != era_ || generation != generation_ || weights != weights_ || !phase_ready_) {
    pump_later();  // There was news of another arena or other weights: start over.
    return Admission::kNoRoom;
  }
  const auto prefetched = prefetched_.find(request);
  const bool may_load = prefetched == prefetched_.end() || !prefetched->second.incomplete;
  std::vector<worker::PinnedBlock> pinned;
  const auto plan = plan_to_admit(request, may_load, pinned);
  if (!plan) return Admission::kNoRoom;
  look_at_state();
  if (era != era_ || generation != generation_ || weights != weights_ || !phase_ready_) {
    pins_.let_go(std::move(pinned));
    pump_later();
    return Admission::kNoRoom;
  }

  const AttemptId id = next_attempt_++;
  Attempt& attempt = attempts_[id];
  attempt.request = request;
  attempt.era = era_;
  begun_.erase(request);
  attempt.pinned = std::move(pinned);
  take_blocks(attempt, *plan, hashes, outputs);
  choice_.on_done(decision_, ipc::MonotonicClock::now());
  end_prefetch(request, &attempt);
  // First, so that it waits for no word with the manager, and none can bring news before.
  if (attempt.loading.empty()) {
    start_step(id, attempt);
  } else {
    submit_load(id, attempt);
  }
  if (offload_usable()) {
    tell_use(plan->hit_blocks);
  }
  return Admission::kAdmitted;
}

void Engine::tell_use(std::uint32_t blocks) {
  for (const std::vector<Digest>& chain : places_->chains(blocks)) {
    const auto used = client_->use_prefix(chain);
    if (!used) ipc::log_debug("use of a prefix: {}", used.error().to_string());
  }
}

bool Engine::has_pending_block(const std::vector<Digest>& hashes) const {
  return std::any_of(index_.begin(), index_.end(), [&](const GroupIndex& group) {
    return std::any_of(hashes.begin(), hashes.end(), [&](const Digest& hash) {
      const auto found = group.find(hash);
      return found && found->state == GroupIndex::State::kPending;
    });
  });
}

bool Engine::may_fit(std::size_t request, const std::vector<Digest>& hashes) const {
  const std::uint32_t outputs = output_blocks_of(requests_[request]);
  for (std::uint32_t g = 0; g < index_.size(); ++g) {
    if (options_.geometry.groups[g].rule != ipc::HitRule::kFull) continue;
    std::uint64_t needed = outputs;
    for (const Digest& hash : hashes) {
      const auto found = index_[g].find(hash);
      // Blocks that others use are there already; all others take room, hit or not.
      if (!found || index_[g].references(found->block) == 0) ++needed;
    }
    if (needed > index_[g].available()) return false;
  }
  return true;
}

void Engine::ask_whether_manager_serves(const std::vector<Digest>& hashes) {
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  if (hashes.empty() || !offload_usable() || now - manager_asked_ < kManagerLook) return;
  const auto found =
      client_->lookup(std::span(hashes).first(1), ipc::Deadline::after(kManagerTime));
  manager_serves_ = found.has_value();
  manager_asked_ = ipc::MonotonicClock::now();
  if (!found) ipc::log_debug("lookup: {}", found.error().to_string());
}

PrefixPlan Engine::make_plan(const TraceRequest& request,
                             const std::vector<Digest>& hashes,
                             bool may_load) {
  decision_ = {};
  places_.emplace(units_, options_.geometry.groups, hashes,
                  [this](GroupId group, const worker::UnitPart& place) {
                    return client_->presence(group, place.key) == worker::Presence::kHit &&
                           !lacking_.has(group, place);
                  });
  const auto length = static_cast<std::uint32_t>(hashes.size());
  const std::uint32_t whole = whole_blocks_of(request);
  const auto on_device = [&](GroupId group, std::uint32_t position) {
    return index_of(group).find(hashes[position]) ? BlockSource::kDevice : BlockSource::kNowhere;
  };
  PrefixPlan plan = worker::plan_prefix(options_.geometry.groups, length, whole, on_device);
  if (plan.hit_blocks == length || !may_load || !offload_usable() || !manager_serves_) return plan;
  const auto anywhere = [&](GroupId group, std::uint32_t position) {
    if (on_device(group, position) == BlockSource::kDevice) return BlockSource::kDevice;
    return places_->find(group, position) ? BlockSource::kHost : BlockSource::kNowhere;
  };
  worker::ChosenPlan chosen = worker::choose_loads(
      choice_, options_.geometry,
      worker::plan_prefix(options_.geometry.groups, length, whole, anywhere), std::move(plan),
      length, whole, kTraceBlockTokens, loading_bytes_, ipc::MonotonicClock::now());
  decision_ = chosen.decision;
  return std::move(chosen.plan);
}

std::optional<PrefixPlan> Engine::plan_to_admit(std::size_t request,
                                                bool may_load,
                                                std::vector<worker::PinnedBlock>& pinned) {
  const std::vector<Digest>& hashes = hashes_of(request);
  const std::uint32_t outputs = output_blocks_of(requests_[request]);
  for (std::uint32_t looks = 0;; ++looks) {
    PrefixPlan plan = make_plan(requests_[request], hashes, may_load && looks < kMostLooks);
    if (!fits(plan, hashes, outputs) || !make_room(request, plan, hashes, outputs)) {
      return std::nullopt;
    }
    // Rather a load that fails in part than none, where each plan meets other units that lack some.
    const bool is_last = looks + 1 >= kMostLooks;
    if (pin_loads(plan, pinned, is_last ? LoadPins::Parts::kAny : LoadPins::Parts::kAsPlanned)) {
      return plan;
    }
  }
}

bool Engine::fits(const PrefixPlan& plan,
                  const std::vector<Digest>& hashes,
                  std::uint32_t output_blocks) const {
  std::vector<std::uint64_t> needed(index_.size());
  for (std::size_t g = 0; g < index_.size(); ++g) {
    if (options_.geometry.groups[g].rule == ipc::HitRule::kFull) needed[g] = output_blocks;
  }
  for (const worker::PlannedBlock& block : plan.blocks) {
    const GroupIndex& group = index_of(block.group);
    const auto found = group.find(hashes[block.position]);
    const bool in_use =
        block.source == BlockSource::kDevice && found && group.references(found->block) > 0;
    if (!in_use) ++needed[block.group.value];
  }
  for (std::size_t g = 0; g < index_.size(); ++g) {
    if (needed[g] > index_[g].available()) return false;
  }
  return true;
}

void Engine::take_blocks(Attempt& attempt,
                         const PrefixPlan& plan,
                         const std::vector<Digest>& hashes,
                         std::uint32_t output_blocks) {
  attempt.hit_blocks = plan.hit_blocks;
  attempt.hit_from_host = plan.hit_from_host;
  // What is there is held first, so that making room for the rest does not evict it.
  for (const worker::PlannedBlock& planned : plan.blocks) {
    HeldBlock held;
    held.group = planned.group;
    held.position = planned.position;
    held.hash = hashes[planned.position];
    if (planned.position > 0) held.before = hashes[planned.position - 1];
    held.source = planned.source;
    if (planned.source == BlockSource::kDevice) {
      const auto found = index_of(planned.group).find(held.hash);
      KVFERRY_CHECK(found.has_value(), "a planned device hit is gone");
      held.block = found->block;
      index_of(planned.group).acquire(held.block);
      held.survived = index_of(planned.group).valid_since(held.block) < worker_deaths_;
      if (wants_verify()) attempt.verifying.push_back(attempt.blocks.size());
    }
    attempt.blocks.push_back(held);
  }
  const auto allocate = [this](GroupId group) {
    const auto block = index_of(group).allocate();
    KVFERRY_CHECK(block.has_value(), "the room that fits() saw is gone");
    return *block;
  };
  for (std::size_t i = 0; i < attempt.blocks.size(); ++i) {
    HeldBlock& held = attempt.blocks[i];
    if (held.source == BlockSource::kDevice) continue;
    held.block = allocate(held.group);
    held.announced = index_of(held.group).announce(held.block, held.hash, held.before);
    if (held.source != BlockSource::kHost) continue;
    set_place(held);
    attempt.loading.push_back(i);
  }
  for (std::uint32_t g = 0; g < index_.size(); ++g) {
    if (options_.geometry.groups[g].rule != ipc::HitRule::kFull) continue;
    for (std::uint32_t i = 0; i < output_blocks; ++i) {
      HeldBlock held;
      held.group = GroupId{g};
      held.block = allocate(held.group);
      held.hash = output_hash(hashes.back(), i);
      attempt.outputs.push_back(held);
    }
  }
}

void Engine::set_place(HeldBlock& held) {
  const auto place = places_->find(held.group, held.position);
  KVFERRY_CHECK(place.has_value(), "a planned load from nowhere");
  held.place = *place;
}

ipc::Result<ipc::JobId> Engine::send_load(std::span<const worker::LoadItem> items,
                                          std::uint8_t priority,
                                          std::optional<ipc::TimePoint> due) {
  // A load names the generation that was acknowledged last. The blocks are of the one that was
  // acted on, which may be an earlier one: then they are other memory's by now.
  if (!offload_usable()) {
    return KVFERRY_ERROR(kStaleEpoch,
                         "a load of {} blocks, planned in generation {}, is not sent in {}: host "
                         "memory is not usable, or the device's blocks are others now",
                         items.size(), generation_, client_->state().generation);
  }
  return client_->submit_load(items, priority, std::nullopt, due);
}

void Engine::submit_load(AttemptId id, Attempt& attempt) {
  std::vector<worker::LoadItem> items;
  items.reserve(attempt.loading.size());
  for (const std::size_t i : attempt.loading) {
    const HeldBlock& held = attempt.blocks[i];
    items.push_back({held.group, held.block, held.place.key, held.place.part});
  }
  const auto job = send_load(items, ipc::Urgency::kOrdinary, std::nullopt);
  if (job) {
    load_jobs_.emplace(*job, id);
    attempt.begun_at = ipc::MonotonicClock::now();
    for (const worker::LoadItem& item : items) {
      attempt.loading_bytes += worker::link_bytes(options_.geometry, item.group);
    }
    loading_bytes_ += attempt.loading_bytes;
    return;
  }
  ipc::log_debug("load not sent: {}", job.error().to_string());
  pins_.let_go(std::exchange(attempt.pinned, {}));
  for (const std::size_t i : attempt.loading) attempt.blocks[i].source = BlockSource::kNowhere;
  attempt.loading.clear();
  start_step(id, attempt);
}

void Engine::on_load_done(AttemptId id, const worker::Completion& completion) {
  Attempt& attempt = attempts_.at(id);
  counters_.bytes_to_device += completion.bytes;
  choice_.on_loaded(completion.bytes, attempt.begun_at, ipc::MonotonicClock::now());
  loading_bytes_ -= std::exchange(attempt.loading_bytes, 0);
  const auto busy = static_cast<std::uint8_t>(ipc::ErrorCode::kBusy);
  const bool all_busy = !completion.results.empty() &&
                        std::all_of(completion.results.begin(), completion.results.end(),
                                    [busy](std::uint8_t result) { return result == busy; });
  if (all_busy && !attempt.doomed && attempt.load_retries++ < kMaxBusyRetries) {
    loop_.after(kBusyRetry, [this, alive = alive_, id] {
      if (!*alive || ended_) return;
      const auto found = attempts_.find(id);
      if (found == attempts_.end()) return;
      if (found->second.doomed) {
        end_attempt(id);
      } else {
        submit_load(id, found->second);
      }
    });
    return;
  }
  pins_.let_go(std::exchange(attempt.pinned, {}));
  if (!completion.all_ok()) {
    ++counters_.failed_jobs;
    ipc::log_debug("load of request {}: {}", attempt.request + 1, completion.message);
  }
  if (attempt.doomed) {
    end_attempt(id);
    return;
  }
  for (std::size_t i = 0; i < attempt.loading.size(); ++i) {
    HeldBlock& held = attempt.blocks[attempt.loading[i]];
    const std::uint8_t result = result_of(completion, i);
    if (result != 0) {
      note_not_loaded(held.group, held.place, result);
      held.source = BlockSource::kNowhere;
      ++counters_.recomputed;
      continue;
    }
    ++counters_.loads;
    if (held.announced) {
      index_of(held.group).make_valid(held.block, worker_deaths_);
      note_loaded(held.group, held.place);
    }
    if (wants_verify()) attempt.verifying.push_back(attempt.loading[i]);
  }
  attempt.loading.clear();
  start_step(id, attempt);
}

void Engine::note_loaded(GroupId group, const worker::UnitPart& place) {
  index_of(group).mark_stored(
      place.key, worker::parts_shown(options_.geometry.groups[group.value], place.part));
}

void Engine::note_not_loaded(GroupId group, const worker::UnitPart& place, std::uint8_t result) {
  lacking_.note(group, place, result);
  if (result == static_cast<std::uint8_t>(ipc::ErrorCode::kNotFound)) {
    index_of(group).forget_stored(place.key);
  }
}

bool Engine::wants_verify() {
  constexpr std::uint64_t kSampleEvery = 8;
  switch (options_.verify) {
    case VerifyPolicy::kOff: return false;
    case VerifyPolicy::kFull: return true;
    case VerifyPolicy::kSample: return verify_turn_++ % kSampleEvery == 0;
  }
  return false;
}

}  // namespace kvferry::cli
