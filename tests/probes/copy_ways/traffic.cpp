// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/traffic.hpp"

#include <vector>

namespace kvferry::probes {

void Alarm::raise_current() {
  const std::scoped_lock lock(mutex_);
  if (!failure_) {
    failure_ = std::current_exception();
  }
  raised_.notify_all();
}

void Alarm::watch_for(std::chrono::duration<double> time) {
  std::unique_lock lock(mutex_);
  // wait: the end of a measurement; time; a failure of what is measured
  if (raised_.wait_for(lock, time, [this] { return failure_ != nullptr; })) {
    std::rethrow_exception(failure_);
  }
}

LaneTraffic::LaneTraffic(const Lane& lane, Alarm& alarm)
    : lane_(lane), alarm_(alarm), thread_([this](const std::stop_token& stop) { run(stop); }) {}

void LaneTraffic::run(const std::stop_token& stop) {
  try {
    keep_enqueuing(stop);
  } catch (...) {
    alarm_.raise_current();
  }
}

void LaneTraffic::keep_enqueuing(const std::stop_token& stop) {
  std::vector<Event> call_over;
  for (std::uint64_t i = 0; i < kCallsAhead; ++i) {
    call_over.push_back(make_event());
  }
  for (std::uint64_t call = 0; !stop.stop_requested(); ++call) {
    const Event& event = call_over[call % kCallsAhead];
    if (call >= kCallsAhead) {
      // wait-driver: a call of this lane; it waits for the device only
      KVFERRY_PROBE_CUDA(cudaEventSynchronize(event.get()));
      bytes_ += lane_.way->call_bytes();
    }
    lane_.way->enqueue(call, lane_.stream.get());
    KVFERRY_PROBE_CUDA(cudaEventRecord(event.get(), lane_.stream.get()));
  }
  // wait-driver: the calls of this lane; they wait for the device only
  KVFERRY_PROBE_CUDA(cudaStreamSynchronize(lane_.stream.get()));
}

}  // namespace kvferry::probes
