// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/event_loop.hpp"

#include "kvferry/ipc/base/error.hpp"

#include <gtest/gtest.h>

#include <csignal>
#include <stdexcept>
#include <thread>
#include <vector>

namespace kvferry::ipc {
namespace {

using std::chrono::milliseconds;

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

TEST(EventLoopTest, CallsBackForReadableDescriptorsUntilUnwatched) {
  EventLoop loop;
  EventFd event;
  int calls = 0;
  loop.watch(event.fd(), [&] {
    ++calls;
    EXPECT_TRUE(event.drain());
  });
  event.signal();
  loop.run_once(soon());
  EXPECT_EQ(calls, 1);
  loop.unwatch(event.fd());
  event.signal();
  loop.run_once(Deadline::after(milliseconds(1)));
  EXPECT_EQ(calls, 1);
}

TEST(EventLoopTest, DropsAnEventWhoseWatchAnEarlierCallbackRemoved) {
  EventLoop loop;
  EventFd first;
  EventFd second;
  int calls = 0;
  loop.watch(first.fd(), [&] {
    ++calls;
    loop.unwatch(first.fd());
    loop.unwatch(second.fd());
  });
  loop.watch(second.fd(), [&] {
    ++calls;
    loop.unwatch(first.fd());
    loop.unwatch(second.fd());
  });
  first.signal();
  second.signal();
  loop.run_once(soon());
  EXPECT_EQ(calls, 1);
}

TEST(EventLoopTest, RunsTimersInOrderAndNotWhenCancelled) {
  EventLoop loop;
  std::vector<int> order;
  const TimePoint now = MonotonicClock::now();
  loop.at(now + milliseconds(6), [&] {
    order.push_back(3);
    loop.stop();
  });
  loop.at(now + milliseconds(2), [&] { order.push_back(2); });
  loop.at(now + milliseconds(1), [&] { order.push_back(1); });
  const TimerId cancelled = loop.at(now + milliseconds(1), [&] { order.push_back(9); });
  loop.cancel(cancelled);
  EXPECT_TRUE(loop.run());
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_GE(MonotonicClock::now(), now + milliseconds(6));
}

TEST(EventLoopTest, ATimerMayCancelAnotherThatIsDue) {
  EventLoop loop;
  int calls = 0;
  TimerId second = 0;
  loop.at(TimePoint{}, [&] {
    ++calls;
    loop.cancel(second);
  });
  second = loop.at(TimePoint{}, [&] { ++calls; });
  loop.run_once(soon());
  EXPECT_EQ(calls, 1);
}

TEST(EventLoopTest, RunsPostedCallsOfOtherThreads) {
  EventLoop loop;
  int sum = 0;
  std::vector<std::jthread> threads;
  constexpr int kThreads = 4;
  constexpr int kCalls = 1000;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kCalls; ++i) {
        loop.post([&] {
          if (++sum == kThreads * kCalls) loop.stop();
        });
      }
    });
  }
  EXPECT_TRUE(loop.run());
  EXPECT_EQ(sum, kThreads * kCalls);
}

TEST(EventLoopTest, APostFromAPostedCallRunsInTheNextRound) {
  EventLoop loop;
  int calls = 0;
  loop.post([&] { loop.post([&] { ++calls; }); });
  loop.run_once(soon());
  EXPECT_EQ(calls, 0);
  loop.run_once(soon());
  EXPECT_EQ(calls, 1);
}

TEST(EventLoopTest, EndsRunWhenACallbackThrows) {
  EventLoop loop;
  loop.post([] { throw std::runtime_error("expected by this test"); });
  EXPECT_FALSE(loop.run());
  loop.stop();
  EXPECT_TRUE(loop.run()) << "stop() before run() counts, and the failure does not stick";
}

TEST(EventLoopTest, RefusesWhatCannotBePolled) {
  EventLoop loop;
  EXPECT_THROW(loop.watch(-1, [] {}), Exception);
}

TEST(SignalFdTest, TakesSignalsOfThisThread) {
  SignalFd signals;
  EXPECT_EQ(signals.take(), 0);
  ASSERT_EQ(pthread_kill(pthread_self(), SIGTERM), 0);
  EXPECT_EQ(signals.take(), SIGTERM);
  EXPECT_EQ(signals.take(), 0);
}

TEST(SignalFdTest, TakesAHangupUnlessTheParentIgnoredIt) {
  {
    SignalFd signals;
    ASSERT_EQ(pthread_kill(pthread_self(), SIGHUP), 0);
    EXPECT_EQ(signals.take(), SIGHUP);
  }
  // What nohup(1) does. The first SignalFd left the signal blocked: start like a new process.
  sigset_t hangup{};
  sigemptyset(&hangup);
  sigaddset(&hangup, SIGHUP);
  ASSERT_EQ(pthread_sigmask(SIG_UNBLOCK, &hangup, nullptr), 0);
  struct sigaction ignore {};
  struct sigaction before {};
  ignore.sa_handler = SIG_IGN;
  ASSERT_EQ(sigaction(SIGHUP, &ignore, &before), 0);
  SignalFd signals;
  ASSERT_EQ(pthread_kill(pthread_self(), SIGHUP), 0);
  EXPECT_EQ(signals.take(), 0);
  ASSERT_EQ(sigaction(SIGHUP, &before, nullptr), 0);
}

}  // namespace
}  // namespace kvferry::ipc
