// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/live_table.hpp"

#include "kvferry/ipc/base/size.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kOnTerminal = 200ms;
constexpr ipc::Duration kElsewhere = 5s;
/// So that a heading is always in sight.
constexpr std::uint64_t kRowsPerHeading = 40;

struct Column {
  std::string_view title;
  std::size_t width;
};
constexpr std::array kColumns = {
    Column{"iteration", 9}, Column{"weights", 7},     Column{"reserved", 10}, Column{"after", 10},
    Column{"used", 10},     Column{"least free", 10}, Column{"pause ms", 9},  Column{"update", 8},
    Column{"continue", 9},  Column{"done", 5},        Column{"abort", 5},     Column{"retract", 7}};
using Cells = std::array<std::string, kColumns.size()>;

std::string aligned(const Cells& cells, std::size_t columns) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::string cell =
        fmt::format("{}{:>{}}", i == 0 ? "" : "  ", cells[i], kColumns[i].width);
    // The last column stays free: some terminals wrap as soon as it is written.
    if (columns > 0 && line.size() + cell.size() >= columns) break;
    line += cell;
  }
  return line;
}

std::string ms_text(const std::optional<double>& ms) {
  return ms ? fmt::format("{:.1f}", *ms) : "-";
}

}  // namespace

std::string live_heading(std::size_t columns) {
  Cells titles;
  for (std::size_t i = 0; i < titles.size(); ++i) titles[i] = kColumns[i].title;
  return aligned(titles, columns);
}

std::string live_row(const IterationRecord& iteration, std::size_t columns) {
  const RankReserve total = iteration.total();
  return aligned(
      {std::to_string(iteration.number), fmt::format("v{}", iteration.version),
       ipc::format_size(total.reserved_before), ipc::format_size(total.reserved_after),
       ipc::format_size(total.used_after), ipc::format_size(iteration.least_free()),
       ms_text(iteration.pause_ms), ms_text(iteration.update_ms), ms_text(iteration.continue_ms),
       std::to_string(iteration.answers.finished), std::to_string(iteration.answers.aborted),
       std::to_string(iteration.answers.retracted)},
      columns);
}

std::string live_sentence(const IterationRecord& iteration, std::uint32_t iterations) {
  const RankReserve total = iteration.total();
  return fmt::format(
      "{} of {} iterations: weights v{}, reserved {} -> {}, used {}, {} free on the fullest "
      "device; "
      "pause {} ms, update {} ms, continue {} ms; {} requests done, {} aborted, {} retracted",
      iteration.number, iterations, iteration.version, ipc::format_size(total.reserved_before),
      ipc::format_size(total.reserved_after), ipc::format_size(total.used_after),
      ipc::format_size(iteration.least_free()), ms_text(iteration.pause_ms),
      ms_text(iteration.update_ms), ms_text(iteration.continue_ms), iteration.answers.finished,
      iteration.answers.aborted, iteration.answers.retracted);
}

ipc::Duration LiveTable::period() const noexcept {
  return line_.on_terminal() ? kOnTerminal : kElsewhere;
}

void LiveTable::add(const IterationRecord& iteration) {
  if (!line_.on_terminal()) {
    last_ = live_sentence(iteration, iterations_);
    return;
  }
  const std::size_t columns = line_.columns();
  if (rows_++ % kRowsPerHeading == 0) line_.say(live_heading(columns));
  line_.say(live_row(iteration, columns));
}

void LiveTable::update(const std::string& doing) {
  if (line_.on_terminal()) {
    line_.draw(doing.substr(0, line_.columns() - 1));
  } else {
    line_.draw(last_.empty() ? doing : last_);
  }
}

}  // namespace kvferry::cli
