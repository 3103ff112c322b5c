// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "manager/host_pool.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace kvferry::cache_manager {

/// Blocks that an earlier manager left without checksums, of which movers may have some to tell: of
/// no use to anybody before all of theirs are there. They hold their slots, so that nothing else is
/// written there. @threading one thread. @lifetime the pool outlives it.
class LateSums {
 public:
  struct Block {
    ipc::BlockKey key;
    ipc::Digest before;
    HostBlockRef held;
    ipc::JobId job;           ///< That stored it: what is told of another one is not of it.
    std::uint64_t parts = 0;  ///< Which are stored, a bit for each.
    std::vector<std::uint64_t> sums{};  ///< SlabShape::sums(), zeros for other parts.
  };

  explicit LateSums(const HostPool& pool) : pool_(pool) {}

  /// False for one that has no parts.
  [[nodiscard]] bool add(Block block);
  /// By a rank's mover, which may say anything: of another rank's bytes, of other places and of
  /// other jobs it counts for nothing. Gives the blocks that have all of theirs now.
  [[nodiscard]] std::vector<Block> told(std::uint32_t rank, std::span<const ipc::KeptSum> sums);
  /// So many at most are awaited no longer, and their slots free.
  std::size_t drop(std::size_t most);
  [[nodiscard]] std::size_t size() const noexcept { return awaited_; }
  [[nodiscard]] bool empty() const noexcept { return awaited_ == 0; }

 private:
  struct Waiting {
    Block block;
    std::size_t left = 0;  ///< Of its sums.
  };
  /// What lies at an offset of the pool.
  struct Place {
    std::size_t block = 0;
    std::uint32_t sum = 0;
    std::optional<std::uint32_t> rank;  ///< Of whom it is; nothing: ranks share it.
  };

  void expect(std::uint64_t offset, const Place& place);

  const HostPool& pool_;
  std::vector<Waiting> blocks_;  ///< Some are over: they hold nothing.
  std::size_t dropped_ = 0;      ///< Of blocks_, from the first one.
  std::unordered_map<std::uint64_t, Place> places_;
  std::size_t awaited_ = 0;
};

}  // namespace kvferry::cache_manager
