// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "stream_completions.hpp"

#include "worker/host_device.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::Status;
using std::chrono_literals::operator""s;

class StreamCompletionsTest : public ::testing::Test {
 protected:
  bool run_until(const std::function<bool()>& condition) {
    const Deadline deadline = Deadline::after(20s);
    while (!condition() && !deadline.expired()) loop_.run_once(deadline);
    return condition();
  }

  std::unique_ptr<ipc::Device> device_ = test::open_host_device(64ULL << 20);
  ipc::EventLoop loop_;
  StreamCompletions completions_{loop_, device_->make_stream(ipc::StreamPriority::kNormal).value(),
                                 "test", [](const ipc::Error&) { FAIL(); }};
};

TEST_F(StreamCompletionsTest, CallsBackInOrderAfterTheWork) {
  auto memory = device_->allocate(8ULL << 20, ipc::HandleKind::kVmm, nullptr).value();
  auto* bytes = static_cast<unsigned char*>(memory->address().raw());
  std::memset(bytes, 1, 8ULL << 20);
  std::vector<int> order;
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t offset = static_cast<std::uint64_t>(i) << 20;
    ASSERT_TRUE(completions_.stream().zero(memory->address() + offset, 1ULL << 20).has_value());
    completions_.when_done([&order, bytes, i, offset](const Status& status) {
      EXPECT_TRUE(status.has_value());
      EXPECT_EQ(bytes[offset + (1ULL << 20) - 1], 0);
      order.push_back(i);
    });
  }
  EXPECT_EQ(completions_.pending(), 8U);
  EXPECT_TRUE(run_until([&] { return order.size() == 8; }));
  EXPECT_EQ(completions_.pending(), 0U);
}

TEST_F(StreamCompletionsTest, CalleesMayStartNewWorkInTheFreedSlot) {
  int left = 50;
  std::function<void(const Status&)> again = [&](const Status&) {
    if (--left > 0) completions_.when_done(again);
  };
  completions_.when_done(again);
  EXPECT_TRUE(run_until([&] { return left == 0; }));
}

}  // namespace
}  // namespace kvferry::worker
