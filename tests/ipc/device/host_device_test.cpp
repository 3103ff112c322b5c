// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "host_fixture.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

namespace kvferry::ipc {
namespace {

using HostDeviceTest = HostDeviceFixture;

TEST_F(HostDeviceTest, CountsExactlyWhatIsAllocated) {
  const auto device = open(64 * kMiB);
  EXPECT_EQ(device->name(), "host device " + device_name());
  EXPECT_EQ(device->memory_info()->total_bytes, 64 * kMiB);
  EXPECT_EQ(device->memory_info()->free_bytes, 64 * kMiB);
  auto first = allocate(*device, 5 * kMiB + 1);
  EXPECT_EQ(first->size_bytes(), 6 * kMiB);
  auto second = allocate(*device, 2 * kMiB, HandleKind::kLegacy);
  EXPECT_EQ(used(), 8 * kMiB);
  EXPECT_EQ(device->memory_info()->free_bytes, 56 * kMiB);
  EXPECT_TRUE(first->release().has_value());
  EXPECT_TRUE(first->release().has_value());
  EXPECT_EQ(used(), 2 * kMiB);
  second.reset();
  EXPECT_EQ(used(), 0U);
}

TEST_F(HostDeviceTest, RefusesBeyondItsCapacityAndNamesBothValues) {
  const auto device = open(8 * kMiB);
  const auto first = allocate(*device, 6 * kMiB);
  for (const std::uint64_t size :
       {4 * kMiB, 16 * kMiB, ~std::uint64_t{0}, ~std::uint64_t{0} - kMiB}) {
    const auto refused = device->allocate(size, HandleKind::kVmm, nullptr);
    ASSERT_FALSE(refused.has_value()) << size;
    EXPECT_EQ(refused.error().code, ErrorCode::kNoDeviceMemory);
    EXPECT_NE(refused.error().message.find("2097152 bytes free"), std::string::npos)
        << refused.error().message;
  }
  const auto refused = device->allocate(4 * kMiB, HandleKind::kVmm, nullptr);
  EXPECT_NE(refused.error().message.find("4194304 bytes asked"), std::string::npos)
      << refused.error().message;
  EXPECT_EQ(used(), 6 * kMiB);
  const auto fits = allocate(*device, 2 * kMiB);
  EXPECT_EQ(device->memory_info()->free_bytes, 0U);
}

TEST_F(HostDeviceTest, ACapacityThatIsNoMultipleOfTheGranularityIsNeverExceeded) {
  const auto device = open(3 * kMiB);
  EXPECT_FALSE(device->allocate(3 * kMiB, HandleKind::kVmm, nullptr).has_value());
  const auto fits = allocate(*device, 2 * kMiB);
  EXPECT_FALSE(device->allocate(1, HandleKind::kVmm, nullptr).has_value());
  EXPECT_EQ(device->memory_info()->free_bytes, kMiB);
}

TEST_F(HostDeviceTest, RefusesNothingAndUnknownKinds) {
  const auto device = open(8 * kMiB);
  EXPECT_EQ(device->allocate(0, HandleKind::kVmm, nullptr).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(device->allocate(1, static_cast<HandleKind>(7), nullptr).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(device->reserve(0).error().code, ErrorCode::kInvalidArgument);
}

TEST_F(HostDeviceTest, OneNameHasOneCapacityWhileItIsInUse) {
  auto device = open(8 * kMiB);
  const auto same = open(8 * kMiB);
  try {
    const auto other = open(16 * kMiB);
    FAIL() << "a second capacity was accepted";
  } catch (const Exception& refused) {
    EXPECT_EQ(refused.error().code, ErrorCode::kAlreadyExists);
    EXPECT_NE(refused.error().message.find("8388608"), std::string::npos);
    EXPECT_NE(refused.error().message.find("16777216"), std::string::npos);
  }
  const auto unrelated = open(16 * kMiB, "other");
}

TEST_F(HostDeviceTest, ANameWithoutUsersTakesANewCapacity) {
  { const auto device = open(8 * kMiB); }
  EXPECT_EQ(open(16 * kMiB)->memory_info()->total_bytes, 16 * kMiB);
}

TEST_F(HostDeviceTest, TwoOpenersShareTheCapacity) {
  const auto one = open(8 * kMiB);
  const auto two = open(8 * kMiB);
  const auto memory = allocate(*one, 6 * kMiB);
  EXPECT_EQ(two->memory_info()->free_bytes, 2 * kMiB);
  EXPECT_FALSE(two->allocate(4 * kMiB, HandleKind::kVmm, nullptr).has_value());
}

TEST_F(HostDeviceTest, PagesAreThereBeforeTheyAreTouched) {
  const auto device = open(32 * kMiB);
  const auto memory = allocate(*device, 16 * kMiB);
  struct stat info {};
  const ExportedHandle handle = memory->export_handle().value();
  ASSERT_EQ(::fstat(handle.fd.get(), &info), 0);
  EXPECT_EQ(static_cast<std::uint64_t>(info.st_blocks) * 512, 16 * kMiB);
  EXPECT_EQ(bytes(*memory)[16 * kMiB - 1], 0);
}

TEST_F(HostDeviceTest, MemoryComesBackAtItsAddressWithNewContents) {
  const auto device = open(8 * kMiB);
  const auto range = device->reserve(4 * kMiB).value();
  EXPECT_EQ(range->size_bytes(), 4 * kMiB);
  EXPECT_EQ(used(), 0U);
  for (int cycle = 0; cycle < 50; ++cycle) {
    const auto memory = allocate(*device, 4 * kMiB, HandleKind::kVmm, range.get());
    ASSERT_EQ(memory->address(), range->address());
    ASSERT_EQ(bytes(*memory)[0], 0) << "old pages in cycle " << cycle;
    ASSERT_EQ(bytes(*memory)[4 * kMiB - 1], 0);
    bytes(*memory)[0] = 0xAB;
    bytes(*memory)[4 * kMiB - 1] = 0xCD;
    ASSERT_TRUE(memory->release().has_value());
    ASSERT_EQ(used(), 0U);
  }
}

TEST_F(HostDeviceTest, ARangeTakesWhatFitsAndOneThingAtATime) {
  const auto device = open(16 * kMiB);
  const auto range = device->reserve(4 * kMiB).value();
  const auto too_large = device->allocate(6 * kMiB, HandleKind::kVmm, range.get());
  EXPECT_EQ(too_large.error().code, ErrorCode::kInvalidArgument);
  const auto memory = allocate(*device, 2 * kMiB, HandleKind::kVmm, range.get());
  const auto second = device->allocate(2 * kMiB, HandleKind::kVmm, range.get());
  EXPECT_EQ(second.error().code, ErrorCode::kBusy);
  const auto legacy = device->allocate(2 * kMiB, HandleKind::kLegacy, range.get());
  EXPECT_EQ(legacy.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(used(), 2 * kMiB) << "a refused allocation is still charged";
}

TEST_F(HostDeviceTest, ARangeThatEndsFirstLeavesItsMemoryMapped) {
  const auto device = open(8 * kMiB);
  auto range = device->reserve(2 * kMiB).value();
  auto memory = allocate(*device, 2 * kMiB, HandleKind::kVmm, range.get());
  range.reset();
  bytes(*memory)[5] = 1;
  EXPECT_TRUE(memory->release().has_value());
  EXPECT_EQ(used(), 0U);
}

TEST_F(HostDeviceTest, CountsInALongLockTable) {
  // Longer than what the kernel gives in one read.
  std::vector<UniqueFd> others;
  for (int i = 0; i < 300; ++i) {
    others.emplace_back(::memfd_create("kvferry-test-lock", MFD_CLOEXEC));
    struct flock lock {};
    lock.l_type = F_RDLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = i;
    lock.l_len = i % 3 == 0 ? 0 : 1000;
    ASSERT_EQ(::fcntl(others.back().get(), F_OFD_SETLK, &lock), 0);
  }
  const auto device = open(64 * kMiB);
  std::vector<std::unique_ptr<DeviceMemory>> memory;
  for (std::uint64_t i = 1; i <= 8; ++i) {
    memory.push_back(allocate(*device, 2 * kMiB));
    ASSERT_EQ(used(), i * 2 * kMiB);
  }
}

TEST_F(HostDeviceTest, CountsWhileTheLockTableGrowsAndShrinks) {
  // Just more than the kernel gives in one read, and then gone all at once: what is left may lie
  // before the place at which the next read goes on.
  const auto change = [](int fd, short type, off_t start, off_t length) {
    struct flock lock {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = start;
    lock.l_len = length;
    return ::fcntl(fd, F_OFD_SETLK, &lock);
  };
  // The table goes by processor: theirs on the first one, ours after it.
  const auto run_on = [](bool first) {
    cpu_set_t allowed{};
    EXPECT_EQ(::sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    std::size_t chosen = CPU_SETSIZE;
    for (std::size_t cpu = 0; cpu < CPU_SETSIZE && !(first && chosen < CPU_SETSIZE); ++cpu) {
      if (CPU_ISSET(cpu, &allowed)) chosen = cpu;
    }
    cpu_set_t one{};
    CPU_SET(chosen, &one);
    EXPECT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
  };
  std::atomic<bool> over = false;
  std::thread others([&] {
    run_on(true);
    const UniqueFd file(::memfd_create("kvferry-test-lock", MFD_CLOEXEC));
    while (!over) {
      for (off_t i = 0; i < 100; ++i) EXPECT_EQ(change(file.get(), F_RDLCK, 2 * i, 1), 0);
      EXPECT_EQ(change(file.get(), F_UNLCK, 0, 0), 0);
    }
  });
  std::thread ours([&] {
    run_on(false);
    for (int i = 0; i < 40; ++i) {
      const auto device = open(64 * kMiB);
      const auto memory = allocate(*device, 2 * kMiB);
      EXPECT_EQ(device->memory_info()->free_bytes, 62 * kMiB) << i;
    }
  });
  ours.join();
  over = true;
  others.join();
}

TEST_F(HostDeviceTest, ThreadsThatAllocateAtOnceNeverExceedTheCapacityNorAreRefusedForNothing) {
  const auto device = open(16 * kMiB);
  std::vector<std::vector<std::unique_ptr<DeviceMemory>>> held(4);
  std::vector<std::thread> threads;
  threads.reserve(held.size());
  for (auto& mine : held) {
    threads.emplace_back([&] {
      while (true) {
        auto memory = device->allocate(2 * kMiB, HandleKind::kVmm, nullptr);
        if (!memory.has_value()) return;
        mine.push_back(std::move(memory).value());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::size_t count = 0;
  for (const auto& mine : held) count += mine.size();
  EXPECT_EQ(count, 8U);
  EXPECT_EQ(used(), 16 * kMiB);
}

TEST_F(HostDeviceTest, RegistersHostMemoryOnceAndWithoutOverlap) {
  const auto device = open(8 * kMiB);
  std::vector<char> pool(4096);
  char* const data = pool.data();
  EXPECT_EQ(device->register_host(nullptr, 1).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(device->register_host(data, 0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(device->register_host(data, ~0ULL).error().code, ErrorCode::kInvalidArgument);
  EXPECT_TRUE(device->register_host(data + 1024, 1024).has_value());
  for (const auto& [start, size] :
       {std::pair{1024, 1024}, {0, 1025}, {2047, 1}, {1500, 10}, {0, 4096}}) {
    EXPECT_EQ(device->register_host(data + start, static_cast<std::uint64_t>(size)).error().code,
              ErrorCode::kAlreadyExists)
        << start;
  }
  EXPECT_TRUE(device->register_host(data, 1024).has_value());
  EXPECT_TRUE(device->register_host(data + 2048, 2048).has_value());
  EXPECT_EQ(device->unregister_host(data + 1).error().code, ErrorCode::kNotFound);
  EXPECT_TRUE(device->unregister_host(data + 1024).has_value());
  EXPECT_EQ(device->unregister_host(data + 1024).error().code, ErrorCode::kNotFound);
  EXPECT_TRUE(device->register_host(data + 1024, 1024).has_value());
}

TEST_F(HostDeviceTest, RefusesRegionsThatOverlapThemselves) {
  const auto device = open(8 * kMiB);
  unsigned char byte = 0;
  EXPECT_TRUE(device->make_region_table({{&byte, 8, 8, 0, 0}}).has_value());
  for (const kernels::StridedRegion& bad :
       {kernels::StridedRegion{nullptr, 8, 8, 0, 0}, kernels::StridedRegion{&byte, 8, 0, 0, 0},
        kernels::StridedRegion{&byte, 7, 8, 0, 0}}) {
    EXPECT_EQ(device->make_region_table({{&byte, 8, 8, 0, 0}, bad}).error().code,
              ErrorCode::kInvalidArgument);
  }
}

TEST_F(HostDeviceTest, LeavesNoNameBehind) {
  const auto names = [] {
    std::vector<std::string> found;
    for (const char* folder : {"/dev/shm", "/tmp"}) {
      for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        const std::string name = entry.path().filename();
        if (name.find(device_name()) != std::string::npos) found.push_back(name);
      }
    }
    return found;
  };
  {
    const auto device = open(8 * kMiB);
    const auto memory = allocate(*device, 2 * kMiB);
    EXPECT_TRUE(names().empty());
  }
  EXPECT_TRUE(names().empty());
}

}  // namespace
}  // namespace kvferry::ipc
