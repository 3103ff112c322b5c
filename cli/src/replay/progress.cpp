// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/progress.hpp"

#include "print.hpp"
#include "table.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kTerminalPeriod = 200ms;
constexpr ipc::Duration kPlainPeriod = 5s;
constexpr std::size_t kBarChars = 24;

std::string bar(double share) {
  const auto full =
      std::min(kBarChars, static_cast<std::size_t>(share * static_cast<double>(kBarChars)));
  return "[" + std::string(full, '#') + std::string(kBarChars - full, '.') + "] ";
}

/// Asked each time: the window may have another size by now.
std::size_t terminal_columns() {
  winsize size{};
  constexpr std::size_t kUsual = 80;
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsual;
  return size.ws_col;
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

std::string progress_line(const ProgressFigures& figures, std::size_t columns) {
  const std::string done = with_separators(figures.done);
  const std::string all = with_separators(figures.requests);
  const double hits = 100.0 * figures.hit_rate;
  std::string full = fmt::format(
      "{} of {} requests   hit rate {:.1f} %   to host {:.2f} GB/s   to device {:.2f} GB/s", done,
      all, hits, figures.to_host_per_s, figures.to_device_per_s);
  if (columns == 0) return full;
  const double share = static_cast<double>(figures.done) /
                       static_cast<double>(std::max<std::uint64_t>(1, figures.requests));
  const std::string percent = fmt::format("{:.0f} %", 100.0 * share);
  const std::string brief = fmt::format("{}/{}  hits {:.0f} %  out {:.2f}  in {:.2f} GB/s", done,
                                        all, hits, figures.to_host_per_s, figures.to_device_per_s);
  // The last column stays free: some terminals wrap as soon as it is written.
  for (const std::string& line : {bar(share) + full, full, bar(share) + brief, brief,
                                  fmt::format("{}/{}  hits {:.0f} %", done, all, hits), percent}) {
    if (line.size() < columns) return line;
  }
  return percent.substr(0, columns - 1);
}

void Progress::draw() {
  const ProgressFigures figures{counters_.requests, requests_, counters_.hit_rate(), to_host_per_s_,
                                to_device_per_s_};
  const std::string line = progress_line(figures, terminal_ ? terminal_columns() : 0);
  write_err(terminal_ ? line : line + "\n");
  drawn_columns_ = terminal_ ? line.size() : 0;
}

void Progress::erase() {
  if (drawn_columns_ == 0) return;
  const std::size_t rows_above = (drawn_columns_ - 1) / terminal_columns();
  print_err("\r{}\033[J", rows_above > 0 ? fmt::format("\033[{}A", rows_above) : "");
  drawn_columns_ = 0;
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
  erase();
  draw();
}

void Progress::say(const std::string& message) {
  const bool redraw = drawn_columns_ > 0;
  erase();
  print_err("{}\n", message);
  if (redraw) draw();
}

void Progress::finish() { erase(); }

}  // namespace kvferry::cli
