// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/worker/store_end.hpp"

#include <chrono>
#include <cstddef>
#include <optional>
#include <unordered_map>
#include <vector>

namespace kvferry::worker {

/// Keys that an engine's stores are under way for: an offer of one of them would be told that it is
/// there or stored already, which it is not if that store fails. One that was in use is not offered
/// again for a while, or every step would ask. @threading one thread.
class StoringKeys {
 public:
  static constexpr ipc::Duration kInUsePause = std::chrono::milliseconds(20);

  explicit StoringKeys(std::size_t groups) : groups_(groups) {}
  void begin(GroupId group, const Digest& key) { groups_[group.value][key].reset(); }
  void end(GroupId group, const Digest& key, StoreEnd end, ipc::TimePoint now);
  /// @param now as in end(), never earlier than before
  [[nodiscard]] bool has(GroupId group, const Digest& key, ipc::TimePoint now);

 private:
  using Keys = std::unordered_map<Digest, std::optional<ipc::TimePoint>>;  ///< Until when.
  static constexpr std::size_t kSweepAt = 4096;

  std::vector<Keys> groups_;
};

}  // namespace kvferry::worker
