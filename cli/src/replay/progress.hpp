// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "replay/counters.hpp"

#include <cstdint>
#include <string>

namespace kvferry::cli {

/// Shows how a replay goes on, on stderr: one line that is drawn over and over on a terminal, a
/// line every few seconds elsewhere.
class Progress {
 public:
  Progress(std::uint64_t requests, const ReplayCounters& counters);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// How often update() is worth calling.
  [[nodiscard]] ipc::Duration period() const noexcept;
  void update();
  /// A line of its own, at once, above the moving one.
  void say(const std::string& message);
  /// Takes the moving line away.
  void finish();

 private:
  [[nodiscard]] std::string status_line() const;

  const std::uint64_t requests_;
  const ReplayCounters& counters_;
  const bool terminal_;
  bool drawn_ = false;
  ipc::TimePoint measured_at_;
  std::uint64_t to_host_before_ = 0;
  std::uint64_t to_device_before_ = 0;
  double to_host_per_s_ = 0;
  double to_device_per_s_ = 0;
};

}  // namespace kvferry::cli
