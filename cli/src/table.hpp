// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

enum class Align : std::uint8_t { kLeft, kRight };

/// Text in aligned columns, two spaces apart, for terminals.
class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// Missing cells are empty. @pre not more cells than columns.
  void add(std::vector<std::string> cells);
  [[nodiscard]] bool empty() const noexcept { return rows_.empty(); }
  /// Titles are left out when all of them are empty.
  [[nodiscard]] std::string render(std::string_view indent = "") const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

[[nodiscard]] inline double to_ms(std::chrono::microseconds time) {
  return static_cast<double>(time.count()) / 1000.0;
}
/// 1234567 -> "1,234,567".
[[nodiscard]] std::string with_separators(std::uint64_t value);

}  // namespace kvferry::cli
