// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "rank/rank_self.hpp"

#include <functional>
#include <memory>

namespace kvferry::ipc {

/// This rank's end of the lease, in the role that its configuration gives it: the owner allocates
/// and frees, the attacher maps and lets go.
/// @threading view() from any thread. clear(), init() and reinit() one at a time.
class RankLease {
 public:
  /// on_change is called on the lease's thread. Throws Exception; kInvalidArgument for a source
  /// without the owner's role. What is referred to outlives it.
  RankLease(const RankSelf& self,
            const RuntimeDir& dir,
            ArenaUser& user,
            ArenaSource* source,
            std::function<void(const LeaseView&)> on_change);
  RankLease(const RankLease&) = delete;
  RankLease& operator=(const RankLease&) = delete;
  ~RankLease() = default;

  [[nodiscard]] Rank rank() const noexcept { return self_.config.rank; }
  [[nodiscard]] bool is_owner() const noexcept { return owner_ != nullptr; }
  [[nodiscard]] LeaseView view() const { return owner_ ? owner_->view() : attacher_->view(); }

  /// The owner's next epoch, in the size that was last asked for.
  [[nodiscard]] Result<Epoch> init(Deadline deadline);
  /// Whether the next epoch could be allocated when everything else on the device is gone.
  [[nodiscard]] bool fits_device() const;
  /// Ends an epoch. kStaleEpoch when another session is named.
  [[nodiscard]] Result<ClearOutcome> clear(const RankClear& clear);
  /// The owner's next epoch; the attacher waits for it.
  [[nodiscard]] Result<Epoch> reinit(const RankReinit& reinit);
  /// This process ends: reinit() waits for no owner any more. @threading any.
  void cancel_waits() noexcept {
    if (attacher_) attacher_->cancel_waits();
  }

 private:
  const RankSelf self_;
  ArenaOptions arena_;  ///< Of the latest epoch.
  // Exactly one of the two, by role.
  std::unique_ptr<LeaseOwner> owner_;
  std::unique_ptr<LeaseAttacher> attacher_;
};

}  // namespace kvferry::ipc
