// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/store_units.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>

namespace kvferry::worker {
StoreUnits::StoreUnits(std::uint32_t blocks) : blocks_(blocks) {
  if (blocks == 0 || blocks > ipc::kMostUnitBlocks) {
    throw ipc::Exception(KVFERRY_ERROR(kInvalidArgument, "store units of {} blocks: give 1 to {}",
                                       blocks, ipc::kMostUnitBlocks));
  }
}

std::vector<ipc::Digest> StoreUnits::keys(std::span<const ipc::Digest> hashes) const {
  std::vector<ipc::Digest> keys;
  keys.reserve(hashes.size() / blocks_ + 1);
  for (std::size_t first = 0; first < hashes.size(); first += blocks_) {
    keys.push_back(hashes[std::min<std::size_t>(first + blocks_, hashes.size()) - 1]);
  }
  return keys;
}

UnitPart StoreUnits::part_of(std::span<const ipc::Digest> hashes, std::size_t i) const {
  KVFERRY_CHECK(i < hashes.size(), "a part of a block that the prefix does not have");
  const std::size_t end = std::min<std::size_t>(i / blocks_ * blocks_ + blocks_, hashes.size());
  return {hashes[end - 1], static_cast<std::uint32_t>(i % blocks_)};
}

}  // namespace kvferry::worker
