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

}  // namespace

double least_wait(const TurnRecord& turn,
                  double computed_before_s,
                  const LinkRates& link) noexcept {
  const double moved = std::max(seconds_of(turn.loaded_bytes, link.to_device),
                                seconds_of(turn.stored_bytes, link.to_host));
  return std::max(0.0, moved - computed_before_s);
}

double least_wait(const std::vector<TurnRecord>& turns, const LinkRates& link) noexcept {
  double sum = 0;
  for (std::size_t i = 1; i < turns.size(); ++i) {
    sum += least_wait(turns[i], turns[i - 1].computed_s, link);
  }
  return sum;
}

}  // namespace kvferry::cli
