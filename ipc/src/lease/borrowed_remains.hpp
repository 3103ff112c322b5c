// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/arena.hpp"

#include <cstdint>
#include <functional>
#include <string>

namespace kvferry::ipc::lease {

/// What is left of the allocations that an engine lent for an epoch, after it was to free them.
struct Remains {
  std::size_t allocations = 0;  ///< That still exist, and are not lent for another epoch.
  std::size_t of = 0;           ///< How many there were.
  std::uint64_t bytes = 0;
  std::uint64_t shared_bytes = 0;  ///< Lent for another epoch as well: looked at when that ends.
  std::string note;                ///< Why one of them cannot be looked at.
};

/// lent_elsewhere: another epoch, not released yet, has regions in the allocation.
[[nodiscard]] Remains look_at_remains(const Arena& released,
                                      const std::function<bool(AllocationId)>& lent_elsewhere);

/// Who keeps it and what to do, for a person. failure: what release() said; "" when it was well.
[[nodiscard]] std::string describe_remains(const Remains& remains, const std::string& failure);

/// True while the arena is not released and has regions in the allocation.
[[nodiscard]] bool lends(const Arena& arena, AllocationId id);

}  // namespace kvferry::ipc::lease
