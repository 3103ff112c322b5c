// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "decode_graph.hpp"

#include "kvferry/ipc/device/await_stream.hpp"
#include "make_stream.hpp"
#include "model_tables.hpp"
#include "support/forwarding_device.hpp"
#include "worker/host_device.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using std::chrono_literals::operator""s;

constexpr std::uint32_t kTokensPerBlock = 16;

/// Counts the pinned buffers that it makes.
class CountingDevice final : public test::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::PinnedBuffer>> make_pinned_buffer(
      std::uint64_t size_bytes) override {
    ++made;
    return ForwardingDevice::make_pinned_buffer(size_bytes);
  }
  int made = 0;
};

class DecodeGraphTest : public testing::Test {
 protected:
  DecodeGraphTest() {
    kernels::StridedRegion region;
    region.base = static_cast<unsigned char*>(blocks_.address().raw());
    region.block_stride = region.block_bytes = 4096;
    GroupView group;
    group.block_count = 4;
    group.tables[GroupView::index(ipc::RegionSet::kAll)] =
        device_.make_region_table({region}).value();
    arena_.groups.push_back(std::move(group));
  }
  /// A pass of one sequence, to its end.
  void compute() {
    const std::vector<GroupPass> groups(1);
    ASSERT_TRUE(graph_.takes(groups, 1));
    const auto tables = tables_.address(Deadline::after(20s));
    ASSERT_TRUE(tables.has_value()) << tables.error().to_string();
    const auto launched = graph_.launch(groups, arena_, *stream_, *tables, kTokensPerBlock);
    ASSERT_TRUE(launched.has_value()) << launched.error().to_string();
    ipc::EventFd done;
    ASSERT_TRUE(stream_->notify(done.fd()).has_value());
    ASSERT_TRUE(await_stream(*stream_, done, Deadline::after(20s), "a pass").has_value());
    EXPECT_EQ(graph_.take_outputs(1).outputs.size(), 1U);
  }

  CountingDevice device_{test::open_host_device(64ULL << 20)};
  CachingAllocator allocator_{device_};
  ModelTables tables_{device_, allocator_};
  ScratchBuffer blocks_ = allocator_.allocate(4 * 4096).value();
  std::atomic<std::uint64_t> device_bytes_{0};
  MappedArena arena_;
  DecodeGraph graph_{device_, allocator_, device_bytes_};
  std::unique_ptr<ipc::Stream> stream_ = make_stream(device_, ipc::StreamPriority::kNormal);
};

// To free one synchronises a device on which other steps run.
TEST_F(DecodeGraphTest, GivenUpItKeepsItsPinnedBuffersForTheNextRecording) {
  ASSERT_NO_FATAL_FAILURE(compute());
  const std::uint64_t bytes = device_bytes_;
  EXPECT_GT(bytes, 0U);
  const int made = device_.made;
  graph_.give_up();
  EXPECT_EQ(device_bytes_, 0U);
  ASSERT_NO_FATAL_FAILURE(compute());
  EXPECT_EQ(device_bytes_, bytes);
  EXPECT_EQ(graph_.recordings(), 2U);
  EXPECT_EQ(device_.made, made);
}

TEST_F(DecodeGraphTest, ReleasedItGivesThemUpAndResumedItHasAllAgain) {
  ASSERT_NO_FATAL_FAILURE(compute());
  const std::uint64_t bytes = device_bytes_;
  const int made = device_.made;
  EXPECT_EQ(graph_.release(), bytes);
  EXPECT_EQ(device_bytes_, 0U);
  EXPECT_EQ(graph_.resume().value(), bytes);
  EXPECT_EQ(device_.made, 2 * made);
  ASSERT_NO_FATAL_FAILURE(compute());
  EXPECT_EQ(device_.made, 2 * made);
}

}  // namespace
}  // namespace kvferry::worker
