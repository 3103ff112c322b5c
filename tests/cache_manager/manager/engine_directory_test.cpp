// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/engine_directory.hpp"

#include <gtest/gtest.h>

#include <ctime>

namespace kvferry::cache_manager {
namespace {

std::uint64_t since_boot_us() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec) / 1000;
}

TEST(EngineDirectoryTest, GenerationsGrowOverRestartsByAClockThatNobodySetsBack) {
  const std::uint64_t before = since_boot_us();
  EngineDirectory first;
  const std::uint64_t used = first.open("chat").generation();
  EXPECT_GT(used, before);
  ASSERT_LE(used, since_boot_us() + 1) << "no wall clock says so little";
  while (since_boot_us() <= used + 1) {
    // A manager takes longer than this to start; a few microseconds.
  }
  EngineDirectory second;
  EXPECT_GT(second.open("chat").generation(), used);
}

}  // namespace
}  // namespace kvferry::cache_manager
