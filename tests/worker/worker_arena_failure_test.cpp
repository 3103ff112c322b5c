// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Zeroing that fails half-way must be waited for like any other work.
#include "support/forwarding_device.hpp"
#include "support/forwarding_stream.hpp"
#include "worker/host_device.hpp"
#include "worker_arena.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::Epoch;
using ipc::ErrorCode;
using ipc::Result;
using ipc::Status;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr std::uint64_t kMiB = 1ULL << 20;

/// What a device that fails or hangs in the middle looks like.
struct Trouble {
  int zeroes_left = 1000;   ///< The one after them fails.
  bool notifies = true;     ///< Else notify() fails.
  bool looks_busy = false;  ///< Work that was launched does not end yet.
};

class TroubledStream final : public test::ForwardingStream {
 public:
  TroubledStream(std::unique_ptr<ipc::Stream> stream, Trouble& trouble)
      : ForwardingStream(std::move(stream)), trouble_(trouble) {}

  [[nodiscard]] Status zero(ipc::DevicePtr target, std::uint64_t size_bytes) override {
    if (trouble_.zeroes_left-- == 0) return KVFERRY_ERROR(kCuda, "zero was told to fail");
    return real().zero(target, size_bytes);
  }
  [[nodiscard]] Status notify(int event_fd) override {
    if (!trouble_.notifies) return KVFERRY_ERROR(kCuda, "notify was told to fail");
    return real().notify(event_fd);
  }
  [[nodiscard]] Result<bool> query() override {
    return trouble_.looks_busy ? Result<bool>(false) : real().query();
  }

 private:
  Trouble& trouble_;
};

/// A host device whose streams are troubled.
class TroubledDevice final : public test::ForwardingDevice {
 public:
  TroubledDevice(std::unique_ptr<ipc::Device> device, Trouble& trouble)
      : ForwardingDevice(std::move(device)), trouble_(trouble) {}

  [[nodiscard]] Result<std::unique_ptr<ipc::Stream>> make_stream(
      ipc::StreamPriority priority) override {
    KVFERRY_ASSIGN(auto stream, ForwardingDevice::make_stream(priority));
    return std::unique_ptr<ipc::Stream>(
        std::make_unique<TroubledStream>(std::move(stream), trouble_));
  }

 private:
  Trouble& trouble_;
};

class WorkerArenaFailureTest : public ::testing::Test {
 protected:
  static ipc::ArenaLayout make_layout() {
    ipc::Geometry geometry;
    geometry.name = "test";
    geometry.tokens_per_block = 16;
    ipc::GroupSpec group;
    group.name = "main";
    group.regions = {{ipc::RegionKind::kKey, ipc::DataType::kFp16, 0, false, 1024},
                     {ipc::RegionKind::kValue, ipc::DataType::kFp16, 0, false, 1024}};
    geometry.groups = {group};
    ipc::ArenaOptions options;
    options.order = ipc::ArenaOrder::kLayerFirstMany;
    options.gpu_blocks = 8;
    return ipc::plan_arena(geometry, options).value();
  }
  Status map() {
    return user_.on_mapped(ipc::SessionId::from_words(1, 2), arena_,
                           ipc::ArenaContents::kUndefined);
  }
  /// The contract of on_mapped() after an error, with work still under way and then without.
  void expect_waits() {
    const Status busy = user_.quiesce(Epoch{1}, Deadline::after(20ms));
    ASSERT_FALSE(busy.has_value()) << "the memory may be unmapped under the device's work";
    EXPECT_EQ(busy.error().code, ErrorCode::kTimeout);
    trouble_.looks_busy = false;
    EXPECT_TRUE(user_.quiesce(Epoch{1}, Deadline::after(20s)).has_value());
    user_.on_unmapped(Epoch{1});
    EXPECT_TRUE(arena_.release().has_value());
  }

  Trouble trouble_;
  TroubledDevice device_{test::open_host_device(64 * kMiB), trouble_};
  WorkerArena user_{device_, ipc::Rank{0}};
  ipc::Arena arena_ =
      ipc::Arena::allocate(device_, Epoch{1}, make_layout(), ipc::HandleKind::kVmm, nullptr)
          .value();
};

TEST_F(WorkerArenaFailureTest, ZeroingOfASecondSegmentThatFailsIsWaitedFor) {
  ASSERT_GE(arena_.layout().segment_bytes.size(), 2U);
  trouble_.zeroes_left = 1;
  trouble_.looks_busy = true;
  EXPECT_EQ(map().error().code, ErrorCode::kCuda);
  expect_waits();
}

TEST_F(WorkerArenaFailureTest, ZeroingWithoutANotificationIsWaitedFor) {
  trouble_.notifies = false;
  trouble_.looks_busy = true;
  EXPECT_EQ(map().error().code, ErrorCode::kCuda);
  expect_waits();
}

}  // namespace
}  // namespace kvferry::worker
