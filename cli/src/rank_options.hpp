// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"
#include "kvferry/worker/worker.hpp"
#include "options.hpp"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace kvferry::cli {

/// How an arena is made: the same for mover, worker and replay.
struct ArenaChoice {
  ipc::CacheOwner cache_owner = ipc::CacheOwner::kWorker;
  ipc::HandleKind handles = ipc::HandleKind::kVmm;
  ipc::ArenaOrder order = ipc::ArenaOrder::kLayerFirst;
  std::optional<std::uint64_t> staging_slot_bytes;  ///< Nothing: by device and block.
  std::optional<std::uint32_t> staging_slots;
};
void add_arena_options(CLI::App& app, ArenaChoice& choice);
/// "--weights-id": what weights are known by, 32 hexadecimal digits.
CLI::Option* add_weights_id(CLI::App& app, std::optional<ipc::Digest>& target);
/// "--arena-memory": for the commands that start workers.
void add_arena_memory(CLI::App& app, worker::ArenaMemory& target);
/// A mover that owns the cache cannot use an engine's memory: kInvalidArgument.
[[nodiscard]] ipc::Status check_arena_memory(worker::ArenaMemory memory, ipc::CacheOwner owner);

/// What mover and worker are started with.
struct RankOptions {
  CommonOptions common;
  std::string engine = "default";
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
  std::string geometry;
  std::uint32_t gpu_blocks = 1024;
  std::string device = "auto";
  ArenaChoice arena;
  ipc::LeaseTimeouts timeouts;
  int parent_fd = -1;
};
void add_rank_options(CLI::App& app, RankOptions& options);
[[nodiscard]] ipc::Result<ipc::RankConfig> make_rank_config(const RankOptions& options);

/// The geometry sharded over ranks, with the presets named when it is unknown.
[[nodiscard]] ipc::Result<ipc::Geometry> find_geometry(const std::string& name,
                                                       std::uint32_t ranks);
/// Arena options with the staging ring that suits the device: none for a block-first arena, else a
/// few slots that each hold at least one packed block of every group.
[[nodiscard]] ipc::ArenaOptions make_arena_options(const ArenaChoice& choice,
                                                   const ipc::Geometry& geometry,
                                                   std::uint32_t gpu_blocks,
                                                   ipc::DeviceKind device);
/// A forced strategy that such an arena cannot do is kInvalidArgument, however many blocks it has.
[[nodiscard]] ipc::Status check_strategy(cache_manager::CopyStrategy strategy,
                                         const ipc::Geometry& geometry,
                                         ipc::ArenaOptions arena);
/// A simulated device for one rank that holds two epochs of its arena and a worker's scratch.
[[nodiscard]] ipc::Result<ipc::DeviceSpec> host_device_for(const std::string& name,
                                                           const ipc::Geometry& geometry,
                                                           const ipc::ArenaOptions& arena);
/// What a worker computes all the time, for kvferry bench, which starts it.
struct LoadOptions {
  std::optional<worker::ComputeLoadKind> kind;
  std::string times_file;
  [[nodiscard]] std::optional<worker::ComputeLoadConfig> config() const;
};
void add_load_options(CLI::App& app, LoadOptions& options);
/// "--cache-dir": empty means ipc::default_cache_dir().
CLI::Option* add_cache_dir(CLI::App& app, std::string& target);
/// "--gpu-blocks" of 1 ... 2^31.
CLI::Option* add_gpu_blocks(CLI::App& app, std::uint32_t& target, const std::string& help);

}  // namespace kvferry::cli
