// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/shared_memory.hpp"

#include "ipc/os/temp_dir.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

namespace kvferry::ipc {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kBytes = 8192;

UniqueFd raw_memfd(std::size_t size, int seals) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(size)), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(SharedMemoryTest, TheCreatorWritesAndOthersOnlyRead) {
  const SharedMemory::SingleWriter segment = *SharedMemory::create_single_writer("s", kBytes);
  const SharedMapping reader = *SharedMemory::map_single_writer(segment.fd, kBytes);
  ASSERT_EQ(reader.size_bytes(), kBytes);
  ASSERT_NE(reader.data(), segment.mapping.data());
  segment.mapping.data()[kBytes - 1] = std::byte{7};
  EXPECT_EQ(reader.data()[kBytes - 1], std::byte{7});

  EXPECT_EQ(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment.fd.get(), 0),
            MAP_FAILED);
  EXPECT_EQ(::mprotect(reader.data(), kBytes, PROT_READ | PROT_WRITE), -1);
  EXPECT_EQ(::write(segment.fd.get(), "x", 1), -1);
  for (const off_t size : {0, 4096, 16384}) EXPECT_EQ(::ftruncate(segment.fd.get(), size), -1);
  EXPECT_EQ(::fcntl(segment.fd.get(), F_ADD_SEALS, F_SEAL_WRITE), -1) << "no seal is added later";
  EXPECT_FALSE(SharedMemory::map_pool(UniqueFd(::dup(segment.fd.get())), kBytes).has_value());
}

TEST(SharedMemoryTest, ASegmentWithoutItsSealsOrSizeIsRefused) {
  const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;
  EXPECT_TRUE(SharedMemory::map_single_writer(raw_memfd(kBytes, all), kBytes).has_value());
  const std::pair<std::size_t, int> wrong[] = {
      {kBytes, 0},
      {kBytes, F_SEAL_SHRINK | F_SEAL_GROW},
      {kBytes, F_SEAL_GROW | F_SEAL_FUTURE_WRITE},
      {kBytes, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE},
      {kBytes - 4096, all},
      {kBytes + 4096, all},
      {0, all},
  };
  for (const auto& [size, seals] : wrong) {
    const auto mapping = SharedMemory::map_single_writer(raw_memfd(size, seals), kBytes);
    ASSERT_FALSE(mapping.has_value()) << size << " " << seals;
    EXPECT_EQ(mapping.error().code, ErrorCode::kProtocol);
  }
}

TEST(SharedMemoryTest, DescriptorsOfOtherKindsAreRefused) {
  const test::ShortTempDir temp;
  const UniqueFd file(::open((temp / "file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(file.get(), kBytes), 0);
  int pipe_fds[2];
  ASSERT_EQ(::pipe2(pipe_fds, O_CLOEXEC), 0);
  const UniqueFd read_end(pipe_fds[0]);
  const UniqueFd write_end(pipe_fds[1]);
  for (const UniqueFd* fd : {&file, &read_end}) {
    const auto mapping = SharedMemory::map_single_writer(*fd, kBytes);
    ASSERT_FALSE(mapping.has_value());
    EXPECT_EQ(mapping.error().code, ErrorCode::kProtocol);
  }
  EXPECT_EQ(SharedMemory::map_pool(UniqueFd(), kBytes).error().code, ErrorCode::kProtocol);
}

TEST(SharedMemoryTest, APoolIsWrittenByAllAndKeepsItsSize) {
  for (const bool reserve : {false, true}) {
    const UniqueFd pool = *SharedMemory::create_pool("p", kBytes, reserve);
    struct stat info {};
    ASSERT_EQ(::fstat(pool.get(), &info), 0);
    EXPECT_EQ(info.st_blocks * 512, reserve ? static_cast<blkcnt_t>(kBytes) : 0);
    const SharedMapping a = *SharedMemory::map_pool(pool, kBytes);
    const SharedMapping b = *SharedMemory::map_pool(pool, kBytes);
    a.data()[0] = std::byte{1};
    b.data()[1] = std::byte{2};
    EXPECT_EQ(b.data()[0], std::byte{1});
    EXPECT_EQ(a.data()[1], std::byte{2});
    EXPECT_EQ(::ftruncate(pool.get(), 0), -1);
    EXPECT_EQ(::ftruncate(pool.get(), 2 * kBytes), -1);
    EXPECT_EQ(SharedMemory::map_pool(pool, kBytes + 4096).error().code, ErrorCode::kProtocol);
  }
}

TEST(SharedMemoryTest, APoolBeyondTheMemoryIsRefusedWithBothNumbers) {
  const auto pool = SharedMemory::create_pool("p", std::uint64_t{1} << 50, true);
  ASSERT_FALSE(pool.has_value());
  EXPECT_EQ(pool.error().code, ErrorCode::kNoHostMemory);
  EXPECT_THAT(pool.error().message, HasSubstr("1024.0 TiB"));
  EXPECT_THAT(pool.error().message, HasSubstr("available"));
}

TEST(SharedMemoryTest, ReservingAPoolCanBeGivenUpInItsMiddle) {
  constexpr std::uint64_t kManySteps = std::uint64_t{1} << 30;
  int asked = 0;
  const auto pool = SharedMemory::create_pool("p", kManySteps, true, [&] { return ++asked == 2; });
  ASSERT_FALSE(pool.has_value());
  EXPECT_EQ(pool.error().code, ErrorCode::kCancelled) << pool.error().message;
  EXPECT_EQ(asked, 2);
}

TEST(SharedMemoryTest, NoBytesAreNoSegment) {
  EXPECT_EQ(SharedMemory::create_single_writer("s", 0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(SharedMemory::create_pool("p", 0, false).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(SharedMapping().data(), nullptr);
  EXPECT_EQ(SharedMapping().size_bytes(), 0U);
}

}  // namespace
}  // namespace kvferry::ipc
