// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/traffic.hpp"

#include <algorithm>

namespace kvferry::cli {
namespace {

constexpr ipc::Duration kAwake = std::chrono::milliseconds(1);

double seconds_since(ipc::TimePoint start) {
  return std::chrono::duration<double>(ipc::MonotonicClock::now() - start).count();
}

}  // namespace

ipc::Status Traffic::submit(std::size_t lane, std::size_t job, bool to_host) {
  const Job& items = jobs_.at(lane).at(job);
  const std::uint64_t handle = handle_of(lane, job);
  KVFERRY_ASSIGN(const std::uint64_t id, target_.submit(handle, items, to_host));
  under_way_.emplace(id, UnderWay{lane, job});
  return ipc::ok();
}

void Traffic::take(const std::function<void(const UnderWay&, std::uint64_t bytes)>& on_done) {
  target_.take([&](const BenchTarget::Ended& job) {
    const auto found = under_way_.find(job.job);
    if (found == under_way_.end()) return;
    const UnderWay ended = found->second;
    under_way_.erase(found);
    target_.note_progress();
    if (!job.error) {
      on_done(ended, job.bytes);
    } else if (!failed_) {
      failed_ = job.error;
    }
  });
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
  KVFERRY_TRY(target_.run_until(
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
  const double cpu_before = target_.cpu_seconds();
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  for (std::uint32_t i = 0; i < in_flight_; ++i) {
    for (std::size_t lane = 0; lane < jobs_.size(); ++lane) submit_next(lane);
  }
  KVFERRY_TRY(target_.run_until(
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
  result.cpu_seconds = target_.cpu_seconds() - cpu_before;
  return result;
}

ipc::Result<Traffic::Window> Traffic::move_for(Way way, ipc::Duration time) {
  std::array<std::uint64_t, 2> submitted{};
  std::array<std::uint64_t, 2> ended_in{};
  Window window;
  bool open = false;
  bool over = false;
  const auto submit_next = [&](std::size_t lane) {
    if (failed_ || over || !has_lane(way, lane)) return;
    const std::size_t job = submitted.at(lane)++ % jobs_.at(lane).size();
    if (const auto sent = submit(lane, job, lane == kToHostLane); !sent) failed_ = sent.error();
  };
  for (std::uint32_t i = 0; i < in_flight_; ++i) {
    for (std::size_t lane = 0; lane < jobs_.size(); ++lane) submit_next(lane);
  }
  const auto on_done = [&](const UnderWay& ended, std::uint64_t bytes) {
    const ipc::TimePoint now = ipc::MonotonicClock::now();
    if (open && !over) window.bytes += bytes;
    ++ended_in.at(ended.lane);
    bool all_go = true;  // as many have ended as were under way at first
    for (std::size_t lane = 0; lane < jobs_.size(); ++lane) {
      all_go = all_go && (!has_lane(way, lane) || ended_in.at(lane) >= in_flight_);
    }
    if (!open && all_go) {
      open = true;
      window.from = now;
    } else if (open && !over && now - window.from >= time) {
      over = true;
      window.to = now;
    }
    submit_next(ended.lane);
  };
  KVFERRY_TRY(target_.run_until(
      [&] {
        take(on_done);
        return under_way_.empty();
      },
      "copies"));
  if (failed_) return *failed_;
  return window;
}

// Enough of them that beginning and ending do not count.
std::uint64_t Traffic::jobs_for(std::uint64_t bytes) const noexcept {
  constexpr std::uint64_t kLeastRounds = 4;
  return std::max((bytes + job_bytes_ - 1) / job_bytes_, kLeastRounds * in_flight_);
}

ipc::Status Traffic::finish() {
  for (std::size_t lane = 0; lane < jobs_.size(); ++lane) {
    for (std::size_t job = 0; job < jobs_.at(lane).size(); ++job) {
      KVFERRY_TRY(target_.drop(handle_of(lane, job)));
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
  target_.stay_awake(kAwake);
  KVFERRY_TRY(wait_for_all());
  return seconds_since(start) * 1e6;
}

}  // namespace kvferry::cli
