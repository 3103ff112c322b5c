// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/figure.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace kvferry::cli {

std::string_view to_string(Way way) noexcept {
  switch (way) {
    case Way::kToHost: return "d2h";
    case Way::kToDevice: return "h2d";
    case Way::kBoth: return "both";
  }
  return "invalid";
}

std::string_view to_string(Locality locality) noexcept {
  return locality == Locality::kRandom ? "random" : "sequential";
}

std::string_view to_string(BenchPath path) noexcept {
  switch (path) {
    case BenchPath::kEngine: return "engine";
    case BenchPath::kBare: return "bare";
    case BenchPath::kMover: return "mover";
    case BenchPath::kOwn: return "own";
  }
  return "invalid";
}

double us_since(ipc::TimePoint start) noexcept {
  return std::chrono::duration<double, std::micro>(ipc::MonotonicClock::now() - start).count();
}

double Samples::quantile(double share) const {
  KVFERRY_CHECK(!values_.empty(), "a quantile of nothing");
  std::vector<double> sorted = values_;
  std::sort(sorted.begin(), sorted.end());
  if (share == 0.5) {
    const std::size_t middle = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  }
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<std::size_t>(rank, 1, sorted.size()) - 1];
}

const Samples& LinkLimit::of(Way way) const noexcept {
  return way == Way::kToHost ? to_host : way == Way::kToDevice ? to_device : both;
}

Samples& LinkLimit::of(Way way) noexcept {
  return way == Way::kToHost ? to_host : way == Way::kToDevice ? to_device : both;
}

}  // namespace kvferry::cli
