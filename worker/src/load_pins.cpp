// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/load_pins.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/model/block_key.hpp"

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
                                       const PlaceOf& place_of,
                                       Parts parts) {
  // Blocks of one unit are one to be pinned; how many of it are loaded, by group and key.
  struct Loads {
    std::size_t place = 0;  ///< In `wanted`.
    std::uint64_t count = 0;
  };
  std::vector<std::unordered_map<Digest, Loads>> loads;
  std::vector<PinWanted> wanted;
  for (const PlannedBlock& planned : plan.blocks) {
    if (planned.source != BlockSource::kHost) continue;
    loads.resize(std::max<std::size_t>(loads.size(), planned.group.value + std::size_t{1}));
    const UnitPart place = place_of(planned.group, planned.position);
    Loads& of_unit = loads[planned.group.value][place.key];
    if (of_unit.count++ == 0) {
      of_unit.place = wanted.size();
      wanted.push_back({{planned.group, place.key}});
    }
    if (parts == Parts::kAsPlanned) wanted[of_unit.place].parts |= std::uint64_t{1} << place.part;
  }
  KVFERRY_ASSIGN(const std::vector<PinOutcome> outcomes,
                 client.pin_parts(wanted, Deadline::after(kPinTime)));
  Taken taken;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const PinnedBlock& block = wanted[i].block;
    const std::uint64_t lacking = outcomes[i].lacking;
    if (outcomes[i].pinned) {
      taken.pinned.push_back(block);
    } else if (lacking == 0) {
      taken.gone += loads[block.group.value].at(block.key).count;
    }
    for (std::uint32_t part = 0; part < ipc::kMostUnitBlocks; ++part) {
      if ((lacking >> part & 1U) == 0) continue;
      ++taken.gone;
      taken.lacking.push_back({block.group, {block.key, part}});
    }
  }
  if (taken.gone > 0) let_go(std::exchange(taken.pinned, {}));
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
