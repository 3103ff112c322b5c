// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/background.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace kvferry::ipc {

/// One manager's host pool in a process that copies from and to it: mapped whole, registered with
/// the device piece by piece, and only where its own rank's blocks lie. A piece is registered when
/// a copy first touches it, at the latest. With a background, others are before that: when the last
/// ones that were touched for the first time lie at one distance from each other (which they do
/// while a pool fills: neighbours, or, where each rank has pages of its own, those of one rank),
/// kAhead more at that distance. So copies find their memory registered, and what is not used is
/// not pinned.
/// @threading any. @lifetime device and background outlive it, and what is left to do there. The
/// destructor gives everything back, in the background if there is one.
class PoolMapping {
 public:
  /// A copy never crosses a multiple of this.
  static constexpr std::uint64_t kPieceBytes = 64ULL << 20;
  static constexpr std::size_t kAhead = 16;  ///< 1 GiB.

  /// numa_nodes: what is registered is moved there before, in turns; empty: it stays where it is.
  [[nodiscard]] static Result<std::shared_ptr<PoolMapping>> map(Device& device,
                                                                UniqueFd fd,
                                                                std::uint64_t size_bytes,
                                                                Background* background = nullptr,
                                                                std::vector<int> numa_nodes = {});
  PoolMapping(const PoolMapping&) = delete;
  PoolMapping& operator=(const PoolMapping&) = delete;
  ~PoolMapping();

  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return pieces_->size_bytes; }
  /// Of the pool, to hand it on.
  [[nodiscard]] const UniqueFd& descriptor() const noexcept { return fd_; }
  /// The address of a range inside one piece, which is registered from now on.
  [[nodiscard]] Result<void*> pinned(std::uint64_t offset, std::uint64_t size_bytes);
  /// The same for a range that may cross pieces, for who does not mind where they meet: a kernel.
  [[nodiscard]] Result<void*> pinned_across(std::uint64_t offset, std::uint64_t size_bytes);
  /// For this process to read, registered or not; empty when it is not inside the pool.
  [[nodiscard]] std::span<const std::byte> bytes(std::uint64_t offset,
                                                 std::uint64_t size_bytes) const noexcept;
  /// All of a range is registered: the two above would not take long.
  [[nodiscard]] bool is_pinned(std::uint64_t offset, std::uint64_t size_bytes) const noexcept;
  /// Registers a range in the background, and calls back from there, also when this has ended.
  /// @pre there is a background; the range lies in the pool
  void pin(std::uint64_t offset, std::uint64_t size_bytes, std::function<void(Status)> done);
  /// Soon copies will come at these places: the pieces that they are in are registered in the
  /// background, each by itself, so that a copy waits for its own at most. Takes no time where they
  /// are; nothing without a background. Places outside the pool are left out.
  void expect(std::span<const std::uint64_t> offsets);
  /// So many pieces are registered now.
  [[nodiscard]] std::uint64_t registered() const noexcept;

 private:
  enum class State : std::uint8_t { kNone, kBusy, kRegistered };

  /// What the background works on, also when the mapping itself has ended.
  struct Pieces {
    Pieces(Device& on, SharedMapping memory, std::uint64_t bytes, std::vector<int> nodes);
    Device& device;
    SharedMapping mapping;
    std::uint64_t size_bytes;
    std::vector<int> numa_nodes;
    std::vector<std::atomic<State>> states;
    std::vector<std::atomic<bool>> touched;  ///< By a copy.
    std::mutex mutex;  ///< Guards changes of states; held for no call of the driver.
    std::condition_variable changed;
    std::atomic<bool> ending = false;  ///< Nothing is registered ahead any more.

    [[nodiscard]] Status ensure(std::size_t piece);
    void give_back();
  };

  PoolMapping(std::shared_ptr<Pieces> pieces, UniqueFd fd, Background* background)
      : pieces_(std::move(pieces)), fd_(std::move(fd)), background_(background) {}
  void on_first_touch(std::size_t piece);

  const std::shared_ptr<Pieces> pieces_;
  const UniqueFd fd_;
  Background* const background_;
  std::mutex ahead_mutex_;  ///< Guards the two below.
  std::optional<std::size_t> last_touched_;
  std::size_t distance_ =
      0;  ///< Of the last two that were touched for the first time; 0: backwards.
};

}  // namespace kvferry::ipc
