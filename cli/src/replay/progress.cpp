// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/progress.hpp"

#include "table.hpp"

#include <fmt/format.h>

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

}  // namespace

Progress::Progress(std::uint64_t requests, const ReplayCounters& counters)
    : requests_(requests), counters_(counters), measured_at_(ipc::MonotonicClock::now()) {}

ipc::Duration Progress::period() const noexcept {
  return line_.on_terminal() ? kTerminalPeriod : kPlainPeriod;
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

void Progress::update() {
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  const double seconds = std::chrono::duration<double>(now - measured_at_).count();
  if (seconds > 0) {
    // On a terminal the rate is smoothed: a single period is too short to read.
    const double weight = line_.on_terminal() ? 0.3 : 1.0;
    const auto rate = [&](std::uint64_t bytes, std::uint64_t& before, double& per_s) {
      per_s += weight * (static_cast<double>(bytes - before) / 1e9 / seconds - per_s);
      before = bytes;
    };
    rate(counters_.bytes_to_host, to_host_before_, to_host_per_s_);
    rate(counters_.bytes_to_device, to_device_before_, to_device_per_s_);
    measured_at_ = now;
  }
  const ProgressFigures figures{counters_.requests, requests_, counters_.hit_rate(), to_host_per_s_,
                                to_device_per_s_};
  line_.draw(progress_line(figures, line_.columns()));
}

}  // namespace kvferry::cli
