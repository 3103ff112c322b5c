// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace kvferry::cli {

/// One turn, and the wait before it.
struct TurnRecord {
  double waited_s = 0;             ///< Since the turn before it ended: nothing was computed.
  double computed_s = 0;           ///< From its begin to its end.
  std::uint64_t loaded_bytes = 0;  ///< Of its sequences, since the turns that they had before.
  std::uint64_t stored_bytes = 0;  ///< Of anybody, since the turn before it began.
};

/// Bytes per second that all links together move each way, the other way being busy or not.
struct LinkRates {
  double to_host = 0;
  double to_device = 0;
};

/// Seconds that a turn has to wait at least: what the link takes for what was moved for it, less
/// the compute of the turn before, under which all of it could go. Not less than nothing.
[[nodiscard]] double least_wait(const TurnRecord& turn,
                                double computed_before_s,
                                const LinkRates& link) noexcept;
/// Of all turns; the first one finds its blocks on the device.
[[nodiscard]] double least_wait(const std::vector<TurnRecord>& turns,
                                const LinkRates& link) noexcept;

}  // namespace kvferry::cli
