// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "host_fixture.hpp"
#include "kvferry/kernels/host_twins.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <future>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace kvferry::ipc {
namespace {

class HostStreamTest : public HostDeviceFixture {
 protected:
  /// Waits until all work so far has ended, as a client does: eventfd, then query.
  static void drain(Stream& stream) {
    const UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    ASSERT_TRUE(stream.notify(event.get()).has_value());
    ASSERT_TRUE(wait_event(event.get()));
    EXPECT_TRUE(stream.query().value());
  }
  static bool wait_event(int fd) {
    pollfd entry{fd, POLLIN, 0};
    std::uint64_t count = 0;
    return ::poll(&entry, 1, 20000) == 1 && ::read(fd, &count, sizeof(count)) == sizeof(count) &&
           count == 1;
  }
  static std::uint64_t* words(PinnedBuffer& buffer) {
    return reinterpret_cast<std::uint64_t*>(buffer.data());
  }

  std::unique_ptr<Device> device_ = open(64 * kMiB);
  std::unique_ptr<DeviceMemory> memory_ = allocate(*device_, 16 * kMiB);
  std::unique_ptr<Stream> stream_ = device_->make_stream(StreamPriority::kNormal).value();
};

TEST_F(HostStreamTest, CopiesBothWaysAndZeroesInOrder) {
  std::vector<unsigned char> in(kMiB);
  std::mt19937 random(3);
  for (unsigned char& byte : in) byte = static_cast<unsigned char>(random());
  std::vector<unsigned char> before(kMiB, 1);
  std::vector<unsigned char> after(kMiB, 1);
  const DevicePtr device = memory_->address();
  const CopyOp load{in.data(), device + 100, kMiB};
  const CopyOp store_before{before.data(), device + 100, kMiB};
  const CopyOp store_after{after.data(), device + 100, kMiB};
  ASSERT_TRUE(stream_->copy(CopyDirection::kHostToDevice, {&load, 1}, CopyMode::kEach));
  ASSERT_TRUE(stream_->copy(CopyDirection::kDeviceToHost, {&store_before, 1}, CopyMode::kBatch));
  ASSERT_TRUE(stream_->zero(device + 100, kMiB / 2));
  ASSERT_TRUE(stream_->copy(CopyDirection::kDeviceToHost, {&store_after, 1}, CopyMode::kBatch));
  drain(*stream_);
  EXPECT_EQ(before, in);
  std::fill(in.begin(), in.begin() + kMiB / 2, static_cast<unsigned char>(0));
  EXPECT_EQ(after, in);
}

TEST_F(HostStreamTest, WorkOfManyShortItemsStaysInOrderPastTheQueueLimit) {
  // Each copy moves the previous one's result one place on; any exchange of two breaks the chain.
  constexpr std::size_t kSteps = 5000;
  std::vector<std::uint32_t> host(kSteps + 1);
  host[0] = 4711;
  const DevicePtr cell = memory_->address();
  for (std::size_t i = 0; i < kSteps; ++i) {
    const CopyOp up{&host[i], cell, sizeof(host[0])};
    const CopyOp down{&host[i + 1], cell, sizeof(host[0])};
    ASSERT_TRUE(stream_->copy(CopyDirection::kHostToDevice, {&up, 1}, CopyMode::kEach));
    ASSERT_TRUE(stream_->copy(CopyDirection::kDeviceToHost, {&down, 1}, CopyMode::kEach));
  }
  drain(*stream_);
  EXPECT_EQ(host[kSteps], 4711U);
}

TEST_F(HostStreamTest, PatternsOfMoreBlocksThanOneLaunchHolds) {
  constexpr std::uint64_t kBlocks = 1000;
  constexpr std::uint64_t kBytes = 1003;
  auto* const base = bytes(*memory_);
  const auto table =
      device_
          ->make_region_table({{base, 1024, kBytes, 0, 1}, {base + 8 * kMiB, 2048, 2048, 1003, 2}})
          .value();
  std::vector<kernels::SeededBlock> blocks(kBlocks);
  for (std::uint32_t i = 0; i < kBlocks; ++i) blocks[i] = {1000 + i, 999 - i, 0};
  ASSERT_TRUE(stream_->fill_pattern(*table, blocks));
  const auto results = device_->make_pinned_buffer(kBlocks * 8).value();
  ASSERT_TRUE(stream_->verify_pattern(*table, blocks, *results));
  drain(*stream_);
  EXPECT_EQ(std::accumulate(words(*results), words(*results) + kBlocks, std::uint64_t{0}), 0U);

  base[8 * kMiB + 2048ULL * 3 + 17] ^= 1U;  // Block id 3 is blocks[996].
  ASSERT_TRUE(stream_->verify_pattern(*table, blocks, *results));
  drain(*stream_);
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    EXPECT_EQ(words(*results)[i], i == 996 ? 1U : 0U) << i;
  }
}

TEST_F(HostStreamTest, GatherScatterAndChecksumOfMoreBlocksThanOneLaunchHolds) {
  constexpr std::uint64_t kBlocks = 700;
  auto* const base = bytes(*memory_);
  const std::vector<kernels::StridedRegion> regions = {{base, 600, 600, 0, 1},
                                                       {base + kMiB, 777, 500, 601, 2}};
  const auto table = device_->make_region_table(regions).value();
  constexpr std::uint64_t kStride = 1200;
  const auto packed = allocate(*device_, kStride * kBlocks);
  std::vector<kernels::SeededBlock> seeded(kBlocks);
  std::vector<std::uint32_t> ids(kBlocks);
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    seeded[i] = {i * 17ULL, i, 0};
    ids[i] = (i * 331) % 700;  // 331 and 700 share no factor: all ids, mixed.
  }
  const auto before = device_->make_pinned_buffer(kBlocks * 8).value();
  const auto after = device_->make_pinned_buffer(kBlocks * 8).value();
  ASSERT_TRUE(stream_->fill_pattern(*table, seeded));
  ASSERT_TRUE(stream_->checksum(*table, ids, *before));
  ASSERT_TRUE(stream_->gather(*table, ids, packed->address(), kStride));
  ASSERT_TRUE(stream_->zero(memory_->address(), 2 * kMiB));
  ASSERT_TRUE(stream_->scatter(*table, ids, packed->address(), kStride));
  ASSERT_TRUE(stream_->checksum(*table, ids, *after));
  const auto wrong = device_->make_pinned_buffer(kBlocks * 8).value();
  ASSERT_TRUE(stream_->verify_pattern(*table, seeded, *wrong));
  drain(*stream_);
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    ASSERT_EQ(words(*wrong)[i], 0U) << i;
    ASSERT_EQ(words(*before)[i], words(*after)[i]) << i;
    ASSERT_EQ(std::memcmp(bytes(*packed) + i * kStride, base + std::size_t{ids[i]} * 600, 600), 0)
        << i;
    ASSERT_NE(words(*before)[i], words(*before)[(i + 1) % kBlocks]) << i;
  }
}

TEST_F(HostStreamTest, NotifiesAfterTheWorkBeforeIt) {
  std::vector<unsigned char> host(8 * kMiB, 9);
  const CopyOp load{host.data(), memory_->address(), host.size()};
  UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  ASSERT_TRUE(stream_->copy(CopyDirection::kHostToDevice, {&load, 1}, CopyMode::kEach));
  ASSERT_TRUE(stream_->notify(event.get()));
  ASSERT_TRUE(wait_event(event.get()));
  EXPECT_TRUE(stream_->query().value());
  EXPECT_EQ(bytes(*memory_)[8 * kMiB - 1], 9);
}

TEST_F(HostStreamTest, IsNotIdleBeforeTheLastNotificationIsWritten) {
  // Full, and so the write waits until somebody reads.
  const UniqueFd event(::eventfd(0, EFD_CLOEXEC));
  std::uint64_t count = UINT64_MAX - 1;
  ASSERT_EQ(::write(event.get(), &count, sizeof(count)), sizeof(count));
  ASSERT_TRUE(stream_->notify(event.get()).has_value());
  auto idle = std::async(std::launch::async, [this] {
    while (!stream_->query().value()) std::this_thread::yield();
  });
  EXPECT_EQ(idle.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  ASSERT_EQ(::read(event.get(), &count, sizeof(count)), sizeof(count));
  idle.wait();
  ASSERT_EQ(::read(event.get(), &count, sizeof(count)), sizeof(count));
  EXPECT_EQ(count, 1U);
}

TEST_F(HostStreamTest, ANotificationReachesTheEventThatWasNamed) {
  // The caller closes its number at once; a file that takes the number must not be written.
  UniqueFd named(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const UniqueFd watch(::dup(named.get()));
  std::vector<unsigned char> host(16 * kMiB);
  const CopyOp load{host.data(), memory_->address(), host.size()};
  ASSERT_TRUE(stream_->copy(CopyDirection::kHostToDevice, {&load, 1}, CopyMode::kEach));
  ASSERT_TRUE(stream_->notify(named.get()));
  named.reset();
  const UniqueFd successor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  EXPECT_TRUE(wait_event(watch.get()));
  EXPECT_TRUE(stream_->query().value());
  std::uint64_t count = 0;
  EXPECT_EQ(::read(successor.get(), &count, sizeof(count)), -1);
}

TEST_F(HostStreamTest, RefusesWhatCannotBeRight) {
  unsigned char byte = 0;
  const DevicePtr device = memory_->address();
  for (const CopyOp& op :
       {CopyOp{nullptr, device, 1}, CopyOp{&byte, DevicePtr{}, 1}, CopyOp{&byte, device, ~0ULL}}) {
    EXPECT_EQ(stream_->copy(CopyDirection::kHostToDevice, {&op, 1}, CopyMode::kEach).error().code,
              ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(stream_->zero(DevicePtr{}, 8).error().code, ErrorCode::kInvalidArgument);
  EXPECT_FALSE(stream_->notify(-1).has_value());
  const auto table = device_->make_region_table({{bytes(*memory_), 64, 64, 10, 0}}).value();
  const std::array<std::uint32_t, 2> ids = {0, 1};
  EXPECT_EQ(stream_->gather(*table, ids, device, 73).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(stream_->scatter(*table, ids, DevicePtr{}, 74).error().code,
            ErrorCode::kInvalidArgument);
  const auto one_word = device_->make_pinned_buffer(8).value();
  EXPECT_EQ(stream_->checksum(*table, ids, *one_word).error().code, ErrorCode::kInvalidArgument);
  EXPECT_TRUE(stream_->query().value()) << "refused work was enqueued";
}

TEST_F(HostStreamTest, TheEndOfAStreamFinishesItsWork) {
  std::vector<unsigned char> host(kMiB, 5);
  const CopyOp load{host.data(), memory_->address(), host.size()};
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(stream_->copy(CopyDirection::kHostToDevice, {&load, 1}, CopyMode::kEach));
  }
  ASSERT_TRUE(stream_->zero(memory_->address(), 1));
  stream_.reset();
  EXPECT_EQ(bytes(*memory_)[0], 0);
  EXPECT_EQ(bytes(*memory_)[kMiB - 1], 5);
}

TEST_F(HostStreamTest, ALaunchOutlivesTheRecordedWork) {
  std::vector<unsigned char> host(8 * kMiB, 5);
  const CopyOp load{host.data(), memory_->address(), host.size()};
  auto work = stream_->record([&](Stream& stream) -> Status {
    KVFERRY_TRY(stream.copy(CopyDirection::kHostToDevice, {&load, 1}, CopyMode::kEach));
    return stream.zero(memory_->address(), 1);
  });
  ASSERT_TRUE(work.has_value());
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(stream_->launch(**work).has_value());
  work->reset();
  drain(*stream_);
  EXPECT_EQ(bytes(*memory_)[0], 0);
  EXPECT_EQ(bytes(*memory_)[8 * kMiB - 1], 5);
}

TEST_F(HostStreamTest, PinnedBuffersHoldWholeWordsAndStartAtZero) {
  const auto buffer = device_->make_pinned_buffer(13).value();
  EXPECT_EQ(buffer->size_bytes(), 13U);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 8, 0U);
  EXPECT_EQ(words(*buffer)[0], 0U);
  EXPECT_EQ(device_->make_pinned_buffer(0).error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvferry::ipc
