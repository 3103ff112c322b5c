// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/copy_depth.hpp"

namespace kvferry::cache_manager {

std::uint64_t CopyDepth::call_bytes(CopyStrategy strategy, ipc::TimePoint now) const noexcept {
  if (paced_ || !is_calm(now)) return kSlotBytes;
  switch (strategy) {
    case CopyStrategy::kDirect: return call_bytes_;
    // Of many slices: the call itself takes as long as the copy.
    case CopyStrategy::kBatch: return 2 * kSlotBytes;
    // Rows are a call for each block in any case, and kernels are to be short.
    default: return kSlotBytes;
  }
}

}  // namespace kvferry::cache_manager
