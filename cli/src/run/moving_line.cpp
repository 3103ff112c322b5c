// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/moving_line.hpp"

#include "print.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <utility>

namespace kvferry::cli {
namespace {

/// Asked each time: the window may have another size by now.
std::size_t terminal_columns() {
  winsize size{};
  constexpr std::size_t kUsual = 80;
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsual;
  return size.ws_col;
}

}  // namespace

MovingLine::MovingLine() : terminal_(isatty(STDERR_FILENO) == 1) {}

std::size_t MovingLine::columns() const { return terminal_ ? terminal_columns() : 0; }

void MovingLine::draw(std::string line) {
  erase();
  write_err(terminal_ ? line : line + "\n");
  if (terminal_) drawn_ = std::move(line);
}

void MovingLine::say(const std::string& message) {
  std::string standing = drawn_;
  erase();
  print_err("{}\n", message);
  if (!standing.empty()) draw(std::move(standing));
}

void MovingLine::erase() {
  if (drawn_.empty()) return;
  const std::size_t rows_above = (drawn_.size() - 1) / terminal_columns();
  print_err("\r{}\033[J", rows_above > 0 ? fmt::format("\033[{}A", rows_above) : "");
  drawn_.clear();
}

}  // namespace kvferry::cli
