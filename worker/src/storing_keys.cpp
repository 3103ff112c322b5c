// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/storing_keys.hpp"

namespace kvferry::worker {

void StoringKeys::end(GroupId group, const Digest& key, StoreEnd end, ipc::TimePoint now) {
  Keys& keys = groups_[group.value];
  if (end != StoreEnd::kInUse) {
    keys.erase(key);
    return;
  }
  keys[key] = now + kInUsePause;
  if (keys.size() < kSweepAt) return;
  std::erase_if(keys, [now](const auto& entry) { return entry.second && *entry.second <= now; });
}

bool StoringKeys::has(GroupId group, const Digest& key, ipc::TimePoint now) {
  Keys& keys = groups_[group.value];
  const auto at = keys.find(key);
  if (at == keys.end()) return false;
  if (!at->second || *at->second > now) return true;
  keys.erase(at);
  return false;
}

}  // namespace kvferry::worker
