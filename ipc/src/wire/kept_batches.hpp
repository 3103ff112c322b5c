// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/codec.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

namespace kvferry::ipc {

/// The newest batches of KV events, by sequence number.
class KeptBatches {
 public:
  struct Batch {
    std::string topic;
    Bytes bytes;
    [[nodiscard]] std::size_t size() const noexcept { return topic.size() + bytes.size(); }
  };

  KeptBatches(std::size_t most_batches, std::size_t most_bytes)
      : most_batches_(std::max<std::size_t>(1, most_batches)), most_bytes_(most_bytes) {}

  /// It gets the number next().
  const Batch& add(std::string topic, Bytes bytes) {
    batches_.push_back({std::move(topic), std::move(bytes)});
    bytes_ += batches_.back().size();
    while (batches_.size() > most_batches_ || (bytes_ > most_bytes_ && batches_.size() > 1)) {
      bytes_ -= batches_.front().size();
      batches_.pop_front();
      ++first_;
    }
    return batches_.back();
  }
  /// The oldest that is kept, and one past the newest.
  [[nodiscard]] std::uint64_t first() const noexcept { return first_; }
  [[nodiscard]] std::uint64_t next() const noexcept { return first_ + batches_.size(); }
  /// @pre first() <= sequence < next()
  [[nodiscard]] const Batch& at(std::uint64_t sequence) const {
    return batches_.at(static_cast<std::size_t>(sequence - first_));
  }
  [[nodiscard]] std::size_t size() const noexcept { return batches_.size(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::size_t most_batches_;
  std::size_t most_bytes_;
  std::deque<Batch> batches_;
  std::uint64_t first_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace kvferry::ipc
