// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/index/prefix_rules.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

/// Which blocks are in host memory, in shared memory: a manager writes it, engines look, without a
/// message and without ever waiting for each other or for the manager. What is found is advice: a
/// load asks the manager, by the whole key, and takes what is there then.
///
/// A hash table of 16 bytes a place, by open addressing: 104 bits of a hash of the key, keyed by
/// its root (so that roots which are secret keep their blocks to those who know them, and a block
/// which is not there is taken for one that is once in 10^31 / entries looks), whether the block is
/// there or on its way, and its run: how many blocks in a row are there, this one included, each
/// continuing the one before. So whether a whole prefix is there is read off its last block, and
/// how much of one is by bisection. It grows by doubling, at two thirds full: between 24 and 48
/// bytes a block, and all that it was before as much again.
namespace kvferry::ipc {

class HugePageMaker;

namespace prefix_table {
struct Hash;
struct Header;
struct Slot;
}  // namespace prefix_table

struct TableEntry {
  bool pending = false;   ///< Being stored; else it can be loaded.
  std::uint32_t run = 0;  ///< At most kMostRun, which says: at least so many. 0 while pending.
  friend bool operator==(const TableEntry&, const TableEntry&) = default;
};

/// The writer's side, with its memory. @threading one thread.
class PrefixTable {
 public:
  static constexpr std::uint32_t kMostRun = (1U << 22U) - 1;
  /// Of any table.
  static constexpr std::uint64_t kMostEntries = std::uint64_t{1} << 26U;

  struct Stats {
    std::uint64_t entries = 0;
    std::uint64_t slots = 0;
    std::uint64_t bytes = 0;   ///< Of the slots.
    std::uint64_t unkept = 0;  ///< Times that it had no room for an entry: nobody finds that one.
  };

  /// Room for so many entries at most, of which little is taken at first. Throws Exception.
  explicit PrefixTable(std::uint64_t most_entries);
  PrefixTable(const PrefixTable&) = delete;
  PrefixTable& operator=(const PrefixTable&) = delete;
  ~PrefixTable();

  /// So many entries more will come, or some less: it grows once for all of them.
  void reserve(std::uint64_t entries);
  struct Put {
    BlockKey key;
    TableEntry entry;
  };
  /// Enters a block, or changes its entry.
  void put(const BlockKey& key, const TableEntry& entry);
  /// One after another, in half the time: while one is written, memory of the next ones is fetched.
  void put(std::span<const Put> puts);
  /// Takes it out, if it is there.
  void erase(const BlockKey& key);

  /// For PrefixTableView::map(): nobody else can write through it.
  [[nodiscard]] const UniqueFd& fd() const noexcept { return memory_.fd; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return memory_.mapping.size_bytes(); }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }

 private:
  void grow(std::uint32_t slots_log2);
  void put(const prefix_table::Hash& hash, const TableEntry& entry);

  std::uint32_t most_log2_;
  SharedMemory::SingleWriter memory_;
  const std::unique_ptr<HugePageMaker> huge_pages_;
  const std::uint64_t seed_;
  prefix_table::Header* header_;
  prefix_table::Slot* slots_ = nullptr;
  std::uint64_t mask_ = 0;
  Stats stats_;
};

/// A reader's side. @threading any. @lifetime of its own: it goes on to show what was there last
/// when the writer is dead.
class PrefixTableView {
 public:
  /// kProtocol (no such table, or not sealed), kVersionMismatch.
  [[nodiscard]] static Result<PrefixTableView> map(const UniqueFd& fd, std::uint64_t size_bytes);

  [[nodiscard]] std::optional<TableEntry> find(const BlockKey& key) const noexcept;
  /// @param blocks of one prefix, first to last
  /// @param rules one for each group; none: nothing is usable
  [[nodiscard]] PrefixMatch match(const Digest& root,
                                  std::span<const Digest> blocks,
                                  std::span<const GroupRule> rules) const noexcept;

 private:
  explicit PrefixTableView(SharedMapping mapping) : mapping_(std::move(mapping)) {}
  [[nodiscard]] const prefix_table::Header& header() const noexcept;
  /// In a row, up to this block; 0: it is not there.
  [[nodiscard]] std::uint32_t run_of(const BlockKey& key) const noexcept;

  SharedMapping mapping_;
};

}  // namespace kvferry::ipc
