// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace kvferry::cli {

/// One turn, and the wait before it.
struct TurnRecord {
  double waited_s = 0;             ///< Since the turn before it ended: nothing was computed.
  double computed_s = 0;           ///< From its begin to its end, without stalled_s.
  double stalled_s = 0;            ///< In it: nothing was computed until a load had ended.
  std::uint64_t loaded_bytes = 0;  ///< Of its sequences, since the turns that they had before.
  std::uint64_t stored_bytes = 0;  ///< Of anybody, since the turn before it began.
  /// Loaded in it, of a sequence that the device does not hold.
  std::uint64_t streamed_bytes = 0;

  [[nodiscard]] double waiting_s() const noexcept { return waited_s + stalled_s; }
};

/// Bytes per second that all links together move each way, the other way being busy or not.
struct LinkRates {
  double to_host = 0;
  double to_device = 0;
};

/// Seconds that a turn has to wait at least, before it and in it: what the link takes for what was
/// moved for it before, less the compute of the turn before that was not needed to hide what that
/// one streamed; and what it takes for what it streams, less its own compute. Neither is less than
/// nothing.
[[nodiscard]] double least_wait(const TurnRecord& turn,
                                const TurnRecord& before,
                                const LinkRates& link) noexcept;
/// Of all turns; the first one finds its blocks on the device, or streams them.
[[nodiscard]] double least_wait(const std::vector<TurnRecord>& turns,
                                const LinkRates& link) noexcept;

}  // namespace kvferry::cli
