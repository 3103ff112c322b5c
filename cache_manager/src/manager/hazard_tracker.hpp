// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"

#include <cstdint>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace kvferry::cache_manager {

/// A physical place that copies may collide on: a device block of an engine (on all its ranks) or a
/// slot of the host pool. Never a logical id.
struct Place {
  std::uint64_t space = 0;  ///< Engine and group of a device block, or slab generation of a slot.
  std::uint32_t index = 0;
  bool host = false;

  [[nodiscard]] static Place device(std::uint32_t engine, ipc::GroupId group, ipc::BlockId block) {
    return {
        .space = (std::uint64_t{engine} << 32U) | group.value, .index = block.value, .host = false};
  }
  [[nodiscard]] static Place host_slot(std::uint64_t slab_generation, std::uint32_t index) {
    return {.space = slab_generation, .index = index, .host = true};
  }
  [[nodiscard]] auto tie() const noexcept { return std::tie(space, index, host); }
  friend bool operator==(const Place& a, const Place& b) { return a.tie() == b.tie(); }
  friend bool operator<(const Place& a, const Place& b) { return a.tie() < b.tie(); }
};

struct PlaceHash {
  std::size_t operator()(const Place& place) const noexcept {
    std::uint64_t mixed = (place.space * 0x9E3779B97F4A7C15ULL) ^
                          (std::uint64_t{place.index} * 0xC2B2AE3D27D4EB4FULL) ^
                          (place.host ? 0x165667B19E3779F9ULL : 0);
    mixed ^= mixed >> 29U;
    return static_cast<std::size_t>(mixed * 0xBF58476D1CE4E5B9ULL);
  }
};

enum class Access : std::uint8_t { kRead = 1, kWrite };

struct Claim {
  Place place;
  Access access = Access::kRead;
};

/// Keeps conflicting jobs apart: per place, claims in submission order; one writer or many readers
/// hold it. A job may run when it holds all its places. All claims of a job are made at once and in
/// one order, so there is no cycle. @threading one thread.
class HazardTracker {
 public:
  /// Queues the job's claims; true when it holds all of them already. Several claims of one job on
  /// one place count as the strongest. @pre the job is not known.
  [[nodiscard]] bool add(ipc::JobId job, std::span<const Claim> claims);
  /// Ends a job, running or waiting; gives the jobs that may run now, in submission order.
  [[nodiscard]] std::vector<ipc::JobId> remove(ipc::JobId job);
  /// Whether any unfinished job claims the place.
  [[nodiscard]] bool is_claimed(const Place& place) const { return places_.contains(place); }
  [[nodiscard]] std::size_t jobs() const noexcept { return jobs_.size(); }
  [[nodiscard]] std::size_t places() const noexcept { return places_.size(); }

 private:
  struct Waiter {
    ipc::JobId job;
    Access access = Access::kRead;
    bool granted = false;
  };
  struct JobClaims {
    std::vector<Place> places;
    std::size_t missing = 0;
    std::uint64_t sequence = 0;
  };

  std::unordered_map<Place, std::vector<Waiter>, PlaceHash> places_;
  std::unordered_map<ipc::JobId, JobClaims> jobs_;
  std::uint64_t next_sequence_ = 0;
};

}  // namespace kvferry::cache_manager
