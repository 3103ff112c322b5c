// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "unit_match.hpp"

#include "kvferry/worker/store_units.hpp"

#include <algorithm>
#include <vector>

namespace kvferry::worker {

std::uint32_t usable_in_units(const ipc::PrefixTableView& table,
                              const ipc::Digest& root,
                              std::span<const ipc::Digest> hashes,
                              std::span<const ipc::GroupRule> rules,
                              std::uint32_t unit_blocks) {
  const StoreUnits units(unit_blocks);
  const std::size_t unit = unit_blocks;
  const std::vector<ipc::Digest> whole = units.keys(hashes.first(hashes.size() / unit * unit));
  const std::uint32_t usable = table.match(root, whole, rules).usable;
  const auto is_there = [&](std::uint32_t group, const ipc::Digest& key) {
    const auto found = table.find({root, key, ipc::GroupId{group}});
    return found && !found->pending;
  };
  // Behind those a group that needs all of them may have one partial unit. Others need not have
  // what lies between: a state that is there for a partial unit alone, say.
  std::size_t most = hashes.size();
  for (std::uint32_t group = 0; group < rules.size(); ++group) {
    if (rules[group].rule != ipc::HitRule::kFull) continue;
    std::size_t held = usable;
    while (held < whole.size() && is_there(group, whole[held])) ++held;
    most = std::min(most, held * unit + unit - 1);
  }
  for (std::size_t end = most; end > usable * unit; --end) {
    bool is_anywhere = false;  // the cheaper look
    for (std::uint32_t group = 0; group < rules.size() && !is_anywhere; ++group) {
      is_anywhere = is_there(group, hashes[end - 1]);
    }
    if (!is_anywhere) continue;
    const std::vector<ipc::Digest> keys = units.keys(hashes.first(end));
    if (table.match(root, keys, rules).usable == keys.size()) {
      return static_cast<std::uint32_t>(end);
    }
  }
  return static_cast<std::uint32_t>(usable * unit);
}

}  // namespace kvferry::worker
