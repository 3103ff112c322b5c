// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/worker/caching_allocator.hpp"
#include "safetensors.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace kvferry::worker {

/// A file that rank 0 reads and broadcasts to the devices of all ranks, piece by piece, through
/// memory of which each piece has its half for a while: rank 0 reads the next one meanwhile.
/// @threading one thread. @lifetime device, stream and allocator outlive it. Its memory is in use
/// until the stream has been seen to end; end() lets that come.
class WeightsBroadcast {
  struct Start {};  // For start() alone.

 public:
  static constexpr std::uint64_t kPieceBytes = 8ULL << 20;

  /// What rank 0 has opened for an update to come. root: none when the group is a kept one.
  struct Opened {
    SafetensorsFile file;
    ipc::BroadcastId id;
    std::unique_ptr<ipc::BroadcastRoot> root;
  };
  struct Ranks {
    std::uint32_t rank = 0;
    std::uint32_t ranks = 0;
  };

  /// Waits until all ranks have joined.
  [[nodiscard]] static ipc::Result<std::unique_ptr<ipc::BroadcastGroup>> join(
      ipc::Device& device,
      const ipc::BroadcastId& id,
      Ranks ranks,
      const ipc::BroadcastRoot* root,
      const ipc::BroadcastWait& wait);
  /// Takes memory. opened: at rank 0 alone.
  [[nodiscard]] static ipc::Result<std::unique_ptr<WeightsBroadcast>> start(
      ipc::Device& device,
      CachingAllocator& allocator,
      ipc::Stream& stream,
      std::unique_ptr<ipc::BroadcastGroup> group,
      std::optional<Opened> opened);

  /// Through start().
  WeightsBroadcast(Start /*start*/,
                   ipc::Stream& stream,
                   std::unique_ptr<ipc::BroadcastGroup> group,
                   std::optional<Opened> opened)
      : stream_(stream), opened_(std::move(opened)), group_(std::move(group)) {}

  /// The tensors of the file, on every rank. The first call.
  [[nodiscard]] ipc::Result<std::vector<TensorInfo>> tensors(const ipc::BroadcastWait& wait);
  /// Enqueues the bytes of the file from there on, at most kPieceBytes; every rank asks for the
  /// same ones. They lie at that address for the work that is enqueued before done_with_piece().
  [[nodiscard]] ipc::Result<ipc::DevicePtr> piece(std::uint64_t offset,
                                                  std::uint64_t size_bytes,
                                                  const ipc::BroadcastWait& wait);
  [[nodiscard]] ipc::Status done_with_piece();
  /// Waits until all that was enqueued has ended well.
  [[nodiscard]] ipc::Status finish(const ipc::BroadcastWait& wait);
  /// The group, for the next update. After finish().
  [[nodiscard]] std::unique_ptr<ipc::BroadcastGroup> keep_group() { return std::move(group_); }
  /// Leaves the group: what still runs on the stream ends soon.
  void end() noexcept { group_.reset(); }

 private:
  struct Half {
    ScratchBuffer memory;
    std::unique_ptr<ipc::PinnedBuffer> read;  ///< From the file, or of the file's header.
    ipc::EventFd done;
    bool in_use = false;
  };

  [[nodiscard]] ipc::Status take_memory(ipc::Device& device, CachingAllocator& allocator);
  [[nodiscard]] ipc::Status await(Half& half, const ipc::BroadcastWait& wait);
  /// Rank 0 sends what stands there, the others receive it there.
  [[nodiscard]] ipc::Status exchange(std::span<std::byte> bytes, const ipc::BroadcastWait& wait);
  [[nodiscard]] ipc::Status exchange_piece(std::span<std::byte> bytes,
                                           const ipc::BroadcastWait& wait);

  ipc::Stream& stream_;
  std::optional<Opened> opened_;
  std::array<Half, 2> halves_;
  ipc::EventFd finished_;
  std::size_t next_ = 0;  ///< Of the halves.
  std::unique_ptr<ipc::BroadcastGroup> group_;
};

}  // namespace kvferry::worker
