// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "host_fixture.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <utility>

namespace kvferry::ipc {
namespace {

class HostImportTest : public HostDeviceFixture {
 protected:
  static void expect_refused(Result<std::unique_ptr<DeviceMemory>> result,
                             std::string_view what,
                             ErrorCode code = ErrorCode::kProtocol) {
    ASSERT_FALSE(result.has_value()) << what;
    EXPECT_EQ(result.error().code, code) << what << ": " << result.error().message;
  }

  /// A memfd that looks like a device's memory, except for what the caller leaves out.
  static ExportedHandle forge(const std::string& name, std::uint64_t size, int seals) {
    ExportedHandle handle;
    handle.size_bytes = 2 * kMiB;
    handle.fd = UniqueFd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(::ftruncate(handle.fd.get(), static_cast<off_t>(size)), 0);
    EXPECT_EQ(::fcntl(handle.fd.get(), F_ADD_SEALS, seals), 0);
    return handle;
  }

  std::unique_ptr<Device> exporter_ = open(16 * kMiB);
  std::unique_ptr<Device> importer_ = open(16 * kMiB);
};

TEST_F(HostImportTest, SharesBytesAndKeepsTheMemoryAlive) {
  auto owned = allocate(*exporter_, 4 * kMiB);
  const auto imported = importer_->import(owned->export_handle().value(), nullptr).value();
  EXPECT_EQ(imported->size_bytes(), 4 * kMiB);
  EXPECT_EQ(imported->kind(), HandleKind::kVmm);
  EXPECT_NE(imported->address(), owned->address());
  bytes(*owned)[12345] = 77;
  EXPECT_EQ(bytes(*imported)[12345], 77);
  EXPECT_EQ(used(), 4 * kMiB) << "an import is not a second allocation";

  EXPECT_TRUE(owned->release().has_value());
  EXPECT_EQ(used(), 4 * kMiB);
  EXPECT_EQ(bytes(*imported)[12345], 77);
  EXPECT_TRUE(imported->release().has_value());
  EXPECT_EQ(used(), 0U);
}

TEST_F(HostImportTest, RefusesAnotherOpenFileOfTheObject) {
  // The books end with the open file that the allocator made: memory mapped from another one would
  // be in use and counted nowhere.
  auto owned = allocate(*exporter_, 2 * kMiB);
  ExportedHandle handle = owned->export_handle().value();
  const std::string link = fmt::format("/proc/self/fd/{}", handle.fd.get());
  handle.fd = UniqueFd(::open(link.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(handle.fd.valid());
  expect_refused(importer_->import(std::move(handle), nullptr), "claims 0 bytes");
}

TEST_F(HostImportTest, MapsAtAReservedAddress) {
  auto owned = allocate(*exporter_, 2 * kMiB);
  const auto range = importer_->reserve(2 * kMiB).value();
  for (unsigned char round = 1; round < 5; ++round) {
    const auto imported = importer_->import(owned->export_handle().value(), range.get()).value();
    ASSERT_EQ(imported->address(), range->address());
    bytes(*imported)[round] = round;
    EXPECT_EQ(bytes(*owned)[round], round);
    EXPECT_TRUE(imported->release().has_value());
  }
}

TEST_F(HostImportTest, ADescriptorInFlightIsCounted) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
  PacketSocket sender{UniqueFd(ends[0])};
  UniqueFd receiver(ends[1]);
  auto owned = allocate(*exporter_, 2 * kMiB);
  {
    const ExportedHandle handle = owned->export_handle().value();
    const std::array<std::uint8_t, 1> byte = {1};
    const std::array<int, 1> fds = {handle.fd.get()};
    ASSERT_TRUE(sender.send(byte, fds).has_value());
  }
  EXPECT_TRUE(owned->release().has_value());
  EXPECT_EQ(used(), 2 * kMiB) << "only an unread message holds it";
  receiver.reset();
  sender = PacketSocket();
  EXPECT_EQ(used(), 0U);
}

TEST_F(HostImportTest, AnUnusedHandleIsCounted) {
  auto owned = allocate(*exporter_, 2 * kMiB);
  auto handle = owned->export_handle();
  EXPECT_TRUE(owned->release().has_value());
  EXPECT_EQ(used(), 2 * kMiB);
  handle.value().fd.reset();
  EXPECT_EQ(used(), 0U);
}

TEST_F(HostImportTest, OnlyTheAllocatorExports) {
  auto owned = allocate(*exporter_, 2 * kMiB);
  const auto imported = importer_->import(owned->export_handle().value(), nullptr).value();
  EXPECT_EQ(imported->export_handle().error().code, ErrorCode::kInvalidArgument);
  EXPECT_TRUE(imported->release().has_value());
  EXPECT_TRUE(owned->release().has_value());
  EXPECT_EQ(owned->export_handle().error().code, ErrorCode::kInvalidArgument);
}

TEST_F(HostImportTest, ALegacyHandleOpenedTwiceIsOnePointerWithACount) {
  const auto owned = allocate(*exporter_, 2 * kMiB, HandleKind::kLegacy);
  const auto first = importer_->import(owned->export_handle().value(), nullptr).value();
  const auto second = importer_->import(owned->export_handle().value(), nullptr).value();
  EXPECT_EQ(first->address(), second->address());
  EXPECT_EQ(used(), 2 * kMiB);
  EXPECT_TRUE(first->release().has_value());
  EXPECT_TRUE(first->release().has_value());
  bytes(*owned)[9] = 33;
  EXPECT_EQ(bytes(*second)[9], 33) << "the count went down twice";
  EXPECT_TRUE(second->release().has_value());
  const auto third = importer_->import(owned->export_handle().value(), nullptr).value();
  EXPECT_EQ(bytes(*third)[9], 33);
  EXPECT_TRUE(third->release().has_value());
  EXPECT_TRUE(owned->release().has_value());
  EXPECT_EQ(used(), 0U);
}

TEST_F(HostImportTest, RefusesHandlesThatAreNone) {
  auto owned = allocate(*exporter_, 2 * kMiB);
  ExportedHandle empty;
  empty.size_bytes = 2 * kMiB;
  expect_refused(importer_->import(std::move(empty), nullptr), "no descriptor");
  ExportedHandle with_token = owned->export_handle().value();
  with_token.token.resize(64);
  expect_refused(importer_->import(std::move(with_token), nullptr), "a token");
  ExportedHandle no_size = owned->export_handle().value();
  no_size.size_bytes = 0;
  expect_refused(importer_->import(std::move(no_size), nullptr), "no size");
  ExportedHandle no_kind = owned->export_handle().value();
  no_kind.kind = static_cast<HandleKind>(0);
  expect_refused(importer_->import(std::move(no_kind), nullptr), "no kind");
}

TEST_F(HostImportTest, RefusesADifferentSizeKindOrDevice) {
  auto owned = allocate(*exporter_, 2 * kMiB);
  ExportedHandle larger = owned->export_handle().value();
  larger.size_bytes = 4 * kMiB;
  expect_refused(importer_->import(std::move(larger), nullptr), "size");
  ExportedHandle legacy = owned->export_handle().value();
  legacy.kind = HandleKind::kLegacy;
  expect_refused(importer_->import(std::move(legacy), nullptr), "kind");
  const auto stranger = open(16 * kMiB, "stranger");
  expect_refused(stranger->import(owned->export_handle().value(), nullptr), "device");
  ExportedHandle pipe_handle;
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const UniqueFd other_end(ends[1]);
  pipe_handle.fd = UniqueFd(ends[0]);
  pipe_handle.size_bytes = 2 * kMiB;
  expect_refused(importer_->import(std::move(pipe_handle), nullptr), "a pipe");
}

TEST_F(HostImportTest, RefusesForgedMemory) {
  constexpr int kAllSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
  const std::string right =
      fmt::format("kvferry-dev.{}.{}.{}.vmm", device_name(), 16 * kMiB, 2 * kMiB);
  expect_refused(importer_->import(forge("something", 2 * kMiB, kAllSeals), nullptr), "name");
  expect_refused(importer_->import(forge(right, kMiB, kAllSeals), nullptr), "shorter inside");
  expect_refused(importer_->import(forge(right, 2 * kMiB, F_SEAL_GROW), nullptr), "can shrink");
  expect_refused(importer_->import(forge(right, 2 * kMiB, kAllSeals), nullptr), "not in the books");
}

TEST_F(HostImportTest, ExportedMemoryCannotBeResized) {
  auto owned = allocate(*exporter_, 2 * kMiB);
  const ExportedHandle handle = owned->export_handle().value();
  EXPECT_NE(::ftruncate(handle.fd.get(), 4096), 0);
  EXPECT_NE(::ftruncate(handle.fd.get(), 4 * static_cast<off_t>(kMiB)), 0);
  EXPECT_EQ(::fcntl(handle.fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST_F(HostImportTest, MemoryThatOutlivesItsDeviceKeepsTheCapacityClaimed) {
  auto owned = allocate(*exporter_, 2 * kMiB);
  const ExportedHandle handle = owned->export_handle().value();
  owned.reset();
  exporter_.reset();
  importer_.reset();
  EXPECT_THROW(open(32 * kMiB), Exception);
  EXPECT_EQ(open(16 * kMiB)->memory_info()->free_bytes, 14 * kMiB);
}

}  // namespace
}  // namespace kvferry::ipc
