// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/store_units.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/worker/client.hpp"

#include <algorithm>

namespace kvferry::worker {
namespace {

/// Which is a cheaper look than one at a prefix.
bool is_anywhere(Client& client, const ipc::Digest& key) {
  const auto groups = static_cast<std::uint32_t>(client.state().group_blocks.size());
  for (std::uint32_t group = 0; group < groups; ++group) {
    if (client.presence(ipc::GroupId{group}, key) == Presence::kHit) return true;
  }
  return false;
}

}  // namespace

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

ipc::Result<std::uint32_t> StoreUnits::usable(Client& client,
                                              std::span<const ipc::Digest> hashes) const {
  const std::size_t most_whole = hashes.size() / blocks_;
  std::vector<ipc::Digest> looked_for = keys(hashes.first(most_whole * blocks_));
  KVFERRY_ASSIGN(const ipc::PrefixMatch whole, client.match_prefix(looked_for));
  const std::size_t found = std::size_t{whole.usable} * blocks_;
  looked_for.resize(whole.usable + std::size_t{1});
  const std::size_t most = std::min<std::size_t>(blocks_ - 1, hashes.size() - found);
  for (std::size_t partial = most; partial > 0; --partial) {
    looked_for.back() = hashes[found + partial - 1];
    if (!is_anywhere(client, looked_for.back())) continue;
    KVFERRY_ASSIGN(const ipc::PrefixMatch with_it, client.match_prefix(looked_for));
    if (with_it.usable == looked_for.size()) {
      return static_cast<std::uint32_t>(found + partial);
    }
  }
  return static_cast<std::uint32_t>(found);
}

}  // namespace kvferry::worker
