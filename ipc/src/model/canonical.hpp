// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/keyed_hash.hpp"

#include <cstdint>
#include <string_view>
#include <vector>

namespace kvferry::ipc::model {

/// Bytes that are the same in every process and build for the same values: numbers as 64-bit
/// little-endian, texts after their length, so that no two sequences of values run together.
class Canonical {
 public:
  /// The tag keeps digests of different things apart.
  explicit Canonical(std::string_view tag) { text(tag); }

  void number(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      bytes_.push_back(static_cast<std::uint8_t>(value >> shift));
    }
  }
  void text(std::string_view value) {
    number(value.size());
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }
  void digest(const Digest& value) {
    bytes_.insert(bytes_.end(), value.bytes.begin(), value.bytes.end());
  }
  [[nodiscard]] Digest digest() const { return Digest::hash(bytes_.data(), bytes_.size()); }
  [[nodiscard]] Digest keyed_digest(const Digest& key) const {
    return keyed_hash(key, bytes_.data(), bytes_.size());
  }

 private:
  std::vector<std::uint8_t> bytes_;
};

}  // namespace kvferry::ipc::model
