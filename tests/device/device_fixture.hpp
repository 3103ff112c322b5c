// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "support/child_process.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace kvferry::ipc {

inline constexpr std::uint64_t kMiB = 1ULL << 20;

/// A host device of this process's own: cases run side by side and count free memory.
inline std::string device_text() {
  const std::string device = KVFERRY_TEST_DEVICE;
  return device == "host" ? fmt::format("host:conformance-{}:256MiB", ::getpid()) : device;
}

/// One for allocations of several GiB, which the host backend does not back before they are used.
inline std::string large_device_text() {
  const std::string device = KVFERRY_TEST_DEVICE;
  return device == "host" ? fmt::format("host:conformance-large-{}:10GiB", ::getpid()) : device;
}

/// A device of the backend that the binary is built for, and one stream of it.
class DeviceConformanceTest : public testing::TestWithParam<HandleKind> {
 protected:
  void SetUp() override {
    auto spec = DeviceSpec::parse(device_text());
    ASSERT_TRUE(spec.has_value());
    if (spec->kind == DeviceKind::kCuda && cuda_device_count() == 0) {
      if (environment("KVFERRY_REQUIRE_GPU") == "1") {
        FAIL() << "KVFERRY_REQUIRE_GPU=1, but no CUDA device is usable here";
      }
      GTEST_SKIP() << "no CUDA device";
    }
    device_ = open_device(*spec);
    auto stream = device_->make_stream(StreamPriority::kNormal);
    ASSERT_TRUE(stream.has_value());
    stream_ = std::move(stream).value();
  }

  void finish() {
    const EventFd done;
    ASSERT_TRUE(stream_->notify(done.fd()).has_value());
    pollfd waited{done.fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&waited, 1, test::soon().poll_timeout_ms()), 1);
    const auto idle = stream_->query();
    ASSERT_TRUE(idle.has_value()) << idle.error().to_string();
  }

  std::unique_ptr<DeviceMemory> allocate(std::uint64_t size, AddressRange* at = nullptr) {
    auto memory = device_->allocate(size, GetParam(), at);
    if (!memory) {
      ADD_FAILURE() << memory.error().to_string();
      return nullptr;
    }
    return std::move(memory).value();
  }

  std::unique_ptr<PinnedBuffer> pinned(std::uint64_t size) {
    auto buffer = device_->make_pinned_buffer(size);
    EXPECT_TRUE(buffer.has_value());
    return std::move(buffer).value();
  }

  void copy(CopyDirection direction, void* host, DevicePtr device, std::uint64_t size) {
    const CopyOp op{host, device, size};
    ASSERT_TRUE(stream_->copy(direction, {&op, 1}, CopyMode::kEach).has_value());
    finish();
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace kvferry::ipc
