// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "rl/record.hpp"
#include "run/moving_line.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvferry::cli {

/// Shows how an RL loop goes on, on stderr: on a terminal a line for each iteration under a
/// heading, and below them what is being done; elsewhere a plain line now and then.
class LiveTable {
 public:
  explicit LiveTable(std::uint32_t iterations) : iterations_(iterations) {}

  /// How often update() is worth calling.
  [[nodiscard]] ipc::Duration period() const noexcept;
  /// An iteration whose requests have all ended, too.
  void add(const IterationRecord& iteration);
  /// doing: what it does now, in words.
  void update(const std::string& doing);
  void say(const std::string& message) { line_.say(message); }
  /// Takes the moving line away.
  void finish() { line_.erase(); }

 private:
  const std::uint32_t iterations_;
  MovingLine line_;
  std::uint64_t rows_ = 0;
  std::string last_;  ///< The latest iteration, in words.
};

/// Heading and line of an iteration in columns, sizes over all ranks; columns that a terminal of so
/// many characters has no room for are left out, the last first. 0: no limit.
[[nodiscard]] std::string live_heading(std::size_t columns);
[[nodiscard]] std::string live_row(const IterationRecord& iteration, std::size_t columns);
/// The same in words.
[[nodiscard]] std::string live_sentence(const IterationRecord& iteration, std::uint32_t iterations);

}  // namespace kvferry::cli
