// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/geometry.hpp"

#include <cstdint>
#include <vector>

namespace kvferry::ipc {

/// Which blocks of a prefix a group must hold for it to be used.
struct GroupRule {
  HitRule rule = HitRule::kFull;
  std::uint32_t window_blocks = 0;  ///< kSlidingWindow only.
  friend bool operator==(const GroupRule&, const GroupRule&) = default;
  template <typename V> void visit(V& v) { v(rule, window_blocks); }
};
[[nodiscard]] std::vector<GroupRule> rules_of(const Geometry& geometry);
/// The same for prefixes that are counted in units of so many blocks, of which the last one may be
/// partial. @pre unit_blocks > 0
[[nodiscard]] std::vector<GroupRule> rules_in_units(std::vector<GroupRule> rules,
                                                    std::uint32_t unit_blocks);

/// How many of a prefix's n blocks, counted from its end, such a group must hold.
[[nodiscard]] std::uint32_t blocks_needed(const GroupRule& rule, std::uint32_t n) noexcept;

/// Blocks of a prefix that can be loaded.
struct PrefixMatch {
  std::uint32_t usable = 0;  ///< From the first one on, by the rules of all groups.
  /// The block behind them is being stored: in every group it is there or on its way.
  bool pending = false;
  friend bool operator==(const PrefixMatch&, const PrefixMatch&) = default;
};

}  // namespace kvferry::ipc
