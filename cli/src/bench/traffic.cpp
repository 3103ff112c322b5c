// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/traffic.hpp"

#include <algorithm>

namespace kvferry::cli {
namespace {

constexpr std::size_t kCompletions = 64;
constexpr ipc::Duration kAwake = std::chrono::milliseconds(1);
constexpr ipc::Duration kDropped = std::chrono::seconds(5);

double seconds_since(ipc::TimePoint start) {
  return std::chrono::duration<double>(ipc::MonotonicClock::now() - start).count();
}

}  // namespace

ipc::Status Traffic::submit(std::size_t lane, std::size_t job, bool to_host) {
  const Job& items = jobs_.at(lane).at(job);
  const std::uint64_t handle = handle_of(lane, job);
  KVFERRY_ASSIGN(const worker::JobId id, to_host ? instance_.client().swap_out(handle, items)
                                                 : instance_.client().swap_in(handle, items));
  under_way_.emplace(id.value, UnderWay{lane, job});
  return ipc::ok();
}

void Traffic::take(const std::function<void(const UnderWay&, std::uint64_t bytes)>& on_done) {
  for (const worker::Completion& completion : instance_.client().poll(kCompletions)) {
    const auto found = under_way_.find(completion.job.value);
    if (found == under_way_.end()) continue;
    const UnderWay ended = found->second;
    under_way_.erase(found);
    instance_.note_progress();
    if (completion.all_ok()) {
      on_done(ended, completion.bytes);
      continue;
    }
    const auto wrong = std::find_if(completion.results.begin(), completion.results.end(),
                                    [](std::uint8_t code) { return code != 0; });
    if (!failed_) failed_ = ipc::Error{static_cast<ipc::ErrorCode>(*wrong), completion.message};
  }
}

ipc::Status Traffic::prepare() {
  for (std::size_t lane = 0; lane < jobs_.size(); ++lane) {
    for (std::size_t job = 0; job < jobs_.at(lane).size(); ++job) {
      KVFERRY_TRY(submit(lane, job, true));
      if (under_way_.size() >= in_flight_) KVFERRY_TRY(wait_for_all());
    }
  }
  return wait_for_all();
}

ipc::Status Traffic::wait_for_all() {
  KVFERRY_TRY(instance_.run_until(
      [this] {
        take([](const UnderWay&, std::uint64_t) {});
        return under_way_.empty();
      },
      "a copy"));
  if (failed_) return *failed_;
  return ipc::ok();
}

ipc::Result<Traffic::Moved> Traffic::move(Way way, std::uint64_t bytes_each_way) {
  std::array<std::uint64_t, 2> submitted{};
  std::array<std::uint64_t, 2> jobs{};
  Moved result;
  for (std::size_t lane = 0; lane < jobs_.size(); ++lane) {
    if (has_lane(way, lane)) jobs.at(lane) = jobs_for(bytes_each_way);
  }
  // A job's turn comes again when all others have had theirs, long after its end.
  const auto submit_next = [&](std::size_t lane) {
    if (failed_ || submitted.at(lane) == jobs.at(lane)) return;
    const std::size_t job = submitted.at(lane)++ % jobs_.at(lane).size();
    if (const auto sent = submit(lane, job, lane == kToHostLane); !sent) failed_ = sent.error();
  };
  const double cpu_before = instance_.cpu_seconds();
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  for (std::uint32_t i = 0; i < in_flight_; ++i) {
    for (std::size_t lane = 0; lane < jobs_.size(); ++lane) submit_next(lane);
  }
  KVFERRY_TRY(instance_.run_until(
      [&] {
        take([&](const UnderWay& ended, std::uint64_t bytes) {
          result.bytes += bytes;
          submit_next(ended.lane);
        });
        return under_way_.empty();
      },
      "copies"));
  if (failed_) return *failed_;
  result.seconds = seconds_since(start);
  result.cpu_seconds = instance_.cpu_seconds() - cpu_before;
  return result;
}

// Enough of them that beginning and ending do not count.
std::uint64_t Traffic::jobs_for(std::uint64_t bytes) const noexcept {
  constexpr std::uint64_t kLeastRounds = 4;
  return std::max((bytes + job_bytes_ - 1) / job_bytes_, kLeastRounds * in_flight_);
}

ipc::Status Traffic::finish() {
  for (std::size_t lane = 0; lane < jobs_.size(); ++lane) {
    for (std::size_t job = 0; job < jobs_.at(lane).size(); ++job) {
      KVFERRY_TRY(
          instance_.client().drop_sequence(handle_of(lane, job), ipc::Deadline::after(kDropped)));
    }
  }
  return ipc::ok();
}

ipc::Result<double> Traffic::one_job(Way way, std::uint32_t turn) {
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  for (std::size_t lane = 0; lane < jobs_.size(); ++lane) {
    if (!has_lane(way, lane)) continue;
    KVFERRY_TRY(submit(lane, turn % jobs_.at(lane).size(), lane == kToHostLane));
  }
  instance_.stay_awake(kAwake);
  KVFERRY_TRY(wait_for_all());
  return seconds_since(start) * 1e6;
}

}  // namespace kvferry::cli
