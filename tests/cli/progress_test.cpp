// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/progress.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvferry::cli {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr ProgressFigures kBusy{99'999'999, 100'000'000, 0.8512, 123.45, 67.89};

TEST(ProgressLineTest, NeverWrapsHoweverNarrowTheTerminal) {
  for (std::size_t columns = 1; columns <= 200; ++columns) {
    EXPECT_LT(progress_line(kBusy, columns).size(), columns) << columns;
  }
}

TEST(ProgressLineTest, ShowsAllFiguresWithABarWhereThereIsRoom) {
  const std::string line = progress_line(kBusy, 160);
  EXPECT_THAT(line, StartsWith("[#######################"));
  EXPECT_THAT(line, HasSubstr("99,999,999 of 100,000,000 requests"));
  EXPECT_THAT(line, HasSubstr("hit rate 85.1 %"));
  EXPECT_THAT(line, HasSubstr("to host 123.45 GB/s"));
}

TEST(ProgressLineTest, LeavesTheBarOutBeforeAnyFigure) {
  const std::string line = progress_line({1'000, 2'000, 0.5, 1.25, 0.75}, 80);
  for (const char* figure : {"1,000", "2,000", "50", "1.25", "0.75"}) {
    EXPECT_THAT(line, HasSubstr(figure));
  }
}

TEST(ProgressLineTest, WithoutATerminalThereIsNoBarAndNoLimit) {
  EXPECT_THAT(progress_line(kBusy, 0), StartsWith("99,999,999 of 100,000,000 requests   hit"));
}

}  // namespace
}  // namespace kvferry::cli
