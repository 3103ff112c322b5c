// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::cli {

/// The next of 1, 2, 2.5, 5 times a power of ten that is no less.
[[nodiscard]] double round_step(double step);

/// An SVG drawing that follows the reader's choice of light or dark. Texts are escaped here; styles
/// are classes: of ours "title", "note", "axis", "grid", "line", and of the caller's style sheet.
class SvgDrawing {
 public:
  enum class Anchor : std::uint8_t { kStart, kMiddle, kEnd };
  struct Point {
    double x = 0;
    double y = 0;
  };

  /// light and dark: rules of the caller's classes for each choice.
  SvgDrawing(Point size, std::string_view title, std::string_view light, std::string_view dark);

  void line(std::string_view style, Point from, Point to);
  void polyline(std::string_view style, std::span<const Point> points);
  void circle(std::string_view style, Point center, double radius);
  void text(Point at, std::string_view text, Anchor anchor = Anchor::kStart);
  void styled_text(std::string_view style, Point at, std::string_view text);
  /// Read from below, around its middle.
  void upright_text(Point middle, std::string_view text);
  [[nodiscard]] std::string finish() &&;

 private:
  std::string svg_;
};

}  // namespace kvferry::cli
