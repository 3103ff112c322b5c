// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "manager/host_pool.hpp"

#include <cstdint>
#include <map>
#include <utility>

namespace kvferry::cache_manager {

/// Swapped-out blocks of running sequences, addressed by their owner's handle: never found by a
/// prefix, untouched by clears and by weight updates, gone with a drop or with their owner.
/// @threading one thread.
class SequenceStore {
 public:
  /// One life of a handle: a swap-out that ends after a drop must not bring the sequence back.
  using Life = std::uint64_t;

  /// The handle's current life, started when there is none.
  [[nodiscard]] Life open(std::uint32_t engine,
                          std::uint64_t handle,
                          const ipc::IncarnationId& owner);
  /// Replaces the block at that place; false when the life is over.
  bool put(std::uint32_t engine,
           std::uint64_t handle,
           Life life,
           ipc::GroupId group,
           std::uint32_t index,
           HostBlockRef block);
  /// Null when nothing is stored there.
  [[nodiscard]] HostBlockRef find(std::uint32_t engine,
                                  std::uint64_t handle,
                                  ipc::GroupId group,
                                  std::uint32_t index) const;
  /// Forgets a handle under which nothing is stored (a swap-out that failed).
  void drop_if_empty(std::uint32_t engine, std::uint64_t handle);
  /// False when there is no such sequence.
  bool drop(std::uint32_t engine, std::uint64_t handle);
  void drop_owner(const ipc::IncarnationId& owner);
  [[nodiscard]] std::size_t sequences() const noexcept { return sequences_.size(); }
  [[nodiscard]] std::size_t blocks() const noexcept;

 private:
  struct Sequence {
    Life life = 0;
    ipc::IncarnationId owner;
    std::map<std::pair<std::uint32_t, std::uint32_t>, HostBlockRef> blocks;  ///< (group, index).
  };

  std::map<std::pair<std::uint32_t, std::uint64_t>, Sequence> sequences_;
  Life next_life_ = 1;
};

}  // namespace kvferry::cache_manager
