// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "split_map.hpp"

#include <cstddef>
#include <cstdint>
#include <list>

namespace kvferry::cache_manager {

/// Keys of blocks that are gone, oldest first.
class RememberedKeys {
 public:
  void insert(std::uint64_t key) {
    erase(key);
    at_[key] = order_.insert(order_.end(), key);
  }
  /// Whether it was there.
  bool erase(std::uint64_t key) {
    const auto* at = at_.find(key);
    if (at == nullptr) return false;
    order_.erase(*at);
    at_.erase(key);
    return true;
  }
  /// @pre not empty
  void drop_oldest() { erase(order_.front()); }
  [[nodiscard]] std::size_t size() const noexcept { return at_.size(); }

 private:
  std::list<std::uint64_t> order_;
  SplitMap<std::uint64_t, std::list<std::uint64_t>::iterator> at_;
};

}  // namespace kvferry::cache_manager
