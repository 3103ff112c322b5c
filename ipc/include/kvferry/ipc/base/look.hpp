// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <thread>

namespace kvferry::ipc {

/// Looks again and again, for what comes sooner than a sleeping thread wakes: a device's notice
/// takes some 35 us, a sleeping thread 10. Lets others run between two looks. True as soon as a
/// look is; false when none was for so long, or at once for no time at all.
template <typename Look> [[nodiscard]] bool look_for(Duration time, Look look) {
  for (const Deadline end = Deadline::after(time); !end.expired();) {
    if (look()) return true;
    // wait-brief: whoever runs instead of us; its slice of time
    std::this_thread::yield();
  }
  return false;
}

}  // namespace kvferry::ipc
