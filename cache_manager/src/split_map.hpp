// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/block_key.hpp"
#include "split_table.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace kvferry::cache_manager {

/// How a SplitMap looks for its keys.
template <typename Key> struct SplitMapKey {
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept { return std::hash<Key>{}(key); }
  };
  using Equal = std::equal_to<Key>;
};
/// Without a call: of the time that millions of blocks take, keys that are compared have a part.
template <> struct SplitMapKey<ipc::BlockKey> {
  struct Hash {
    std::size_t operator()(const ipc::BlockKey& key) const noexcept {
      std::array<std::uint64_t, 2> block{};
      std::memcpy(block.data(), key.block.bytes.data(), sizeof(block));
      std::uint64_t root = 0;
      std::memcpy(&root, key.root.bytes.data(), sizeof(root));
      constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ULL;
      return static_cast<std::size_t>(((block[0] ^ root) * kOdd + block[1]) ^ key.group.value);
    }
  };
  struct Equal {
    bool operator()(const ipc::BlockKey& a, const ipc::BlockKey& b) const noexcept {
      return a.group == b.group && is_same(a.block, b.block) && is_same(a.root, b.root);
    }
    static bool is_same(const ipc::Digest& a, const ipc::Digest& b) noexcept {
      std::array<std::uint64_t, 2> of_a{};
      std::array<std::uint64_t, 2> of_b{};
      std::memcpy(of_a.data(), a.bytes.data(), sizeof(of_a));
      std::memcpy(of_b.data(), b.bytes.data(), sizeof(of_b));
      return ((of_a[0] ^ of_b[0]) | (of_a[1] ^ of_b[1])) == 0;
    }
  };
};

/// A hash map for millions of entries, whose values lie in a SplitTable: they move when others come
/// and go.
template <typename Key, typename Value> class SplitMap {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return slots_.size(); }
  [[nodiscard]] bool empty() const noexcept { return slots_.empty(); }
  /// So many more will come: it need not grow for them.
  void reserve(std::size_t more) { slots_.reserve(more); }
  /// Null where there is none. Stays valid until an entry is added or erased.
  [[nodiscard]] Value* find(const Key& key) {
    Slot* slot = slots_.find(hash_of(key), is(key));
    return slot == nullptr ? nullptr : &slot->value;
  }
  [[nodiscard]] const Value* find(const Key& key) const {
    const Slot* slot = slots_.find(hash_of(key), is(key));
    return slot == nullptr ? nullptr : &slot->value;
  }
  /// A new value where there was none. Valid as what find() says.
  Value& operator[](const Key& key) {
    const std::uint64_t hash = hash_of(key);
    if (Slot* slot = slots_.find(hash, is(key))) return slot->value;
    Slot& added = slots_.add(hash);
    added.key = key;
    added.used = true;
    return added.value;
  }
  /// Whether it was there.
  bool erase(const Key& key) {
    Slot* slot = slots_.find(hash_of(key), is(key));
    if (slot != nullptr) slots_.erase(*slot);
    return slot != nullptr;
  }
  /// What find() is about to look at comes into the processor's cache.
  void prefetch(const Key& key) const noexcept { slots_.prefetch(hash_of(key)); }
  /// In no order; what is visited must not erase or add any.
  template <typename Visit> void visit(const Visit& visit) const {
    slots_.visit([&visit](const Slot& slot) { visit(slot.key, slot.value); });
  }

 private:
  struct Slot {
    Key key{};
    Value value{};
    bool used = false;

    [[nodiscard]] bool is_used() const noexcept { return used; }
    [[nodiscard]] std::uint64_t hash() const noexcept { return hash_of(key); }
  };

  static std::uint64_t hash_of(const Key& key) noexcept {
    return spread_bits(typename SplitMapKey<Key>::Hash{}(key));
  }
  static auto is(const Key& key) {
    return [&key](const Slot& slot) { return typename SplitMapKey<Key>::Equal{}(slot.key, key); };
  }

  SplitTable<Slot> slots_;
};

}  // namespace kvferry::cache_manager
