// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <cstdint>

namespace kvferry::worker {

/// Thread blocks of each kernel that gathers what is stored, or scatters what was loaded, at most
/// and at least 1. Each may keep a multiprocessor from compute for some 10 us; fewer copy slower.
struct CopyBudget {
  std::uint32_t gather = ipc::kCopyThreadBlocks;
  std::uint32_t scatter = ipc::kCopyThreadBlocks;
};

}  // namespace kvferry::worker
