// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace kvferry::cache_manager {

/// A vector for millions of elements in a process that has to answer meanwhile: one that grows
/// moves none of them, which takes others half a second at ten million. References stay valid.
/// @threading as a vector
template <typename T> class PagedVector {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// @pre i < size()
  [[nodiscard]] T& operator[](std::size_t i) { return pages_[i >> kBits][i & kMask]; }
  [[nodiscard]] const T& operator[](std::size_t i) const { return pages_[i >> kBits][i & kMask]; }
  /// Elements that are new are as T{} is; it never shrinks.
  void grow(std::size_t size) {
    if (size <= size_) return;
    while (pages_.size() << kBits < size) pages_.push_back(std::make_unique<T[]>(kMask + 1));
    size_ = size;
  }
  T& add(T element = {}) {
    grow(size_ + 1);
    return (*this)[size_ - 1] = element;
  }

 private:
  static constexpr unsigned kBits = 8;
  static constexpr std::size_t kMask = (std::size_t{1} << kBits) - 1;

  std::vector<std::unique_ptr<T[]>> pages_;
  std::size_t size_ = 0;
};

}  // namespace kvferry::cache_manager
