// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace kvferry::cache_manager {

/// A mover works on one job at a time in each direction.
struct MoverLane {
  ipc::IncarnationId mover;
  bool to_host = false;
  // NOLINTNEXTLINE(readability-implicit-bool-conversion): the compiler's own comparison
  friend constexpr auto operator<=>(const MoverLane&, const MoverLane&) = default;
};

/// Whether movers get on with what they have. A lane that answers nothing for a whole deadline,
/// though it has jobs, is asked to give them up; a mover that then answers nothing at all for
/// another one is stuck. Any answer is progress and starts the clock anew. @threading one thread.
class MoverWatch {
 public:
  explicit MoverWatch(ipc::Duration deadline) : deadline_(deadline) {}

  void sent(const MoverLane& lane, ipc::TimePoint now);
  void answered(const MoverLane& lane, ipc::TimePoint now);
  /// A job of the lane is over, by its answer or otherwise.
  void closed(const MoverLane& lane);
  void forget(const ipc::IncarnationId& mover);

  [[nodiscard]] std::optional<ipc::TimePoint> next() const;
  /// Lanes that are to give up their jobs; call gave_up() or not_before() for each.
  [[nodiscard]] std::vector<MoverLane> stalled(ipc::TimePoint now) const;
  void gave_up(const MoverLane& lane, ipc::TimePoint now);
  /// Gives the lane until then.
  void not_before(const MoverLane& lane, ipc::TimePoint when);
  /// Movers that answered nothing since they were asked to give up.
  [[nodiscard]] std::set<ipc::IncarnationId> stuck(ipc::TimePoint now) const;

 private:
  struct Lane {
    std::uint32_t open = 0;
    ipc::TimePoint due;  ///< Then, unless something is answered before.
    bool asked = false;  ///< To give up.
  };

  ipc::Duration deadline_;
  std::map<MoverLane, Lane> lanes_;  ///< With open jobs.
};

}  // namespace kvferry::cache_manager
