// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/arena_blocks.hpp"
#include "bench/copier/messages.hpp"
#include "bench/copier/pinned_pieces.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace kvferry::cli {

/// All copies of one way in a worker that copies by itself. Requests go in chunks, in their order,
/// as many under way as the link needs. Staged ones take turns on a few tracks, each a slot of the
/// ring with a stream of its own: kernel and copy of a chunk follow each other there without
/// anybody in between, beside those of the other slots. All others share one stream. Copies are
/// joined, and cut at the pool's pieces, as a mover's.
/// @threading the loop's thread. @lifetime all that it is given outlives it.
class CopyLane {
 public:
  struct Context {
    ipc::EventLoop& loop;
    ipc::Device& device;
    const ArenaBlocks& arena;
    PinnedPieces& pool;
    OwnStrategy strategy;
    ipc::CopyDirection direction;
    std::vector<ipc::DevicePtr> slots;  ///< Of this lane; staged only.
    std::uint64_t slot_bytes = 0;
    std::function<void(const CopyReply&)> answer;
    std::function<void(const ipc::Error&)> on_device_failed;  ///< It is beyond use.
    std::function<bool()> has_news;  ///< Something came that is not to wait.
  };

  /// Throws Exception.
  explicit CopyLane(Context context);
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;
  ~CopyLane();

  /// Started by the next pump(), and answered once. @pre check_copy_request() has nothing against
  /// it.
  void submit(CopyRequest request);
  /// Starts what there is room for, and sees to it that its end is told.
  void pump();

 private:
  struct Job {
    CopyRequest request;
    std::size_t next = 0;    ///< Item.
    std::size_t chunks = 0;  ///< Under way.
    std::optional<ipc::Error> error;
    [[nodiscard]] bool has_next() const noexcept { return !error && next < request.items.size(); }
  };
  struct Chunk {
    Job* job = nullptr;
    std::uint64_t size_bytes = 0;
    std::size_t calls = 0;
  };
  struct Track {
    ipc::DevicePtr slot;
    ipc::EventFd ended;
    std::deque<Chunk> under_way;          ///< In stream order.
    std::deque<std::size_t> notices;      ///< That are to come: of how many chunks each.
    std::size_t unnoticed = 0;            ///< The last chunks, of which no notice tells.
    std::unique_ptr<ipc::Stream> stream;  ///< Last: what is left in it may still signal the above.
  };

  [[nodiscard]] bool stages() const noexcept { return context_.strategy == OwnStrategy::kStaged; }
  [[nodiscard]] bool to_host() const noexcept {
    return context_.direction == ipc::CopyDirection::kDeviceToHost;
  }
  [[nodiscard]] Job* next_job() noexcept;
  [[nodiscard]] bool has_room(const Track& track) const noexcept;
  void start_chunk(Job& job, Track& track);
  [[nodiscard]] ipc::Status enqueue_staged(Job& job, Track& track, Chunk& chunk);
  [[nodiscard]] ipc::Status enqueue_direct(Job& job, Track& track, Chunk& chunk);
  void ask_for_notices();
  [[nodiscard]] bool watch(Track& track);
  void on_signalled(Track& track);
  void finish(Track& track, std::size_t chunks);
  void answer_ended();
  void arm_watchdog();
  void on_watchdog();

  Context context_;
  std::deque<std::unique_ptr<Job>> jobs_;  ///< In the order of their coming.
  std::vector<std::unique_ptr<Track>> tracks_;
  std::size_t turn_ = 0;  ///< The next chunk's track.
  std::size_t chunks_ = 0;
  std::size_t calls_ = 0;
  std::uint64_t bytes_ = 0;
  bool watchdog_armed_ = false;
  ipc::TimerId watchdog_ = 0;
  ipc::TimePoint progress_{};
  std::vector<ipc::CopyOp> ops_;  ///< Kept for its memory.
  std::vector<ipc::RowCopyOp> rows_;
  std::vector<ipc::CopyOp> block_ops_;  ///< Of one block, before they are cut and joined; likewise.
  std::vector<ipc::RowCopyOp> block_rows_;
  std::vector<std::uint32_t> ids_;
};

}  // namespace kvferry::cli
