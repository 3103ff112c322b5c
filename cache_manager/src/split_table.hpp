// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// Spreads what is left of a key over all bits (the finalizer of splitmix64): a table's slots are
/// chosen by the upper ones.
[[nodiscard]] constexpr std::uint64_t spread_bits(std::uint64_t hash) noexcept {
  hash = (hash ^ (hash >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  hash = (hash ^ (hash >> 27U)) * 0x94D049BB133111EBULL;
  return hash ^ (hash >> 31U);
}

/// Memory that is about to be looked at comes into the processor's cache meanwhile.
inline void fetch_line(const void* at) noexcept {
  __builtin_prefetch(at);
  // Else a function that does nothing but this is taken for one that does nothing.
  asm volatile("" : : "r"(at));
}

/// A hash table by open addressing, for millions of slots in a process that has to answer
/// meanwhile. One that grows moves all that it holds at once, which takes tenths of a second at ten
/// million; this one is split by hash into parts that grow alone. A look touches one or two lines
/// of memory where a chain of nodes touches three or four.
///
/// A Slot{} is empty; one that is_used() has a hash(), whose bits are spread, at least the upper 32
/// of them. Slots move when others come and go.
/// @threading as a vector
template <typename Slot> class SplitTable {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  /// So many more will come: parts need not grow for them.
  void reserve(std::size_t more) {
    const std::size_t each = (size_ + more) / parts_.size();
    // What the hash leaves uneven is a few times the root.
    for (Part& one : parts_) one.reserve(each + each / 8);
  }
  /// Null where there is none of that hash that is_it(slot) says it is.
  template <typename IsIt> [[nodiscard]] Slot* find(std::uint64_t hash, const IsIt& is_it) {
    return parts_[part_of(hash)].find(hash, is_it);
  }
  template <typename IsIt>
  [[nodiscard]] const Slot* find(std::uint64_t hash, const IsIt& is_it) const {
    return parts_[part_of(hash)].find(hash, is_it);
  }
  /// An empty slot, which is to be filled at once. @pre none like it is there
  [[nodiscard]] Slot& add(std::uint64_t hash) {
    Slot& added = parts_[part_of(hash)].add(hash);
    ++size_;
    return added;
  }
  /// @pre of this table
  void erase(const Slot& slot) {
    parts_[part_of(slot.hash())].erase(slot);
    --size_;
  }
  /// What find() is about to look at for that hash comes into the processor's cache.
  void prefetch(std::uint64_t hash) const noexcept { parts_[part_of(hash)].prefetch(hash); }
  /// In no order; what is visited must not erase or add any.
  template <typename Visit> void visit(const Visit& visit) const {
    for (const Part& one : parts_) one.visit(visit);
  }

 private:
  static constexpr unsigned kBits = 8;

  class Part {
   public:
    void reserve(std::size_t size) {
      // At most three quarters are used.
      const std::size_t wanted = std::bit_ceil(std::max(kLeastSlots, size + size / 3 + 1));
      if (size > 0 && wanted > slots_.size()) move_to(wanted);
    }
    template <typename IsIt> [[nodiscard]] Slot* find(std::uint64_t hash, const IsIt& is_it) {
      return found(slots_, hash, is_it);
    }
    template <typename IsIt>
    [[nodiscard]] const Slot* find(std::uint64_t hash, const IsIt& is_it) const {
      return found(slots_, hash, is_it);
    }
    Slot& add(std::uint64_t hash) {
      if ((size_ + 1) * 4 > slots_.size() * 3) move_to(std::max(kLeastSlots, slots_.size() * 2));
      ++size_;
      return slots_[free_for(hash)];
    }
    // What lies behind it in its row moves up, so that rows never have a gap.
    void erase(const Slot& slot) {
      auto hole = static_cast<std::size_t>(&slot - slots_.data());
      for (std::size_t at = next(hole); slots_[at].is_used(); at = next(at)) {
        const std::size_t from_home = (at - home(slots_[at].hash())) & mask_;
        if (from_home < ((at - hole) & mask_)) continue;  // it would come before its home
        slots_[hole] = std::move(slots_[at]);
        hole = at;
      }
      slots_[hole] = Slot{};
      --size_;
    }
    void prefetch(std::uint64_t hash) const noexcept {
      if (!slots_.empty()) fetch_line(&slots_[home(hash)]);
    }
    template <typename Visit> void visit(const Visit& visit) const {
      for (const Slot& slot : slots_) {
        if (slot.is_used()) visit(slot);
      }
    }

   private:
    static constexpr std::size_t kLeastSlots = 8;

    template <typename Slots, typename IsIt>
    [[nodiscard]] auto found(Slots& slots, std::uint64_t hash, const IsIt& is_it) const
        -> decltype(slots.data()) {
      if (slots.empty()) return nullptr;
      for (std::size_t at = home(hash); slots[at].is_used(); at = next(at)) {
        if (is_it(slots[at])) return &slots[at];
      }
      return nullptr;
    }
    [[nodiscard]] std::size_t next(std::size_t at) const noexcept { return (at + 1) & mask_; }
    // By the bits below those that chose the part.
    [[nodiscard]] std::size_t home(std::uint64_t hash) const noexcept {
      return static_cast<std::size_t>(hash >> 32U) & mask_;
    }
    [[nodiscard]] std::size_t free_for(std::uint64_t hash) const noexcept {
      std::size_t at = home(hash);
      while (slots_[at].is_used()) at = next(at);
      return at;
    }
    void move_to(std::size_t count) {
      std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(count));
      mask_ = static_cast<std::uint32_t>(count - 1);
      for (Slot& slot : old) {
        if (slot.is_used()) slots_[free_for(slot.hash())] = std::move(slot);
      }
    }

    std::vector<Slot> slots_;  ///< None, or a power of two of them.
    std::uint32_t mask_ = 0;
    std::uint32_t size_ = 0;
  };

  static std::size_t part_of(std::uint64_t hash) noexcept { return hash >> (64U - kBits); }

  std::array<Part, std::size_t{1} << kBits> parts_;
  std::size_t size_ = 0;
};

}  // namespace kvferry::cache_manager
