// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/bench_target.hpp"
#include "bench/figure.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvferry::cli {

/// Jobs of an engine, of one way or both at once: they take turns, so many of each way at a time.
/// What goes to the device was swapped out before, under the same handles.
/// @threading the loop's thread.
class Traffic {
 public:
  using Job = std::vector<worker::SequenceItem>;

  /// First the jobs to the host, second those to the device; job_bytes: that one of them moves.
  Traffic(BenchTarget& target,
          std::array<std::vector<Job>, 2> jobs,
          std::uint32_t in_flight,
          std::uint64_t job_bytes)
      : target_(target), jobs_(std::move(jobs)), in_flight_(in_flight), job_bytes_(job_bytes) {}

  /// Swaps all jobs out, so that there is something to swap in and host memory is there and pinned.
  [[nodiscard]] ipc::Status prepare();
  struct Moved {
    double seconds = 0;  ///< From the first submit until the last completion was seen.
    std::uint64_t bytes = 0;
    double cpu_seconds = 0;
  };
  /// So many bytes of each way, and no fewer jobs than a few rounds of what is under way.
  [[nodiscard]] ipc::Result<Moved> move(Way way, std::uint64_t bytes_each_way);
  struct Window {
    ipc::TimePoint from;
    ipc::TimePoint to;
    std::uint64_t bytes = 0;  ///< Of jobs that ended in it.
  };
  /// Jobs under way all the time, for so long: what they take to get going, and to end, is not in
  /// it.
  [[nodiscard]] ipc::Result<Window> move_for(Way way, ipc::Duration time);
  /// One job at a time: microseconds from its submit until its completion has been seen.
  [[nodiscard]] ipc::Result<double> one_job(Way way, std::uint32_t turn);
  /// Drops what was swapped out: the next jobs need the room.
  [[nodiscard]] ipc::Status finish();

 private:
  struct UnderWay {
    std::size_t lane = 0;
    std::size_t job = 0;
  };

  [[nodiscard]] static std::uint64_t handle_of(std::size_t lane, std::size_t job) noexcept {
    return (static_cast<std::uint64_t>(lane) << 32U) + job + 1;
  }
  [[nodiscard]] ipc::Status submit(std::size_t lane, std::size_t job, bool to_host);
  [[nodiscard]] ipc::Status wait_for_all();
  [[nodiscard]] std::uint64_t jobs_for(std::uint64_t bytes) const noexcept;
  /// Takes what has come; on_done for each job that ended well.
  void take(const std::function<void(const UnderWay&, std::uint64_t bytes)>& on_done);

  BenchTarget& target_;
  const std::array<std::vector<Job>, 2> jobs_;
  const std::uint32_t in_flight_;
  const std::uint64_t job_bytes_;
  std::unordered_map<std::uint64_t, UnderWay> under_way_;
  std::optional<ipc::Error> failed_;
};

}  // namespace kvferry::cli
