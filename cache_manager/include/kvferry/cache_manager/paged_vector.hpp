// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
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
  [[nodiscard]] T& operator[](std::size_t i) { return (*pages_[i >> kBits])[i % kPage]; }
  [[nodiscard]] const T& operator[](std::size_t i) const {
    return (*pages_[i >> kBits])[i % kPage];
  }
  /// Elements that are new are as T{} is; it never shrinks.
  void grow(std::size_t size) {
    if (size <= size_) return;
    while (pages_.size() << kBits < size) pages_.push_back(std::make_unique<Page>());
    size_ = size;
  }
  T& add(T element = {}) {
    grow(size_ + 1);
    return (*this)[size_ - 1] = element;
  }

 private:
  static constexpr unsigned kBits = 8;
  static constexpr std::size_t kPage = std::size_t{1} << kBits;
  using Page = std::array<T, kPage>;

  std::vector<std::unique_ptr<Page>> pages_;
  std::size_t size_ = 0;
};

}  // namespace kvferry::cache_manager
