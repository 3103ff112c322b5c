// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace kvferry::worker {

/// The device blocks of one group: which hash lies where, who uses what, and which unused block
/// was touched longest ago. A block is free, in use (references > 0), or kept (indexed, unused, in
/// LRU order). Of the replay's engine and the reference worker's scheduler; others that have no
/// index of their own may use it. A broken precondition ends the process. @threading one thread.
class GroupIndex {
 public:
  explicit GroupIndex(std::uint32_t block_count);

  enum class State : std::uint8_t { kPending, kValid };
  struct Found {
    ipc::BlockId block;
    State state = State::kPending;
  };

  /// Does not touch the LRU order.
  [[nodiscard]] std::optional<Found> find(const ipc::Digest& hash) const;
  /// A block with one reference: a free one, else the least recently used unused one, which is
  /// forgotten. Nothing when every block is in use.
  [[nodiscard]] std::optional<ipc::BlockId> allocate();
  /// Blocks that allocate() could give out one after another.
  [[nodiscard]] std::uint32_t available() const noexcept { return free_count_ + kept_count_; }
  [[nodiscard]] std::uint32_t block_count() const noexcept {
    return static_cast<std::uint32_t>(blocks_.size());
  }

  /// The kept blocks that the next `count` calls of allocate() would forget, in their order: those
  /// that no free one spares.
  [[nodiscard]] std::vector<ipc::BlockId> next_victims(std::uint64_t count) const;
  [[nodiscard]] std::uint32_t free_count() const noexcept { return free_count_; }

  /// Names the contents that the block will hold; others find it as kPending. False when the hash
  /// is indexed already: the block stays private. before: the hash of the block that it continues,
  /// for contents(); zero at the beginning of a prefix. @pre in use, not indexed.
  bool announce(ipc::BlockId block, const ipc::Digest& hash, const ipc::Digest& before = {});
  /// Its contents are complete. No effect when it is not indexed (any more). when: a note of the
  /// owner's, for valid_since().
  void make_valid(ipc::BlockId block, std::uint64_t when = 0);
  /// Takes it out of the index; it is free once unused.
  void forget(ipc::BlockId block);
  /// Takes everything out of the index.
  void forget_all();

  void acquire(ipc::BlockId block);
  /// The last release makes an indexed valid block the most recently used one and any other free.
  void release(ipc::BlockId block);
  /// The same, but as the least recently used one: for who held it to let it go. When another
  /// holder released it since it was last unused, that was a use: then as release().
  void release_as_oldest(ipc::BlockId block);

  struct Contents {
    ipc::Digest hash;
    ipc::Digest before;
  };
  /// @pre indexed
  [[nodiscard]] Contents contents(ipc::BlockId block) const;

  /// A note of the owner's, dropped with the index entry: the host tier has it.
  void mark_stored(ipc::BlockId block);
  /// The store unit with this key has these parts, a bit for each, and those noted before. Noted
  /// with the block that ends it: no effect when none is indexed under the key.
  void mark_stored(const ipc::Digest& unit, std::uint64_t parts);
  /// It was found to lack a part, or to be gone.
  void forget_stored(const ipc::Digest& unit);
  /// What is known to be there of the unit with this key; nothing where no block ends it.
  [[nodiscard]] std::uint64_t stored_parts(const ipc::Digest& unit) const;
  [[nodiscard]] bool is_stored(ipc::BlockId block) const;
  [[nodiscard]] bool is_indexed(ipc::BlockId block) const;
  [[nodiscard]] std::uint64_t valid_since(ipc::BlockId block) const;
  [[nodiscard]] std::uint32_t references(ipc::BlockId block) const;

 private:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  struct Block {
    ipc::Digest hash;
    std::uint64_t valid_since = 0;
    std::uint64_t stored = 0;  ///< Parts of the unit that it ends.
    std::uint32_t references = 0;
    bool indexed = false;
    bool valid = false;
    bool used = false;  ///< Released by one of several holders since it was last unused.
    std::uint32_t previous = kNone;  ///< Neighbours in the kept list, towards older ...
    std::uint32_t next = kNone;      ///< ... and newer; or the next free block.
    ipc::Digest before;
  };

  Block& at(ipc::BlockId block);
  [[nodiscard]] const Block& at(ipc::BlockId block) const;
  void unlink_kept(std::uint32_t index);
  void append_kept(std::uint32_t index);
  void prepend_kept(std::uint32_t index);
  /// Whether the block is unused now, and to be kept.
  [[nodiscard]] bool drop_reference(ipc::BlockId block);
  void push_free(std::uint32_t index);
  void drop_entry(Block& block);

  std::vector<Block> blocks_;
  std::unordered_map<ipc::Digest, std::uint32_t> by_hash_;
  std::uint32_t free_head_ = kNone;
  std::uint32_t free_count_ = 0;
  std::uint32_t oldest_ = kNone;
  std::uint32_t newest_ = kNone;
  std::uint32_t kept_count_ = 0;
};

}  // namespace kvferry::worker
