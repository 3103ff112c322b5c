// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/host_pool.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "manager/namespace_accounts.hpp"

#include <algorithm>
#include <bit>

namespace kvferry::cache_manager {
namespace {

constexpr std::uint64_t kSystemPage = 4096;
constexpr std::uint32_t kMinPages = 16;
constexpr std::uint32_t kWordBits = 64;
// A slab may grow by this many pages over the least possible to lose less at its end.
constexpr std::uint32_t kExtraPages = 7;
constexpr std::uint64_t kTolerableLossShare = 16;
// Slabs with pages for each rank are large: a pool that has no room for so many of them keeps small
// ones.
constexpr std::uint64_t kPlentyOfSlabs = 16;
// Longer copies are hardly faster (docs/performance.md).
constexpr std::uint64_t kLongCopyBytes = 4ULL << 20;
constexpr std::uint32_t kPlentyShare = 4;
// Once a run suffices, so many more slabs are looked at for a shorter one.
constexpr std::uint32_t kSlabsToCompare = 16;

struct SlabLayout {
  std::uint64_t shard_base = 0;
  std::uint64_t shard_stride = 0;
  std::uint64_t bytes = 0;
};

SlabLayout layout_of(const SlabShape& shape, std::uint64_t capacity) {
  SlabLayout layout;
  layout.shard_base =
      ipc::align_up(capacity * shape.bytes.replicated_bytes, HostPool::kRunAlignment);
  layout.shard_stride = ipc::align_up(capacity * shape.bytes.shard_bytes, HostPool::kRunAlignment);
  layout.bytes = layout.shard_base + layout.shard_stride * shape.ranks;
  return layout;
}

std::uint32_t capacity_of(const SlabShape& shape, std::uint64_t bytes) {
  std::uint64_t capacity = bytes / shape.block_bytes();
  while (capacity > 0 && layout_of(shape, capacity).bytes > bytes) {
    --capacity;
  }
  return static_cast<std::uint32_t>(capacity);
}

}  // namespace

HostPool::HostPool(std::uint64_t pool_bytes) {
  if (pool_bytes < kMinPages * kSystemPage) {
    throw ipc::Exception(
        KVFERRY_ERROR(kInvalidArgument, "host pool of {} is too small: give at least {}",
                      ipc::format_size(pool_bytes), ipc::format_size(kMinPages * kSystemPage)));
  }
  const std::uint64_t pages =
      std::max<std::uint64_t>(kMinPages, (pool_bytes + kMaxPageBytes - 1) / kMaxPageBytes);
  page_bytes_ = pool_bytes / pages / kSystemPage * kSystemPage;
  page_taken_.assign(pages, false);
  free_pages_ = static_cast<std::uint32_t>(pages);
  ready_pages_ = free_pages_;
}

void HostPool::set_ready(std::uint64_t bytes) noexcept {
  ready_pages_ =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes / page_bytes_, page_taken_.size()));
}

// The fewest pages that lose little at the slab's end, else those that lose the least; 0 when the
// whole pool does not hold one block.
std::uint32_t HostPool::pages_wanted(const SlabShape& shape) const {
  const auto all = static_cast<std::uint32_t>(page_taken_.size());
  const std::uint64_t block = shape.block_bytes();
  std::uint64_t least = (block + page_bytes_ - 1) / page_bytes_;
  if (least <= all && capacity_of(shape, least * page_bytes_) == 0) {
    ++least;  // The runs' alignment does not fit.
  }
  if (least > all || capacity_of(shape, least * page_bytes_) == 0) {
    return 0;
  }
  auto best = static_cast<std::uint32_t>(least);
  double best_loss = 1.0;
  // A small pool keeps small slabs, so that every shape finds one.
  const std::uint32_t most =
      std::max(best, std::min(best + kExtraPages, all / static_cast<std::uint32_t>(4)));
  for (std::uint32_t pages = best; pages <= most; ++pages) {
    const std::uint64_t bytes = pages * page_bytes_;
    const std::uint64_t lost = bytes - capacity_of(shape, bytes) * block;
    if (lost <= bytes / kTolerableLossShare) {
      return pages;
    }
    const double loss = static_cast<double>(lost) / static_cast<double>(bytes);
    if (loss < best_loss) {
      best_loss = loss;
      best = pages;
    }
  }
  return best;
}

std::optional<std::uint32_t> HostPool::find_pages(std::uint32_t count) const {
  std::uint32_t run = 0;
  for (std::uint32_t page = 0; page < ready_pages_; ++page) {
    run = page_taken_[page] ? 0 : run + 1;
    if (run == count) {
      return page + 1 - count;
    }
  }
  return std::nullopt;
}

std::optional<SlabPlace> HostPool::spread_layout(const SlabShape& shape) const {
  if (shape.ranks < 2 || shape.bytes.shard_bytes == 0) return std::nullopt;
  const std::uint64_t capacity = page_bytes_ / shape.bytes.shard_bytes;
  const std::uint64_t replicated = capacity * shape.bytes.replicated_bytes;
  const std::uint64_t replicated_pages = (replicated + page_bytes_ - 1) / page_bytes_;
  const std::uint64_t pages = replicated_pages + shape.ranks;
  const std::uint64_t lost = pages * page_bytes_ - capacity * shape.block_bytes();
  if (capacity == 0 || pages * kPlentyOfSlabs > page_taken_.size() ||
      lost > pages * page_bytes_ / kTolerableLossShare) {
    return std::nullopt;
  }
  return SlabPlace{0,
                   static_cast<std::uint32_t>(pages),
                   static_cast<std::uint32_t>(capacity),
                   replicated_pages * page_bytes_,
                   page_bytes_,
                   shape};
}

std::optional<SlabPlace> HostPool::find_spread_place(const SlabShape& shape) const {
  std::optional<SlabPlace> place = spread_layout(shape);
  if (!place) return std::nullopt;
  const auto first = find_pages(place->pages);
  if (!first) return std::nullopt;
  place->first_page = *first;
  return place;
}

std::optional<SlabPlace> HostPool::find_place(const SlabShape& shape) const {
  if (const auto spread = find_spread_place(shape)) return spread;
  for (std::uint32_t pages = pages_wanted(shape); pages > 0; --pages) {
    const std::uint32_t capacity = capacity_of(shape, pages * page_bytes_);
    if (capacity == 0) {
      break;
    }
    if (const auto first = find_pages(pages)) {
      const SlabLayout layout = layout_of(shape, capacity);
      return SlabPlace{*first, pages, capacity, layout.shard_base, layout.shard_stride, shape};
    }
  }
  return std::nullopt;
}

std::uint32_t HostPool::open_slab(const SlabPlace& place) {
  Slab slab;
  static_cast<SlabPlace&>(slab) = place;
  slab.generation = next_generation_++;
  slab.longest_run = place.capacity;
  slab.taken.assign((place.capacity + kWordBits - 1) / kWordBits, 0);
  for (std::uint32_t page = place.first_page; page < place.first_page + place.pages; ++page) {
    page_taken_[page] = true;
  }
  free_pages_ -= place.pages;
  std::uint32_t id = 0;
  if (unused_slab_ids_.empty()) {
    id = static_cast<std::uint32_t>(slabs_.size());
    slabs_.emplace_back(std::move(slab));
  } else {
    id = unused_slab_ids_.back();
    unused_slab_ids_.pop_back();
    slabs_[id] = std::move(slab);
  }
  with_room_[place.shape].insert(id);
  free_slots_[place.shape] += place.capacity;
  if (observer_ != nullptr) observer_->on_slab_opened(id, place);
  return id;
}

// What comes from another process's memory: nothing of it may overflow.
ipc::Status HostPool::check_place(const SlabPlace& place) const {
  const std::uint64_t pages = page_taken_.size();
  if (place.pages == 0 || place.first_page >= pages || place.pages > pages - place.first_page) {
    return KVFERRY_ERROR(kInvalidArgument, "a slab of {} pages from page {} on, of {}", place.pages,
                         place.first_page, pages);
  }
  const auto taken = page_taken_.begin() + place.first_page;
  if (std::find(taken, taken + place.pages, true) != taken + place.pages) {
    return KVFERRY_ERROR(kInvalidArgument, "the slab at page {} meets another one",
                         place.first_page);
  }
  const std::uint64_t bytes = place.pages * page_bytes_;
  const SlabShape& shape = place.shape;
  // Each factor is at most the slab's bytes, before any of them is multiplied.
  const bool is_sane =
      shape.ranks > 0 && shape.ranks <= ipc::kMaxRanks && shape.parts > 0 &&
      shape.parts <= ipc::kMostUnitBlocks && shape.bytes.replicated_bytes % shape.parts == 0 &&
      shape.bytes.shard_bytes % shape.parts == 0 && place.capacity > 0 && place.capacity <= bytes &&
      shape.ranks <= bytes && shape.bytes.replicated_bytes <= bytes &&
      shape.bytes.shard_bytes <= bytes && place.shard_base <= bytes &&
      place.shard_stride <= bytes && shape.block_bytes() > 0;
  if (!is_sane || shape.bytes.replicated_bytes > place.shard_base / place.capacity ||
      shape.bytes.shard_bytes > place.shard_stride / place.capacity ||
      place.shard_stride > (bytes - place.shard_base) / shape.ranks) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "the slab at page {} has no room for {} blocks of {} on {} ranks",
                         place.first_page, place.capacity, shape.bytes.shard_bytes, shape.ranks);
  }
  return ipc::ok();
}

ipc::Result<std::uint32_t> HostPool::adopt(const SlabPlace& place) {
  KVFERRY_TRY(check_place(place));
  return open_slab(place);
}

HostSlot HostPool::adopt_slot(std::uint32_t slab, std::uint32_t index) {
  KVFERRY_CHECK(slab < slabs_.size() && slabs_[slab] && index < slabs_[slab]->capacity &&
                    !slabs_[slab]->is_taken(index),
                "a slot is adopted that is not free");
  mark_taken(slab, index);
  return {slab, index, slabs_[slab]->generation};
}

void HostPool::close_if_unused(std::uint32_t slab) {
  if (slabs_[slab] && slabs_[slab]->used == 0) close_slab(slab);
}

bool HostPool::Slab::is_taken(std::uint32_t index) const noexcept {
  return ((taken[index / kWordBits] >> (index % kWordBits)) & 1ULL) != 0;
}

bool HostPool::is_free_neighbour(const SlabShape& shape, const HostSlot& after) const {
  if (after.slab >= slabs_.size() || !slabs_[after.slab]) return false;
  const Slab& slab = *slabs_[after.slab];
  return slab.generation == after.generation && slab.shape == shape &&
         after.index + 1 < slab.capacity && !slab.is_taken(after.index + 1);
}

HostPool::FreeRun HostPool::Slab::free_run_from(std::uint32_t index) const noexcept {
  const auto skip = [this](std::uint32_t at, bool while_taken) {
    while (at < capacity) {
      const std::uint32_t left = kWordBits - at % kWordBits;
      const std::uint64_t rest = taken[at / kWordBits] >> (at % kWordBits);
      const auto bits =
          static_cast<std::uint32_t>(while_taken ? std::countr_one(rest) : std::countr_zero(rest));
      at += std::min(bits, left);
      if (bits < left) break;
    }
    return std::min(at, capacity);
  };
  const std::uint32_t first = skip(index, true);
  return {0, first, skip(first, false) - first};
}

bool HostPool::suits_better(const FreeRun& a, const FreeRun& b, std::uint32_t wanted) noexcept {
  if (a.length >= wanted && b.length >= wanted) return a.length < b.length;
  return a.length > b.length;
}

HostPool::FreeRun HostPool::find_run(const SlabShape& shape, std::uint32_t wanted) {
  FreeRun best;
  const auto roomy = with_room_.find(shape);
  if (roomy == with_room_.end()) return best;
  std::uint32_t compared = 0;
  for (const std::uint32_t id : roomy->second) {
    Slab& slab = *slabs_[id];
    const bool suffices = best.length >= wanted;
    if (suffices ? slab.longest_run < wanted : slab.longest_run <= best.length) continue;
    if (suffices && ++compared > kSlabsToCompare) break;
    std::uint32_t longest = 0;
    for (std::uint32_t at = slab.lowest_free_word * kWordBits; at < slab.capacity;) {
      FreeRun run = slab.free_run_from(at);
      run.slab = id;
      at = run.first + run.length;
      longest = std::max(longest, run.length);
      if (run.length > 0 && suits_better(run, best, wanted)) best = run;
      if (best.length == wanted || (wanted == 1 && best.length > 0)) return best;
    }
    slab.longest_run = longest;
  }
  return best;
}

std::optional<HostSlot> HostPool::allocate(const SlabShape& shape, const Extent& extent) {
  if (shape.block_bytes() == 0) {
    return std::nullopt;
  }
  if (extent.after && is_free_neighbour(shape, *extent.after)) {
    return take(extent.after->slab, extent.after->index + 1);
  }
  const std::uint32_t wanted = std::max(1U, extent.left);
  FreeRun run = find_run(shape, wanted);
  // While pages are plenty, a slab of its own is worth it for a copy that is longer.
  const bool is_short = run.length < wanted && run.length * shape.block_bytes() < kLongCopyBytes;
  const bool is_plenty = free_pages_ > page_taken_.size() / kPlentyShare;
  if (run.length == 0 || (is_short && is_plenty)) {
    const std::optional<SlabPlace> place = find_place(shape);
    if (place && place->capacity > run.length) {
      run = {open_slab(*place), 0, place->capacity};
    }
  }
  if (run.length == 0) {
    return std::nullopt;
  }
  ++placed_extents_;
  return take(run.slab, run.first);
}

HostSlot HostPool::take(std::uint32_t id, std::uint32_t index) {
  mark_taken(id, index);
  ++placed_blocks_;
  const HostSlot slot{id, index, slabs_[id]->generation};
  if (observer_ != nullptr) observer_->on_taken(slot);
  return slot;
}

void HostPool::mark_taken(std::uint32_t id, std::uint32_t index) {
  Slab& slab = *slabs_[id];
  const SlabShape& shape = slab.shape;
  slab.taken[index / kWordBits] |= 1ULL << (index % kWordBits);
  while (slab.lowest_free_word < slab.taken.size() && slab.taken[slab.lowest_free_word] == ~0ULL) {
    ++slab.lowest_free_word;
  }
  ++slab.used;
  --free_slots_[shape];
  if (slab.used == slab.capacity) {
    auto& roomy = with_room_[shape];
    roomy.erase(id);
    if (roomy.empty()) {
      with_room_.erase(shape);
    }
  }
  used_bytes_ += shape.block_bytes();
  ++used_blocks_;
}

const HostPool::Slab& HostPool::slab_of(const HostSlot& slot) const {
  KVFERRY_CHECK(slot.slab < slabs_.size() && slabs_[slot.slab].has_value(),
                "host slot names no slab");
  const Slab& slab = *slabs_[slot.slab];
  KVFERRY_CHECK(slab.generation == slot.generation, "host slot of an earlier slab");
  KVFERRY_CHECK(slot.index < slab.capacity && slab.is_taken(slot.index),
                "host slot is not allocated");
  return slab;
}

void HostPool::free(const HostSlot& slot) {
  (void)slab_of(slot);
  Slab& slab = *slabs_[slot.slab];
  const std::uint32_t word = slot.index / kWordBits;
  slab.taken[word] &= ~(1ULL << (slot.index % kWordBits));
  slab.lowest_free_word = std::min(slab.lowest_free_word, word);
  slab.longest_run = slab.capacity;  // somewhere up to that
  --slab.used;
  ++free_slots_[slab.shape];
  used_bytes_ -= slab.shape.block_bytes();
  --used_blocks_;
  if (observer_ != nullptr) observer_->on_freed(slot);
  if (slab.used > 0) {
    with_room_[slab.shape].insert(slot.slab);
    return;
  }
  close_slab(slot.slab);
}

void HostPool::close_slab(std::uint32_t id) {
  const Slab& slab = *slabs_[id];
  for (std::uint32_t page = slab.first_page; page < slab.first_page + slab.pages; ++page) {
    page_taken_[page] = false;
  }
  free_pages_ += slab.pages;
  if (const auto counted = free_slots_.find(slab.shape);
      (counted->second -= slab.capacity - slab.used) == 0) {
    free_slots_.erase(counted);
  }
  if (const auto roomy = with_room_.find(slab.shape); roomy != with_room_.end()) {
    roomy->second.erase(id);
    if (roomy->second.empty()) {
      with_room_.erase(roomy);
    }
  }
  if (observer_ != nullptr) observer_->on_slab_closed(id);
  slabs_[id].reset();
  unused_slab_ids_.push_back(id);
}

SlotOffsets HostPool::offsets(const HostSlot& slot, ipc::Rank rank) const {
  const Slab& slab = slab_of(slot);
  KVFERRY_CHECK(rank.value < slab.shape.ranks, "rank beyond the slab's shape");
  const std::uint64_t start = slab.first_page * page_bytes_;
  return SlotOffsets{
      .replicated = start + slot.index * slab.shape.bytes.replicated_bytes,
      .shard = start + slab.shard_base + rank.value * slab.shard_stride +
               slot.index * slab.shape.bytes.shard_bytes,
  };
}

const SlabShape& HostPool::shape(const HostSlot& slot) const { return slab_of(slot).shape; }

std::uint32_t HostPool::used_in_slab(std::uint32_t slab) const {
  return slab < slabs_.size() && slabs_[slab] ? slabs_[slab]->used : 0;
}

ipc::Status HostPool::can_hold(const SlabShape& shape) const {
  if (shape.block_bytes() == 0 || pages_wanted(shape) == 0) {
    return KVFERRY_ERROR(kNoHostMemory,
                         "a host block of group {} takes {} and the whole pool has {}: start the "
                         "manager with a larger --pool",
                         shape.group.value, ipc::format_size(shape.block_bytes()),
                         ipc::format_size(page_taken_.size() * page_bytes_));
  }
  return ipc::ok();
}

std::uint64_t HostPool::free_slots(const SlabShape& shape) const {
  const auto slots = free_slots_.find(shape);
  return slots == free_slots_.end() ? 0 : slots->second;
}

std::uint64_t HostPool::free_ready_pages() const {
  return static_cast<std::uint64_t>(
      std::count(page_taken_.begin(), page_taken_.begin() + ready_pages_, false));
}

// Slabs of fewer pages than are wanted lose more.
double HostPool::blocks_a_page(const SlabShape& shape) const {
  const std::uint32_t pages = shape.block_bytes() == 0 ? 0 : pages_wanted(shape);
  if (pages == 0) return 0;
  const double packed = static_cast<double>(capacity_of(shape, pages * page_bytes_)) / pages;
  const std::optional<SlabPlace> spread = spread_layout(shape);
  return spread ? std::max(packed, static_cast<double>(spread->capacity) / spread->pages) : packed;
}

std::uint64_t HostPool::free_bytes_for(const SlabShape& shape) const {
  return free_pages_ * page_bytes_ + free_slots(shape) * shape.block_bytes();
}

HostPool::Stats HostPool::stats() const {
  Stats stats;
  stats.bytes = page_taken_.size() * page_bytes_;
  stats.used_bytes = used_bytes_;
  stats.free_bytes = stats.bytes - used_bytes_;
  stats.blocks = used_blocks_;
  stats.slabs = static_cast<std::uint32_t>(slabs_.size() - unused_slab_ids_.size());
  stats.pages = static_cast<std::uint32_t>(page_taken_.size());
  stats.free_pages = free_pages_;
  stats.ready_bytes = ready_pages_ * page_bytes_;
  stats.page_bytes = page_bytes_;
  stats.placed_blocks = placed_blocks_;
  stats.placed_extents = placed_extents_;
  return stats;
}

HostBlock::HostBlock(HostPool& pool,
                     const HostSlot& slot,
                     bool is_doubted,
                     NamespaceAccount* account)
    : pool_(&pool), slot_(slot), account_(account), doubted_(is_doubted ? ~std::uint64_t{0} : 0) {
  if (account_ != nullptr) account_->charge(pool_->shape(slot_).block_bytes());
}

HostBlock::~HostBlock() {
  if (account_ != nullptr) account_->refund(pool_->shape(slot_).block_bytes());
  pool_->free(slot_);
}

}  // namespace kvferry::cache_manager
