// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/copy_depth.hpp"

namespace kvferry::cache_manager {

// Whether a better job is to wait for no more than a slot.
bool CopyDepth::lets_in(Kind kind, ipc::TimePoint now) const noexcept {
  if (!loads_) return false;
  if (kind.ahead || options_.urgent == UrgentLoads::kAlways) return true;
  return !is_calm(now) && kind.strategy != CopyStrategy::kStaged;
}

std::uint64_t CopyDepth::most_bytes(Kind kind, ipc::TimePoint now) const noexcept {
  if (lets_in(kind, now)) return kSlotBytes;
  return is_calm(now) ? 2 * call_bytes_ : 2 * kSlotBytes;
}

std::uint64_t CopyDepth::call_bytes(Kind kind, ipc::TimePoint now) const noexcept {
  if (lets_in(kind, now)) {
    // Half a slot of the ring would be left empty.
    return kind.strategy == CopyStrategy::kStaged ? kSlotBytes : kSlotBytes / 2;
  }
  if (options_.paced || !is_calm(now)) return kSlotBytes;
  switch (kind.strategy) {
    case CopyStrategy::kDirect: return call_bytes_;
    // Of many slices: the call itself takes as long as the copy.
    case CopyStrategy::kBatch: return 2 * kSlotBytes;
    // Rows are a call for each block in any case, and kernels are to be short.
    default: return kSlotBytes;
  }
}

}  // namespace kvferry::cache_manager
