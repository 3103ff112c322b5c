// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/model/geometry.hpp"

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <vector>

namespace kvferry::cache_manager {

class NamespaceAccount;

/// What a slab is cut for: one group of one geometry, in units of so many device blocks. Blocks of
/// different shapes never share a slab.
struct SlabShape {
  ipc::Digest fingerprint;
  ipc::GroupId group;
  ipc::HostBlockShape bytes;  ///< Of all parts.
  std::uint32_t ranks = 1;
  std::uint32_t parts = 1;  ///< Device blocks of a slot: those of one rank lie one after another.

  /// The shape in units of so many of its blocks. @pre its blocks are no units
  [[nodiscard]] SlabShape in_units(std::uint32_t blocks) const noexcept {
    SlabShape unit = *this;
    unit.bytes.replicated_bytes *= blocks;
    unit.bytes.shard_bytes *= blocks;
    unit.parts = blocks;
    return unit;
  }
  /// Of one part, all ranks.
  [[nodiscard]] std::uint64_t part_bytes() const noexcept { return block_bytes() / parts; }
  /// A checksum for what the ranks share and for each rank's bytes, of each part.
  [[nodiscard]] std::uint32_t sums() const noexcept { return parts * (ranks + 1); }

  [[nodiscard]] std::uint64_t block_bytes() const noexcept {
    return bytes.replicated_bytes + bytes.shard_bytes * ranks;
  }
  [[nodiscard]] auto tie() const noexcept {
    return std::tie(fingerprint, group, bytes.replicated_bytes, bytes.shard_bytes, ranks, parts);
  }
  friend bool operator==(const SlabShape& a, const SlabShape& b) { return a.tie() == b.tie(); }
  friend bool operator<(const SlabShape& a, const SlabShape& b) { return a.tie() < b.tie(); }
};

/// One block's place in the pool. generation tells a slab's lives apart.
struct HostSlot {
  std::uint32_t slab = 0;
  std::uint32_t index = 0;
  std::uint64_t generation = 0;
  friend constexpr auto operator<=>(const HostSlot&, const HostSlot&) = default;
};

/// Blocks that are stored together are to lie together, so that one copy moves many. What the next
/// slot of such a batch is chosen by.
struct Extent {
  std::optional<HostSlot> after;  ///< The last slot of the batch: its neighbour, if that is free.
  std::uint32_t left = 1;         ///< Slots that the batch still needs, this one included.

  /// The batch has got this slot.
  void advance(const HostSlot& slot) noexcept {
    after = slot;
    if (left > 1) --left;
  }
};

/// Where a rank's copier finds the parts of a block, from the start of the pool.
struct SlotOffsets {
  std::uint64_t replicated = 0;
  std::uint64_t shard = 0;
};

/// Where a slab lies, and how it is cut.
struct SlabPlace {
  std::uint32_t first_page = 0;
  std::uint32_t pages = 0;
  std::uint32_t capacity = 0;      ///< Blocks.
  std::uint64_t shard_base = 0;    ///< From the slab's start, rank 0.
  std::uint64_t shard_stride = 0;  ///< From one rank's run to the next.
  SlabShape shape;
};

/// Is told what becomes of a pool's slots, before anybody may use them. @threading the pool's.
class PoolObserver {
 public:
  virtual ~PoolObserver() = default;
  virtual void on_slab_opened(std::uint32_t slab, const SlabPlace& place) = 0;
  virtual void on_slab_closed(std::uint32_t slab) = 0;
  virtual void on_taken(const HostSlot& slot) = 0;
  virtual void on_freed(const HostSlot& slot) = 0;
  /// A taken slot holds that block from now on. sums: SlabShape::sums(), part by part of what the
  /// ranks share, then of each rank's bytes, all zero for a part that was not stored; empty: not
  /// known (yet).
  virtual void on_visible(const HostSlot& slot,
                          const ipc::BlockKey& key,
                          const ipc::Digest& before,
                          std::span<const std::uint64_t> sums) = 0;
  /// It is nobody's any more, but may still be read.
  virtual void on_hidden(const HostSlot& slot) = 0;
  /// A visible one is used. when: grows from use to use, and wraps.
  virtual void on_used(const HostSlot& slot, std::uint32_t when) = 0;
};

/// Accounting of the host pool; never touches its memory. The pool is divided into equal pages; a
/// slab is a run of pages cut for one shape, with the parts in separate runs (replicated parts,
/// then each rank's shards) so that neighbouring blocks of a rank are one range. In a pool that is
/// large enough each rank's run is a page of its own, so that its mover alone registers it. An
/// empty slab gives its pages back. @threading one thread.
class HostPool {
 public:
  static constexpr std::uint64_t kMaxPageBytes = 64ULL << 20;
  static constexpr std::uint64_t kRunAlignment = 256;

  struct Stats {
    std::uint64_t bytes = 0;       ///< Of all pages.
    std::uint64_t used_bytes = 0;  ///< Of all allocated blocks.
    std::uint64_t free_bytes = 0;  ///< bytes - used_bytes; fragments of slabs included.
    std::uint64_t blocks = 0;
    std::uint32_t slabs = 0;
    std::uint32_t pages = 0;
    std::uint32_t free_pages = 0;   ///< Those that are not ready included.
    std::uint64_t ready_bytes = 0;  ///< From the start.
    std::uint64_t page_bytes = 0;
    std::uint64_t placed_blocks = 0;   ///< Ever allocated,
    std::uint64_t placed_extents = 0;  ///< in so many runs of neighbours.
    [[nodiscard]] bool is_filling() const noexcept { return ready_bytes < bytes; }
  };

  /// Throws Exception (kInvalidArgument) for a pool below 64 KiB.
  explicit HostPool(std::uint64_t pool_bytes);
  /// Is told from now on; null: nobody. It outlives the pool, or is taken off before.
  void observe(PoolObserver* observer) noexcept { observer_ = observer; }
  [[nodiscard]] PoolObserver* observer() const noexcept { return observer_; }
  /// Only so many bytes from the start may be used, until more are there. All, before the first
  /// call.
  void set_ready(std::uint64_t bytes) noexcept;
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;
  ~HostPool() = default;

  /// The neighbour of the batch's last slot; else the start of the first free run that holds what
  /// is left of it, of a new slab rather than of short runs, or of the longest run there is.
  /// Nothing when no slab of the shape has room and no run of pages is free.
  [[nodiscard]] std::optional<HostSlot> allocate(const SlabShape& shape, const Extent& extent = {});
  /// @pre the slot is allocated; a double free is a mistake of ours.
  void free(const HostSlot& slot);
  /// A slab that was there already: kInvalidArgument where it is none that this pool could have
  /// made, or meets another one. Its slots are taken one by one; close_if_unused() then.
  [[nodiscard]] ipc::Result<std::uint32_t> adopt(const SlabPlace& place);
  /// The observer is not told. @pre it is free
  [[nodiscard]] HostSlot adopt_slot(std::uint32_t slab, std::uint32_t index);
  void close_if_unused(std::uint32_t slab);
  /// @pre the slot is allocated.
  [[nodiscard]] SlotOffsets offsets(const HostSlot& slot, ipc::Rank rank) const;
  [[nodiscard]] const SlabShape& shape(const HostSlot& slot) const;
  /// Allocated blocks in the slot's slab.
  [[nodiscard]] std::uint32_t used_in_slab(std::uint32_t slab) const;
  /// There are pages for a new slab of the shape.
  [[nodiscard]] bool can_open(const SlabShape& shape) const {
    return find_place(shape).has_value();
  }
  /// Of its slabs.
  [[nodiscard]] std::uint64_t free_slots(const SlabShape& shape) const;
  /// That are no slab's, and there already.
  [[nodiscard]] std::uint64_t free_ready_pages() const;
  [[nodiscard]] std::uint32_t pages_of_slab(std::uint32_t slab) const {
    return slab < slabs_.size() && slabs_[slab] ? slabs_[slab]->pages : 0;
  }
  /// Blocks of the shape that a page holds in a slab, at best; 0: the pool holds none at all.
  [[nodiscard]] double blocks_a_page(const SlabShape& shape) const;
  /// That blocks of the shape could have: of its slabs, and of pages that are no slab's.
  [[nodiscard]] std::uint64_t free_bytes_for(const SlabShape& shape) const;
  /// kNoHostMemory when not even an empty pool could hold one block of the shape.
  [[nodiscard]] ipc::Status can_hold(const SlabShape& shape) const;
  [[nodiscard]] Stats stats() const;

 private:
  struct FreeRun {
    std::uint32_t slab = 0;
    std::uint32_t first = 0;
    std::uint32_t length = 0;
  };
  struct Slab : SlabPlace {
    std::uint32_t used = 0;
    std::uint32_t lowest_free_word = 0;
    std::uint64_t generation = 0;
    std::uint32_t longest_run = 0;  ///< No free run is longer; exact after a search.
    std::vector<std::uint64_t> taken;

    [[nodiscard]] bool is_taken(std::uint32_t index) const noexcept;
    /// The first one from there on; length 0: none.
    [[nodiscard]] FreeRun free_run_from(std::uint32_t index) const noexcept;
  };

  [[nodiscard]] std::uint32_t pages_wanted(const SlabShape& shape) const;
  [[nodiscard]] std::optional<std::uint32_t> find_pages(std::uint32_t count) const;
  /// Where each rank has a page of its own, from the pool's start; nothing for shapes that this
  /// does not suit, or in a pool that is small for it.
  [[nodiscard]] std::optional<SlabPlace> spread_layout(const SlabShape& shape) const;
  /// The same where there is room; nothing when no such place is free, too.
  [[nodiscard]] std::optional<SlabPlace> find_spread_place(const SlabShape& shape) const;
  /// Where a slab of the shape could be.
  [[nodiscard]] std::optional<SlabPlace> find_place(const SlabShape& shape) const;
  [[nodiscard]] std::uint32_t open_slab(const SlabPlace& place);
  void close_slab(std::uint32_t id);
  [[nodiscard]] ipc::Status check_place(const SlabPlace& place) const;
  void mark_taken(std::uint32_t id, std::uint32_t index);
  [[nodiscard]] const Slab& slab_of(const HostSlot& slot) const;
  [[nodiscard]] bool is_free_neighbour(const SlabShape& shape, const HostSlot& after) const;
  /// The shortest that suffices; else the longest.
  [[nodiscard]] static bool suits_better(const FreeRun& a,
                                         const FreeRun& b,
                                         std::uint32_t wanted) noexcept;
  /// Of all slabs of the shape; length 0: none has room.
  [[nodiscard]] FreeRun find_run(const SlabShape& shape, std::uint32_t wanted);
  [[nodiscard]] HostSlot take(std::uint32_t id, std::uint32_t index);

  PoolObserver* observer_ = nullptr;
  std::uint64_t page_bytes_ = 0;
  std::vector<bool> page_taken_;
  std::uint32_t free_pages_ = 0;
  std::uint32_t ready_pages_ = 0;
  std::vector<std::optional<Slab>> slabs_;
  std::vector<std::uint32_t> unused_slab_ids_;
  std::map<SlabShape, std::set<std::uint32_t>> with_room_;
  std::map<SlabShape, std::uint64_t> free_slots_;  ///< Of its slabs.
  std::uint64_t next_generation_ = 1;
  std::uint64_t used_bytes_ = 0;
  std::uint64_t used_blocks_ = 0;
  std::uint64_t placed_blocks_ = 0;
  std::uint64_t placed_extents_ = 0;
};

/// Holds one slot and frees it. Shared between the index or a sequence and the jobs that touch the
/// slot: the memory may be reused only when the last of them has let go.
/// @lifetime the pool outlives it.
class HostBlock {
 public:
  /// is_doubted: an earlier manager filled it, and nobody has looked since whether it is whole.
  /// account: of the namespace that it is charged to, which outlives it; null: of none.
  HostBlock(HostPool& pool,
            const HostSlot& slot,
            bool is_doubted = false,
            NamespaceAccount* account = nullptr);
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;
  ~HostBlock();

  [[nodiscard]] const HostSlot& slot() const noexcept { return slot_; }
  [[nodiscard]] bool is_doubted(std::uint32_t part = 0) const noexcept {
    return (doubted_ >> part & 1U) != 0;
  }
  void trust(std::uint32_t part = 0) const noexcept { doubted_ &= ~(std::uint64_t{1} << part); }
  /// Which parts are stored, a bit for each. @default the first one
  void set_parts(std::uint64_t parts) const noexcept { parts_ = parts; }
  [[nodiscard]] std::uint64_t parts() const noexcept { return parts_; }
  [[nodiscard]] bool has_part(std::uint32_t part) const noexcept {
    return part < ipc::kMostUnitBlocks && (parts_ >> part & 1U) != 0;
  }
  [[nodiscard]] NamespaceAccount* account() const noexcept { return account_; }

 private:
  HostPool* pool_;
  HostSlot slot_;
  NamespaceAccount* account_;
  mutable std::uint64_t parts_ = 1;
  mutable std::uint64_t doubted_;
};
using HostBlockRef = std::shared_ptr<const HostBlock>;

}  // namespace kvferry::cache_manager
