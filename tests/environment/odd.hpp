// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace kvferry::test {

/// What libkvferry_odd.so, preloaded, makes of a process's surroundings; chosen by a list in
/// KVFERRY_ODD.
enum class Odd : std::uint8_t {
  kEintr,      ///< "eintr": every fourth call that a signal may interrupt is interrupted.
  kClock,      ///< "clock": the wall clock jumps by up to a day, back or forth, at every look.
  kOldKernel,  ///< "old-kernel": no SO_PEERPIDFD, as before Linux 6.5.
};
inline constexpr std::array<const char*, 3> kOddNames = {"eintr", "clock", "old-kernel"};
inline constexpr const char* kOddVariable = "KVFERRY_ODD";
/// A file of this struct's size: how often each was done, over all processes, also killed ones.
inline constexpr const char* kOddCountsVariable = "KVFERRY_ODD_COUNTS";
struct OddCounts {
  std::array<std::atomic<std::uint64_t>, kOddNames.size()> done;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace kvferry::test
