// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/device/pool_mapping.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "mover/copy_plan.hpp"
#include "mover/load_check.hpp"
#include "mover/strategy_chooser.hpp"

#include <array>
#include <memory>
#include <vector>

namespace kvferry::cache_manager {

/// The mapped epoch as a lane needs it. Valid from on_mapped until quiesce has returned ok.
struct MappedArena {
  const ipc::Arena* arena = nullptr;
  ipc::SessionId session;
  BlockParts parts;
  CopyStrategy strategy = CopyStrategy::kBatch;  ///< Resolved, never kAuto.
  /// Of each job, in the place of the one above; null: none to choose.
  std::shared_ptr<StrategyChooser> chooser;
  explicit MappedArena(const ipc::Arena& mapped) : arena(&mapped), parts(mapped.layout()) {}

  /// For copies by kernel. Before the first job.
  [[nodiscard]] ipc::Status make_tables(ipc::Device& device);
  /// @pre make_tables()
  [[nodiscard]] const ipc::RegionTable& table(ipc::GroupId group, ipc::RegionSet set) const {
    return *tables_.at(group.value).at(set == ipc::RegionSet::kReplicated ? 1 : 0);
  }

 private:
  /// By group; of what is sharded, and of what is replicated.
  std::vector<std::array<std::unique_ptr<ipc::RegionTable>, 2>> tables_;
};

/// A job on its way through a lane.
struct LaneJob {
  ipc::MoverJob job;
  std::shared_ptr<const MappedArena> arena;
  std::shared_ptr<ipc::PoolMapping> pool;
  ipc::TimePoint submitted;
  std::shared_ptr<const LoadCheck> check = nullptr;  ///< Of a load by layers; null: not checked.
  CopyStrategy strategy = CopyStrategy::kBatch;      ///< Since it began.
};

}  // namespace kvferry::cache_manager
