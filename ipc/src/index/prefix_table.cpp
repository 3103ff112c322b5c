// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/index/prefix_table.hpp"

#include "index/table_format.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "os/huge_pages.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

namespace kvferry::ipc {

using prefix_table::Hash;
using prefix_table::Header;
using prefix_table::Slot;

namespace {

/// Beyond two thirds of the slots looks get long.
constexpr std::uint64_t most_entries_of(std::uint64_t slots) noexcept { return slots / 3 * 2; }

std::uint32_t log2_for(std::uint64_t entries, std::uint32_t most_log2) noexcept {
  std::uint32_t log2 = prefix_table::kLeastLog2;
  while (log2 < most_log2 && most_entries_of(std::uint64_t{1} << log2) < entries) ++log2;
  return log2;
}

constexpr std::uint32_t kLargestLog2 = 27;
static_assert(most_entries_of(std::uint64_t{1} << kLargestLog2) >= PrefixTable::kMostEntries);

SharedMemory::SingleWriter make_memory(std::uint32_t most_log2) {
  auto made =
      SharedMemory::create_single_writer("kvferry-prefix-table", prefix_table::size_for(most_log2));
  if (!made) throw Exception(std::move(made).error());
  return std::move(made).value();
}

/// Where it is, or the empty slot where its row ends.
std::uint64_t place_of(const Slot* slots, std::uint64_t mask, const Hash& hash) noexcept {
  std::uint64_t at = hash.tag & mask;
  for (;; at = (at + 1) & mask) {
    const std::uint64_t rest = slots[at].rest.load(std::memory_order_relaxed);
    if (rest == 0) return at;
    if (prefix_table::tag_of(rest) == hash.tag &&
        slots[at].low.load(std::memory_order_relaxed) == hash.low) {
      return at;
    }
  }
}

/// A reader that meets it half written finds another hash, or nothing.
void write(Slot& slot, std::uint64_t low, std::uint64_t rest) noexcept {
  slot.rest.store(0, std::memory_order_release);
  slot.low.store(low, std::memory_order_release);
  slot.rest.store(rest, std::memory_order_release);
}

}  // namespace

PrefixTable::PrefixTable(std::uint64_t most_entries)
    : most_log2_(log2_for(std::min(most_entries, kMostEntries), kLargestLog2)),
      memory_(make_memory(most_log2_)),
      huge_pages_(std::make_unique<HugePageMaker>(true)),
      seed_(Digest::random().low()),
      header_(reinterpret_cast<Header*>(memory_.mapping.data())) {  // zero, as all of it
  grow(prefix_table::kLeastLog2);
  header_->most_log2.store(most_log2_, std::memory_order_relaxed);
  header_->seed.store(seed_, std::memory_order_relaxed);
  header_->version.store(prefix_table::kVersion, std::memory_order_relaxed);
  header_->magic.store(prefix_table::kMagic, std::memory_order_release);
}

PrefixTable::~PrefixTable() = default;

// Readers go on in the old slots, which stay as they are, until they see the new ones.
void PrefixTable::grow(std::uint32_t slots_log2) {
  const std::uint64_t count = std::uint64_t{1} << slots_log2;
  Slot* slots =
      reinterpret_cast<Slot*>(memory_.mapping.data() + prefix_table::offset_of(slots_log2));
  // Looks come to all of them in any order: in small pages most miss the processor's table of them.
  const std::uint64_t first = round_up_to_huge_page(prefix_table::offset_of(slots_log2));
  const std::uint64_t end = prefix_table::offset_of(slots_log2 + 1);
  if (first < end) huge_pages_->make(memory_.mapping.data() + first, end - first);
  for (std::uint64_t i = 0; slots_ != nullptr && i <= mask_; ++i) {
    const std::uint64_t rest = slots_[i].rest.load(std::memory_order_relaxed);
    if (rest == 0) continue;
    const Hash hash{prefix_table::tag_of(rest), slots_[i].low.load(std::memory_order_relaxed)};
    write(slots[place_of(slots, count - 1, hash)], hash.low, rest);
  }
  slots_ = slots;
  mask_ = count - 1;
  stats_.slots = count;
  stats_.bytes = count * sizeof(Slot);
  header_->slots_log2.store(slots_log2, std::memory_order_release);
}

void PrefixTable::reserve(std::uint64_t entries) {
  const std::uint32_t log2 = log2_for(stats_.entries + std::min(entries, kMostEntries), most_log2_);
  if (std::uint64_t{1} << log2 > stats_.slots) grow(log2);
}

void PrefixTable::put(const BlockKey& key, const TableEntry& entry) {
  put(prefix_table::hash_of(key, seed_), entry);
}

void PrefixTable::put(std::span<const Put> puts) {
  constexpr std::size_t kAtOnce = 16;  // about as many lines as a core fetches at a time
  std::array<Hash, kAtOnce> hashes;
  for (; !puts.empty(); puts = puts.subspan(std::min(kAtOnce, puts.size()))) {
    const std::size_t count = std::min(kAtOnce, puts.size());
    for (std::size_t i = 0; i < count; ++i) {
      hashes[i] = prefix_table::hash_of(puts[i].key, seed_);
      __builtin_prefetch(&slots_[hashes[i].tag & mask_], /*for writing*/ 1);
    }
    for (std::size_t i = 0; i < count; ++i) put(hashes[i], puts[i].entry);
  }
}

void PrefixTable::put(const Hash& hash, const TableEntry& entry) {
  std::uint64_t at = place_of(slots_, mask_, hash);
  if (slots_[at].rest.load(std::memory_order_relaxed) != 0) {
    slots_[at].rest.store(prefix_table::rest_of(hash, entry), std::memory_order_release);
    return;
  }
  if (stats_.entries + 1 > most_entries_of(stats_.slots)) {
    const auto log2 = static_cast<std::uint32_t>(std::bit_width(stats_.slots));
    if (log2 > most_log2_) {
      if (stats_.unkept++ == 0) {
        log_warn("prefix table: full with {} entries; engines do not find the others",
                 stats_.entries);
      }
      return;
    }
    grow(log2);
    at = place_of(slots_, mask_, hash);
  }
  write(slots_[at], hash.low, prefix_table::rest_of(hash, entry));
  ++stats_.entries;
}

// What lies behind it in its row moves up, so that rows never have a gap.
void PrefixTable::erase(const BlockKey& key) {
  std::uint64_t hole = place_of(slots_, mask_, prefix_table::hash_of(key, seed_));
  if (slots_[hole].rest.load(std::memory_order_relaxed) == 0) return;
  --stats_.entries;
  // What follows is stored behind it: a reader that meets any of it sees that the count is odd.
  header_->moves.fetch_add(1, std::memory_order_acq_rel);
  for (std::uint64_t at = (hole + 1) & mask_;; at = (at + 1) & mask_) {
    const std::uint64_t rest = slots_[at].rest.load(std::memory_order_relaxed);
    if (rest == 0) break;
    const std::uint64_t home = prefix_table::tag_of(rest) & mask_;
    if (((at - home) & mask_) < ((at - hole) & mask_)) continue;  // it would come before its home
    write(slots_[hole], slots_[at].low.load(std::memory_order_relaxed), rest);
    hole = at;
  }
  slots_[hole].rest.store(0, std::memory_order_release);
  header_->moves.fetch_add(1, std::memory_order_release);
}

}  // namespace kvferry::ipc
