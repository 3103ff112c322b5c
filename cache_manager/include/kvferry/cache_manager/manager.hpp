// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "kvferry/cache_manager/namespace_quota.hpp"
#include "kvferry/cache_manager/watermarks.hpp"
#include "kvferry/ipc/wire/kv_events.hpp"

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kvferry::cache_manager {

/// Of which loads the contents are checked, where their checksums are known. Those that an earlier
/// manager stored are checked once in any case. kAlways: stores are answered once they are known,
/// and a block that has none is a miss; kInvalidArgument without checksums.
enum class VerifyLoads : std::uint8_t { kOff = 1, kSampled, kAlways };

struct ManagerConfig {
  std::string runtime_dir;  ///< Empty: the default.
  std::string instance = "default";
  std::uint64_t pool_bytes = 1ULL << 30;  ///< Host memory for blocks, all engines together.
  /// Also an orderly end leaves it to the next manager, with those that copy for this one.
  bool keeps_pool = false;
  /// Movers compute checksums of what they have stored, when their processors have nothing else to
  /// do. Blocks without them are not kept for another manager.
  bool checksums = true;
  VerifyLoads verify_loads = VerifyLoads::kSampled;
  /// Sampled: one block in so many.
  static constexpr std::uint32_t kSample = 16;
  /// Of 2 MiB: reserved ones, where the machine has enough of them, or what the kernel makes of
  /// ordinary ones.
  bool huge_pages = true;
  /// Where its memory is to be; empty: anywhere.
  std::vector<int> numa_nodes;
  /// What of it goes when something else needs its place: one of eviction_policies().
  std::string eviction_policy{kDefaultEvictionPolicy};
  std::uint32_t max_jobs_per_engine = 1024;  ///< Beyond it submits are kBusy.
  /// Of engines by name, 1 to kMaxShare; of all others 1. Engines that copy over one GPU's link get
  /// of each direction in proportion to them, while they have jobs for it.
  std::map<std::string, std::uint32_t> shares;
  static constexpr std::uint32_t kMaxShare = 1000;
  /// A job that could not be started for so long ends as kTimeout.
  std::chrono::milliseconds queue_deadline{60'000};
  /// A mover that answers nothing for so long has its jobs cancelled (kTimeout); one that then does
  /// not even give them up is ended after as long again.
  std::chrono::milliseconds job_deadline{30'000};
  /// What an earlier manager left without checksums is dropped when no mover has told them by then.
  /// One that has as much left as it may, 2^17 parts of 2 MiB, needs that long on one processor.
  std::chrono::milliseconds late_sums_deadline{60'000};
  /// Where it is told what the prefix index stores and removes; empty: nowhere.
  std::string kv_events;
  /// Where those ask who missed some of that or come late; empty: nowhere.
  std::string kv_events_snapshot;
  ipc::KvEventEncoding kv_events_encoding = ipc::KvEventEncoding::kMaps;

  /// What namespaces may have of the pool.
  NamespaceQuotas quotas;
  /// Whether blocks are evicted before a store needs their place.
  Watermarks watermarks;

  [[nodiscard]] std::uint32_t share_of(const std::string& engine) const {
    const auto at = shares.find(engine);
    return at == shares.end() ? 1 : at->second;
  }
};

/// Runs the manager until SIGTERM, SIGINT or SIGHUP. When an earlier one of the instance was
/// killed, what it had in its pool is served on, if a mover still has that pool and it is of this
/// size. Throws Exception when it cannot be set up (kAlreadyExists: a second manager on the
/// instance, or another process at an endpoint; kNoHostMemory: the pool does not fit).
void run_manager(const ManagerConfig& config);

}  // namespace kvferry::cache_manager
