// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvferry::worker {

struct StoreGateOptions {
  /// Blocks that may be on their way to host memory at a time; 0: as many as there are.
  std::uint64_t most_blocks = 0;
  /// After host memory had no room, or a store failed: how long nothing is asked for.
  ipc::Duration full_pause = std::chrono::milliseconds(20);
};

struct StoreGateCounts {
  std::uint64_t dropped_queue = 0;  ///< Blocks: too many were on their way.
  /// Blocks: host memory had no room, or had none just before, or a store had just failed.
  std::uint64_t dropped_room = 0;
};

/// Which stores an engine begins while the way to host memory is congested. What it does not let
/// through is dropped: the block is not stored now, and the engine goes on at once; the next use of
/// the block may try again. So the queue of stores, and the device blocks that it holds, have a
/// bound, and neither loads nor steps wait for it. Pure bookkeeping. @threading one thread.
class StoreGate {
 public:
  explicit StoreGate(StoreGateOptions options = {}) : options_(options) {}
  /// Another bound, for what is begun from now on.
  void set_most_blocks(std::uint64_t most_blocks) noexcept { options_.most_blocks = most_blocks; }

  /// How many of so many blocks may be stored now: the first ones, which belong to the beginnings
  /// of prefixes. The others are counted as dropped.
  [[nodiscard]] std::size_t admit(std::size_t blocks, ipc::TimePoint now);
  /// Whether admit() would let any block through; counts nothing.
  [[nodiscard]] bool is_open(ipc::TimePoint now) const noexcept;
  /// How many blocks admit() would let through at most.
  [[nodiscard]] std::size_t room(ipc::TimePoint now) const noexcept;
  /// Blocks of a store that was submitted; as many end, however they do.
  void begin(std::size_t blocks) noexcept { under_way_ += blocks; }
  void end(std::size_t blocks) noexcept;
  /// A store failed: nothing is asked for as long as after host memory had no room, so that what
  /// fails again does not do so all the time.
  void on_failed(ipc::TimePoint now) noexcept;
  /// Host memory had no room for so many blocks.
  void on_full(std::size_t blocks, ipc::TimePoint now) noexcept;

  [[nodiscard]] std::uint64_t under_way() const noexcept { return under_way_; }
  [[nodiscard]] const StoreGateCounts& counts() const noexcept { return counts_; }

 private:
  StoreGateOptions options_;
  std::uint64_t under_way_ = 0;
  ipc::TimePoint closed_until_{};
  StoreGateCounts counts_;
};

}  // namespace kvferry::worker
