// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/worker/load_choice.hpp"
#include "kvferry/worker/prefetcher.hpp"
#include "kvferry/worker/store_gate.hpp"
#include "kvferry/worker/write_policy.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace kvferry::worker {

/// What an engine does with the host tier, and when.
struct TierOptions {
  WritePolicyOptions write;
  /// WriteMode::kWriteBack: how long a request that is let in waits for its room, while what is
  /// there is stored; then the device loses that.
  ipc::Duration write_back_wait = std::chrono::milliseconds(50);
  /// Blocks on their way to host memory at a time; 0: as many as the device holds.
  std::uint64_t store_queue = 0;
  LoadChoiceOptions recompute;
  std::optional<PrefetchOptions> prefetch;      ///< Nothing: no prefetches.
  std::uint32_t prefetch_requests = 8;          ///< First ones of the queue that have some.
  std::uint32_t unit_blocks = 1;                ///< ipc::ModelIdentity::unit_blocks.
  std::string name_space = "default";           ///< ipc::ModelIdentity::name_space.
  std::optional<ipc::Digest> name_space_key{};  ///< ipc::ModelIdentity::name_space_key.
};

}  // namespace kvferry::worker
