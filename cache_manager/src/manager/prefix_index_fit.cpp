// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Whether a batch fits before anything is evicted for it.
#include "manager/prefix_index.hpp"

#include <algorithm>
#include <limits>

namespace kvferry::cache_manager {
namespace {

/// A manager that looks at millions of blocks answers nobody meanwhile. Where so many do not tell
/// it is taken to fit, and found out by eviction: a few ms.
constexpr std::size_t kMostLooks = std::size_t{1} << 18U;

}  // namespace

/// Adds up what there is and what could go, until that suffices.
class PrefixIndex::Fitting {
 public:
  Fitting(const PrefixIndex& index, std::span<const Wanted> wanted, const NamespaceAccount& payer);

  [[nodiscard]] Fit find();

 private:
  /// What a shape wants, and what it could have so far.
  struct Share {
    const SlabShape* shape = nullptr;
    double wanted = 0;
    double slots = 0;  ///< Free ones, and of blocks that could go.
    double pages = 0;  ///< Of slabs that could go; those of this shape are not counted.
    double blocks_a_page = 0;
  };

  [[nodiscard]] bool is_own(const Partition& partition) const noexcept {
    return &payer_.partition() == &partition;
  }
  /// Null: nobody wants blocks of that shape.
  [[nodiscard]] Share* share_of(const SlabShape& shape);
  /// Bytes of the partition that may go for the batch, at most.
  [[nodiscard]] std::uint64_t most_of(const Partition& partition) const;
  /// By what is counted anyway.
  [[nodiscard]] Fit bound() const;
  [[nodiscard]] bool is_enough() const;
  void add_blocks();
  void add_blocks_of(const Partition& partition);
  void add_slabs();
  [[nodiscard]] bool can_go(std::uint32_t slab, const SlabEntries& held);
  [[nodiscard]] Fit verdict() const;

  const PrefixIndex& index_;
  const NamespaceAccount& payer_;
  std::vector<Share> shares_;
  std::uint64_t wanted_bytes_ = 0;
  std::uint64_t least_block_ = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t over_limit_ = 0;    ///< Bytes of its own that have to go for the hard limit,
  std::uint64_t own_bytes_ = 0;     ///< and those that can.
  std::size_t looks_ = kMostLooks;  ///< Left.
  double free_pages_ = 0;
  double other_pages_ = 0;  ///< Of slabs of no wanted shape that could go.
};

PrefixIndex::Fitting::Fitting(const PrefixIndex& index,
                              std::span<const Wanted> wanted,
                              const NamespaceAccount& payer)
    : index_(index),
      payer_(payer),
      free_pages_(static_cast<double>(index.pool_.free_ready_pages())) {
  for (const Wanted& one : wanted) {
    if (one.blocks == 0) continue;
    shares_.push_back({.shape = &one.shape,
                       .wanted = static_cast<double>(one.blocks),
                       .slots = static_cast<double>(index.pool_.free_slots(one.shape)),
                       .blocks_a_page = index.pool_.blocks_a_page(one.shape)});
    wanted_bytes_ += one.blocks * one.shape.block_bytes();
    least_block_ = std::min(least_block_, one.shape.block_bytes());
  }
  if (!payer_.has_room_for(wanted_bytes_)) {
    over_limit_ = payer_.bytes() + wanted_bytes_ - payer_.limits().hard;
  }
}

PrefixIndex::Fitting::Share* PrefixIndex::Fitting::share_of(const SlabShape& shape) {
  const auto at = std::find_if(shares_.begin(), shares_.end(),
                               [&shape](const Share& one) { return *one.shape == shape; });
  return at == shares_.end() ? nullptr : &*at;
}

// Of others what evict_for() may take at its first block, when that is most: what has to go for the
// hard limit has gone by then.
std::uint64_t PrefixIndex::Fitting::most_of(const Partition& partition) const {
  if (is_own(partition)) return std::numeric_limits<std::uint64_t>::max();
  const Partition& own = payer_.partition();
  const std::uint64_t first = own.bytes - std::min(own.bytes, over_limit_) + least_block_;
  if (first > own.soft || partition.soft == 0) return partition.above_share();
  return above_level(partition, own, first);
}

// Of ratios: so much is no block.
bool PrefixIndex::Fitting::is_enough() const {
  constexpr double kNothing = 1e-6;
  if (own_bytes_ < over_limit_) return false;
  double pages_short = -free_pages_ - other_pages_;  // of all together
  for (const Share& share : shares_) {
    const double lacks = share.wanted - share.slots;
    if (lacks > (share.pages + free_pages_) * share.blocks_a_page + kNothing) return false;
    if (share.blocks_a_page > 0) pages_short += lacks / share.blocks_a_page;
  }
  return pages_short <= kNothing;
}

PrefixIndex::Fit PrefixIndex::Fitting::bound() const {
  if (wanted_bytes_ > payer_.limits().hard) return Fit::kOverLimit;
  std::uint64_t room = 0;
  if (index_.evicts_) {
    if (payer_.partition().cached < over_limit_) return Fit::kOverLimit;
    for (const auto& partition : index_.accounts_.partitions()) {
      room += std::min(partition->cached, most_of(*partition));
    }
  } else if (over_limit_ > 0) {
    return Fit::kOverLimit;
  }
  const HostPool::Stats pool = index_.pool_.stats();
  room += pool.ready_bytes - std::min(pool.ready_bytes, pool.used_bytes);
  return room < wanted_bytes_ ? Fit::kNoRoom : Fit::kFits;
}

void PrefixIndex::Fitting::add_blocks() {
  add_blocks_of(payer_.partition());
  for (const auto& partition : index_.accounts_.partitions()) {
    if (is_enough()) return;
    if (!is_own(*partition)) add_blocks_of(*partition);
  }
}

void PrefixIndex::Fitting::add_blocks_of(const Partition& partition) {
  const std::uint64_t most = most_of(partition);
  std::uint64_t given = 0;
  index_.order_.visit_evictable(
      partition.id, [this](EntryId id) { return is_evictable(*index_.entries_[id]); },
      [&](EntryId id) {
        const SlabShape& shape = index_.pool_.shape(index_.entries_[id]->block->slot());
        if (is_own(partition)) own_bytes_ += shape.block_bytes();
        if (Share* share = share_of(shape)) {
          if (shape.block_bytes() > most - given) return false;
          given += shape.block_bytes();
          ++share->slots;
        }
        return !is_enough();
      },
      looks_);
}

bool PrefixIndex::Fitting::can_go(std::uint32_t slab, const SlabEntries& held) {
  if (held.count != index_.pool_.used_in_slab(slab)) return false;
  std::unordered_map<const Partition*, std::uint64_t> goes;
  for (const Entry* entry = held.first; entry != nullptr; entry = entry->slab_next) {
    if (looks_ == 0 || !is_evictable(*entry)) return false;
    --looks_;
    goes[&index_.account_of(*entry).partition()] +=
        index_.pool_.shape(entry->block->slot()).block_bytes();
  }
  return std::all_of(goes.begin(), goes.end(), [this](const auto& of_one) {
    return of_one.second <= most_of(*of_one.first);
  });
}

void PrefixIndex::Fitting::add_slabs() {
  for (const auto& [slab, held] : index_.by_slab_) {
    if (is_enough() || looks_ == 0) return;
    const SlabShape& shape = index_.pool_.shape(held.first->block->slot());
    const Share* const own = share_of(shape);
    // What lacks nothing else has no use of it.
    if (own != nullptr && shares_.size() == 1) continue;
    if (!can_go(slab, held)) continue;
    const double pages = index_.pool_.pages_of_slab(slab);
    for (Share& share : shares_) {
      if (&share != own) share.pages += pages;
    }
    if (own == nullptr) other_pages_ += pages;
  }
}

PrefixIndex::Fit PrefixIndex::Fitting::verdict() const {
  if (is_enough() || looks_ == 0) return Fit::kFits;
  return own_bytes_ < over_limit_ ? Fit::kOverLimit : Fit::kNoRoom;
}

PrefixIndex::Fit PrefixIndex::Fitting::find() {
  if (const Fit at_best = bound(); at_best != Fit::kFits || is_enough()) return at_best;
  if (!index_.evicts_) return verdict();
  add_blocks();
  add_slabs();
  return verdict();
}

PrefixIndex::Fit PrefixIndex::fit(std::span<const Wanted> wanted, NamespaceAccount* account) const {
  return Fitting(*this, wanted, account != nullptr ? *account : accounts_.nobody()).find();
}

}  // namespace kvferry::cache_manager
