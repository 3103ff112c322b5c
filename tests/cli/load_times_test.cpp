// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/load_times.hpp"

#include "ipc/os/temp_dir.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <vector>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ns;

ipc::TimePoint at(std::int64_t ns) { return ipc::TimePoint(std::chrono::nanoseconds(ns)); }

class LoadTimesTest : public ::testing::Test {
 protected:
  void append(const std::vector<std::uint64_t>& ends, std::size_t cut_bytes = 0) {
    append_to(file_, ends, cut_bytes);
  }
  static void append_to(const std::filesystem::path& file,
                        const std::vector<std::uint64_t>& ends,
                        std::size_t cut_bytes = 0) {
    std::ofstream out(file, std::ios::binary | std::ios::app);
    out.write(reinterpret_cast<const char*>(ends.data()),
              static_cast<std::streamsize>(ends.size() * sizeof(ends.front()) - cut_bytes));
  }
  template <typename Times>
  static std::vector<double> within(const Times& times, std::int64_t from, std::int64_t to) {
    Samples rounds;
    times.add_within(at(from), at(to), rounds);
    return rounds.values();
  }

  test::ShortTempDir dir_;
  std::filesystem::path file_ = dir_ / "times";
};

TEST_F(LoadTimesTest, CountsRoundsThatLieWithinWhole) {
  append({1'000, 3'000, 6'000, 10'000});
  LoadTimes times(file_);
  ASSERT_TRUE(times.read().has_value());
  EXPECT_EQ(times.last(), at(10'000));
  EXPECT_EQ(within(times, 0, 20'000), (std::vector<double>{2, 3, 4}));
  EXPECT_EQ(within(times, 1'000, 6'000), (std::vector<double>{2, 3}));
  EXPECT_EQ(within(times, 1'001, 9'999), (std::vector<double>{3}));
  EXPECT_TRUE(within(times, 3'001, 6'000).empty()) << "an end is no round";
  EXPECT_TRUE(within(times, 10'001, 20'000).empty());
}

TEST_F(LoadTimesTest, ReadsOnWhereItWasAndNoHalfOfAnEnd) {
  LoadTimes times(file_);
  ASSERT_TRUE(times.read().has_value()) << "it may not be there yet";
  EXPECT_FALSE(times.last().has_value());
  append({1'000, 2'000}, 3);
  ASSERT_TRUE(times.read().has_value());
  EXPECT_EQ(times.last(), at(1'000));
  std::filesystem::resize_file(file_, 8);
  append({2'000, 5'000});
  ASSERT_TRUE(times.read().has_value());
  EXPECT_EQ(within(times, 0, 9'000), (std::vector<double>{1, 3}));
}

TEST_F(LoadTimesTest, ARoundOfSeveralRanksTakesAsLongAsTheSlowest) {
  const std::filesystem::path other = dir_ / "other";
  append({1'000, 3'000, 6'000, 10'000, 11'000});
  append_to(other, {1'500, 6'500, 7'500});
  RanksLoadTimes times({file_, other});
  ASSERT_TRUE(times.read().has_value());
  EXPECT_EQ(within(times, 0, 20'000), (std::vector<double>{5, 3}))
      << "round by round, as many as both have";
  EXPECT_TRUE(within(times, 7'000, 20'000).empty()) << "one rank has none there";
}

TEST_F(LoadTimesTest, TimesOfSeveralRanksReachAsFarAsTheLastRanks) {
  const std::filesystem::path other = dir_ / "other";
  append({1'000, 3'000});
  RanksLoadTimes times({file_, other});
  ASSERT_TRUE(times.read().has_value());
  EXPECT_FALSE(times.last().has_value()) << "one rank told nothing yet";
  append_to(other, {2'000});
  ASSERT_TRUE(times.read().has_value());
  EXPECT_EQ(times.last(), at(2'000));
  append_to(other, {9'000, 8'000});
  EXPECT_FALSE(times.read().has_value()) << "a flaw of any rank's";
}

TEST_F(LoadTimesTest, EndsThatGoBackAreNoTimes) {
  append({2'000, 1'000});
  LoadTimes times(file_);
  const auto read = times.read();
  ASSERT_FALSE(read.has_value());
  EXPECT_EQ(read.error().code, ipc::ErrorCode::kProtocol);
}

}  // namespace
}  // namespace kvferry::cli
