// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>

namespace kvferry::ipc {

/// Names one use of one of the words by which a rank's worker and its transfers tell each other,
/// layer by layer, how far they are: a slot below kLayerSlots, and a number that grows with each
/// use of it, over all engines (worker::Client::layer_ticket()). Every rank has words of its own.
struct LayerTicket {
  std::uint32_t slot = 0;
  std::uint64_t use = 0;  ///< From 1.
  friend constexpr auto operator<=>(const LayerTicket&, const LayerTicket&) = default;
  template <typename V> void visit(V& v) { v(slot, use); }
};
inline constexpr std::uint32_t kLayerSlots = 256;
/// Layers [first, end) of a geometry.
struct LayerRange {
  std::uint32_t first = 0;
  std::uint32_t end = 0;
  [[nodiscard]] constexpr bool contains(std::uint32_t layer) const noexcept {
    return first <= layer && layer < end;
  }
  friend constexpr auto operator<=>(const LayerRange&, const LayerRange&) = default;
  template <typename V> void visit(V& v) { v(first, end); }
};

}  // namespace kvferry::ipc
