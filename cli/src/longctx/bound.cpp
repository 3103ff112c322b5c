// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "longctx/bound.hpp"

#include <algorithm>
#include <cstddef>

namespace kvferry::cli {
namespace {

double seconds_of(std::uint64_t bytes, double bytes_per_second) {
  return bytes == 0 || bytes_per_second <= 0 ? 0 : static_cast<double>(bytes) / bytes_per_second;
}

/// What is left of its compute when it has hidden what it could of what it streamed; less than
/// nothing: what it could not.
double spare_compute(const TurnRecord& turn, const LinkRates& link) {
  return turn.computed_s - seconds_of(turn.streamed_bytes, link.to_device);
}

}  // namespace

double least_wait(const TurnRecord& turn,
                  const TurnRecord& before,
                  const LinkRates& link) noexcept {
  const double moved = std::max(seconds_of(turn.loaded_bytes, link.to_device),
                                seconds_of(turn.stored_bytes, link.to_host));
  return std::max(0.0, moved - std::max(0.0, spare_compute(before, link))) +
         std::max(0.0, -spare_compute(turn, link));
}

double least_wait(const std::vector<TurnRecord>& turns, const LinkRates& link) noexcept {
  if (turns.empty()) return 0;
  double sum = std::max(0.0, -spare_compute(turns.front(), link));
  for (std::size_t i = 1; i < turns.size(); ++i) sum += least_wait(turns[i], turns[i - 1], link);
  return sum;
}

}  // namespace kvferry::cli
