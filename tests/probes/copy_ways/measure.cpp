// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/measure.hpp"

#include "probes/copy_ways/traffic.hpp"

#include <sys/resource.h>
#include <sys/time.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>

namespace kvferry::probes {
namespace {

/// Until queues are full and clocks are up.
constexpr std::chrono::milliseconds kSettleTime{40};
constexpr double kGib = 1073741824.0;

double quantile(const std::vector<double>& sorted, double share) {
  const auto at = static_cast<std::size_t>(share * static_cast<double>(sorted.size()));
  return sorted[std::min(at, sorted.size() - 1)];
}

TokenTimes summary_of(std::vector<double> tokens_us) {
  if (tokens_us.empty()) {
    throw std::runtime_error(
        "no token began and ended in the time of a measurement; "
        "give more --seconds");
  }
  std::sort(tokens_us.begin(), tokens_us.end());
  return {quantile(tokens_us, 0.5), quantile(tokens_us, 0.99), tokens_us.size()};
}

std::chrono::nanoseconds duration_of(const timeval& time) {
  return std::chrono::seconds(time.tv_sec) + std::chrono::microseconds(time.tv_usec);
}

std::chrono::nanoseconds processor_time_of_process() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return duration_of(usage.ru_utime) + duration_of(usage.ru_stime);
}

std::vector<std::uint64_t> bytes_of(const std::vector<std::unique_ptr<LaneTraffic>>& traffic) {
  std::vector<std::uint64_t> bytes;
  bytes.reserve(traffic.size());
  for (const auto& lane : traffic) {
    bytes.push_back(lane->bytes());
  }
  return bytes;
}

}  // namespace

Figures Measurement::with_nothing_beside(const std::vector<Lane>& lanes) {
  return rates(lanes, time_ / 2, false);
}

Figures Measurement::beside_decode(const std::vector<Lane>& lanes) {
  const DecodeRuns runs(decode_);
  Alarm never_raised;
  never_raised.watch_for(kSettleTime);
  decode_.begin_sample();
  never_raised.watch_for(time_ / 2);
  const TokenTimes alone = summary_of(decode_.end_sample());
  Figures figures = rates(lanes, time_, true);
  figures.tokens_alone = alone;
  return figures;
}

Figures Measurement::rates(const std::vector<Lane>& lanes,
                           std::chrono::duration<double> time,
                           bool sampled) {
  Alarm alarm;
  std::vector<std::unique_ptr<LaneTraffic>> traffic;
  for (const Lane& lane : lanes) {
    traffic.push_back(std::make_unique<LaneTraffic>(lane, alarm));
  }
  alarm.watch_for(kSettleTime);

  const auto processor_time = [this] {
    return processor_time_of_process() - decode_.processor_time();
  };
  const std::vector<std::uint64_t> before = bytes_of(traffic);
  const std::chrono::nanoseconds processor_before = processor_time();
  const auto start = std::chrono::steady_clock::now();
  if (sampled) {
    decode_.begin_sample();
  }
  alarm.watch_for(time);
  Figures figures;
  if (sampled) {
    figures.tokens_beside = summary_of(decode_.end_sample());
  }
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
  const std::chrono::duration<double, std::milli> processor_ms =
      processor_time() - processor_before;
  const std::vector<std::uint64_t> after = bytes_of(traffic);

  for (std::size_t i = 0; i < lanes.size(); ++i) {
    // Over all of the time: of lanes that take turns for long each is faster in its own.
    const std::chrono::duration<double, std::nano> time_ns = passed;
    figures.lane_gbps.push_back(static_cast<double>(after[i] - before[i]) / time_ns.count());
  }
  figures.gbps = std::accumulate(figures.lane_gbps.begin(), figures.lane_gbps.end(), 0.0);
  if (figures.gbps <= 0) {
    throw std::runtime_error("no call ended in the time of a measurement; give more --seconds");
  }
  figures.processor_ms_per_gib =
      processor_ms.count() / (figures.gbps * 1e9 * passed.count() / kGib);
  return figures;
}

}  // namespace kvferry::probes
