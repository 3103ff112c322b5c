// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/way.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stop_token>
#include <thread>

namespace kvferry::probes {

/// Lets one thread pass time until something fails in another.
/// @threading any.
class Alarm {
 public:
  /// In a catch block: what was caught is the failure. The first one stays.
  void raise_current();
  /// Passes the time. @throws what the alarm was raised with, as soon as it is.
  void watch_for(std::chrono::duration<double> time);

 private:
  std::mutex mutex_;
  std::condition_variable raised_;
  std::exception_ptr failure_;
};

/// Keeps a lane busy, by a thread of its own, from construction to destruction.
class LaneTraffic {
 public:
  LaneTraffic(const Lane& lane, Alarm& alarm);
  LaneTraffic(const LaneTraffic&) = delete;
  LaneTraffic& operator=(const LaneTraffic&) = delete;
  ~LaneTraffic() = default;

  /// Of all calls that are over.
  std::uint64_t bytes() const { return bytes_.load(); }

 private:
  void run(const std::stop_token& stop);
  void keep_enqueuing(const std::stop_token& stop);

  const Lane& lane_;
  Alarm& alarm_;
  std::atomic<std::uint64_t> bytes_ = 0;
  std::jthread thread_;  // declared last: it uses all of the above
};

}  // namespace kvferry::probes
