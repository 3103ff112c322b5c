// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/device_fixture.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/kernels/host_twins.hpp"
#include "support/child_process.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

// What every device backend must do alike. Built once per backend: KVFERRY_TEST_DEVICE names it.
namespace kvferry::ipc {
namespace {

TEST_P(DeviceConformanceTest, VerifyFindsEachWrongWordInItsBlock) {
  auto memory = allocate(8 * kMiB);
  ASSERT_NE(memory, nullptr);
  std::vector<kernels::StridedRegion> regions(3);
  for (std::size_t r = 0; r < regions.size(); ++r) {
    regions[r].base = static_cast<unsigned char*>((memory->address() + r * kMiB).raw());
    regions[r].block_bytes = r == 1 ? 509 : 4096;  // an odd one, with a cut last word
    regions[r].block_stride = r == 1 ? 509 : 4096;
    regions[r].salt = r + 1;
  }
  auto table = device_->make_region_table(regions);
  ASSERT_TRUE(table.has_value());
  std::vector<kernels::SeededBlock> blocks;
  for (std::uint32_t i = 0; i < 230; ++i) blocks.push_back({1000 + i, i, 0});  // > one launch
  ASSERT_TRUE(stream_->fill_pattern(**table, blocks).has_value());
  auto results = pinned(blocks.size() * 8);
  const auto* words = reinterpret_cast<const std::uint64_t*>(results->data());
  std::memset(results->data(), 0, results->size_bytes());
  ASSERT_TRUE(stream_->verify_pattern(**table, blocks, *results).has_value());
  finish();
  for (std::size_t i = 0; i < blocks.size(); ++i) EXPECT_EQ(words[i], 0U) << i;

  auto byte = pinned(1);
  const DevicePtr victim = memory->address() + kMiB + 17 * 509 + 508;  // last byte, block 17
  copy(CopyDirection::kDeviceToHost, byte->data(), victim, 1);
  *byte->data() ^= std::byte{0x40};
  copy(CopyDirection::kHostToDevice, byte->data(), victim, 1);
  std::memset(results->data(), 0, results->size_bytes());
  ASSERT_TRUE(stream_->verify_pattern(**table, blocks, *results).has_value());
  finish();
  for (std::size_t i = 0; i < blocks.size(); ++i) EXPECT_EQ(words[i], i == 17 ? 1U : 0U) << i;
}

TEST_P(DeviceConformanceTest, ChecksumsMatchTheReference) {
  auto memory = allocate(4 * kMiB);
  ASSERT_NE(memory, nullptr);
  std::vector<kernels::StridedRegion> regions(2);
  regions[0] = {static_cast<unsigned char*>(memory->address().raw()), 1000, 999, 0, 1};
  regions[1] = {static_cast<unsigned char*>((memory->address() + kMiB).raw()), 2048, 2048, 999, 2};
  auto table = device_->make_region_table(regions);
  std::vector<kernels::SeededBlock> blocks;
  std::vector<std::uint32_t> ids;
  for (std::uint32_t i = 0; i < 300; ++i) {
    blocks.push_back({77 + i, i, 0});
    ids.push_back(299 - i);
  }
  // The image below has the gaps between the blocks in it.
  ASSERT_TRUE(stream_->zero(memory->address(), 4 * kMiB).has_value());
  ASSERT_TRUE(stream_->fill_pattern(**table, blocks).has_value());
  auto results = pinned(ids.size() * 8);
  ASSERT_TRUE(stream_->checksum(**table, ids, *results).has_value());
  auto image = pinned(4 * kMiB);
  copy(CopyDirection::kDeviceToHost, image->data(), memory->address(), 4 * kMiB);
  auto host_regions = regions;
  for (auto& region : host_regions) {
    region.base = reinterpret_cast<unsigned char*>(image->data()) +
                  (region.base - static_cast<unsigned char*>(memory->address().raw()));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    kernels::BlockIds one;
    one.count = 1;
    one.ids[0] = ids[i];
    std::uint64_t expected = 0;
    kernels::host::checksum(host_regions.data(), 2, one, &expected);
    EXPECT_EQ(reinterpret_cast<const std::uint64_t*>(results->data())[i], expected) << i;
  }
}

TEST_P(DeviceConformanceTest, CopiesOneByOneAndBatchedMoveTheSameBytes) {
  auto memory = allocate(16 * kMiB);
  ASSERT_NE(memory, nullptr);
  constexpr std::uint64_t kChunk = 16 << 10;
  constexpr std::size_t kCount = 400;
  auto source = pinned(kCount * kChunk);
  auto target = pinned(kCount * kChunk);
  std::mt19937_64 random(3);
  for (std::uint64_t i = 0; i < kCount * kChunk; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(source->data() + i, &word, 8);
  }
  for (const CopyMode mode : {CopyMode::kEach, CopyMode::kBatch}) {
    std::vector<CopyOp> up;
    std::vector<CopyOp> down;
    for (std::size_t i = 0; i < kCount; ++i) {
      const DevicePtr at = memory->address() + (kCount - 1 - i) * 2 * kChunk;
      up.push_back({source->data() + i * kChunk, at, kChunk});
      down.push_back({target->data() + i * kChunk, at, kChunk});
    }
    std::memset(target->data(), 0, target->size_bytes());
    ASSERT_TRUE(stream_->zero(memory->address(), 16 * kMiB).has_value());
    ASSERT_TRUE(stream_->copy(CopyDirection::kHostToDevice, up, mode).has_value());
    ASSERT_TRUE(stream_->copy(CopyDirection::kDeviceToHost, down, mode).has_value());
    finish();
    EXPECT_EQ(std::memcmp(source->data(), target->data(), kCount * kChunk), 0);
  }
}

TEST_P(DeviceConformanceTest, RowsMatchTheReferenceWhateverTheirSizesPitchesAndAlignment) {
  constexpr std::uint64_t kDeviceBytes = 16 * kMiB;
  constexpr std::uint64_t kHostBytes = 8 * kMiB;
  auto memory = allocate(kDeviceBytes);
  ASSERT_NE(memory, nullptr);
  auto host = pinned(kHostBytes);
  auto device_image = pinned(kDeviceBytes);
  std::mt19937_64 random(11);
  const auto pick = [&random](std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  };
  const auto scramble = [&random](std::byte* bytes, std::uint64_t size) {
    for (std::uint64_t i = 0; i < size; i += 8) {
      const std::uint64_t word = random();
      std::memcpy(bytes + i, &word, 8);
    }
  };
  for (std::size_t round = 0; round < 40; ++round) {
    // From single bytes over 512-byte scales to 64 KiB pages; places that are 1-, 4- or 8-byte
    // aligned only.
    const std::uint64_t alignment = std::array<std::uint64_t, 4>{1, 4, 8, 512}.at(round % 4);
    scramble(host->data(), kHostBytes);
    scramble(device_image->data(), kDeviceBytes);
    copy(CopyDirection::kHostToDevice, device_image->data(), memory->address(), kDeviceBytes);
    std::vector<RowCopyOp> ops;
    std::uint64_t device_at = alignment * pick(0, 9);
    std::uint64_t host_at = alignment * pick(0, 9);
    for (std::uint64_t i = 0, count = pick(1, 5); i < count; ++i) {
      RowCopyOp op;
      op.row_bytes = alignment * pick(1, 65'536 / std::max<std::uint64_t>(alignment, 8));
      op.rows = pick(1, 40);
      op.device_pitch = op.row_bytes + alignment * pick(0, 3) * pick(0, 900);
      op.host_pitch = op.row_bytes + alignment * pick(0, 2);
      if (device_at + op.rows * op.device_pitch > kDeviceBytes ||
          host_at + op.rows * op.host_pitch > kHostBytes) {
        break;
      }
      op.host = host->data() + host_at;
      op.device = memory->address() + device_at;
      device_at += op.rows * op.device_pitch + alignment * pick(0, 5);
      host_at += op.rows * op.host_pitch;
      ops.push_back(op);
    }
    ops.push_back({host->data(), 0, memory->address(), 0, 0, 7});  // nothing
    ops.push_back({host->data(), 0, memory->address(), 0, 7, 0});  // nothing either
    const bool to_host = round % 8 < 4;
    std::vector<std::byte> expected_host(host->data(), host->data() + kHostBytes);
    std::vector<std::byte> expected_device(device_image->data(),
                                           device_image->data() + kDeviceBytes);
    for (const RowCopyOp& op : ops) {
      for (std::uint64_t row = 0; row < op.rows; ++row) {
        std::byte* on_host = expected_host.data() +
                             (static_cast<std::byte*>(op.host) - host->data()) +
                             row * op.host_pitch;
        std::byte* on_device = expected_device.data() +
                               (op.device.address - memory->address().address) +
                               row * op.device_pitch;
        std::memcpy(to_host ? on_host : on_device, to_host ? on_device : on_host, op.row_bytes);
      }
    }
    const auto direction = to_host ? CopyDirection::kDeviceToHost : CopyDirection::kHostToDevice;
    const auto copied = stream_->copy_rows(direction, ops);
    ASSERT_TRUE(copied.has_value()) << copied.error().to_string();
    finish();
    copy(CopyDirection::kDeviceToHost, device_image->data(), memory->address(), kDeviceBytes);
    ASSERT_EQ(std::memcmp(host->data(), expected_host.data(), kHostBytes), 0) << "round " << round;
    ASSERT_EQ(std::memcmp(device_image->data(), expected_device.data(), kDeviceBytes), 0)
        << "round " << round;
  }
}

// Regions of a large arena: beyond 4 GiB, and further apart than the pitch of a 2D copy may be.
TEST_P(DeviceConformanceTest, RowsMayLieFurtherApartThanAPitchMayBe) {
  constexpr std::uint64_t kGiB = 1024 * kMiB;
  constexpr std::uint64_t kRow = 12'345;
  constexpr std::uint64_t kRows = 4;
  std::unique_ptr<Device> device = open_device(*DeviceSpec::parse(large_device_text()));
  auto memory = device->allocate(7 * kGiB, GetParam(), nullptr);
  ASSERT_TRUE(memory.has_value()) << memory.error().to_string();
  auto stream = device->make_stream(StreamPriority::kNormal);
  ASSERT_TRUE(stream.has_value());
  stream_ = std::move(stream).value();
  auto up = pinned(kRows * kRow);
  auto down = pinned(kRows * kRow);
  std::mt19937_64 random(5);
  for (std::uint64_t i = 0; i < kRows * kRow; ++i) up->data()[i] = std::byte(random());
  // One that has no divisor that would do as a pitch, and is copied row by row; one beyond 2 GiB
  // that has; one below.
  for (const std::uint64_t pitch : {2 * kGiB + 11, 2 * kGiB + kMiB, kGiB + 256}) {
    std::memset(down->data(), 0, kRows * kRow);
    const DevicePtr at = (*memory)->address() + 77;
    const RowCopyOp store{up->data(), kRow, at, pitch, kRow, kRows};
    RowCopyOp load = store;
    load.host = down->data();
    ASSERT_TRUE(stream_->copy_rows(CopyDirection::kHostToDevice, {&store, 1}).has_value());
    finish();
    for (std::uint64_t row = 0; row < kRows; ++row) {
      copy(CopyDirection::kDeviceToHost, down->data() + row * kRow, at + row * pitch, kRow);
    }
    ASSERT_EQ(std::memcmp(up->data(), down->data(), kRows * kRow), 0) << "to device, " << pitch;
    std::memset(down->data(), 0, kRows * kRow);
    ASSERT_TRUE(stream_->copy_rows(CopyDirection::kDeviceToHost, {&load, 1}).has_value());
    finish();
    ASSERT_EQ(std::memcmp(up->data(), down->data(), kRows * kRow), 0) << "to host, " << pitch;
  }
  stream_.reset();
  ASSERT_TRUE((*memory)->release().has_value());
}

TEST_P(DeviceConformanceTest, RowsThatOverlapOrLeaveTheAddressSpaceAreRefused) {
  auto memory = allocate(kMiB);
  ASSERT_NE(memory, nullptr);
  auto host = pinned(kMiB);
  const RowCopyOp valid{host->data(), 64, memory->address(), 128, 64, 10};
  std::vector<RowCopyOp> invalid(6, valid);
  invalid[0].host_pitch = 63;
  invalid[1].device_pitch = 63;
  invalid[2].rows = ~0ULL;
  invalid[3].device = {};
  invalid[4].host = nullptr;
  invalid[5].row_bytes = ~0ULL;
  for (const RowCopyOp& op : invalid) {
    const std::vector<RowCopyOp> ops{valid, op};
    const auto copied = stream_->copy_rows(CopyDirection::kDeviceToHost, ops);
    ASSERT_FALSE(copied.has_value());
    EXPECT_EQ(copied.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_FALSE(stream_->copy_rows(static_cast<CopyDirection>(9), {&valid, 1}).has_value());
  EXPECT_TRUE(stream_->query().has_value());
}

TEST_P(DeviceConformanceTest, ReleaseGivesTheMemoryBackToTheDriver) {
  const auto before = device_->memory_info();
  auto memory = allocate(64 * kMiB);
  ASSERT_NE(memory, nullptr);
  const auto during = device_->memory_info();
  ASSERT_TRUE(memory->release().has_value());
  const auto after = device_->memory_info();
  ASSERT_TRUE(before.has_value() && during.has_value() && after.has_value());
  EXPECT_EQ(before->free_bytes - during->free_bytes, 64 * kMiB);
  EXPECT_EQ(after->free_bytes, before->free_bytes);
  EXPECT_TRUE(memory->release().has_value());  // twice is harmless
}

TEST_P(DeviceConformanceTest, RefusesMoreThanThereIsNamingBothSizes) {
  const auto info = device_->memory_info();
  ASSERT_TRUE(info.has_value());
  auto memory = device_->allocate(info->total_bytes + 64 * kMiB, GetParam(), nullptr);
  ASSERT_FALSE(memory.has_value());
  EXPECT_EQ(memory.error().code, ErrorCode::kNoDeviceMemory) << memory.error().to_string();
  EXPECT_NE(memory.error().message.find("free"), std::string::npos) << memory.error().message;
  EXPECT_TRUE(stream_->query().has_value());  // and the device still works
}

TEST_P(DeviceConformanceTest, VmmMemoryComesBackAtTheSameAddress) {
  if (GetParam() != HandleKind::kVmm) GTEST_SKIP() << "VMM only";
  auto range = device_->reserve(8 * kMiB);
  ASSERT_TRUE(range.has_value());
  for (int epoch = 0; epoch < 20; ++epoch) {
    auto memory = allocate(4 * kMiB, range->get());
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(memory->address(), (*range)->address());
    ASSERT_TRUE(stream_->zero(memory->address(), 4 * kMiB).has_value());
    finish();
    ASSERT_TRUE(memory->release().has_value());
  }
}

// A peer process that imports our memory: device_peer.cpp.
class Peer {
 public:
  explicit Peer(HandleKind kind) {
    int pair[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    socket_ = PacketSocket(UniqueFd(pair[0]));
    const UniqueFd other(pair[1]);
    child_ = std::make_unique<test::ChildProcess>(
        test::ChildOptions{test::sibling_program("kvferry_device_peer"),
                           {device_text(), std::string(to_string(kind))},
                           {},
                           {other.get()}});
  }
  void send(const ExportedHandle& handle) {
    std::vector<std::uint8_t> bytes(8);
    std::memcpy(bytes.data(), &handle.size_bytes, 8);
    bytes.insert(bytes.end(), handle.token.begin(), handle.token.end());
    const int fd = handle.fd.get();
    const auto fds = handle.fd.valid() ? std::span<const int>(&fd, 1) : std::span<const int>();
    ASSERT_TRUE(socket_.send(bytes, fds).has_value());
  }
  [[nodiscard]] test::ChildProcess& child() { return *child_; }

 private:
  PacketSocket socket_;
  std::unique_ptr<test::ChildProcess> child_;
};

TEST_P(DeviceConformanceTest, AnotherProcessReadsAndWritesTheSameMemory) {
  auto memory = allocate(32 * kMiB);
  ASSERT_NE(memory, nullptr);
  auto image = pinned(kMiB);
  std::memset(image->data(), 0x5A, kMiB);
  copy(CopyDirection::kHostToDevice, image->data(), memory->address() + 31 * kMiB, kMiB);
  Peer peer(GetParam());
  auto handle = memory->export_handle();
  ASSERT_TRUE(handle.has_value()) << handle.error().to_string();
  peer.send(*handle);
  handle->fd.reset();
  ASSERT_TRUE(peer.child().wait_line("mapped", test::soon())) << peer.child().stderr_text();
  ASSERT_TRUE(peer.child().write_line("invert"));  // the last MiB, through its own mapping
  ASSERT_TRUE(peer.child().wait_line("inverted", test::soon())) << peer.child().stderr_text();
  copy(CopyDirection::kDeviceToHost, image->data(), memory->address() + 31 * kMiB, kMiB);
  for (std::uint64_t i = 0; i < kMiB; ++i) {
    ASSERT_EQ(image->data()[i], std::byte{0xA5}) << i;
  }
  ASSERT_TRUE(peer.child().write_line("close"));
  ASSERT_TRUE(peer.child().wait_line("closed", test::soon())) << peer.child().stderr_text();
  ASSERT_TRUE(memory->release().has_value());
  peer.child().close_stdin();
  EXPECT_EQ(peer.child().wait(test::soon()), test::ChildExit::exited(0));
}

// What an engine does: memory that kvferry did not allocate, known by an address inside it.
TEST_P(DeviceConformanceTest, BorrowedMemoryIsFoundFromAnyAddressAndSharedAsAWhole) {
  auto memory = allocate(32 * kMiB);
  ASSERT_NE(memory, nullptr);
  auto lent = device_->borrow(memory->address() + (17 * kMiB + 4096));
  ASSERT_TRUE(lent.has_value()) << lent.error().to_string();
  EXPECT_EQ((*lent)->address(), memory->address());
  EXPECT_EQ((*lent)->size_bytes(), memory->size_bytes());
  EXPECT_EQ((*lent)->kind(), GetParam());
  auto again = device_->borrow(memory->address());
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ((*again)->id(), (*lent)->id());
  auto image = pinned(kMiB);
  std::memset(image->data(), 0x5A, kMiB);
  copy(CopyDirection::kHostToDevice, image->data(), memory->address() + 31 * kMiB, kMiB);
  Peer peer(GetParam());
  auto handle = (*lent)->export_handle();
  ASSERT_TRUE(handle.has_value()) << handle.error().to_string();
  peer.send(*handle);
  handle->fd.reset();
  ASSERT_TRUE(peer.child().wait_line("mapped", test::soon())) << peer.child().stderr_text();
  ASSERT_TRUE(peer.child().write_line("invert"));
  ASSERT_TRUE(peer.child().wait_line("inverted", test::soon())) << peer.child().stderr_text();
  copy(CopyDirection::kDeviceToHost, image->data(), memory->address() + 31 * kMiB, kMiB);
  for (std::uint64_t i = 0; i < kMiB; ++i) ASSERT_EQ(image->data()[i], std::byte{0xA5}) << i;
  ASSERT_TRUE(peer.child().write_line("close"));
  ASSERT_TRUE(peer.child().wait_line("closed", test::soon())) << peer.child().stderr_text();
}

TEST_P(DeviceConformanceTest, BorrowingKeepsNothingOnceGivenBackAndSeesTheFree) {
  const auto before = device_->memory_info();
  auto memory = allocate(64 * kMiB);
  ASSERT_NE(memory, nullptr);
  auto lent = device_->borrow(memory->address());
  ASSERT_TRUE(lent.has_value()) << lent.error().to_string();
  EXPECT_TRUE((*lent)->still_allocated().value_or(false));
  ASSERT_TRUE((*lent)->release().has_value());
  EXPECT_TRUE((*lent)->still_allocated().value_or(false)) << "giving back frees nothing";
  EXPECT_FALSE((*lent)->export_handle().has_value());
  ASSERT_TRUE(memory->release().has_value());
  EXPECT_FALSE((*lent)->still_allocated().value_or(true));
  const auto after = device_->memory_info();
  ASSERT_TRUE(before.has_value() && after.has_value());
  EXPECT_EQ(after->free_bytes, before->free_bytes);
  // Whatever lies there next is another allocation.
  auto next = allocate(64 * kMiB);
  ASSERT_NE(next, nullptr);
  auto other = device_->borrow(next->address());
  ASSERT_TRUE(other.has_value());
  EXPECT_NE((*other)->id(), (*lent)->id());
  EXPECT_FALSE((*lent)->still_allocated().value_or(true));
}

TEST_P(DeviceConformanceTest, MemoryThatIsNotOnTheDeviceCannotBeBorrowed) {
  std::vector<std::byte> heap(kMiB);
  const DevicePtr pageable{reinterpret_cast<std::uintptr_t>(heap.data())};
  auto refused = device_->borrow(pageable);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument) << refused.error().to_string();
  auto buffer = pinned(kMiB);
  refused = device_->borrow(DevicePtr{reinterpret_cast<std::uintptr_t>(buffer->data())});
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument) << refused.error().to_string();
  EXPECT_TRUE(stream_->query().has_value());  // and the device still works
}

TEST_P(DeviceConformanceTest, KilledImporterPinsNothing) {
  const auto before = device_->memory_info();
  auto memory = allocate(64 * kMiB);
  ASSERT_NE(memory, nullptr);
  Peer peer(GetParam());
  auto handle = memory->export_handle();
  ASSERT_TRUE(handle.has_value());
  peer.send(*handle);
  handle->fd.reset();
  ASSERT_TRUE(peer.child().wait_line("mapped", test::soon())) << peer.child().stderr_text();
  peer.child().kill();
  // Death is proven by the pidfd, even while the child is still a zombie.
  ASSERT_TRUE(peer.child().wait_zombie(test::soon()));
  ASSERT_TRUE(memory->release().has_value());
  ASSERT_EQ(peer.child().wait(test::soon()), test::ChildExit::killed_by(SIGKILL));
  const auto after = device_->memory_info();
  ASSERT_TRUE(before.has_value() && after.has_value());
  EXPECT_EQ(after->free_bytes, before->free_bytes);
}

TEST_P(DeviceConformanceTest, ImporterKeepsReferenceCountedMemoryAlive) {
  if (GetParam() != HandleKind::kVmm) GTEST_SKIP() << "freeing legacy memory first is undefined";
  auto memory = allocate(64 * kMiB);
  ASSERT_NE(memory, nullptr);
  Peer peer(GetParam());
  auto handle = memory->export_handle();
  ASSERT_TRUE(handle.has_value());
  peer.send(*handle);
  handle->fd.reset();
  ASSERT_TRUE(peer.child().wait_line("mapped", test::soon())) << peer.child().stderr_text();
  const auto mapped = device_->memory_info();
  ASSERT_TRUE(memory->release().has_value());
  const auto released = device_->memory_info();
  ASSERT_TRUE(mapped.has_value() && released.has_value());
  EXPECT_EQ(released->free_bytes, mapped->free_bytes) << "the peer still maps it";
  ASSERT_TRUE(peer.child().write_line("close"));
  ASSERT_TRUE(peer.child().wait_line("closed", test::soon())) << peer.child().stderr_text();
  const auto closed = device_->memory_info();
  ASSERT_TRUE(closed.has_value());
  EXPECT_EQ(closed->free_bytes, released->free_bytes + 64 * kMiB);
}

TEST_P(DeviceConformanceTest, RegisteredHostMemoryMovesLikePinnedMemory) {
  auto memory = allocate(4 * kMiB);
  ASSERT_NE(memory, nullptr);
  std::vector<std::byte> raw(6 * kMiB);
  auto address = reinterpret_cast<std::uintptr_t>(raw.data());
  auto* aligned = raw.data() + (kMiB - address % kMiB);
  ASSERT_TRUE(device_->register_host(aligned, 4 * kMiB).has_value());
  std::memset(aligned, 0x3C, 4 * kMiB);
  copy(CopyDirection::kHostToDevice, aligned, memory->address(), 4 * kMiB);
  std::memset(aligned, 0, 4 * kMiB);
  copy(CopyDirection::kDeviceToHost, aligned, memory->address(), 4 * kMiB);
  EXPECT_EQ(aligned[4 * kMiB - 1], std::byte{0x3C});
  EXPECT_TRUE(device_->unregister_host(aligned).has_value());
  EXPECT_FALSE(device_->register_host(nullptr, kMiB).has_value());
  EXPECT_FALSE(device_->register_host(aligned, 0).has_value());
}

INSTANTIATE_TEST_SUITE_P(Handles,
                         DeviceConformanceTest,
                         testing::Values(HandleKind::kVmm, HandleKind::kLegacy),
                         [](const auto& param) { return std::string(to_string(param.param)); });

}  // namespace
}  // namespace kvferry::ipc
