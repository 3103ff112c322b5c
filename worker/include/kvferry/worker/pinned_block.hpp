// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/block_key.hpp"

#include <cstdint>

namespace kvferry::worker {

/// A block in host memory, or a store unit.
struct PinnedBlock {
  ipc::GroupId group;
  ipc::Digest key;  ///< As LoadItem's.
};

/// One to be pinned for a load of some of its parts.
struct PinWanted {
  PinnedBlock block;
  std::uint64_t parts = 0;  ///< Of the store unit, a bit for each; 0: whichever it has.
};

/// What became of it.
struct PinOutcome {
  bool pinned = false;
  /// The unit is there without these of the parts, and so is not pinned: it may give way to one
  /// that has them.
  std::uint64_t lacking = 0;
};

}  // namespace kvferry::worker
