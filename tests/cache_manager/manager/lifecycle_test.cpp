// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/lifecycle.hpp"

#include <gtest/gtest.h>

namespace kvferry::cache_manager {
namespace {

// An owner that has to kill a mover answers that late, and is not to be taken for one that failed.
TEST(LifecycleTest, RanksAreGivenTheTimeThatUnpinningTheWholePoolTakes) {
  const ipc::LeaseTimeouts timeouts;
  for (const std::uint64_t gib : {1U, 64U, 256U, 2048U}) {
    EXPECT_GT(clear_margin(gib << 30U),
              timeouts.kill + gib * timeouts.kill_per_pinned_gib + 2 * timeouts.settle)
        << gib << " GiB";
  }
}

}  // namespace
}  // namespace kvferry::cache_manager
