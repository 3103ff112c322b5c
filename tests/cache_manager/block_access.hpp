// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/device/stream_word.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "support/child_process.hpp"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// A test's own way to what lies on a device, of either backend: a stream that waits for nobody
/// else's, as a worker's is. All calls but begin() return when the device has ended what they ask.
/// @threading one thread. @lifetime the device outlives it.
class BlockAccess {
 public:
  using Bytes = std::vector<unsigned char>;

  /// regions: of blocks of so many packed bytes. device: makes the buffers.
  BlockAccess(ipc::Device& device,
              std::unique_ptr<ipc::Stream> stream,
              std::vector<kernels::StridedRegion> regions,
              std::uint64_t block_bytes)
      : stream_(std::move(stream)),
        regions_(std::move(regions)),
        block_bytes_(block_bytes),
        buffer_(device.make_pinned_buffer(block_bytes).value()),
        word_(device.make_pinned_buffer(sizeof(std::uint32_t)).value()),
        table_(device.make_region_table(regions_).value()) {
    gate().store(0);
  }
  BlockAccess(const BlockAccess&) = delete;
  BlockAccess& operator=(const BlockAccess&) = delete;
  ~BlockAccess() {
    // Whatever a failed test left behind the gate must not be freed under the device.
    open_gate();
    finish();
  }

  void put(std::uint32_t block, const Bytes& bytes) {
    std::memcpy(buffer_->data(), bytes.data(), block_bytes_);
    copy(ipc::CopyDirection::kHostToDevice, ops_of(block));
  }
  [[nodiscard]] Bytes get(std::uint32_t block) {
    copy(ipc::CopyDirection::kDeviceToHost, ops_of(block));
    return taken();
  }
  /// A packed block, in a slot of the ring say.
  void put_packed(ipc::DevicePtr packed, const Bytes& bytes) {
    std::memcpy(buffer_->data(), bytes.data(), block_bytes_);
    copy(ipc::CopyDirection::kHostToDevice, {{buffer_->data(), packed, block_bytes_}});
  }
  [[nodiscard]] Bytes get_packed(ipc::DevicePtr packed) {
    copy(ipc::CopyDirection::kDeviceToHost, {{buffer_->data(), packed, block_bytes_}});
    return taken();
  }

  /// As a worker's agent does it.
  void gather(std::uint32_t block, ipc::DevicePtr packed) {
    EXPECT_TRUE(stream_->gather(*table_, {&block, 1}, packed, block_bytes_).has_value());
    finish();
  }
  void scatter(std::uint32_t block, ipc::DevicePtr packed) {
    EXPECT_TRUE(stream_->scatter(*table_, {&block, 1}, packed, block_bytes_).has_value());
    finish();
  }
  /// The same, enqueued and held before it begins, until end() lets it go and waits for it.
  void begin_gather(std::uint32_t block, ipc::DevicePtr packed) {
    close_gate();
    EXPECT_TRUE(stream_->gather(*table_, {&block, 1}, packed, block_bytes_).has_value());
  }
  void begin_scatter(std::uint32_t block, ipc::DevicePtr packed) {
    close_gate();
    EXPECT_TRUE(stream_->scatter(*table_, {&block, 1}, packed, block_bytes_).has_value());
  }
  void end() {
    open_gate();
    finish();
  }

 private:
  [[nodiscard]] ipc::StreamWord gate() const {
    return ipc::StreamWord(reinterpret_cast<std::uint32_t*>(word_->data()));
  }
  void close_gate() { EXPECT_TRUE(stream_->wait_word(gate(), ++held_).has_value()); }
  void open_gate() { gate().store(held_); }

  [[nodiscard]] std::vector<ipc::CopyOp> ops_of(std::uint32_t block) const {
    std::vector<ipc::CopyOp> ops;
    for (const kernels::StridedRegion& region : regions_) {
      const auto base = reinterpret_cast<std::uintptr_t>(region.base);
      ops.push_back({buffer_->data() + region.packed_offset,
                     ipc::DevicePtr{base} + block * region.block_stride, region.block_bytes});
    }
    return ops;
  }
  void copy(ipc::CopyDirection direction, const std::vector<ipc::CopyOp>& ops) {
    const ipc::Status copied = stream_->copy(direction, ops, ipc::CopyMode::kEach);
    EXPECT_TRUE(copied.has_value()) << copied.error().to_string();
    finish();
  }
  [[nodiscard]] Bytes taken() const {
    Bytes bytes(block_bytes_);
    std::memcpy(bytes.data(), buffer_->data(), block_bytes_);
    return bytes;
  }
  void finish() {
    const ipc::EventFd ended;
    EXPECT_TRUE(stream_->notify(ended.fd()).has_value());
    pollfd waited{ended.fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&waited, 1, test::soon().poll_timeout_ms()), 1) << "the stream does not end";
    // The stream orders the memory, not the eventfd.
    const auto state = stream_->query();
    EXPECT_TRUE(state.has_value()) << state.error().to_string();
  }

  std::unique_ptr<ipc::Stream> stream_;
  const std::vector<kernels::StridedRegion> regions_;
  const std::uint64_t block_bytes_;
  std::unique_ptr<ipc::PinnedBuffer> buffer_;
  std::unique_ptr<ipc::PinnedBuffer> word_;
  std::unique_ptr<ipc::RegionTable> table_;
  std::uint32_t held_ = 0;
};

}  // namespace kvferry::cache_manager
