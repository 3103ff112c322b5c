// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/os/event_loop.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvferry::worker {

/// Pointers and sizes of one group in the mapped arena.
struct GroupView {
  std::uint32_t block_count = 0;
  /// By RegionSet; null where the group has no such region.
  std::array<std::unique_ptr<ipc::RegionTable>, 3> tables;
  std::array<std::uint64_t, 3> packed_bytes{};

  [[nodiscard]] const ipc::RegionTable* table(ipc::RegionSet set) const noexcept {
    return tables[index(set)].get();
  }
  [[nodiscard]] std::uint64_t packed(ipc::RegionSet set) const noexcept {
    return packed_bytes[index(set)];
  }
  [[nodiscard]] static std::size_t index(ipc::RegionSet set) noexcept {
    return static_cast<std::size_t>(set) - 1;
  }
};

/// What the runner and the staging agent may use of one mapped epoch.
struct MappedArena {
  ipc::SessionId session;
  ipc::Epoch epoch;
  std::vector<GroupView> groups;
  std::uint64_t slot_bytes = 0;
  std::vector<ipc::DevicePtr> slots;
};

class WorkerArena;

/// Permission to use the arena: while one exists, quiesce() waits and nothing is unmapped. Held
/// from before the first launch until the work was observed complete. @threading any.
class ArenaUse {
 public:
  ArenaUse() = default;
  ArenaUse(ArenaUse&& other) noexcept
      : owner_(std::exchange(other.owner_, nullptr)),
        arena_(std::exchange(other.arena_, nullptr)) {}
  ArenaUse& operator=(ArenaUse&& other) noexcept {
    ArenaUse taken(std::move(other));
    std::swap(owner_, taken.owner_);
    std::swap(arena_, taken.arena_);
    return *this;
  }
  ArenaUse(const ArenaUse&) = delete;
  ArenaUse& operator=(const ArenaUse&) = delete;
  ~ArenaUse();

  [[nodiscard]] const MappedArena& arena() const noexcept { return *arena_; }

 private:
  friend class WorkerArena;
  ArenaUse(WorkerArena* owner, const MappedArena* arena) : owner_(owner), arena_(arena) {}
  WorkerArena* owner_ = nullptr;
  const MappedArena* arena_ = nullptr;
};

static_assert(std::is_nothrow_move_constructible_v<ArenaUse>);

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

  [[nodiscard]] ipc::Status on_mapped(ipc::SessionId session,
                                      ipc::Arena& arena,
                                      ipc::ArenaContents contents) override;
  [[nodiscard]] ipc::Status quiesce(ipc::Epoch epoch, ipc::Deadline deadline) override;
  void on_unmapped(ipc::Epoch epoch) override;

 private:
  friend class ArenaUse;
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
