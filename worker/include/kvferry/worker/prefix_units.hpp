// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/worker/store_units.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace kvferry::worker {

/// In which store units of host memory the blocks of one prefix are, for an engine that plans block
/// by block (plan_prefix()): some of a unit's blocks may be on the device, others are loaded. Where
/// Client::match_in_units() says how much there is, this says of each block where; beyond that it
/// finds a partial unit that ended anywhere in this prefix, also where other groups have none.
/// Answers are those of the first look, whatever others do meanwhile. @threading one thread.
/// @lifetime the spans outlive it
class PrefixUnits {
 public:
  /// Whether the unit can be loaded. That it has the part cannot be seen from outside: whoever
  /// learned that it has not says so.
  using IsThere = std::function<bool(ipc::GroupId group, const UnitPart& place)>;

  /// @param hashes of the prefix's blocks, chained
  PrefixUnits(StoreUnits units,
              std::span<const ipc::GroupSpec> groups,
              std::span<const ipc::Digest> hashes,
              IsThere is_there);

  /// Where a load finds block `position`: in the unit as long as this prefix goes on like it, or in
  /// a partial one that holds it. @pre position < hashes.size()
  [[nodiscard]] std::optional<UnitPart> find(ipc::GroupId group, std::uint32_t position);
  /// The units that hold the first blocks of the prefix, for Client::use_prefix() and pin(): one
  /// chain where all groups have the same ones, else one more for each group with others, and for
  /// each unit that holds some more of what a group needs, as where a window's row ended in
  /// between. Units are named whole, also where the prefix needs a part of them alone.
  [[nodiscard]] std::vector<std::vector<ipc::Digest>> chains(std::uint32_t blocks);

 private:
  /// The end of the unit that holds it; 0: there is none.
  [[nodiscard]] std::uint32_t look(ipc::GroupId group, std::uint32_t position) const;
  /// Of the whole unit, or of the prefix.
  [[nodiscard]] std::size_t end_of_unit(std::size_t position) const;
  struct Row {
    std::size_t unit = 0;  ///< Of the prefix.
    ipc::Digest key;
    friend bool operator==(const Row&, const Row&) = default;
  };
  /// Of what the group needs of so many blocks, the units that there are, by position.
  [[nodiscard]] std::vector<Row> rows_of(ipc::GroupId group, std::uint32_t blocks);

  StoreUnits units_;
  std::span<const ipc::GroupSpec> groups_;
  std::span<const ipc::Digest> hashes_;
  IsThere is_there_;
  std::vector<std::optional<std::uint32_t>> ends_;  ///< Of each group's blocks, as found.
};

/// Parts that units of windows turned out not to have, when pinned or loaded: what several prefixes
/// made of one unit need not reach as far back. Whoever asked for them again would fail again.
/// Bounded: forgets all when it is full. @threading one thread.
class LackingParts {
 public:
  /// groups outlive it
  LackingParts(StoreUnits units, std::span<const ipc::GroupSpec> groups)
      : units_(units), groups_(groups) {}

  /// A load or pin of it failed, as Completion::results says. No effect for another reason than
  /// that it was not found, nor where units have all their parts: then it is gone.
  void note(ipc::GroupId group, const UnitPart& place, std::uint8_t result);
  [[nodiscard]] bool has(ipc::GroupId group, const UnitPart& place) const;
  /// The unit has these parts, a bit for each; of others nothing is said.
  void forget(ipc::GroupId group, const ipc::Digest& key, std::uint64_t parts);
  /// Keys mean other units now.
  void forget_all() { lacking_.clear(); }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 16U;
  /// One table for all groups: a unit's key may be the same in each.
  [[nodiscard]] static ipc::Digest name_of(ipc::GroupId group, const ipc::Digest& key);

  StoreUnits units_;
  std::span<const ipc::GroupSpec> groups_;
  std::unordered_map<ipc::Digest, std::uint64_t> lacking_;  ///< A bit for each part.
};

/// What a unit has where one of its parts was loaded: in a group that holds all its blocks a unit
/// has all of them up to its end, in others that part is known alone.
[[nodiscard]] std::uint64_t parts_shown(const ipc::GroupSpec& group, std::uint32_t part) noexcept;

/// A block of a prefix that an engine holds, with its contents complete.
struct PrefixBlock {
  ipc::GroupId group;
  std::uint32_t position = 0;
};

/// A unit that an engine can store from the blocks that it holds.
struct UnitStore {
  ipc::GroupId group;
  ipc::Digest key;     ///< Hash of the last of its blocks.
  ipc::Digest before;  ///< Key of the whole unit before it; zero: it is the first.
  std::uint64_t parts = 0;
  std::vector<std::size_t> blocks;  ///< Indexes into those held; the last one's hash is the key.
};

/// What can be stored of these blocks so that PrefixUnits finds it, group by group. A group that
/// holds all its blocks stores a unit only with all of them, up to its end or that of the prefix. A
/// window's blocks are a unit up to the end of their row; a state is one alone, under its own hash,
/// by which the prefix that ends with it looks for it.
/// Blocks beyond `hashes` are left out. Pure. @pre held group by group, positions ascending
[[nodiscard]] std::vector<UnitStore> units_to_store(const StoreUnits& units,
                                                    std::span<const ipc::GroupSpec> groups,
                                                    std::span<const ipc::Digest> hashes,
                                                    std::span<const PrefixBlock> held);

}  // namespace kvferry::worker
