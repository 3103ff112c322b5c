// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <cstdint>

namespace kvferry::worker {

/// Thread blocks of each kernel that gathers what is stored, scatters what was loaded, or scatters
/// what was fetched ahead (loads of Urgency::kAhead and below), at most and at least 1. Each may
/// keep a multiprocessor from compute for some 10 us; fewer copy slower.
struct CopyBudget {
  std::uint32_t gather = ipc::kCopyThreadBlocks;
  std::uint32_t scatter = ipc::kCopyThreadBlocks;
  std::uint32_t ahead = ipc::kCopyThreadBlocks;

  [[nodiscard]] std::uint32_t of(bool stores, bool is_ahead) const noexcept {
    if (stores) return gather;
    return is_ahead ? ahead : scatter;
  }
};

}  // namespace kvferry::worker
