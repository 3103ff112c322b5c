// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <optional>

namespace kvferry::cache_manager {

/// Whether a worker's compute waits for its loads: of the time in which loads were under way
/// lately, its device stood still for more than a small part. Then a load that is faster is worth
/// more than the few percent of compute that it costs, whatever computes at the moment.
/// @threading one thread.
class LoadWaits {
 public:
  /// To be told whenever either changes, as far as that is seen. loading: loads are under way that
  /// were not fetched ahead. computing: the worker's device; nothing: not known, which is no wait.
  void note(ipc::TimePoint now, bool loading, std::optional<bool> computing) noexcept;
  [[nodiscard]] bool are_waited_for() const noexcept;

 private:
  ipc::TimePoint noted_{};
  bool loading_ = false;
  bool waiting_ = false;
  // Seconds, of which those before half a second under way count half.
  double loading_s_ = 0;
  double waiting_s_ = 0;
  bool are_waited_for_ = false;
};

}  // namespace kvferry::cache_manager
