// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/figure.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

namespace kvferry::cli {

/// The ends of the rounds of a worker's load, as its file tells them. @threading one thread.
class LoadTimes {
 public:
  explicit LoadTimes(std::filesystem::path file) : file_(std::move(file)) {}

  /// Reads what has come. kProtocol for a file that is none: ends that go back.
  [[nodiscard]] ipc::Status read();
  /// The last end that has been read.
  [[nodiscard]] std::optional<ipc::TimePoint> last() const;
  /// Adds the microseconds from end to end of all rounds that lie within.
  void add_within(ipc::TimePoint from, ipc::TimePoint to, Samples& rounds) const;

 private:
  std::filesystem::path file_;
  std::vector<std::uint64_t> ends_;  ///< Nanoseconds.
};

/// The rounds of the loads of all ranks, as those of a model that is spread over them: its next
/// token takes as long as the slowest rank. Loads do not wait for each other, so the rounds of a
/// window are matched by their number in it. @threading one thread.
class RanksLoadTimes {
 public:
  /// A file of each rank. @pre at least one.
  explicit RanksLoadTimes(const std::vector<std::filesystem::path>& files);

  /// As LoadTimes, of all.
  [[nodiscard]] ipc::Status read();
  /// Until when all of them have been read.
  [[nodiscard]] std::optional<ipc::TimePoint> last() const;
  /// Adds of each round that all ranks have in there the microseconds of the slowest.
  void add_within(ipc::TimePoint from, ipc::TimePoint to, Samples& rounds) const;

 private:
  std::vector<LoadTimes> ranks_;
};

}  // namespace kvferry::cli
