// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/worker/client.hpp"
#include "kvferry/worker/prefix_plan.hpp"
#include "kvferry/worker/store_units.hpp"

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kvferry::worker {

/// What an engine is about to load from host memory is pinned there until it has been loaded: a
/// look pins nothing, and stores, the engine's own that the manager has still to come to included,
/// evict what it found. A call waits for the manager, 200 ms at most.
/// @threading the client's thread
class LoadPins {
 public:
  /// Where a load finds a block. @pre the plan loads it
  using PlaceOf = std::function<UnitPart(ipc::GroupId group, std::uint32_t position)>;
  struct Lacking {
    ipc::GroupId group;
    UnitPart place;
  };
  struct Taken {
    std::vector<PinnedBlock> pinned;  ///< To be let go of when the load has ended.
    /// Of the plan's loads: then nothing is pinned, and a new plan needed.
    std::uint64_t gone = 0;
    std::vector<Lacking> lacking;  ///< Of those, parts that a unit which is there does not have.
  };
  /// Whether units have to have the parts that the plan loads. Where plan after plan meets some
  /// that have not, what there is may be worth more than none.
  enum class Parts : std::uint8_t { kAsPlanned, kAny };

  /// Pins all that the plan loads, or nothing of it. Errors as Client::pin_blocks().
  [[nodiscard]] Result<Taken> take(Client& client,
                                   const PrefixPlan& plan,
                                   const PlaceOf& place_of,
                                   Parts parts = Parts::kAsPlanned);
  /// Pins what is there of these, and returns it.
  [[nodiscard]] static Result<std::vector<PinnedBlock>> take_there(
      Client& client, std::span<const PinnedBlock> blocks);
  /// Notes that they are needed no more: also from within the client's own calls.
  void let_go(std::vector<PinnedBlock> pinned);
  /// Unpins what was let go of. Sends and does not wait.
  void unpin(Client& client);

 private:
  std::vector<std::vector<PinnedBlock>> let_go_;
};

}  // namespace kvferry::worker
