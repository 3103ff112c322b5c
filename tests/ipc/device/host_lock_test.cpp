// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_lock.hpp"

#include "host_fixture.hpp"

#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

namespace kvferry::ipc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using HostLockTest = HostDeviceFixture;

TEST_F(HostLockTest, AWaiterGivesUpAtItsDeadlineAndNamesTheHolder) {
  const auto held = HostLock::acquire(device_name(), Deadline::after(seconds(20)));
  ASSERT_TRUE(held.has_value());
  const auto refused = HostLock::acquire(device_name(), Deadline::after(milliseconds(20)));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kTimeout);
  EXPECT_NE(refused.error().message.find(fmt::format("pid {}", ::getpid())), std::string::npos)
      << refused.error().message;
  EXPECT_TRUE(HostLock::acquire(device_name("x"), Deadline::after(seconds(20))).has_value());
}

TEST_F(HostLockTest, LetsOneInAtATime) {
  std::atomic<int> inside{0};
  std::atomic<int> entered{0};
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const auto lock = HostLock::acquire(device_name(), Deadline::after(seconds(20)));
        ASSERT_TRUE(lock.has_value()) << lock.error().message;
        EXPECT_EQ(++inside, 1);
        ++entered;
        std::this_thread::yield();
        --inside;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(entered, 400);
}

}  // namespace
}  // namespace kvferry::ipc
