// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/model/geometry.hpp"

#include <cstdint>
#include <string>

namespace kvferry::ipc {

/// What a worker and a mover of one rank are both started with. They are compared at hello.
struct RankConfig {
  std::string runtime_dir;  ///< Empty: the default (RuntimeDir::open).
  std::string instance = "default";
  std::string engine = "default";
  Rank rank;
  Geometry geometry;  ///< Holds the rank count, too.
  CacheOwner cache_owner = CacheOwner::kWorker;
  HandleKind handles = HandleKind::kVmm;
  ArenaOptions arena;
  DeviceSpec device;
  LeaseTimeouts timeouts;
  /// Of a mover that limits what it begins in a second, for the manager to know; 0: it does not.
  std::uint64_t store_rate = 0;
  std::uint64_t load_rate = 0;
  IncarnationId incarnation = Digest::random();  ///< This life of this process.
};

}  // namespace kvferry::ipc
