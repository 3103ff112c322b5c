// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

namespace kvferry::ipc {

/// How long a host block is to stay in preference to others of its namespace, and how much: blocks
/// of a lower priority are evicted first, whatever the eviction policy says of them.
struct Retention {
  static constexpr std::uint8_t kMost = 100;
  /// What blocks have of which nothing is said: TensorRT-LLM's default, too, whose numbers can be
  /// given as they are.
  static constexpr std::uint8_t kOrdinary = 35;
  static constexpr std::chrono::hours kLongest{24 * 365 * 100};

  std::uint8_t priority = kOrdinary;  ///< 0 (first to go) to kMost.
  /// From the block's reservation on, up to kLongest; then it is an ordinary one. 0: for as long as
  /// it is there.
  std::chrono::milliseconds duration{0};
  friend bool operator==(const Retention&, const Retention&) = default;
  template <typename V> void visit(V& v) { v(priority, duration); }
};

}  // namespace kvferry::ipc
