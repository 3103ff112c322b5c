// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/block_key.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvferry::worker {

/// A device block of a store unit.
struct UnitPart {
  ipc::Digest key;  ///< Of the unit.
  std::uint32_t part = 0;
  friend bool operator==(const UnitPart&, const UnitPart&) = default;
};

/// How an engine's prefixes lie in store units (ipc::ModelIdentity::unit_blocks): blocks 0 to N - 1
/// of a prefix are its first unit, and so on; the last unit may be partial. A unit's key is the
/// hash of its last block, so that whole units are found whatever comes after them, and a partial
/// one by prefixes that go on from its end.
/// What of a prefix is there: Client::match_in_units(), and then part_of() of so many hashes.
/// @threading any.
class StoreUnits {
 public:
  /// @param blocks of a unit; throws Exception (kInvalidArgument) for what is not 1 to
  /// ipc::kMostUnitBlocks
  explicit StoreUnits(std::uint32_t blocks);

  [[nodiscard]] std::uint32_t blocks() const noexcept { return blocks_; }
  /// The keys of a prefix's units, the partial one included; by them it is stored, used and pinned.
  /// @param hashes of its blocks, first to last: chained, so that each stands for all before it
  [[nodiscard]] std::vector<ipc::Digest> keys(std::span<const ipc::Digest> hashes) const;
  /// Where block i of the prefix is. @pre i < hashes.size()
  [[nodiscard]] UnitPart part_of(std::span<const ipc::Digest> hashes, std::size_t i) const;

 private:
  std::uint32_t blocks_;
};

}  // namespace kvferry::worker
