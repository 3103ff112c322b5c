// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/own_thread.hpp"

#include "kvferry/ipc/base/unique_fd.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <future>
#include <optional>
#include <string>

namespace kvferry::ipc {
namespace {

using std::chrono_literals::operator""ms;

TEST(OwnThreadTest, HasItsNameAndTakesNoSignalsOfOthers) {
  std::string name;
  sigset_t before{};
  ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
  sigset_t blocked{};
  OwnThread thread("kvf-test", OwnThread::Runs::kOurCode, [&] {
    std::array<char, 16> buffer{};
    ::pthread_getname_np(::pthread_self(), buffer.data(), buffer.size());
    name = buffer.data();
    ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  });
  thread.wait_end();
  EXPECT_EQ(name, "kvf-test");
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGALRM, SIGCHLD, SIGPIPE}) {
    EXPECT_EQ(::sigismember(&blocked, number), 1) << number;
  }
  EXPECT_EQ(::sigismember(&blocked, SIGSEGV), 0) << "a fault is its own";
  sigset_t ours{};
  ::pthread_sigmask(SIG_SETMASK, nullptr, &ours);
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGALRM, SIGCHLD, SIGPIPE}) {
    EXPECT_EQ(::sigismember(&ours, number), ::sigismember(&before, number))
        << number << ": the maker's mask is as it was";
  }
}

TEST(OwnThreadTest, WaitEndReturnsWhenTheBodyHas) {
  std::promise<void> may_end;
  bool ended = false;
  std::optional<OwnThread> thread;
  thread.emplace("kvf-test", OwnThread::Runs::kOurCode, [&] {
    may_end.get_future().wait();
    ended = true;
  });
  may_end.set_value();
  thread->wait_end();
  EXPECT_TRUE(ended);
  thread->wait_end();  // once more does nothing
  thread.reset();
}

TEST(OwnThreadTest, WaitEndGoesOnWaitingForCodeOfAnEngine) {
  // The log goes to the thread itself, which ends when it has read that it does not end.
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const UniqueFd log_end(ends[0]);
  const UniqueFd before(::dup(STDERR_FILENO));
  ASSERT_EQ(::dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
  ::close(ends[1]);
  std::string log;
  OwnThread thread("kvf-test", OwnThread::Runs::kEngineCode, [&] {
    std::array<char, 4096> chunk{};
    while (log.find("thread kvf-test does not end") == std::string::npos) {
      const ssize_t size = ::read(log_end.get(), chunk.data(), chunk.size());
      if (size <= 0) return;
      log.append(chunk.data(), static_cast<std::size_t>(size));
    }
  });
  thread.wait_end(10ms);
  ASSERT_EQ(::dup2(before.get(), STDERR_FILENO), STDERR_FILENO);
  EXPECT_THAT(log, testing::HasSubstr("waits for thread kvf-test to end"));
  EXPECT_THAT(log, testing::HasSubstr("look for a callback of the engine"));
}

TEST(OwnThreadDeathTest, OurCodeThatDoesNotEndEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        std::promise<void> never;
        OwnThread thread("kvf-test", OwnThread::Runs::kOurCode, [&] { never.get_future().wait(); });
        thread.wait_end(10ms);
      },
      "thread kvf-test does not end");
}

}  // namespace
}  // namespace kvferry::ipc
