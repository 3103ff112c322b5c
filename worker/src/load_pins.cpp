// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/load_pins.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <unordered_map>
#include <utility>

namespace kvferry::worker {
namespace {

constexpr ipc::Duration kPinTime = std::chrono::milliseconds(200);

}  // namespace

Result<LoadPins::Taken> LoadPins::take(Client& client,
                                       const PrefixPlan& plan,
                                       const PlaceOf& place_of) {
  // Blocks of one unit are one to be pinned; how many of it are loaded, by group and key.
  std::vector<std::unordered_map<Digest, std::uint64_t>> loads;
  std::vector<PinnedBlock> blocks;
  for (const PlannedBlock& planned : plan.blocks) {
    if (planned.source != BlockSource::kHost) continue;
    loads.resize(std::max<std::size_t>(loads.size(), planned.group.value + std::size_t{1}));
    const Digest key = place_of(planned.group, planned.position).key;
    if (loads[planned.group.value][key]++ == 0) blocks.push_back({planned.group, key});
  }
  KVFERRY_ASSIGN(std::vector<PinnedBlock> there, take_there(client, blocks));
  Taken taken;
  if (there.size() == blocks.size()) {
    taken.pinned = std::move(there);
    return taken;
  }
  for (const PinnedBlock& block : there) loads[block.group.value].erase(block.key);
  for (const auto& group : loads) {
    for (const auto& [key, count] : group) taken.gone += count;
  }
  let_go(std::move(there));
  return taken;
}

Result<std::vector<PinnedBlock>> LoadPins::take_there(Client& client,
                                                      std::span<const PinnedBlock> blocks) {
  KVFERRY_ASSIGN(const std::vector<bool> there,
                 client.pin_blocks(blocks, Deadline::after(kPinTime)));
  std::vector<PinnedBlock> pinned;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (there[i]) pinned.push_back(blocks[i]);
  }
  return pinned;
}

void LoadPins::let_go(std::vector<PinnedBlock> pinned) {
  if (!pinned.empty()) let_go_.push_back(std::move(pinned));
}

void LoadPins::unpin(Client& client) {
  for (std::vector<PinnedBlock>& pinned : std::exchange(let_go_, {})) {
    const Status sent = client.unpin_blocks(pinned);
    if (sent) continue;
    ipc::log_debug("{} blocks are not unpinned: {}", pinned.size(), sent.error().to_string());
    // Without a manager there are no pins. A full queue empties.
    if (sent.error().code == ErrorCode::kBusy) let_go_.push_back(std::move(pinned));
  }
}

}  // namespace kvferry::worker
