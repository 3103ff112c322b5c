// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvferry::cache_manager {

/// What became of an earlier manager's pool.
struct AdoptionStats {
  std::uint64_t found = 0;        ///< Visible blocks in the catalogue.
  std::uint64_t adopted = 0;      ///< Of those can be found now.
  std::uint64_t dropped = 0;      ///< The next two, and what is damaged or was cleared meanwhile.
  std::uint64_t unsummed = 0;     ///< Had no checksums, and nobody told of any.
  std::uint64_t stored_anew = 0;  ///< Meanwhile, before they could be found.
  std::uint64_t awaited = 0;      ///< Wait for checksums that movers may still tell.
  std::uint64_t sequences = 0;    ///< Blocks of swapped-out ones.
  std::uint64_t doubtful = 0;     ///< Slots that somebody may be writing, still.
};

}  // namespace kvferry::cache_manager
