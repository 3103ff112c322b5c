// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/worker/client.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace kvferry::worker {

/// How far an engine goes on offering stores while the manager answers none. It has to hold the
/// blocks of what it has offered, for as long as nobody knows whether they are being copied: of a
/// manager that stands still (stopped, or swapped out) that is for ever. So the blocks that were
/// offered without an answer have a bound, at which the engine waits: next to never where the
/// manager has a processor, which answers within some 100 us, and once for a second where it does
/// not. @threading one thread
class OfferPace {
 public:
  /// A manager that owes an answer for so long stands still.
  static constexpr ipc::Duration kAnswerTime = std::chrono::seconds(1);

  /// Ok: offer so many blocks now. kTimeout: the manager has owed an answer for a second; go on
  /// without it for a while.
  /// @param most blocks that may be offered without an answer. An offer of more is made alone: cut
  /// offers to that.
  [[nodiscard]] Status admit(Client& client, std::size_t blocks, std::size_t most);

 private:
  std::uint64_t unanswered_ = 0;  ///< Blocks offered since nothing was owed.
};

/// Takes the first units out that go into one offer of at most so many blocks; one at least.
/// @pre !units.empty()
template <typename Unit>
[[nodiscard]] std::vector<Unit> take_offer(std::vector<Unit>& units, std::size_t most) {
  std::size_t blocks = units.front().blocks.size();
  auto end = units.begin() + 1;
  while (end != units.end() && blocks + end->blocks.size() <= most) {
    blocks += end->blocks.size();
    ++end;
  }
  std::vector<Unit> taken(std::move_iterator(units.begin()), std::move_iterator(end));
  units.erase(units.begin(), end);
  return taken;
}

}  // namespace kvferry::worker
