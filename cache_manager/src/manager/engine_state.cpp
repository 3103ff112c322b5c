// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/engine_state.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/model/block_key.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {

std::string_view to_string(ipc::CachePhase phase) noexcept {
  switch (phase) {
    case ipc::CachePhase::kDetached: return "detached";
    case ipc::CachePhase::kReady: return "ready";
    case ipc::CachePhase::kClearing: return "clearing";
    case ipc::CachePhase::kCleared: return "cleared";
  }
  return "invalid";
}

ipc::Status EngineRecord::fix_config(const ipc::RankHello& hello, const ipc::Digest& fingerprint) {
  EngineConfig config;
  config.geometry = hello.geometry;
  config.order = hello.order;
  config.cache_owner = hello.cache_owner;
  config.fingerprint = fingerprint;
  config.rules = ipc::rules_of(hello.geometry);
  for (std::uint32_t group = 0; group < hello.geometry.groups.size(); ++group) {
    SlabShape shape;
    shape.fingerprint = fingerprint;
    shape.group = ipc::GroupId{group};
    shape.bytes = ipc::host_block_shape(hello.geometry, shape.group);
    shape.ranks = hello.geometry.ranks;
    std::uint64_t shards = 0;
    std::uint64_t total = 0;
    if (!ipc::checked_mul(shape.bytes.shard_bytes, shape.ranks, shards) ||
        !ipc::checked_add(shape.bytes.replicated_bytes, shards, total) || total == 0 ||
        total > (1ULL << 46U)) {
      return KVFERRY_ERROR(
          kInvalidArgument, "engine {} group {}: host blocks of {} + {} x {} bytes are impossible",
          name_, group, shape.bytes.replicated_bytes, shape.ranks, shape.bytes.shard_bytes);
    }
    config.shapes.push_back(shape);
  }
  config_ = std::move(config);
  ranks_.assign(hello.geometry.ranks, {});
  mapped_.assign(hello.geometry.ranks, {});
  workers_.assign(hello.geometry.ranks, {});
  return ipc::ok();
}

ipc::Status EngineRecord::admit(const ipc::Peer& peer, const ipc::RankHello& hello) {
  if (hello.kind != peer.kind) {
    return KVFERRY_ERROR(kProtocol, "{} registered as {} and says hello as {}", peer.name,
                         ipc::to_string(peer.kind), ipc::to_string(hello.kind));
  }
  KVFERRY_TRY(hello.geometry.validate());
  if (hello.rank.value >= hello.geometry.ranks) {
    return KVFERRY_ERROR(kInvalidArgument, "engine {}: rank {} of {} ranks: mend --rank", name_,
                         hello.rank.value, hello.geometry.ranks);
  }
  const ipc::Digest fingerprint = hello.geometry.fingerprint(hello.order);
  if (!config_) {
    KVFERRY_TRY(fix_config(hello, fingerprint));
  }
  if (config_->geometry.ranks != hello.geometry.ranks) {
    return KVFERRY_ERROR(kGeometryMismatch,
                         "engine {} runs on {} ranks, {} was started with {}: start all its "
                         "processes with one rank count",
                         name_, config_->geometry.ranks, peer.name, hello.geometry.ranks);
  }
  if (config_->fingerprint != fingerprint) {
    return KVFERRY_ERROR(kGeometryMismatch,
                         "engine {} has geometry {} ({}), {} was started with {} ({}): start all "
                         "its processes with one geometry and arena order",
                         name_, config_->geometry.name, config_->fingerprint.hex(), peer.name,
                         hello.geometry.name, fingerprint.hex());
  }
  if (config_->cache_owner != hello.cache_owner) {
    return KVFERRY_ERROR(kRoleConflict,
                         "engine {} has cache owner {}, {} was started with cache owner {}: start "
                         "all its processes with one --cache-owner",
                         name_, ipc::to_string(config_->cache_owner), peer.name,
                         ipc::to_string(hello.cache_owner));
  }
  RankRecord& rank = ranks_[hello.rank.value];
  std::optional<RankPeer>& place =
      hello.kind == ipc::ProcessKind::kWorker ? rank.worker : rank.mover;
  if (place && place->id != peer.id && place->connected) {
    return KVFERRY_ERROR(kAlreadyExists,
                         "engine {} rank {} has a living {} (pid {}): end it before starting "
                         "another (pid {})",
                         name_, hello.rank.value, ipc::to_string(hello.kind), place->pid, peer.pid);
  }
  if (const RankPeer* elsewhere = find(peer.id);
      elsewhere != nullptr && (!place || elsewhere != &*place)) {
    return KVFERRY_ERROR(kProtocol, "{} serves another rank of engine {} already", peer.name,
                         name_);
  }
  if (!place || place->id != peer.id) {
    place = RankPeer{.id = peer.id, .pid = peer.pid, .connected = true, .state = {}};
  }
  place->connected = true;
  turned_away_.erase(peer.id);
  return ipc::ok();
}

RankPeer* EngineRecord::find(const ipc::IncarnationId& peer) {
  for (RankRecord& rank : ranks_) {
    for (std::optional<RankPeer>* place : {&rank.worker, &rank.mover}) {
      if (*place && (*place)->id == peer) {
        return &**place;
      }
    }
  }
  return nullptr;
}

ipc::Status EngineRecord::report(const ipc::IncarnationId& peer, const ipc::RankState& state) {
  RankPeer* found = find(peer);
  if (found == nullptr) {
    return KVFERRY_ERROR(kProtocol, "engine {}: state report of a peer without a rank hello",
                         name_);
  }
  found->state = state;
  return ipc::ok();
}

void EngineRecord::set_connected(const ipc::IncarnationId& peer, bool connected) {
  if (RankPeer* found = find(peer)) {
    found->connected = connected;
  }
}

void EngineRecord::remove(const ipc::IncarnationId& peer) {
  for (RankRecord& rank : ranks_) {
    for (std::optional<RankPeer>* place : {&rank.worker, &rank.mover}) {
      if (*place && (*place)->id == peer) {
        place->reset();
      }
    }
  }
  if (!has_rank_peers()) {
    config_.reset();
    ranks_.clear();
    mapped_.clear();
    workers_.clear();
    group_blocks_.clear();
    cleared_ = false;
  }
}

bool EngineRecord::has_rank_peers() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const RankRecord& rank) { return rank.worker || rank.mover; });
}

const RankPeer* EngineRecord::owner(std::uint32_t rank) const {
  const RankRecord& record = ranks_.at(rank);
  const auto& place =
      config_->cache_owner == ipc::CacheOwner::kWorker ? record.worker : record.mover;
  return place ? &*place : nullptr;
}

const RankPeer* EngineRecord::attacher(std::uint32_t rank) const {
  const RankRecord& record = ranks_.at(rank);
  const auto& place =
      config_->cache_owner == ipc::CacheOwner::kWorker ? record.mover : record.worker;
  return place ? &*place : nullptr;
}

bool EngineRecord::is_mapped(const RankRecord& rank, const std::optional<RankPeer>& peer) {
  return peer && peer->connected && peer->state.mapped && !peer->state.session.is_zero() &&
         !(peer->state.session == rank.cleared_session && peer->state.epoch <= rank.cleared_epoch);
}

bool EngineRecord::rank_ready(std::uint32_t rank) const {
  const RankRecord& record = ranks_.at(rank);
  if (!is_mapped(record, record.worker)) {
    return false;
  }
  const RankPeer* owning = owner(rank);
  return owning != nullptr && owning->connected && owning->state.phase == ipc::LeasePhase::kReady &&
         owning->state.session == record.worker->state.session &&
         owning->state.epoch == record.worker->state.epoch &&
         // Both sides say who zeroed it: what an owner has not heard of is not served.
         owning->state.prepared_by == record.worker->state.prepared_by &&
         record.worker->state.group_blocks.size() == config_->shapes.size();
}

bool EngineRecord::rank_offload_ready(std::uint32_t rank) const {
  const RankRecord& record = ranks_.at(rank);
  return rank_connected(rank) && record.settled_worker == record.worker->id &&
         record.settled_mover == record.mover->id;
}

// Everything but the proof that nothing of an earlier mover is left.
bool EngineRecord::rank_connected(std::uint32_t rank) const {
  const RankRecord& record = ranks_.at(rank);
  if (!rank_ready(rank) || !is_mapped(record, record.mover) ||
      record.mover->state.session != record.worker->state.session ||
      record.mover->state.epoch != record.worker->state.epoch) {
    return false;
  }
  // Somebody else's lease: an earlier life of the attacher, or one that serves an earlier manager,
  // may still copy. Whom this manager has turned away does not: it comes only when it is idle, and
  // gets no job.
  const std::vector<ipc::IncarnationId>& holders = owner(rank)->state.lease_holders;
  const ipc::IncarnationId& known = attacher(rank)->id;
  return std::all_of(holders.begin(), holders.end(), [&](const ipc::IncarnationId& holder) {
    return holder == known || turned_away_.contains(holder);
  });
}

std::vector<RankPair> EngineRecord::unsettled() const {
  std::vector<RankPair> pairs;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!rank_connected(rank) || rank_offload_ready(rank)) {
      continue;
    }
    pairs.push_back({ranks_[rank].mover->id, ranks_[rank].worker->id});
  }
  return pairs;
}

void EngineRecord::note_settled(const RankPair& pair) {
  for (RankRecord& rank : ranks_) {
    if (rank.mover && rank.worker && rank.mover->id == pair.mover &&
        rank.worker->id == pair.worker) {
      rank.settled_mover = pair.mover;
      rank.settled_worker = pair.worker;
    }
  }
}

std::optional<std::uint32_t> EngineRecord::rank_of_mover(const ipc::IncarnationId& mover) const {
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].mover && ranks_[rank].mover->id == mover) return rank;
  }
  return std::nullopt;
}

bool EngineRecord::is_settled_worker(const ipc::IncarnationId& worker) const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const RankRecord& rank) {
    return rank.worker && rank.worker->id == worker && rank.settled_worker == worker;
  });
}

bool EngineRecord::waits_for_worker() const {
  if (ranks_.empty() || phase_ != ipc::CachePhase::kDetached) {
    return false;
  }
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankPeer* owning = owner(rank);
    if (owning == nullptr || !owning->connected || owning->state.phase != ipc::LeasePhase::kReady ||
        mapped_[rank] !=
            Contents{owning->state.session, owning->state.epoch, owning->state.prepared_by}) {
      return false;
    }
  }
  return true;
}

void EngineRecord::end_clear(bool succeeded) {
  clearing_ = false;
  if (!succeeded) return;
  clears_ += cleared_ ? 0U : 1U;  // A cache that was clear already was not cleared again.
  cleared_ = true;
}

void EngineRecord::end_operation(bool succeeded) {
  if (operation_ == EngineOperation::kClear) end_clear(succeeded);
  if (succeeded && operation_ == EngineOperation::kReinit) count_reinit();
  updates_ += succeeded && operation_ == EngineOperation::kUpdateWeights ? 1U : 0U;
  flushes_ += succeeded && operation_ == EngineOperation::kFlush ? 1U : 0U;
  operation_ = EngineOperation::kNone;
}

void EngineRecord::note_cleared(std::uint32_t rank, ipc::SessionId session, ipc::Epoch epoch) {
  if (rank >= ranks_.size()) {
    return;
  }
  RankRecord& record = ranks_[rank];
  if (record.cleared_session != session || record.cleared_epoch < epoch) {
    record.cleared_session = session;
    record.cleared_epoch = epoch;
  }
}

bool EngineRecord::is_cleared(std::uint32_t rank) const {
  const RankRecord& record = ranks_.at(rank);
  const RankPeer* owning = owner(rank);
  return owning != nullptr && !owning->state.session.is_zero() &&
         owning->state.session == record.cleared_session &&
         owning->state.epoch <= record.cleared_epoch;
}

bool EngineRecord::all_epochs_ended() const {
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankPeer* owning = owner(rank);
    if (owning == nullptr || !owning->connected ||
        (owning->state.phase != ipc::LeasePhase::kCleared &&
         owning->state.phase != ipc::LeasePhase::kQuarantined)) {
      return false;
    }
  }
  return !ranks_.empty();
}

bool EngineRecord::refresh(std::uint64_t& next_generation) {
  const std::uint64_t generation_before = generation_;
  const ipc::CachePhase phase_before = phase_;
  const bool offload_before = offload_ready_;
  bool ready = !ranks_.empty();
  bool offload = ready;
  bool other_contents = false;
  bool other_worker = false;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    ready = ready && rank_ready(rank);
    offload = offload && rank_offload_ready(rank);
    if (rank_ready(rank)) {
      const RankPeer& worker = *ranks_[rank].worker;
      const Contents contents{worker.state.session, worker.state.epoch, worker.state.prepared_by};
      if (mapped_[rank] != contents) {
        mapped_[rank] = contents;
        other_contents = true;
      }
      other_worker = other_worker || workers_[rank] != worker.id;
      workers_[rank] = worker.id;
    }
  }
  const ipc::Digest weights_before = std::exchange(weights_, weights_of_ranks());
  if (other_contents || generation_ == 0) {
    generation_ = next_generation++;
  }
  if (clearing_) {
    phase_ = ipc::CachePhase::kClearing;
  } else if (ready) {
    phase_ = ipc::CachePhase::kReady;
    cleared_ = false;
    cache_released_ = false;
    earlier_release_ = false;
    note_.clear();
  } else {
    // Also what another manager, or a clear that failed elsewhere, has left: nothing but a re-init
    // makes the next epoch.
    phase_ =
        cleared_ || all_epochs_ended() ? ipc::CachePhase::kCleared : ipc::CachePhase::kDetached;
  }
  offload_ready_ = offload && phase_ == ipc::CachePhase::kReady;
  if (ready) {
    // Ranks that disagree (they should not) offer what all of them have.
    group_blocks_ = ranks_.front().worker->state.group_blocks;
    for (const RankRecord& rank : ranks_) {
      for (std::size_t i = 0; i < group_blocks_.size(); ++i) {
        group_blocks_[i] = std::min(group_blocks_[i], rank.worker->state.group_blocks[i]);
      }
    }
  }
  return generation_ != generation_before || phase_ != phase_before ||
         offload_ready_ != offload_before || other_worker || weights_ != weights_before;
}

ipc::Digest EngineRecord::weights_of_ranks() const {
  std::vector<ipc::Digest> parts;
  for (const RankRecord& rank : ranks_) {
    if (!rank.worker || rank.worker->state.session.is_zero()) {
      return weights_;
    }
    parts.push_back(rank.worker->state.weights);
  }
  if (parts.empty()) {
    return weights_;
  }
  if (std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return part == parts[0]; })) {
    return parts[0];
  }
  // A rank without weights among others that have some is an identity of its own, too.
  for (ipc::Digest& part : parts) {
    part = part.is_zero() ? ipc::Digest::hash("none", 4) : part;
  }
  return ipc::combine_weights(parts);
}

void EngineRecord::adopt_pause(std::optional<ipc::PauseMode> mode, bool by_release) {
  if (!mode || user_has_spoken_) return;
  earlier_release_ = earlier_release_ || (by_release && (paused_ || !pause_is_known_));
  // Nobody but a user ends a user's pause, a release's resume neither.
  const bool holds = by_release ? !pause_is_known_ : !paused_ || paused_by_release_;
  if (holds) put_pause(mode, by_release);
}

ipc::MemoryTags EngineRecord::held_back() const {
  ipc::MemoryTags tags;
  for (const RankRecord& rank : ranks_) {
    if (rank.worker) tags = tags | rank.worker->state.released;
  }
  // An earlier manager's release is known by the pause that it made.
  const bool gone = phase_ == ipc::CachePhase::kCleared && (paused_by_release_ || earlier_release_);
  if (cache_released_ || gone) tags.add(ipc::MemoryTag::kKvCache);
  return tags;
}

ipc::MemoryTags EngineRecord::released() const {
  ipc::MemoryTags tags = held_back();
  if (phase_ == ipc::CachePhase::kCleared) tags.add(ipc::MemoryTag::kKvCache);
  return tags;
}

bool EngineRecord::weights_lost() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const RankRecord& rank) {
    return rank.worker && rank.worker->state.weights_lost;
  });
}

ipc::EngineState EngineRecord::view() const {
  ipc::EngineState state;
  state.generation = generation_;
  state.phase = phase_;
  state.offload_ready = offload_ready_;
  state.weights = weights_;
  if (config_) state.rules = config_->rules;
  state.note = note_;
  if (phase_ == ipc::CachePhase::kReady) {
    state.group_blocks = group_blocks_;
    for (const RankRecord& rank : ranks_) {
      const ipc::RankState& mapped = rank.worker->state;
      state.ranks.push_back({mapped.session, mapped.epoch, mapped.prepared_by, rank.worker->id});
    }
  }
  return state;
}

ipc::Result<std::vector<RankTarget>> EngineRecord::targets(std::uint64_t generation) const {
  if (phase_ == ipc::CachePhase::kClearing || phase_ == ipc::CachePhase::kCleared) {
    return KVFERRY_ERROR(kNotReady, "engine {} is {}: reinit it and wait for ready", name_,
                         to_string(phase_));
  }
  if (generation != generation_) {
    return KVFERRY_ERROR(kStaleEpoch, "job names generation {} of engine {}, current is {}",
                         generation, name_, generation_);
  }
  if (!offload_ready_) {
    return KVFERRY_ERROR(kNotReady, "engine {} is {}, offload is not ready: wait for it", name_,
                         to_string(phase_));
  }
  std::vector<RankTarget> targets;
  targets.reserve(ranks_.size());
  for (const RankRecord& rank : ranks_) {
    targets.push_back(
        {rank.mover->id, rank.worker->id, rank.worker->state.session, rank.worker->state.epoch});
  }
  return targets;
}

std::string_view to_string(EngineOperation operation) noexcept {
  switch (operation) {
    case EngineOperation::kNone: return "none";
    case EngineOperation::kClear: return "clear";
    case EngineOperation::kReinit: return "reinit";
    case EngineOperation::kPause: return "pause";
    case EngineOperation::kContinue: return "continue";
    case EngineOperation::kFlush: return "flush";
    case EngineOperation::kUpdateWeights: return "update_weights";
    case EngineOperation::kRelease: return "release";
    case EngineOperation::kResume: return "resume";
  }
  return "invalid";
}

}  // namespace kvferry::cache_manager
