// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/worker/load_choice.hpp"
#include "kvferry/worker/prefetcher.hpp"
#include "kvferry/worker/store_gate.hpp"

#include <cstdint>
#include <vector>

namespace kvferry::cli {

/// Everything that the engine of a replay counts.
struct ReplayCounters {
  std::uint64_t requests = 0;  ///< Finished.
  std::uint64_t block_references = 0;
  std::uint64_t hits_device = 0;
  std::uint64_t hits_host = 0;
  std::uint64_t bytes_to_host = 0;    ///< Over the link, all ranks.
  std::uint64_t bytes_to_device = 0;  ///< Over the link, all ranks.
  std::uint64_t loads = 0;            ///< Blocks, over all groups.
  std::uint64_t stores = 0;           ///< Blocks, over all groups.
  std::uint64_t already_stored = 0;   ///< Blocks that the host tier had already.
  std::uint64_t host_full = 0;        ///< Blocks not stored for lack of room.
  std::uint64_t failed_jobs = 0;      ///< Loads and stores with at least one failed block.
  std::uint64_t recomputed = 0;       ///< Blocks computed again because their load failed.
  /// Blocks that were seen in host memory and were not there when they were to be loaded: misses.
  std::uint64_t evicted_before_load = 0;
  std::uint64_t blocks_verified = 0;
  std::uint64_t blocks_corrupt = 0;
  std::uint64_t blocks_survived = 0;  ///< Device hits, all groups, on blocks older than a worker.
  std::uint64_t retracted = 0;        ///< Requests put back: their blocks were gone, or a pause.
  std::uint64_t rejected = 0;         ///< Requests that are longer than the whole device.
  std::uint64_t aborted = 0;          ///< Requests ended by a pause.
  std::uint64_t pauses = 0;           ///< Holds, those of flushes included.
  std::uint64_t flushes = 0;
  std::uint64_t clears = 0;
  std::uint64_t reinits = 0;
  std::uint64_t failed_cycles = 0;     ///< Clears or re-inits that had to be tried again.
  std::uint64_t quarantined = 0;       ///< Clears that left memory with a peer.
  double offload_down_s = 0;           ///< Played with a usable cache and without offload.
  std::uint64_t written_back = 0;      ///< Blocks stored because they were to be evicted.
  std::uint64_t evicted_unstored = 0;  ///< Of write-back: lost, for they could not be stored.
  std::uint64_t room_waits = 0;        ///< Requests that waited for what was written back.
  worker::StoreGateCounts gate;
  worker::LoadChoiceCounts choice;
  worker::PrefetchCounts prefetch;
  std::uint64_t prefetch_used = 0;   ///< Blocks that were there when their request was let in.
  std::uint64_t prefetch_waits = 0;  ///< Requests whose turn had come before their blocks.
  std::uint64_t leases = 0;          ///< Requests whose blocks were only kept in host memory.
  double load_bytes_per_s = 0;       ///< As measured last; 0: not at all.
  double compute_tokens_per_s = 0;   ///< The same, or as given.
  std::vector<double> clear_ms;
  std::vector<double> reinit_ms;

  [[nodiscard]] double hit_rate() const noexcept {
    return block_references == 0 ? 0.0
                                 : static_cast<double>(hits_device + hits_host) /
                                       static_cast<double>(block_references);
  }
};

}  // namespace kvferry::cli
