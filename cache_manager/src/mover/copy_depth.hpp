// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <chrono>
#include <cstdint>
#include <optional>

namespace kvferry::cache_manager {

/// How much a lane enqueues at a time, and by one call. A copy engine takes copies in the order in
/// which they were enqueued, whatever the priorities of their streams, so what is enqueued is what
/// a better job waits for; and it pauses 2 to 5 us between two calls, which of 8 MiB is 1 to 3 %
/// (H100, 2026-11-26). So much by large calls while no better job comes; where some came lately, or
/// always where they are expected, and of loads that nobody waits for yet, one slot of a staging
/// ring, by calls of half a one, which costs 5 to 10 % of the link. What goes through the ring does
/// so by calls of a slot, and not because some came lately.
/// Loads are enqueued half as deep as stores: among those nobody waits.
class CopyDepth {
 public:
  static constexpr std::uint64_t kSlotBytes = std::uint64_t{8} << 20;
  static constexpr auto kLately = std::chrono::seconds(5);

  struct Options {
    bool paced = false;  ///< Bytes a second are limited, which calls of a slot keep to best.
    UrgentLoads urgent = UrgentLoads::kAuto;
  };
  /// Of a job.
  struct Kind {
    CopyStrategy strategy = CopyStrategy::kDirect;
    bool ahead = false;  ///< Fetched ahead: whatever is needed at once goes before it.
  };
  CopyDepth(ipc::CopyDirection direction, Options options) noexcept
      : loads_(direction == ipc::CopyDirection::kHostToDevice),
        call_bytes_(loads_ ? 2 * kSlotBytes : 4 * kSlotBytes),
        options_(options) {}

  /// A job came that goes before one that is under way.
  void note_better(ipc::TimePoint now) noexcept { better_came_ = now; }
  /// That may be enqueued, where a job is copied so; more by what a block is larger than half of
  /// it.
  [[nodiscard]] std::uint64_t most_bytes(Kind kind, ipc::TimePoint now) const noexcept;
  /// Of the next call of a job that is not copied layer by layer.
  [[nodiscard]] std::uint64_t call_bytes(Kind kind, ipc::TimePoint now) const noexcept;

 private:
  [[nodiscard]] bool is_calm(ipc::TimePoint now) const noexcept {
    return !better_came_ || now - *better_came_ >= kLately;
  }
  [[nodiscard]] bool lets_in(Kind kind, ipc::TimePoint now) const noexcept;

  const bool loads_;
  const std::uint64_t call_bytes_;  ///< At most.
  const Options options_;
  std::optional<ipc::TimePoint> better_came_;
};

}  // namespace kvferry::cache_manager
