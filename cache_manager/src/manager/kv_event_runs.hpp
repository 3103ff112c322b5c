// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/wire/kv_events.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvferry::cache_manager {

/// What events say of a model's groups.
struct KvGroups {
  struct Group {
    std::string kind;
    std::uint32_t window_tokens = 0;
  };
  std::uint32_t tokens_per_block = 0;
  std::vector<Group> groups;

  /// @param unit_blocks ipc::ModelIdentity::unit_blocks
  [[nodiscard]] static KvGroups of(const ipc::Geometry& geometry, std::uint32_t unit_blocks = 1);
};

/// Events of one root, made of blocks one by one: those that continue each other, or go one after
/// the other, are one event. Groups have no order among each other; within one it is kept.
class KvEventRuns {
 public:
  /// Of an event, and of a batch: 75 kB, which no subscriber has to wait long for.
  static constexpr std::size_t kMostHashes = 4096;

  void stored(const ipc::Digest& block,
              const ipc::Digest& before,
              ipc::GroupId group,
              const KvGroups& groups);
  void removed(const ipc::Digest& block, ipc::GroupId group);
  /// All that came before does not matter any more.
  void cleared();

  [[nodiscard]] bool empty() const noexcept { return events_.empty(); }
  /// In batches of at most kMostHashes, and empty again.
  [[nodiscard]] std::vector<ipc::KvEventBatch> take();

 private:
  template <typename T> [[nodiscard]] T* last_of(ipc::GroupId group);
  void add(ipc::GroupId group, ipc::KvEvent event);

  std::vector<ipc::KvEvent> events_;
  std::unordered_map<ipc::GroupId, std::size_t> last_;  ///< Of each group, in events_.
};

}  // namespace kvferry::cache_manager
