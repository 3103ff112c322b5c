// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/worker/arena_use.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace kvferry::worker {

/// The worker's user of the arena in both roles: zeroes it where nobody has before, builds its
/// pointer tables, and lets runner and staging agent in and out.
/// @threading any; the ArenaUser calls one at a time. @lifetime device outlives it.
class WorkerArena final : public ipc::ArenaUser {
 public:
  /// Throws Exception when the device refuses a stream.
  WorkerArena(ipc::Device& device, ipc::Rank rank);

  /// Called (on the lease thread) when admission has ended, so that users end what they have
  /// queued.
  /// @threading before the first on_mapped() only. The listener outlives the lease.
  void add_revoke_listener(std::function<void()> listener);

  /// kNotReady while nothing is mapped or the epoch is being revoked, kStaleEpoch for another
  /// session or epoch.
  [[nodiscard]] ipc::Result<ArenaUse> enter(const ipc::SessionId& session, ipc::Epoch epoch);
  /// For whichever epoch is mapped now.
  [[nodiscard]] ipc::Result<ArenaUse> enter();

  [[nodiscard]] ipc::Status on_mapped(ipc::SessionId session,
                                      ipc::Arena& arena,
                                      ipc::ArenaContents contents) override;
  [[nodiscard]] ipc::Status quiesce(ipc::Epoch epoch, ipc::Deadline deadline) override;
  void on_unmapped(ipc::Epoch epoch) override;

 private:
  friend class ArenaUse;
  [[nodiscard]] ipc::Status check_open() const;
  void leave() noexcept;
  [[nodiscard]] ipc::Result<MappedArena> build(ipc::SessionId session, const ipc::Arena& arena);
  [[nodiscard]] ipc::Status zero(const ipc::Arena& arena);
  [[nodiscard]] ipc::Status await_zeroed(ipc::Epoch epoch, ipc::Deadline deadline);

  ipc::Device& device_;
  const ipc::Rank rank_;
  ipc::EventFd zeroed_;
  ipc::EventFd idle_;                    ///< Signalled when the last user leaves.
  std::unique_ptr<ipc::Stream> stream_;  ///< For zeroing; used by the lease thread only.
  bool zeroing_ = false;                 ///< Launched and not seen to end; the lease thread's.
  std::vector<std::function<void()>> listeners_;

  std::mutex mutex_;  ///< Guards everything below.
  std::optional<MappedArena> mapped_;
  bool open_ = false;
  std::uint32_t users_ = 0;
};

}  // namespace kvferry::worker
