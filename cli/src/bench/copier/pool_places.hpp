// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/worker/client.hpp"

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace kvferry::cli {

/// Where jobs have their packed blocks in the engine's pool: one after the other, and what fits a
/// piece across none. The room comes back when all of them are dropped, as between two
/// measurements.
class PoolPlaces {
 public:
  PoolPlaces(const ipc::ArenaLayout& layout, std::uint64_t pool_bytes);

  /// Offsets of the blocks of a job: chosen the first time, the same from then on. kNoHostMemory.
  [[nodiscard]] ipc::Result<const std::vector<std::uint64_t>*> of(
      std::uint64_t handle, const std::vector<worker::SequenceItem>& blocks);
  void drop(std::uint64_t handle);
  [[nodiscard]] std::uint64_t packed_bytes(ipc::GroupId group) const {
    return packed_bytes_.at(group.value);
  }

 private:
  std::vector<std::uint64_t> packed_bytes_;  ///< Of each group.
  std::uint64_t pool_bytes_;
  std::uint64_t next_ = 0;
  std::unordered_map<std::uint64_t, std::vector<std::uint64_t>> places_;
};

}  // namespace kvferry::cli
