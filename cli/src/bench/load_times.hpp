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

}  // namespace kvferry::cli
