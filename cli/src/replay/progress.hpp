// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "replay/counters.hpp"
#include "run/moving_line.hpp"

#include <cstdint>
#include <string>

namespace kvferry::cli {

/// Shows how a replay goes on, on stderr: one line that is drawn over and over on a terminal, a
/// line every few seconds elsewhere.
class Progress {
 public:
  Progress(std::uint64_t requests, const ReplayCounters& counters);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// How often update() is worth calling.
  [[nodiscard]] ipc::Duration period() const noexcept;
  void update();
  /// A line of its own, at once, above the moving one.
  void say(const std::string& message) { line_.say(message); }
  /// Takes the moving line away.
  void finish() { line_.erase(); }

 private:
  const std::uint64_t requests_;
  const ReplayCounters& counters_;
  MovingLine line_;
  ipc::TimePoint measured_at_;
  std::uint64_t to_host_before_ = 0;
  std::uint64_t to_device_before_ = 0;
  double to_host_per_s_ = 0;
  double to_device_per_s_ = 0;
};

/// What is shown of a run at a moment.
struct ProgressFigures {
  std::uint64_t done = 0;
  std::uint64_t requests = 0;
  double hit_rate = 0;
  double to_host_per_s = 0;    ///< GB.
  double to_device_per_s = 0;  ///< GB.
};
/// The line for a terminal of so many columns: it leaves out what does not fit, the bar first, and
/// never wraps. columns 0: not a terminal, everything but the bar.
[[nodiscard]] std::string progress_line(const ProgressFigures& figures, std::size_t columns);

}  // namespace kvferry::cli
