// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "manager/host_pool.hpp"

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

namespace kvferry::cache_manager {

/// Names a swapped-out sequence: the handle is its owner's, and two clients of one engine may well
/// use the same number.
struct SequenceKey {
  std::uint32_t engine = 0;
  ipc::IncarnationId owner;
  std::uint64_t handle = 0;
  friend constexpr auto operator<=>(const SequenceKey&, const SequenceKey&) = default;
};

/// Swapped-out blocks of running sequences: found by their owner only, never by a prefix, untouched
/// by clears and by weight updates, gone with a drop, with their owner or with their geometry.
/// @threading one thread.
class SequenceStore {
 public:
  /// One life of a handle: a swap-out that ends after a drop must not bring the sequence back.
  using Life = std::uint64_t;

  /// Is told of each block that it lets go of, before that is free.
  void on_let_go(std::function<void(const HostBlock&)> on_let_go) {
    on_let_go_ = std::move(on_let_go);
  }
  /// The handle's current life, started when there is none.
  [[nodiscard]] Life open(const SequenceKey& key, const ipc::Digest& fingerprint);
  /// Replaces the block at that place; false when the life is over.
  bool put(const SequenceKey& key,
           Life life,
           ipc::GroupId group,
           std::uint32_t index,
           HostBlockRef block);
  /// Null when nothing is stored there.
  [[nodiscard]] HostBlockRef find(const SequenceKey& key,
                                  ipc::GroupId group,
                                  std::uint32_t index) const;
  /// Forgets a handle under which nothing is stored (a swap-out that failed).
  void drop_if_empty(const SequenceKey& key);
  /// False when there is no such sequence.
  bool drop(const SequenceKey& key);
  /// Its contents are not what they were.
  void drop_block(const SequenceKey& key, const HostBlock& block);
  void drop_owner(const ipc::IncarnationId& owner);
  /// Ends the engine's sequences of every other geometry: no arena will ever fit them. Counts
  /// sequences.
  std::size_t drop_other_geometries(std::uint32_t engine, const ipc::Digest& fingerprint);
  [[nodiscard]] bool has_engine(std::uint32_t engine) const;
  [[nodiscard]] std::size_t sequences() const noexcept { return sequences_.size(); }
  [[nodiscard]] std::size_t blocks() const noexcept;
  /// By the namespace that they are charged to.
  [[nodiscard]] std::map<const NamespaceAccount*, std::size_t> blocks_by_account() const;

 private:
  struct Sequence {
    Life life = 0;
    ipc::Digest fingerprint;
    std::map<std::pair<std::uint32_t, std::uint32_t>, HostBlockRef> blocks;  ///< (group, index).
  };

  void tell(const Sequence& sequence) const;

  std::function<void(const HostBlock&)> on_let_go_ = [](const HostBlock&) {};
  std::map<SequenceKey, Sequence> sequences_;
  Life next_life_ = 1;
};

}  // namespace kvferry::cache_manager
