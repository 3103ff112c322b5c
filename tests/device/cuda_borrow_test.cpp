// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Memory that a framework allocates by itself, in all the ways that CUDA has.
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "support/child_process.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstring>

namespace kvferry::ipc {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr std::uint64_t kMiB = 1ULL << 20;

template <typename Function> Function driver_call(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state = cudaDriverEntryPointSymbolNotFound;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &found, 12'000, cudaEnableDefault, &state),
            cudaSuccess)
      << name;
  return reinterpret_cast<Function>(found);
}

class CudaBorrowTest : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) {
      if (environment("KVFERRY_REQUIRE_GPU") == "1") {
        FAIL() << "KVFERRY_REQUIRE_GPU=1, but no CUDA device is usable here";
      }
      GTEST_SKIP() << "no CUDA device";
    }
    device_ = open_device(DeviceSpec::parse("cuda:0").value());
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  }

  Error refused(const void* pointer) {
    auto lent = device_->borrow(DevicePtr{reinterpret_cast<std::uintptr_t>(pointer)});
    EXPECT_FALSE(lent.has_value());
    return lent ? Error{} : lent.error();
  }

  /// Another process inverts the last MiB of what the handle names.
  static void invert_elsewhere(const ExportedHandle& handle) {
    std::array<int, 2> pair{-1, -1};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()), 0);
    PacketSocket socket{UniqueFd(pair[0])};
    const UniqueFd other(pair[1]);
    test::ChildProcess peer({test::sibling_program("kvferry_device_peer"),
                             {"cuda:0", std::string(to_string(handle.kind))},
                             {},
                             {other.get()}});
    std::vector<std::uint8_t> bytes(8);
    std::memcpy(bytes.data(), &handle.size_bytes, 8);
    bytes.insert(bytes.end(), handle.token.begin(), handle.token.end());
    const int fd = handle.fd.get();
    const auto fds = handle.fd.valid() ? std::span<const int>(&fd, 1) : std::span<const int>();
    ASSERT_TRUE(socket.send(bytes, fds).has_value());
    ASSERT_TRUE(peer.wait_line("mapped", test::soon())) << peer.stderr_text();
    ASSERT_TRUE(peer.write_line("invert"));
    ASSERT_TRUE(peer.wait_line("inverted", test::soon())) << peer.stderr_text();
    ASSERT_TRUE(peer.write_line("close"));
    ASSERT_TRUE(peer.wait_line("closed", test::soon())) << peer.stderr_text();
    peer.close_stdin();
    EXPECT_EQ(peer.wait(test::soon()), test::ChildExit::exited(0));
  }

  std::unique_ptr<Device> device_;
};

TEST_F(CudaBorrowTest, TensorsInsideACudaMallocSegmentAreSharedByOffset) {
  void* segment = nullptr;
  ASSERT_EQ(cudaMalloc(&segment, 20 * kMiB), cudaSuccess);
  auto* tensor = static_cast<unsigned char*>(segment) + 19 * kMiB;
  ASSERT_EQ(cudaMemset(segment, 0x11, 20 * kMiB), cudaSuccess);
  ASSERT_EQ(cudaMemset(tensor, 0x5A, kMiB), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  auto lent = device_->borrow(DevicePtr{reinterpret_cast<std::uintptr_t>(tensor)});
  ASSERT_TRUE(lent.has_value()) << lent.error().to_string();
  EXPECT_EQ((*lent)->kind(), HandleKind::kLegacy);
  EXPECT_EQ((*lent)->address().raw(), segment);
  EXPECT_EQ((*lent)->size_bytes(), 20 * kMiB);
  auto handle = (*lent)->export_handle();
  ASSERT_TRUE(handle.has_value()) << handle.error().to_string();
  invert_elsewhere(*handle);
  std::vector<unsigned char> seen(20 * kMiB);
  ASSERT_EQ(cudaMemcpy(seen.data(), segment, seen.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(seen[19 * kMiB - 1], 0x11);
  EXPECT_EQ(seen[19 * kMiB], 0xA5);
  EXPECT_EQ(seen.back(), 0xA5);
  EXPECT_TRUE((*lent)->release().has_value());
  EXPECT_TRUE((*lent)->still_allocated().value_or(false));
  ASSERT_EQ(cudaFree(segment), cudaSuccess);
  EXPECT_FALSE((*lent)->still_allocated().value_or(true));
}

TEST_F(CudaBorrowTest, FreedAndReplacedMemoryIsNotTakenForTheOldOne) {
  void* first = nullptr;
  ASSERT_EQ(cudaMalloc(&first, 8 * kMiB), cudaSuccess);
  auto lent = device_->borrow(DevicePtr{reinterpret_cast<std::uintptr_t>(first)});
  ASSERT_TRUE(lent.has_value());
  ASSERT_EQ(cudaFree(first), cudaSuccess);
  EXPECT_FALSE((*lent)->export_handle().has_value());
  void* second = nullptr;
  ASSERT_EQ(cudaMalloc(&second, 8 * kMiB), cudaSuccess);
  EXPECT_FALSE((*lent)->still_allocated().value_or(true)) << (first == second);
  EXPECT_FALSE((*lent)->export_handle().has_value());
  ASSERT_EQ(cudaFree(second), cudaSuccess);
}

/// cuMemCreate memory of 4 MiB with the given handle type, mapped in two pieces of 2 MiB each when
/// `pieces` is 2.
class VmmMemory {
 public:
  VmmMemory(CUmemAllocationHandleType type, int pieces) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.requestedHandleTypes = type;
    EXPECT_EQ(
        driver_call<decltype(&cuMemAddressReserve)>("cuMemAddressReserve")(&base_, kSize, 0, 0, 0),
        CUDA_SUCCESS);
    const std::uint64_t each = kSize / static_cast<std::uint64_t>(pieces);
    for (int i = 0; i < pieces; ++i) {
      CUmemGenericAllocationHandle handle = 0;
      EXPECT_EQ(driver_call<decltype(&cuMemCreate)>("cuMemCreate")(&handle, each, &properties, 0),
                CUDA_SUCCESS);
      EXPECT_EQ(driver_call<decltype(&cuMemMap)>("cuMemMap")(
                    base_ + each * static_cast<std::uint64_t>(i), each, 0, handle, 0),
                CUDA_SUCCESS);
      handles_.push_back(handle);
    }
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    EXPECT_EQ(driver_call<decltype(&cuMemSetAccess)>("cuMemSetAccess")(base_, kSize, &access, 1),
              CUDA_SUCCESS);
  }
  VmmMemory(const VmmMemory&) = delete;
  VmmMemory& operator=(const VmmMemory&) = delete;
  ~VmmMemory() { free(); }
  void free() {
    if (handles_.empty()) return;
    driver_call<decltype(&cuMemUnmap)>("cuMemUnmap")(base_, kSize);
    for (const auto handle : handles_) {
      driver_call<decltype(&cuMemRelease)>("cuMemRelease")(handle);
    }
    driver_call<decltype(&cuMemAddressFree)>("cuMemAddressFree")(base_, kSize);
    handles_.clear();
  }
  [[nodiscard]] DevicePtr base() const { return DevicePtr{base_}; }

  static constexpr std::uint64_t kSize = 4 * kMiB;

 private:
  CUdeviceptr base_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;
};

TEST_F(CudaBorrowTest, ExportableVmmMemoryIsSharedByItsDescriptor) {
  VmmMemory memory(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1);
  ASSERT_EQ(cudaMemset(memory.base().raw(), 0x5A, VmmMemory::kSize), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  auto lent = device_->borrow(memory.base() + 3 * kMiB);
  ASSERT_TRUE(lent.has_value()) << lent.error().to_string();
  EXPECT_EQ((*lent)->kind(), HandleKind::kVmm);
  EXPECT_EQ((*lent)->address(), memory.base());
  EXPECT_EQ((*lent)->size_bytes(), VmmMemory::kSize);
  auto handle = (*lent)->export_handle();
  ASSERT_TRUE(handle.has_value()) << handle.error().to_string();
  invert_elsewhere(*handle);
  unsigned char last = 0;
  ASSERT_EQ(
      cudaMemcpy(&last, (memory.base() + (VmmMemory::kSize - 1)).raw(), 1, cudaMemcpyDeviceToHost),
      cudaSuccess);
  EXPECT_EQ(last, 0xA5);
  handle->fd.reset();
  ASSERT_TRUE((*lent)->release().has_value());
  EXPECT_TRUE((*lent)->still_allocated().value_or(false));
  memory.free();
  EXPECT_FALSE((*lent)->still_allocated().value_or(true));
}

// What PyTorch's expandable segments are: each piece is an allocation of its own.
TEST_F(CudaBorrowTest, PiecesOfOneAddressRangeAreAllocationsOfTheirOwn) {
  const VmmMemory memory(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 2);
  auto first = device_->borrow(memory.base() + kMiB);
  auto second = device_->borrow(memory.base() + 3 * kMiB);
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_EQ((*first)->size_bytes(), 2 * kMiB);
  EXPECT_EQ((*second)->address(), memory.base() + 2 * kMiB);
  EXPECT_NE((*first)->id(), (*second)->id());
}

TEST_F(CudaBorrowTest, VmmMemoryThatCannotBeExportedIsRefusedWithTheRemedy) {
  const VmmMemory memory(CU_MEM_HANDLE_TYPE_NONE, 1);
  const Error error = refused(memory.base().raw());
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.message, AllOf(HasSubstr("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
                                   HasSubstr("expandable_segments")));
}

TEST_F(CudaBorrowTest, PoolManagedAndPinnedMemoryIsRefusedWithTheRemedy) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  void* pooled = nullptr;
  ASSERT_EQ(cudaMallocAsync(&pooled, 4 * kMiB, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_THAT(refused(pooled).message, HasSubstr("cudaMallocAsync"));
  ASSERT_EQ(cudaFreeAsync(pooled, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);

  void* managed = nullptr;
  ASSERT_EQ(cudaMallocManaged(&managed, 4 * kMiB), cudaSuccess);
  EXPECT_THAT(refused(managed).message, AllOf(HasSubstr("managed"), HasSubstr("cudaMalloc")));
  ASSERT_EQ(cudaFree(managed), cudaSuccess);

  void* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, kMiB), cudaSuccess);
  EXPECT_THAT(refused(pinned).message, HasSubstr("host memory"));
  ASSERT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

TEST_F(CudaBorrowTest, BorrowingLeavesTheCurrentDeviceAndContextAlone) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 2 * kMiB), cudaSuccess);
  CUcontext before = nullptr;
  CUcontext after = nullptr;
  const auto current = driver_call<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
  ASSERT_EQ(current(&before), CUDA_SUCCESS);
  EXPECT_TRUE(device_->borrow(DevicePtr{reinterpret_cast<std::uintptr_t>(memory)}).has_value());
  ASSERT_EQ(current(&after), CUDA_SUCCESS);
  EXPECT_EQ(before, after);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
}

}  // namespace
}  // namespace kvferry::ipc
