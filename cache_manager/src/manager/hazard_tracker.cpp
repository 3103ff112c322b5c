// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/hazard_tracker.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>

namespace kvferry::cache_manager {

bool HazardTracker::add(ipc::JobId job, std::span<const Claim> claims) {
  KVFERRY_CHECK(!jobs_.contains(job), "job is in the hazard tracker already");
  std::vector<Claim> merged(claims.begin(), claims.end());
  // Strongest access first per place, then one claim per place remains.
  std::sort(merged.begin(), merged.end(), [](const Claim& a, const Claim& b) {
    return a.place != b.place ? a.place < b.place : a.access > b.access;
  });
  merged.erase(std::unique(merged.begin(), merged.end(),
                           [](const Claim& a, const Claim& b) { return a.place == b.place; }),
               merged.end());

  JobClaims& entry = jobs_[job];
  entry.sequence = next_sequence_++;
  entry.places.reserve(merged.size());
  for (const Claim& claim : merged) {
    std::vector<Waiter>& queue = places_[claim.place];
    const bool granted =
        queue.empty() || (claim.access == Access::kRead &&
                          std::all_of(queue.begin(), queue.end(), [](const Waiter& waiter) {
                            return waiter.access == Access::kRead;
                          }));
    queue.push_back({job, claim.access, granted});
    entry.places.push_back(claim.place);
    entry.missing += granted ? 0U : 1U;
  }
  return entry.missing == 0;
}

std::vector<ipc::JobId> HazardTracker::remove(ipc::JobId job) {
  const auto found = jobs_.find(job);
  KVFERRY_CHECK(found != jobs_.end(), "job is not in the hazard tracker");
  const std::vector<Place> places = std::move(found->second.places);
  jobs_.erase(found);

  std::vector<std::pair<std::uint64_t, ipc::JobId>> runnable;
  for (const Place& place : places) {
    const auto at = places_.find(place);
    std::vector<Waiter>& queue = at->second;
    queue.erase(std::find_if(queue.begin(), queue.end(),
                             [job](const Waiter& waiter) { return waiter.job == job; }));
    if (queue.empty()) {
      places_.erase(at);
      continue;
    }
    // The front writer alone, or all readers up to the next writer.
    for (std::size_t i = 0; i < queue.size(); ++i) {
      Waiter& waiter = queue[i];
      if (waiter.access == Access::kWrite && i > 0) {
        break;
      }
      if (!waiter.granted) {
        waiter.granted = true;
        JobClaims& claims = jobs_.at(waiter.job);
        if (--claims.missing == 0) {
          runnable.emplace_back(claims.sequence, waiter.job);
        }
      }
      if (waiter.access == Access::kWrite) {
        break;
      }
    }
  }
  std::sort(runnable.begin(), runnable.end());
  std::vector<ipc::JobId> jobs;
  jobs.reserve(runnable.size());
  for (const auto& [sequence, id] : runnable) {
    jobs.push_back(id);
  }
  return jobs;
}

}  // namespace kvferry::cache_manager
