// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "replay/trace.hpp"

#include <cstdint>
#include <optional>

namespace kvferry::cli {

struct Sizing {
  std::uint32_t gpu_blocks = 0;
  std::uint64_t host_bytes = 0;
};

/// What bounds the defaults: 0 where nothing does.
struct SizingLimits {
  std::uint64_t device_bytes = 0;  ///< Free memory of a device, shared by its ranks.
  std::uint64_t host_bytes = 0;    ///< Memory that the host can spare.
  /// What the kernel says is available: more is refused, whoever asked for it. 0: not known.
  std::uint64_t host_available = 0;
  bool devices_in_host_memory = false;  ///< Simulated ones: their arenas count, too.
};

/// Defaults for what was not given: the device holds about 1 % of the distinct blocks (but the
/// longest request and room for its neighbours), host memory about a fifth. So most blocks that are
/// used again have to come from the host. Then holds both, given or not, to the longest request
/// and to the memory that there is: kInvalidArgument when it does not fit.
[[nodiscard]] ipc::Result<Sizing> choose_sizes(const ipc::Geometry& geometry,
                                               const TraceFacts& facts,
                                               std::optional<std::uint32_t> gpu_blocks,
                                               std::optional<std::uint64_t> host_bytes,
                                               const SizingLimits& limits);

/// Bytes of one trace block on the host: one block of every group, all ranks.
[[nodiscard]] std::uint64_t host_bytes_per_block(const ipc::Geometry& geometry);
/// Bytes of one trace block on one rank's device: one block of every group.
[[nodiscard]] std::uint64_t device_bytes_per_block(const ipc::Geometry& geometry);
/// MemAvailable of the kernel; 0 when it does not say.
[[nodiscard]] std::uint64_t available_host_bytes();

}  // namespace kvferry::cli
