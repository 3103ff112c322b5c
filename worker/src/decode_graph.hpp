// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "decode_launch.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/wire/generation_messages.hpp"
#include "kvferry/worker/arena_use.hpp"
#include "kvferry/worker/caching_allocator.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvferry::worker {

/// Passes of ordinary size as one launch of work that was recorded once (a CUDA graph): everything
/// that differs from pass to pass lies in buffers of its own. It is bound to the addresses of the
/// arena and of the model's tables, so it is launched again after a clear and a re-init that bring
/// the arena back at the same ones, and recorded anew after others.
/// @threading one thread. @lifetime its launches were observed complete before it ends.
class DecodeGraph {
 public:
  static constexpr std::uint32_t kMaxWrites = 256;  ///< In each group.
  static constexpr std::uint32_t kMaxReads = 8192;
  static constexpr std::uint32_t kMaxSequences = 64;

  /// device_bytes: what its buffers take, for others to see; outlives it.
  DecodeGraph(ipc::Device& device,
              CachingAllocator& allocator,
              std::atomic<std::uint64_t>& device_bytes)
      : device_(device), allocator_(allocator), device_bytes_(device_bytes) {}
  DecodeGraph(const DecodeGraph&) = delete;
  DecodeGraph& operator=(const DecodeGraph&) = delete;

  /// Whether the pass fits, and no launch of before is under way.
  [[nodiscard]] bool takes(const std::vector<GroupPass>& groups, std::uint32_t sequences) const;
  /// After an error nothing was launched.
  [[nodiscard]] ipc::Status launch(const std::vector<GroupPass>& groups,
                                   const MappedArena& arena,
                                   ipc::Stream& stream,
                                   ipc::DevicePtr tables,
                                   std::uint32_t tokens_per_block);
  /// @pre the launch was observed complete; the next one may come
  [[nodiscard]] ipc::DecodeReply take_outputs(std::uint32_t sequences);

  /// Whether a launch is under way.
  [[nodiscard]] bool is_busy() const noexcept { return busy_; }
  /// Gives its device memory and what is recorded up; the next launch takes it again and records
  /// anew. The pinned buffers stay: to free one synchronises the device, and steps run.
  /// @pre no launch is under way
  void give_up();
  /// The same until resume(), and the pinned buffers. Returns the bytes of device memory.
  /// @pre no launch is under way
  std::uint64_t release();
  /// Takes as much as it had when it was released, before a launch needs it.
  [[nodiscard]] ipc::Result<std::uint64_t> resume();

  [[nodiscard]] std::uint64_t recordings() const noexcept { return recordings_; }
  [[nodiscard]] std::uint64_t launches() const noexcept { return launches_; }

 private:
  [[nodiscard]] bool is_bound_to(const MappedArena& arena, ipc::DevicePtr tables) const;
  [[nodiscard]] ipc::Status record(const MappedArena& arena,
                                   ipc::Stream& stream,
                                   ipc::DevicePtr tables,
                                   std::uint32_t tokens_per_block);
  [[nodiscard]] ipc::Status make_buffers(std::size_t groups);
  void write_inputs(const std::vector<GroupPass>& groups);

  ipc::Device& device_;
  CachingAllocator& allocator_;
  std::atomic<std::uint64_t>& device_bytes_;
  ScratchBuffer memory_;  ///< Outputs, then the inputs of each group.
  std::unique_ptr<ipc::PinnedBuffer> inputs_;
  std::unique_ptr<ipc::PinnedBuffer> outputs_;
  /// Its own, with the same regions as the arena's: those end with each mapping.
  std::vector<std::unique_ptr<ipc::RegionTable>> tables_;
  std::unique_ptr<ipc::RecordedWork> work_;
  ipc::DevicePtr bound_tables_;      ///< The model's, in what is recorded.
  std::size_t released_groups_ = 0;  ///< For so many it had buffers.
  bool busy_ = false;
  std::uint64_t recordings_ = 0;
  std::uint64_t launches_ = 0;
};

}  // namespace kvferry::worker
