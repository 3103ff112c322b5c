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
/// a better job waits for; and it pauses some 5 us between two calls, which of 8 MiB is 3 % (H100,
/// 2026-11-26). So much by large calls while no better job comes; two slots of a staging ring where
/// some came lately. Loads are enqueued half as deep as stores: among those nobody waits.
class CopyDepth {
 public:
  static constexpr std::uint64_t kSlotBytes = std::uint64_t{8} << 20;
  static constexpr std::uint64_t kMostBytesBeforeBetter = 2 * kSlotBytes;
  static constexpr auto kLately = std::chrono::seconds(5);

  /// paced: bytes a second are limited, which calls of a slot keep to best.
  CopyDepth(ipc::CopyDirection direction, bool paced) noexcept
      : call_bytes_(direction == ipc::CopyDirection::kDeviceToHost ? 4 * kSlotBytes
                                                                   : 2 * kSlotBytes),
        paced_(paced) {}

  /// A job came that goes before one that is under way.
  void note_better(ipc::TimePoint now) noexcept { better_came_ = now; }
  /// That may be enqueued.
  [[nodiscard]] std::uint64_t most_bytes(ipc::TimePoint now) const noexcept {
    return is_calm(now) ? 2 * call_bytes_ : kMostBytesBeforeBetter;
  }
  /// Of the next call of a job that is copied straight, and not layer by layer.
  [[nodiscard]] std::uint64_t call_bytes(CopyStrategy strategy, ipc::TimePoint now) const noexcept;

 private:
  [[nodiscard]] bool is_calm(ipc::TimePoint now) const noexcept {
    return !better_came_ || now - *better_came_ >= kLately;
  }

  const std::uint64_t call_bytes_;  ///< At most.
  const bool paced_;
  std::optional<ipc::TimePoint> better_came_;
};

}  // namespace kvferry::cache_manager
