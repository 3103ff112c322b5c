// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/model/urgency.hpp"

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvferry::cache_manager {

/// How many jobs of an engine and a direction its movers have, and may have. A mover orders what it
/// has by urgency, and does not know of what waits here: so what is fetched ahead may not take all
/// of its places from what is waited for, nor that all of them from what is urgent.
/// @threading one thread.
class SendWindow {
 public:
  /// Stores, and loads that are fetched ahead.
  static constexpr std::uint32_t kJobs = 64;
  /// For ordinary loads beside those, and for urgent ones beside both.
  static constexpr std::uint32_t kKept = 8;
  static constexpr std::uint32_t kMostJobs = kJobs + 2 * kKept;

  [[nodiscard]] bool has_room(std::uint8_t priority) const noexcept {
    std::uint32_t jobs = 0;
    std::uint32_t most = kJobs;
    for (std::size_t i = 0; i < jobs_.size(); ++i, most += kKept) {
      jobs += jobs_[i];
      if (i >= class_of(priority) && jobs >= most) return false;
    }
    return true;
  }
  void sent(std::uint8_t priority) noexcept { ++jobs_[class_of(priority)]; }
  void ended(std::uint8_t priority) {
    std::uint32_t& jobs = jobs_[class_of(priority)];
    KVFERRY_CHECK(jobs > 0, "a job ended that was not sent");
    --jobs;
  }

 private:
  static constexpr std::size_t class_of(std::uint8_t priority) noexcept {
    if (priority <= ipc::Urgency::kAhead) return 0;
    return priority <= ipc::Urgency::kOrdinary ? 1 : 2;
  }

  std::array<std::uint32_t, 3> jobs_{};
};

}  // namespace kvferry::cache_manager
