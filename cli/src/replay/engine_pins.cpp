// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "replay/engine.hpp"

#include <utility>

/// What is found in host memory is pinned there until it is loaded.
namespace kvferry::cli {

using worker::PinnedBlock;

void Engine::on_pins_failed(const ipc::Error& error) {
  ipc::log_debug("pins: {}", error.to_string());
  if (error.code != ipc::ErrorCode::kTimeout) return;
  manager_serves_ = false;
  manager_asked_ = ipc::MonotonicClock::now();
}

bool Engine::pin_loads(const PrefixPlan& plan,
                       std::vector<PinnedBlock>& pinned,
                       worker::LoadPins::Parts parts) {
  if (plan.host_hits == 0) return true;
  const auto place_of = [this](ipc::GroupId group, std::uint32_t position) {
    const auto place = places_->find(group, position);
    KVFERRY_CHECK(place.has_value(), "a planned load from nowhere");
    return *place;
  };
  auto taken = pins_.take(*client_, plan, place_of, parts);
  if (!taken) {
    on_pins_failed(taken.error());
    return false;
  }
  for (const worker::LoadPins::Lacking& one : taken->lacking) {
    note_not_loaded(one.group, one.place, static_cast<std::uint8_t>(ipc::ErrorCode::kNotFound));
  }
  counters_.evicted_before_load += taken->gone;
  pinned = std::move(taken->pinned);
  return taken->gone == 0;
}

void Engine::lease(std::size_t request, const PrefixPlan& plan) {
  std::vector<PinnedBlock> blocks;  // What chains share is pinned more than once, and unpinned so.
  for (const std::vector<ipc::Digest>& chain : places_->chains(plan.hit_blocks)) {
    for (const ipc::Digest& key : chain) {
      for (std::uint32_t g = 0; g < index_.size(); ++g) blocks.push_back({ipc::GroupId{g}, key});
    }
  }
  auto there = worker::LoadPins::take_there(*client_, blocks);
  if (!there) return on_pins_failed(there.error());
  ++counters_.leases;
  prefetched_[request].pinned = std::move(*there);
}

}  // namespace kvferry::cli
