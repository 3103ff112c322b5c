// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>

namespace kvferry::cache_manager {

/// A hash map for millions of entries in a process that has to answer meanwhile. A map that grows
/// moves all that it holds at once, which takes seconds at ten million; this one is split by hash
/// into parts that grow alone.
template <typename Key, typename Value> class SplitMap {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
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
  using Part = std::unordered_map<Key, Value>;
  static constexpr unsigned kBits = 8;

  template <typename Of>
  static auto found(Of& part, const Key& key) -> decltype(&part.begin()->second) {
    const auto at = part.find(key);
    return at == part.end() ? nullptr : &at->second;
  }
  // The parts themselves use the hash's remainder: the split must not leave them few of those.
  static std::size_t part_of(const Key& key) {
    const std::uint64_t hash = std::hash<Key>{}(key);
    return (hash * 0x9E3779B97F4A7C15ULL) >> (64U - kBits);
  }
  Part& part(const Key& key) { return parts_[part_of(key)]; }
  const Part& part(const Key& key) const { return parts_[part_of(key)]; }

  std::array<Part, 1U << kBits> parts_;
  std::size_t size_ = 0;
};

}  // namespace kvferry::cache_manager
