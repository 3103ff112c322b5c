// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/block_key.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <unordered_map>
#include <utility>

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

/// A hash map for millions of entries in a process that has to answer meanwhile. A map that grows
/// moves all that it holds at once, which takes seconds at ten million; this one is split by hash
/// into parts that grow alone.
template <typename Key, typename Value> class SplitMap {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  /// So many more will come: parts need not grow for them.
  void reserve(std::size_t more) {
    const std::size_t each = (size_ + more) / parts_.size();
    // What the hash leaves uneven is a few times the root.
    for (Part& one : parts_) one.reserve(each + each / 8);
  }
  /// Null where there is none. Stays valid until that entry is erased.
  [[nodiscard]] Value* find(const Key& key) { return found(part(key), key); }
  [[nodiscard]] const Value* find(const Key& key) const { return found(part(key), key); }
  /// A new value where there was none.
  Value& operator[](const Key& key) {
    const auto [at, is_new] = part(key).try_emplace(key);
    size_ += is_new ? 1U : 0U;
    return at->second;
  }
  /// Whether it was there.
  bool erase(const Key& key) {
    const std::size_t erased = part(key).erase(key);
    size_ -= erased;
    return erased > 0;
  }
  /// In no order; what is visited must not erase or add any.
  template <typename Visit> void visit(const Visit& visit) const {
    for (const Part& one : parts_) {
      for (const auto& [key, value] : one) visit(key, value);
    }
  }

 private:
  using Hash = typename SplitMapKey<Key>::Hash;
  using Part = std::unordered_map<Key, Value, Hash, typename SplitMapKey<Key>::Equal>;
  static constexpr unsigned kBits = 8;

  template <typename Of>
  static auto found(Of& part, const Key& key) -> decltype(&part.begin()->second) {
    const auto at = part.find(key);
    return at == part.end() ? nullptr : &at->second;
  }
  // The parts themselves use the hash's remainder: the split must not leave them few of those.
  static std::size_t part_of(const Key& key) {
    const std::uint64_t hash = Hash{}(key);
    return (hash * 0x9E3779B97F4A7C15ULL) >> (64U - kBits);
  }
  Part& part(const Key& key) { return parts_[part_of(key)]; }
  const Part& part(const Key& key) const { return parts_[part_of(key)]; }

  std::array<Part, 1U << kBits> parts_;
  std::size_t size_ = 0;
};

}  // namespace kvferry::cache_manager
