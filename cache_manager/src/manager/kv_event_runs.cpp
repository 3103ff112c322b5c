// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/kv_event_runs.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvferry::cache_manager {
namespace {

// vLLM's names.
std::string kind_of(const ipc::GroupSpec& group) {
  const bool is_latent = std::any_of(
      group.regions.begin(), group.regions.end(),
      [](const ipc::RegionSpec& region) { return region.kind == ipc::RegionKind::kLatent; });
  switch (group.rule) {
    case ipc::HitRule::kFull: return is_latent ? "mla_attention" : "full_attention";
    case ipc::HitRule::kSlidingWindow: return is_latent ? "sliding_window_mla" : "sliding_window";
    case ipc::HitRule::kLastState: return "mamba";
  }
  return {};
}

std::size_t hashes_of(const ipc::KvEvent& event) {
  if (const auto* stored = std::get_if<ipc::KvStored>(&event)) return stored->hashes.size();
  if (const auto* removed = std::get_if<ipc::KvRemoved>(&event)) return removed->hashes.size();
  return 0;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

KvGroups KvGroups::of(const ipc::Geometry& geometry, std::uint32_t unit_blocks) {
  KvGroups known;
  known.tokens_per_block = geometry.tokens_per_block * unit_blocks;
  for (const ipc::GroupSpec& group : geometry.groups) {
    const bool has_window = group.rule == ipc::HitRule::kSlidingWindow;
    known.groups.push_back(
        {kind_of(group), has_window ? group.window_blocks * geometry.tokens_per_block : 0});
  }
  return known;
}

template <typename T> T* KvEventRuns::last_of(ipc::GroupId group) {
  const auto at = last_.find(group);
  T* event = at == last_.end() ? nullptr : std::get_if<T>(&events_[at->second]);
  return event == nullptr || event->hashes.size() >= kMostHashes ? nullptr : event;
}

void KvEventRuns::add(ipc::GroupId group, ipc::KvEvent event) {
  last_[group] = events_.size();
  events_.push_back(std::move(event));
}

void KvEventRuns::stored(const ipc::Digest& block,
                         const ipc::Digest& before,
                         ipc::GroupId group,
                         const KvGroups& groups) {
  auto* last = before.is_zero() ? nullptr : last_of<ipc::KvStored>(group);
  if (last != nullptr && last->hashes.back() == before) {
    last->hashes.push_back(block);
    return;
  }
  ipc::KvStored event{.hashes = {block},
                      .before = before,
                      .tokens_per_block = groups.tokens_per_block,
                      .group = group,
                      .group_kind = {}};
  if (group.value < groups.groups.size()) {
    event.group_kind = groups.groups[group.value].kind;
    event.window_tokens = groups.groups[group.value].window_tokens;
  }
  add(group, std::move(event));
}

void KvEventRuns::removed(const ipc::Digest& block, ipc::GroupId group) {
  if (auto* last = last_of<ipc::KvRemoved>(group)) {
    last->hashes.push_back(block);
  } else {
    add(group, ipc::KvRemoved{{block}, group});
  }
}

void KvEventRuns::cleared() {
  events_.clear();
  last_.clear();
  events_.emplace_back(ipc::KvCleared{});
}

std::vector<ipc::KvEventBatch> KvEventRuns::take() {
  std::vector<ipc::KvEventBatch> batches;
  std::size_t hashes = 0;
  for (ipc::KvEvent& event : events_) {
    const std::size_t more = hashes_of(event);
    if (batches.empty() || hashes + more > kMostHashes) {
      batches.push_back({.time = seconds_since_1970(), .events = {}});
      hashes = 0;
    }
    hashes += more;
    batches.back().events.push_back(std::move(event));
  }
  events_.clear();
  last_.clear();
  return batches;
}

}  // namespace kvferry::cache_manager
