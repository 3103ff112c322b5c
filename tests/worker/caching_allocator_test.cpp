// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/caching_allocator.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "worker/host_device.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <iterator>
#include <random>
#include <thread>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::EmptyReason;
using ipc::ErrorCode;
using test::device_used_bytes;
using test::open_host_device;

constexpr std::uint64_t kMiB = 1ULL << 20;

class CachingAllocatorTest : public ::testing::Test {
 protected:
  static ScratchBuffer take(CachingAllocator& allocator, std::uint64_t size_bytes) {
    auto buffer = allocator.allocate(size_bytes);
    EXPECT_TRUE(buffer.has_value()) << buffer.error().to_string();
    return std::move(buffer).value();
  }

  std::unique_ptr<ipc::Device> device_ = open_host_device(256 * kMiB);
};

TEST_F(CachingAllocatorTest, SmallRequestsShareASegment) {
  CachingAllocator allocator(*device_);
  const auto first = take(allocator, 1);
  const auto second = take(allocator, 600);
  EXPECT_EQ(second.address().address - first.address().address, 512U);
  const AllocatorStats stats = allocator.stats();
  EXPECT_EQ(stats.reserved_bytes, 2 * kMiB);
  EXPECT_EQ(stats.used_bytes, 512U + 1024U);
  EXPECT_EQ(stats.segments, 1U);
}

TEST_F(CachingAllocatorTest, FreedMemoryStaysReservedUntilEmptied) {
  CachingAllocator allocator(*device_);
  take(allocator, 30 * kMiB) = ScratchBuffer();
  EXPECT_EQ(allocator.stats().used_bytes, 0U);
  EXPECT_EQ(allocator.stats().reserved_bytes, 30 * kMiB);
  EXPECT_EQ(device_used_bytes(), 30 * kMiB);
  const EmptiedCache emptied = allocator.empty_cache(EmptyReason::kContinue);
  EXPECT_EQ(emptied.freed(), 30 * kMiB);
  EXPECT_EQ(allocator.stats().reserved_bytes, 0U);
  EXPECT_EQ(device_used_bytes(), 0U);
}

TEST_F(CachingAllocatorTest, ReusesACachedBlockWithoutTheDriver) {
  CachingAllocator allocator(*device_);
  auto first = take(allocator, 4 * kMiB);
  const ipc::DevicePtr address = first.address();
  first = ScratchBuffer();
  const auto second = take(allocator, 4 * kMiB);
  EXPECT_EQ(second.address(), address);
  EXPECT_EQ(allocator.stats().segments, 1U);
}

TEST_F(CachingAllocatorTest, NeighboursMergeInEveryOrderOfRelease) {
  CachingAllocator allocator(*device_);
  std::vector<std::size_t> order{0, 1, 2};
  do {
    std::vector<ScratchBuffer> buffers;
    for (int i = 0; i < 3; ++i) buffers.push_back(take(allocator, 5 * kMiB));
    ASSERT_EQ(allocator.stats().segments, 1U);
    for (const std::size_t i : order) buffers[i] = ScratchBuffer();
    EXPECT_EQ(allocator.stats().free_blocks, 1U);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(CachingAllocatorTest, EmptyingLeavesSegmentsInUse) {
  CachingAllocator allocator(*device_);
  auto kept = take(allocator, 3 * kMiB);
  auto neighbour = take(allocator, 3 * kMiB);
  auto other = take(allocator, 40 * kMiB);
  std::memset(kept.address().raw(), 0x5A, kept.size_bytes());
  neighbour = ScratchBuffer();
  other = ScratchBuffer();
  EXPECT_EQ(allocator.empty_cache(EmptyReason::kContinue).freed(), 40 * kMiB);
  EXPECT_EQ(allocator.stats().reserved_bytes, 20 * kMiB);
  EXPECT_EQ(*static_cast<unsigned char*>((kept.address() + (3 * kMiB - 1)).raw()), 0x5A);
}

TEST_F(CachingAllocatorTest, ReadingStatisticsChangesNothingAtAnyLogLevel) {
  CachingAllocator allocator(*device_);
  take(allocator, 8 * kMiB) = ScratchBuffer();
  const std::uint64_t before = device_used_bytes();
  for (const auto level : {ipc::LogLevel::kDebug, ipc::LogLevel::kInfo, ipc::LogLevel::kOff}) {
    ipc::init_logging("test", level);
    for (int i = 0; i < 100; ++i) ASSERT_EQ(allocator.stats().empties, 0U);
  }
  ipc::init_logging("test", ipc::LogLevel::kInfo);
  EXPECT_EQ(allocator.stats().reserved_bytes, 20 * kMiB);
  EXPECT_EQ(device_used_bytes(), before);
}

TEST_F(CachingAllocatorTest, EmptiesItselfWhenTheDriverRefuses) {
  CachingAllocator allocator(*device_);
  take(allocator, 200 * kMiB) = ScratchBuffer();
  // 240 MiB fit only once the cached 200 MiB are back.
  const auto large = take(allocator, 240 * kMiB);
  EXPECT_TRUE(large.valid());
  EXPECT_EQ(allocator.stats().reserved_bytes, 240 * kMiB);
}

TEST_F(CachingAllocatorTest, ReportsTheDriversRefusalAndServesOn) {
  CachingAllocator allocator(*device_);
  const auto held = take(allocator, 200 * kMiB);
  const auto refused = allocator.allocate(100 * kMiB);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kNoDeviceMemory);
  EXPECT_TRUE(take(allocator, 20 * kMiB).valid());
}

TEST_F(CachingAllocatorTest, RefusesZeroAndAbsurdSizes) {
  CachingAllocator allocator(*device_);
  EXPECT_EQ(allocator.allocate(0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(allocator.allocate(~0ULL).error().code, ErrorCode::kInvalidArgument);
}

/// Random allocations and frees: lent ranges never overlap, keep their contents, and the counters
/// are what they say; at the end nothing is left with the driver.
TEST_F(CachingAllocatorTest, HoldsItsInvariantsOverRandomHistories) {
  for (std::uint32_t seed = 0; seed < 3; ++seed) {
    std::mt19937 random(seed);
    CachingAllocator allocator(*device_);
    struct Held {
      ScratchBuffer buffer;
      unsigned char stamp = 0;
    };
    std::vector<Held> held;
    const auto check = [](const Held& item) {
      const auto* bytes = static_cast<const unsigned char*>(item.buffer.address().raw());
      return bytes[0] == item.stamp && bytes[item.buffer.size_bytes() - 1] == item.stamp;
    };
    for (int round = 0; round < 400; ++round) {
      const auto pick = random() % 100;
      if (pick < 55) {
        const std::uint64_t magnitude = 1ULL << (random() % 23);
        auto buffer = allocator.allocate(1 + random() % (2 * magnitude));
        if (!buffer) {
          ASSERT_EQ(buffer.error().code, ErrorCode::kNoDeviceMemory);
          held.clear();
          continue;
        }
        const auto stamp = static_cast<unsigned char>(random());
        auto* bytes = static_cast<unsigned char*>(buffer->address().raw());
        bytes[0] = bytes[buffer->size_bytes() - 1] = stamp;
        held.push_back({std::move(buffer).value(), stamp});
      } else if (pick < 98 && !held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        ASSERT_TRUE(check(held.back())) << "seed " << seed << " round " << round;
        held.pop_back();
      } else if (pick >= 98) {
        allocator.empty_cache(EmptyReason::kContinue);
      }
      std::uint64_t asked = 0;
      for (const Held& item : held) asked += item.buffer.size_bytes();
      const AllocatorStats stats = allocator.stats();
      ASSERT_EQ(stats.used_blocks, held.size());
      ASSERT_GE(stats.used_bytes, asked);
      ASSERT_GE(stats.reserved_bytes, stats.used_bytes);
      ASSERT_LE(stats.segments, stats.used_blocks + stats.free_blocks);
    }
    for (const Held& item : held) ASSERT_TRUE(check(item));
    held.clear();
    EXPECT_EQ(allocator.stats().used_bytes, 0U);
    EXPECT_EQ(allocator.stats().free_blocks, allocator.stats().segments);
    EXPECT_EQ(device_used_bytes(), allocator.stats().reserved_bytes);
    allocator.empty_cache(EmptyReason::kContinue);
    EXPECT_EQ(device_used_bytes(), 0U);
  }
}

TEST_F(CachingAllocatorTest, ServesSeveralThreads) {
  CachingAllocator allocator(*device_);
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&allocator, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        auto buffer = allocator.allocate(1 + random() % (3 * kMiB));
        ASSERT_TRUE(buffer.has_value());
        auto* byte = static_cast<unsigned char*>(buffer->address().raw());
        *byte = static_cast<unsigned char>(t);
        if (i % 50 == 0) allocator.empty_cache(EmptyReason::kContinue);
        ASSERT_EQ(*byte, static_cast<unsigned char>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(allocator.stats().used_blocks, 0U);
}

}  // namespace
}  // namespace kvferry::worker
