// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/stream_wait.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <utility>

namespace kvferry::cache_manager {
namespace {

constexpr std::uint64_t kBytes = 64ULL << 20;

class StreamWaitTest : public testing::Test {
 protected:
  void SetUp() override {
    auto spec = ipc::DeviceSpec::parse(fmt::format("host:stream-wait-{}:128MiB", ::getpid()));
    ASSERT_TRUE(spec.has_value());
    device_ = ipc::open_device(*spec);
    memory_ = device_->allocate(kBytes, ipc::HandleKind::kVmm, nullptr).value();
    stream_ = device_->make_stream(ipc::StreamPriority::kNormal).value();
    // Work that is under way for a while when it is waited for.
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(stream_->zero(memory_->address(), kBytes).has_value());
    }
  }

  std::unique_ptr<ipc::Device> device_;
  std::unique_ptr<ipc::DeviceMemory> memory_;
  std::unique_ptr<ipc::Stream> stream_;
};

TEST_F(StreamWaitTest, ReturnsWhenTheWorkHasEnded) {
  const ipc::EventFd done;
  ASSERT_TRUE(wait_stream(*stream_, done).has_value());
  EXPECT_TRUE(stream_->query().value());
}

TEST_F(StreamWaitTest, WaitsForTheWorkAlsoWhenTheStreamCannotNotify) {
  ipc::EventFd done;
  const ipc::EventFd moved_to = std::move(done);
  // NOLINTNEXTLINE(bugprone-use-after-move): an eventfd that is none makes the stream refuse.
  EXPECT_FALSE(wait_stream(*stream_, done).has_value());
  EXPECT_TRUE(stream_->query().value()) << "its copies would write blocks that are given on";
}

}  // namespace
}  // namespace kvferry::cache_manager
