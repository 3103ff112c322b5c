// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A loop that looks for events before it sleeps. What it asks of the kernel is seen: a look returns
// at once, a sleep may last. The linker puts the eyes between the loop and the C library, and says
// how many processors there are, whatever machine this is.
#include "kvferry/ipc/os/event_loop.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

extern "C" {
int KVFERRY_REAL_EPOLL_WAIT(int epoll, epoll_event* events, int count, int timeout_ms);
int KVFERRY_WRAP_EPOLL_WAIT(int epoll, epoll_event* events, int count, int timeout_ms);
int KVFERRY_WRAP_SCHED_GETAFFINITY(pid_t pid, std::size_t size, cpu_set_t* set);
}

namespace {

int processors = 0;
std::atomic<std::uint64_t> looks{0};
std::atomic<std::uint64_t> sleeps{0};

}  // namespace

int KVFERRY_WRAP_EPOLL_WAIT(int epoll, epoll_event* events, int count, int timeout_ms) {
  ++(timeout_ms == 0 ? looks : sleeps);
  return KVFERRY_REAL_EPOLL_WAIT(epoll, events, count, timeout_ms);
}

int KVFERRY_WRAP_SCHED_GETAFFINITY(pid_t /*pid*/, std::size_t /*size*/, cpu_set_t* set) {
  CPU_ZERO(set);
  for (int i = 0; i < processors; ++i) CPU_SET(static_cast<unsigned>(i), set);
  return 0;
}

namespace kvferry::ipc {
namespace {

using std::chrono::milliseconds;

constexpr int kEnough = 8;
constexpr Duration kLong = std::chrono::hours(1);

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

class StayAwakeTest : public testing::Test {
 protected:
  void SetUp() override { open(kEnough); }
  /// A loop on a machine of so many processors, with a watch that counts.
  void open(int count) {
    processors = count;
    loop_.emplace();
    loop_->watch(event_.fd(), [this] {
      EXPECT_TRUE(event_.drain());
      ++calls_;
    });
    looks = 0;
    sleeps = 0;
  }
  /// From another thread, once that many looks and sleeps have begun; or not at all.
  [[nodiscard]] static std::jthread once(std::uint64_t looked,
                                         std::uint64_t slept,
                                         std::function<void()> what) {
    return std::jthread([looked, slept, what = std::move(what), deadline = soon()] {
      while (looks < looked || sleeps < slept) {
        if (deadline.expired()) return;
        std::this_thread::yield();
      }
      what();
    });
  }

  EventFd event_;
  std::optional<EventLoop> loop_;
  int calls_ = 0;
};

TEST_F(StayAwakeTest, WhatComesMeanwhileIsSeenByLooksWithoutASleep) {
  loop_->stay_awake(kLong);
  for (int round = 1; round <= 3; ++round) {
    const std::uint64_t before = looks;
    const auto other = once(before + 100, 0, [this] { event_.signal(); });
    loop_->run_once(soon());
    EXPECT_EQ(calls_, round);
    EXPECT_GE(looks, before + 100) << "it waited for the event";
  }
  EXPECT_EQ(sleeps, 0U);
}

TEST_F(StayAwakeTest, PostedCallsOfOthersRunWithoutASleep) {
  loop_->stay_awake(kLong);
  bool called = false;
  const auto other = once(100, 0, [&] { loop_->post([&] { called = true; }); });
  loop_->run_once(soon());
  EXPECT_TRUE(called);
  EXPECT_EQ(sleeps, 0U);
}

// The event comes only once it sleeps.
TEST_F(StayAwakeTest, LoopSleepsAgainWhenTheTimeIsOver) {
  const TimePoint from = MonotonicClock::now();
  loop_->stay_awake(milliseconds(5));
  std::atomic<TimePoint> slept_at{};
  const auto other = once(0, 1, [&] {
    slept_at = MonotonicClock::now();
    event_.signal();
  });
  loop_->run_once(soon());
  ASSERT_EQ(calls_, 1);
  EXPECT_GE(slept_at.load() - from, milliseconds(5));
  EXPECT_EQ(sleeps, 1U);
  // Nor does it look in later rounds.
  looks = 0;
  event_.signal();
  loop_->run_once(soon());
  EXPECT_EQ(calls_, 2);
  EXPECT_EQ(looks, 0U);
  EXPECT_EQ(sleeps, 2U);
}

TEST_F(StayAwakeTest, TheLastCallSaysForHowLong) {
  loop_->stay_awake(kLong);
  loop_->stay_awake(Duration::zero());
  const auto other = once(0, 1, [this] { event_.signal(); });
  loop_->run_once(soon());
  EXPECT_EQ(calls_, 1);
  EXPECT_EQ(looks, 0U);
}

TEST_F(StayAwakeTest, TimersAreOnTimeAlsoWhenNothingElseComes) {
  loop_->stay_awake(kLong);
  const TimePoint when = MonotonicClock::now() + milliseconds(3);
  TimePoint ran;
  loop_->at(when, [&] { ran = MonotonicClock::now(); });
  loop_->run_once(soon());
  EXPECT_GE(ran, when);
  EXPECT_EQ(sleeps, 0U);
}

// Each round has something to do at once.
TEST_F(StayAwakeTest, TimersAreOnTimeAlsoWhenEventsNeverEnd) {
  EventFd endless;
  int events = 0;
  loop_->watch(endless.fd(), [&] { ++events; });
  endless.signal();
  loop_->stay_awake(kLong);
  bool ran = false;
  const TimePoint when = MonotonicClock::now() + milliseconds(3);
  loop_->at(when, [&] { ran = true; });
  const Deadline deadline = soon();
  while (!ran && !deadline.expired()) {
    const bool is_due = MonotonicClock::now() >= when;
    loop_->run_once(deadline);
    ASSERT_TRUE(ran || !is_due) << "the round after it was due ran without it";
  }
  EXPECT_TRUE(ran);
  EXPECT_GT(events, 0);
}

TEST_F(StayAwakeTest, DeadlineOfARoundEndsIt) {
  loop_->stay_awake(kLong);
  const TimePoint from = MonotonicClock::now();
  loop_->run_once(Deadline::after(milliseconds(2)));
  EXPECT_GE(MonotonicClock::now() - from, milliseconds(2));
  EXPECT_EQ(calls_, 0);
  EXPECT_EQ(sleeps, 0U);
}

TEST_F(StayAwakeTest, StopOfAnotherThreadEndsIt) {
  loop_->stay_awake(kLong);
  const auto other = once(100, 0, [this] { loop_->stop(); });
  EXPECT_TRUE(loop_->run());
  EXPECT_EQ(sleeps, 0U);
}

TEST_F(StayAwakeTest, WithFewProcessorsTheLoopSleepsAllTheSame) {
  open(kEnough - 1);
  loop_->stay_awake(kLong);
  const auto other = once(0, 1, [this] { event_.signal(); });
  loop_->run_once(soon());
  EXPECT_EQ(calls_, 1);
  EXPECT_EQ(looks, 0U);
  EXPECT_EQ(sleeps, 1U);
}

}  // namespace
}  // namespace kvferry::ipc
