// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/rank_lease.hpp"

#include <utility>

namespace kvferry::ipc {
namespace {

LeaseOptions lease_options(const RankSelf& self) {
  const RankConfig& config = self.config;
  LeaseOptions options;
  options.identity.instance = config.instance;
  options.identity.engine = config.engine;
  options.identity.rank = config.rank;
  options.identity.ranks = config.geometry.ranks;
  options.identity.self = self.kind;
  options.identity.cache_owner = config.cache_owner;
  options.identity.handles = config.handles;
  options.identity.fingerprint = config.geometry.fingerprint(config.arena.order);
  options.identity.incarnation = config.incarnation;
  options.timeouts = config.timeouts;
  options.transitions = self.transitions;
  return options;
}

}  // namespace

RankLease::RankLease(const RankSelf& self,
                     const RuntimeDir& dir,
                     ArenaUser& user,
                     ArenaSource* source,
                     std::function<void(const LeaseView&)> on_change)
    : self_(self), arena_(self.config.arena) {
  const RankConfig& config = self.config;
  const LeaseOptions options = lease_options(self);
  if (options.identity.is_owner()) {
    auto layout = plan_arena(config.geometry, arena_);
    if (!layout) throw Exception(std::move(layout).error());
    owner_ =
        std::make_unique<LeaseOwner>(options, dir, self.device, user, std::move(on_change), source);
    return;
  }
  if (source != nullptr) {
    throw Exception(KVFERRY_ERROR(
        kInvalidArgument,
        "{} {}/{} has regions of an engine to register, but --cache-owner {} lets the other "
        "side allocate; use --cache-owner worker, or register no regions",
        to_string(self.kind), config.engine, config.rank.value, to_string(config.cache_owner)));
  }
  attacher_ = std::make_unique<LeaseAttacher>(options, dir, self.device, config.geometry, user,
                                              std::move(on_change));
}

Result<Epoch> RankLease::init(Deadline deadline) {
  KVFERRY_ASSIGN(const ArenaLayout layout, plan_arena(self_.config.geometry, arena_));
  return owner_->init(layout, deadline);
}

bool RankLease::fits_device() const {
  const auto layout = plan_arena(self_.config.geometry, arena_);
  const auto memory = self_.device.memory_info();
  return layout && memory && layout->total_bytes() <= memory->total_bytes;
}

Result<ClearOutcome> RankLease::clear(const RankClear& clear) {
  const LeaseView now = view();
  if (clear.session != now.session) {
    return KVFERRY_ERROR(kStaleEpoch, "rank {}: clear names session {}, current is {}",
                         self_.config.rank.value, clear.session.hex(), now.session.hex());
  }
  const Deadline deadline = Deadline::after(clear.deadline);
  return owner_ ? owner_->clear(clear.epoch, deadline) : attacher_->detach(clear.epoch, deadline);
}

Result<Epoch> RankLease::reinit(const RankReinit& reinit) {
  const Deadline deadline = Deadline::after(reinit.deadline);
  if (attacher_) {
    KVFERRY_TRY(attacher_->wait_mapped(reinit.epoch, deadline, reinit.session));
    return attacher_->view().epoch;
  }
  if (const LeaseView now = view(); reinit.session != now.session) {
    return KVFERRY_ERROR(kStaleEpoch, "rank {}: reinit names session {}, current is {}",
                         self_.config.rank.value, reinit.session.hex(), now.session.hex());
  }
  ArenaOptions options = arena_;
  if (reinit.gpu_blocks != 0) options.gpu_blocks = reinit.gpu_blocks;
  KVFERRY_ASSIGN(const ArenaLayout layout, plan_arena(self_.config.geometry, options));
  KVFERRY_ASSIGN(const Epoch epoch, owner_->init(layout, deadline));
  arena_ = options;
  return epoch;
}

}  // namespace kvferry::ipc
