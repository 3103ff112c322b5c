// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/watermarks.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "manager/host_pool.hpp"
#include "manager/prefix_index.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvferry::cache_manager {

/// Evicts before stores need it, a few blocks in each turn of the loop, so that everybody is served
/// meanwhile. @threading the loop's thread. @lifetime what it is given outlives it.
class EvictAhead {
 public:
  EvictAhead(ipc::EventLoop& loop,
             const HostPool& pool,
             PrefixIndex& index,
             const Watermarks& marks)
      : loop_(loop), pool_(pool), index_(index), marks_(marks) {}
  EvictAhead(const EvictAhead&) = delete;
  EvictAhead& operator=(const EvictAhead&) = delete;
  ~EvictAhead() { *is_living_ = false; }

  /// Something may have been stored.
  void look();
  /// Blocks that went ahead of need.
  [[nodiscard]] std::uint64_t evicted() const noexcept { return evicted_; }
  /// In one turn of the loop: some tenths of a millisecond.
  static constexpr std::uint32_t kBlocksInATurn = 128;

 private:
  void turn();
  void turn_soon();

  ipc::EventLoop& loop_;
  const HostPool& pool_;
  PrefixIndex& index_;
  const Watermarks marks_;
  std::vector<SlabShape> short_of_;  ///< Between the two marks.
  bool is_posted_ = false;
  /// Nothing could go when the pool had placed so many blocks.
  std::uint64_t nothing_at_ = 0;
  std::uint64_t evicted_ = 0;
  /// Of posted work, which may come after the end.
  std::shared_ptr<bool> is_living_ = std::make_shared<bool>(true);
};

}  // namespace kvferry::cache_manager
