// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

namespace kvferry::cli {

/// The last line on stderr: on a terminal it is drawn over and over, and lines that stay go above
/// it; elsewhere it is a line like any other.
class MovingLine {
 public:
  MovingLine();
  MovingLine(const MovingLine&) = delete;
  MovingLine& operator=(const MovingLine&) = delete;
  ~MovingLine() { erase(); }

  [[nodiscard]] bool on_terminal() const noexcept { return terminal_; }
  /// Room of the terminal now; 0 when there is none.
  [[nodiscard]] std::size_t columns() const;
  /// Takes the place of the line that stands there.
  void draw(std::string line);
  /// A line that stays, at once, above the moving one.
  void say(const std::string& message);
  /// Takes it off the terminal, with the rows that it has got by a narrower window.
  void erase();

 private:
  const bool terminal_;
  std::string drawn_;  ///< What stands on the terminal; empty: nothing.
};

}  // namespace kvferry::cli
