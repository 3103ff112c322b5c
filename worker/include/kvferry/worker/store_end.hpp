// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/worker/client.hpp"

#include <cstddef>
#include <cstdint>

namespace kvferry::worker {

/// What became of a block, or of a store unit, that was offered.
enum class StoreEnd : std::uint8_t {
  kStored = 1,
  kThere,   ///< It was there, with all parts that were offered.
  kNoRoom,  ///< Host memory has none: the next one would have none either.
  kInUse,   ///< Somebody else stores it just now, or it lacks parts and cannot give way: try later.
  kFailed
};

/// Of the unit whose blocks are the items [first, first + count) of a Client::offer_store(). It is
/// stored as a whole or not at all. @pre count > 0
[[nodiscard]] StoreEnd end_of_store(const Completion& offered,
                                    std::size_t first,
                                    std::size_t count);

}  // namespace kvferry::worker
