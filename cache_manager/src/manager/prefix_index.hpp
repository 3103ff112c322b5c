// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "manager/host_pool.hpp"

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace kvferry::cache_manager {

/// The prefix-addressed blocks of the host pool. A block goes Reserved -> Filling -> Visible, or is
/// gone; nothing finds it before every rank has stored it. Visible blocks that nobody pins or reads
/// are evicted in LRU order when room is wanted; of one prefix the last block goes first.
/// @threading one thread. @lifetime the pool outlives it.
class PrefixIndex {
 public:
  /// Names one reservation; never repeated within a manager's life.
  using Token = std::uint64_t;
  using IsForeign = std::function<bool(const ipc::IncarnationId&)>;

  struct Stats {
    std::uint64_t visible = 0;
    std::uint64_t reserved = 0;  ///< Filling ones included.
    std::uint64_t pinned = 0;    ///< Blocks, not pins.
    std::uint64_t evicted = 0;
  };

  explicit PrefixIndex(HostPool& pool);
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;
  ~PrefixIndex();

  /// Presence of every block in every group, and the longest prefix that each group's rule allows,
  /// whose blocks become the most recently used.
  [[nodiscard]] ipc::LookupReply lookup(const ipc::Digest& root,
                                        std::span<const ipc::Digest> blocks,
                                        std::span<const ipc::GroupSpec> groups);

  /// Counts the hashes of which at least one group's block was visible (unpin: pinned by client).
  std::uint32_t pin(const ipc::IncarnationId& client,
                    const ipc::Digest& root,
                    std::span<const ipc::Digest> blocks,
                    std::uint32_t groups);
  std::uint32_t unpin(const ipc::IncarnationId& client,
                      const ipc::Digest& root,
                      std::span<const ipc::Digest> blocks,
                      std::uint32_t groups);

  /// Visible, or on its way there.
  [[nodiscard]] bool has(const ipc::BlockKey& key) const { return find(key) != nullptr; }
  /// Reserves a slot for the key, evicting if it must; extent: as the pool's allocate(), and
  /// advanced.
  [[nodiscard]] ipc::ReservedSlot reserve(const ipc::IncarnationId& client,
                                          const ipc::BlockKey& key,
                                          const SlabShape& shape,
                                          Extent& extent);
  /// The key of a reservation of this client that no job has taken yet; null otherwise.
  [[nodiscard]] const ipc::BlockKey* reservation(const ipc::IncarnationId& client,
                                                 Token token) const;
  /// Reserved -> Filling. @pre reservation(client, token) is not null.
  [[nodiscard]] HostBlockRef begin_fill(const ipc::IncarnationId& client, Token token);
  /// Filling -> Visible; false when the block was dropped meanwhile.
  bool commit(Token token);
  /// Reserved or Filling -> gone. Unknown tokens are ignored: the block was dropped before.
  void discard(Token token);

  /// The slot of a visible block for a load, made the most recently used; null on a miss.
  [[nodiscard]] HostBlockRef acquire(const ipc::BlockKey& key);
  /// A slot outside the index, evicting if it must; null when the pool is full of blocks in use.
  /// extent: as the pool's allocate(), and advanced.
  [[nodiscard]] HostBlockRef allocate(const SlabShape& shape, Extent& extent);

  /// Ends a client's pins and reservations (not what is being filled).
  void drop_client(const ipc::IncarnationId& client);
  /// Drops the root's blocks, except those that a foreign client pins, reserves or fills. Readers
  /// keep their slots until they are done. Counts visible blocks.
  std::uint64_t drop_root(const ipc::Digest& root, const IsForeign& is_foreign);
  [[nodiscard]] bool has_root(const ipc::Digest& root) const { return roots_.contains(root); }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }

 private:
  enum class State : std::uint8_t { kReserved, kFilling, kVisible };
  struct Entry {
    ipc::BlockKey key;
    State state = State::kReserved;
    Token token = 0;
    HostBlockRef block;
    ipc::IncarnationId owner;  ///< Until visible.
    std::unordered_map<ipc::IncarnationId, std::uint32_t> pins;
    std::list<Entry*>::iterator lru;
    bool in_lru = false;
  };
  using Table = std::unordered_map<ipc::BlockKey, std::unique_ptr<Entry>>;

  [[nodiscard]] Entry* find(const ipc::BlockKey& key) const;
  [[nodiscard]] static bool is_evictable(const Entry& entry) {
    return entry.in_lru && entry.block.use_count() == 1;
  }
  void touch(const ipc::Digest& root, std::span<const ipc::Digest> blocks, std::uint32_t groups);
  void make_recent(Entry& entry);
  void leave_lru(Entry& entry);
  void unpin_entry(Entry& entry, const ipc::IncarnationId& client, bool all);
  void erase(Entry& entry);
  [[nodiscard]] bool evict_for(const SlabShape& shape);
  [[nodiscard]] bool evict_slab(std::uint32_t slab);

  HostPool& pool_;
  std::unordered_map<ipc::Digest, Table> roots_;
  std::unordered_map<Token, Entry*> tokens_;  ///< Reserved and Filling.
  std::unordered_map<std::uint32_t, std::unordered_set<Entry*>> by_slab_;
  std::unordered_map<ipc::IncarnationId, std::unordered_set<Entry*>> pinned_by_;
  std::list<Entry*> lru_;  ///< Visible and unpinned; the least recently used first.
  Token next_token_;
  Stats stats_;
};

}  // namespace kvferry::cache_manager
