// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank_options.hpp"

#include "kvferry/ipc/base/size.hpp"

#include <algorithm>

namespace kvferry::cli {
namespace {

using ipc::CacheOwner;
using ipc::HandleKind;
using ipc::Result;

constexpr std::uint32_t kMaxBlocks = 1U << 31;
constexpr std::uint32_t kMaxRanks = 64;
constexpr std::uint32_t kMaxStagingSlots = 256;

}  // namespace

CLI::Option* add_gpu_blocks(CLI::App& app, std::uint32_t& target, const std::string& help) {
  CLI::Option* option = add_parsed<std::uint32_t>(
      app, "--gpu-blocks", target,
      [](std::string_view text) -> Result<std::uint32_t> {
        std::uint64_t value = 0;
        if (!CLI::detail::lexical_cast(std::string(text), value) || value < 1 ||
            value > kMaxBlocks) {
          return KVFERRY_ERROR(kInvalidArgument, "'{}' is no count between 1 and {}", text,
                               kMaxBlocks);
        }
        return static_cast<std::uint32_t>(value);
      },
      help);
  return option->type_name("N");
}

void add_arena_options(CLI::App& app, ArenaChoice& choice) {
  add_choice<CacheOwner>(app, "--cache-owner", choice.cache_owner,
                         {{"worker", CacheOwner::kWorker}, {"mover", CacheOwner::kMover}},
                         "Which process allocates the arena; the other one maps it");
  add_choice<HandleKind>(app, "--handles", choice.handles,
                         {{"vmm", HandleKind::kVmm}, {"legacy", HandleKind::kLegacy}},
                         "How device memory is shared: reference-counted (vmm) or CUDA IPC");
  add_choice<ipc::ArenaOrder>(app, "--arena", choice.order,
                              {{"layer-first", ipc::ArenaOrder::kLayerFirst},
                               {"layer-first-many", ipc::ArenaOrder::kLayerFirstMany},
                               {"block-first", ipc::ArenaOrder::kBlockFirst}},
                              "How blocks lie on the device: layer by layer in one allocation or "
                              "in many, or all slices of a block together");
  add_size(app, "--staging-slot-bytes", choice.staging_slot_bytes,
           "Size of one slot of the staging ring in device memory [GPU: 8MiB and more, whole "
           "blocks; simulated device: 1MiB and more; block-first: none]");
  app.add_option("--staging-slots", choice.staging_slots,
                 "Slots of the staging ring, 0 for none [GPU: 4 to 16, 128MiB of them; "
                 "simulated device: 4; block-first: 0]")
      ->type_name("N")
      ->check(CLI::Range(0U, kMaxStagingSlots));
}

void add_arena_memory(CLI::App& app, worker::ArenaMemory& target) {
  add_choice<worker::ArenaMemory>(
      app, "--arena-memory", target,
      {{"kvferry", worker::ArenaMemory::kKvferry}, {"engine", worker::ArenaMemory::kEngine}},
      "Whose memory the arena is: kvferry's, or tensors of the engine, which registers their "
      "regions");
}

ipc::Status check_arena_memory(worker::ArenaMemory memory, CacheOwner owner) {
  if (memory == worker::ArenaMemory::kKvferry || owner == CacheOwner::kWorker) return ipc::ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "--arena-memory {} needs --cache-owner worker: with --cache-owner {} the "
                       "mover allocates the arena, and the engine has no regions to register",
                       worker::to_string(memory), ipc::to_string(owner));
}

void add_lease_deadlines(CLI::App& app, ipc::LeaseTimeouts& timeouts) {
  add_milliseconds(app, "--drain-deadline", timeouts.drain,
                   "Clears: how long a process may take to end its own copies and kernels");
  add_milliseconds(app, "--revoke-deadline", timeouts.revoke,
                   "Clears: how long the owner waits for the other side to let go, its drain "
                   "included");
  add_milliseconds(
      app, "--kill-deadline", timeouts.kill,
      "Clears: how long a mover that was ended may take to be gone, and 50 ms more per "
      "GiB that it holds");
  add_milliseconds(app, "--settle-deadline", timeouts.settle,
                   "Clears: how long the memory of a dead process may take to be back");
}

void add_rank_options(CLI::App& app, RankOptions& options) {
  app.add_option("--engine", options.engine, "Name of the engine that the rank belongs to")
      ->type_name("NAME")
      ->default_str(options.engine);
  app.add_option("--rank", options.rank, "This process's tensor-parallel rank, from 0")
      ->type_name("N")
      ->default_str("0");
  app.add_option("--ranks", options.ranks, "Tensor-parallel ranks of the engine")
      ->type_name("N")
      ->check(CLI::Range(1U, kMaxRanks))
      ->default_str("1");
  app.add_option("--geometry", options.geometry,
                 "Shape of the KV cache: a preset (tiny, llama-3-8b, ...) or a .toml file")
      ->type_name("NAME|FILE.toml");
  add_gpu_blocks(app, options.gpu_blocks, "Blocks on the device")->default_str("1024");
  app.add_option("--device", options.device,
                 "cuda:N, or host:NAME:SIZE for a simulated device in host memory; auto: the "
                 "rank's GPU, else a simulated one")
      ->type_name("DEVICE")
      ->default_str("auto");
  add_arena_options(app, options.arena);
  add_lease_deadlines(app, options.timeouts);
  app.add_option("--parent-fd", options.parent_fd)->group("");
}

Result<ipc::Geometry> find_geometry(const std::string& name, std::uint32_t ranks) {
  KVFERRY_ASSIGN(ipc::Geometry geometry, ipc::load_geometry(name, ranks));
  KVFERRY_TRY(geometry.validate());
  return geometry;
}

namespace {

struct RingSize {
  std::uint64_t slot_bytes = 0;
  std::uint32_t slots = 0;
};

/// Slots of 8 MiB, in whole blocks: a DMA of that size reaches the link's limit. And as many as it
/// takes to hide the way of a slot through two processes, some 0.4 ms, behind the DMAs of the
/// others: half of them are of each direction; docs/performance.md has the figures.
RingSize staging_ring_for(std::uint64_t largest_block,
                          std::optional<std::uint64_t> wanted_slot_bytes,
                          ipc::DeviceKind device) {
  constexpr std::uint64_t kSlotAlignment = 4096;
  if (device == ipc::DeviceKind::kHost) {
    constexpr std::uint64_t kHostSlotBytes = 1ULL << 20;
    return {wanted_slot_bytes.value_or(
                ipc::align_up(std::max(kHostSlotBytes, largest_block), kSlotAlignment)),
            4};
  }
  constexpr std::uint64_t kLeastSlotBytes = 8ULL << 20;
  constexpr std::uint64_t kRingBytes = 128ULL << 20;
  constexpr std::uint64_t kLeastSlots = 4;
  constexpr std::uint64_t kMostSlots = 16;
  const std::uint64_t blocks = (kLeastSlotBytes + largest_block - 1) / largest_block;
  const std::uint64_t slot_bytes =
      wanted_slot_bytes.value_or(ipc::align_up(blocks * largest_block, kSlotAlignment));
  const std::uint64_t slots = kRingBytes / std::max<std::uint64_t>(1, slot_bytes);
  return {slot_bytes, static_cast<std::uint32_t>(std::clamp(slots, kLeastSlots, kMostSlots))};
}

}  // namespace

ipc::ArenaOptions make_arena_options(const ArenaChoice& choice,
                                     const ipc::Geometry& geometry,
                                     std::uint32_t gpu_blocks,
                                     ipc::DeviceKind device) {
  const bool staged = choice.order != ipc::ArenaOrder::kBlockFirst;
  std::uint64_t largest_block = 1;
  for (std::uint32_t g = 0; g < geometry.groups.size(); ++g) {
    largest_block = std::max(largest_block, geometry.replicated_bytes(ipc::GroupId{g}) +
                                                geometry.sharded_bytes(ipc::GroupId{g}));
  }
  const RingSize ring = staging_ring_for(largest_block, choice.staging_slot_bytes, device);
  ipc::ArenaOptions arena;
  arena.order = choice.order;
  arena.gpu_blocks = gpu_blocks;
  arena.staging_slots = choice.staging_slots.value_or(staged ? ring.slots : 0);
  arena.staging_slot_bytes = arena.staging_slots == 0 ? 0 : ring.slot_bytes;
  return arena;
}

ipc::Status check_strategy(cache_manager::CopyStrategy strategy,
                           const ipc::Geometry& geometry,
                           ipc::ArenaOptions arena) {
  constexpr std::uint32_t kEnoughForEveryGroup = 1024;
  arena.gpu_blocks = kEnoughForEveryGroup;
  KVFERRY_ASSIGN(const ipc::ArenaLayout layout, ipc::plan_arena(geometry, arena));
  KVFERRY_TRY(cache_manager::choose_strategy(strategy, layout));
  return ipc::ok();
}

Result<ipc::DeviceSpec> host_device_for(const std::string& name,
                                        const ipc::Geometry& geometry,
                                        const ipc::ArenaOptions& arena) {
  constexpr std::uint64_t kScratchBytes = 256ULL << 20;
  KVFERRY_ASSIGN(const ipc::ArenaLayout layout, ipc::plan_arena(geometry, arena));
  std::uint64_t capacity = 0;
  if (!ipc::checked_mul(layout.total_bytes(), 2, capacity) ||
      !ipc::checked_add(capacity, kScratchBytes, capacity)) {
    return KVFERRY_ERROR(kInvalidArgument, "an arena of {} blocks is too large", arena.gpu_blocks);
  }
  ipc::DeviceSpec spec;
  spec.kind = ipc::DeviceKind::kHost;
  spec.host_name = name;
  spec.host_capacity_bytes = capacity;
  return spec;
}

Result<ipc::RankConfig> make_rank_config(const RankOptions& options) {
  if (options.rank >= options.ranks) {
    return KVFERRY_ERROR(kInvalidArgument, "--rank {} is not below --ranks {}", options.rank,
                         options.ranks);
  }
  if (options.geometry.empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "--geometry is required, e.g. --geometry tiny");
  }
  if (options.timeouts.drain >= options.timeouts.revoke) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "--drain-deadline {} ms is not below --revoke-deadline {} ms: the other "
                         "side drains while the owner waits",
                         options.timeouts.drain.count(), options.timeouts.revoke.count());
  }
  ipc::RankConfig config;
  config.timeouts = options.timeouts;
  config.runtime_dir = options.common.runtime_dir;
  config.instance = options.common.instance;
  config.engine = options.engine;
  config.rank = ipc::Rank{options.rank};
  KVFERRY_ASSIGN(config.geometry, find_geometry(options.geometry, options.ranks));
  config.cache_owner = options.arena.cache_owner;
  config.handles = options.arena.handles;
  const int gpus = options.device == "auto" ? ipc::cuda_device_count() : 0;
  if (options.device != "auto") {
    KVFERRY_ASSIGN(config.device, ipc::DeviceSpec::parse(options.device));
  } else if (gpus > 0) {
    config.device.kind = ipc::DeviceKind::kCuda;
    config.device.ordinal = static_cast<int>(options.rank % static_cast<std::uint32_t>(gpus));
  }
  config.arena =
      make_arena_options(options.arena, config.geometry, options.gpu_blocks, config.device.kind);
  if (options.device == "auto" && gpus == 0) {
    const std::string name =
        fmt::format("{}.{}.{}", options.common.instance, options.engine, options.rank);
    KVFERRY_ASSIGN(config.device, host_device_for(name, config.geometry, config.arena));
  }
  KVFERRY_TRY(ipc::plan_arena(config.geometry, config.arena));
  return config;
}

CLI::Option* add_weights_id(CLI::App& app, std::optional<ipc::Digest>& target) {
  return add_parsed<std::optional<ipc::Digest>>(
             app, "--weights-id", target,
             [](std::string_view text) -> Result<std::optional<ipc::Digest>> {
               KVFERRY_ASSIGN(const ipc::Digest id, ipc::Digest::from_hex(text));
               if (id.is_zero()) {
                 return KVFERRY_ERROR(kInvalidArgument, "zero is no identity of weights");
               }
               return std::optional(id);
             },
             "What these weights are known by, 32 hexadecimal digits: blocks of another name are "
             "never found [random]")
      ->type_name("HEX");
}

std::optional<worker::ComputeLoadConfig> LoadOptions::config() const {
  if (!kind) return std::nullopt;
  return worker::ComputeLoadConfig{*kind, times_file};
}

void add_load_options(CLI::App& app, LoadOptions& options) {
  add_parsed<std::optional<worker::ComputeLoadKind>>(
      app, "--load", options.kind,
      [](std::string_view text) -> Result<std::optional<worker::ComputeLoadKind>> {
        KVFERRY_ASSIGN(const auto kind, worker::parse_compute_load(text));
        return std::optional(kind);
      },
      "What the device computes all the time, for kvferry bench")
      ->group("");
  app.add_option("--load-times", options.times_file, "Where the ends of its rounds go")->group("");
}

CLI::Option* add_cache_dir(CLI::App& app, std::string& target) {
  return app
      .add_option("--cache-dir", target,
                  "Where calibrations are kept [$XDG_CACHE_HOME/kvferry, else ~/.cache/kvferry]")
      ->type_name("DIR");
}

}  // namespace kvferry::cli
