// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/rank/rank_config.hpp"

#include <string>
#include <string_view>

/// What a worker child and its test agree on.
namespace kvferry::test {

inline constexpr std::uint32_t kGpuBlocks = 32;
inline constexpr std::uint32_t kSlots = 4;
inline constexpr std::uint64_t kSlotBytes = 64 << 10;
inline constexpr std::string_view kEngine = "chat";

/// Two layers of K and V with a replicated latent, and a draft group of its own.
inline ipc::Geometry worker_geometry() {
  ipc::Geometry geometry;
  geometry.name = "test";
  geometry.tokens_per_block = 16;
  ipc::GroupSpec main;
  main.name = "main";
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    main.regions.push_back({ipc::RegionKind::kKey, ipc::DataType::kFp16, layer, false, 4096});
    main.regions.push_back({ipc::RegionKind::kValue, ipc::DataType::kFp16, layer, false, 4096});
  }
  main.regions.push_back({ipc::RegionKind::kLatent, ipc::DataType::kFp16, 0, true, 1024});
  ipc::GroupSpec draft;
  draft.name = "draft";
  draft.regions = {{ipc::RegionKind::kDraft, ipc::DataType::kFp16, 0, false, 520}};
  geometry.groups = {main, draft};
  return geometry;
}

/// owner: "worker" or "mover"; handles: "vmm" or "legacy". Throws ipc::Exception.
inline ipc::RankConfig rank_config(const std::string& runtime_dir,
                                   const std::string& device,
                                   std::string_view owner,
                                   std::string_view handles) {
  ipc::RankConfig config;
  config.runtime_dir = runtime_dir;
  config.engine = kEngine;
  config.geometry = worker_geometry();
  config.cache_owner = owner == "mover" ? ipc::CacheOwner::kMover : ipc::CacheOwner::kWorker;
  config.handles = handles == "legacy" ? ipc::HandleKind::kLegacy : ipc::HandleKind::kVmm;
  config.arena.gpu_blocks = kGpuBlocks;
  config.arena.staging_slots = kSlots;
  config.arena.staging_slot_bytes = kSlotBytes;
  auto spec = ipc::DeviceSpec::parse(device);
  if (!spec) throw ipc::Exception(std::move(spec).error());
  config.device = std::move(spec).value();
  return config;
}

}  // namespace kvferry::test
