// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/progress.hpp"

#include "table.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kTerminalPeriod = 200ms;
constexpr ipc::Duration kPlainPeriod = 5s;
constexpr std::size_t kBarChars = 24;

std::string bar(double share) {
  const auto full = std::min(kBarChars, static_cast<std::size_t>(share * kBarChars));
  return "[" + std::string(full, '#') + std::string(kBarChars - full, '.') + "]";
}

}  // namespace

Progress::Progress(std::uint64_t requests, const ReplayCounters& counters)
    : requests_(requests),
      counters_(counters),
      terminal_(isatty(STDERR_FILENO) == 1),
      measured_at_(ipc::MonotonicClock::now()) {}

ipc::Duration Progress::period() const noexcept {
  return terminal_ ? kTerminalPeriod : kPlainPeriod;
}

std::string Progress::status_line() const {
  const double share = static_cast<double>(counters_.requests) /
                       static_cast<double>(std::max<std::uint64_t>(1, requests_));
  return fmt::format(
      "{}{} of {} requests   hit rate {:.1f} %   to host {:.2f} GB/s   to device {:.2f} GB/s",
      terminal_ ? bar(share) + " " : "", with_separators(counters_.requests),
      with_separators(requests_), 100.0 * counters_.hit_rate(), to_host_per_s_, to_device_per_s_);
}

void Progress::update() {
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  const double seconds = std::chrono::duration<double>(now - measured_at_).count();
  if (seconds > 0) {
    // On a terminal the rate is smoothed: a single period is too short to read.
    const double weight = terminal_ ? 0.3 : 1.0;
    const auto rate = [&](std::uint64_t bytes, std::uint64_t& before, double& per_s) {
      per_s += weight * (static_cast<double>(bytes - before) / 1e9 / seconds - per_s);
      before = bytes;
    };
    rate(counters_.bytes_to_host, to_host_before_, to_host_per_s_);
    rate(counters_.bytes_to_device, to_device_before_, to_device_per_s_);
    measured_at_ = now;
  }
  fmt::print(stderr, "{}{}{}", terminal_ ? "\r\033[K" : "", status_line(), terminal_ ? "" : "\n");
  (void)std::fflush(stderr);
  drawn_ = terminal_;
}

void Progress::say(const std::string& message) {
  const bool redraw = drawn_;
  finish();
  fmt::print(stderr, "{}\n", message);
  if (redraw) {
    fmt::print(stderr, "{}", status_line());
    drawn_ = true;
  }
  (void)std::fflush(stderr);
}

void Progress::finish() {
  if (drawn_) fmt::print(stderr, "\r\033[K");
  drawn_ = false;
}

}  // namespace kvferry::cli
