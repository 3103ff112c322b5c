// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/decode.hpp"
#include "probes/copy_ways/way.hpp"

#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

namespace kvferry::probes {

struct TokenTimes {
  double median_us;
  double p99_us;
  std::size_t count;
};

struct Figures {
  std::vector<double> lane_gbps;
  double gbps = 0;
  double processor_ms_per_gib = 0;  ///< of this process, without what launches and times tokens
  // Of a decode beside it, just before and meanwhile.
  std::optional<TokenTimes> tokens_alone;
  std::optional<TokenTimes> tokens_beside;
};

/// Measures lanes one after another.
class Measurement {
 public:
  /// Beside a decode for `time`; for a half of it with nothing beside, and the tokens with no
  /// copies.
  Measurement(Decode& decode, std::chrono::duration<double> time) : decode_(decode), time_(time) {}

  /// @throws what a lane or a token failed with.
  Figures with_nothing_beside(const std::vector<Lane>& lanes);
  Figures beside_decode(const std::vector<Lane>& lanes);

 private:
  Figures rates(const std::vector<Lane>& lanes, std::chrono::duration<double> time, bool sampled);

  Decode& decode_;
  std::chrono::duration<double> time_;
};

}  // namespace kvferry::probes
