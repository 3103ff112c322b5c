// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The fault matrix strikes every transition of the handshake.
#include "matrix/lease_cells.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace kvferry::test {
namespace {

using ipc::Transition;

bool is_of_the_lease(Transition transition) {
  const std::string name(ipc::to_string(transition));
  return name.starts_with("hello.") || name.starts_with("owner.") || name.starts_with("attacher.");
}

std::set<std::string> of_the_lease() {
  std::set<std::string> names;
  for (auto number = std::uint32_t{1}; number < static_cast<std::uint32_t>(Transition::kEnd);
       ++number) {
    const auto transition = static_cast<Transition>(number);
    if (is_of_the_lease(transition)) names.emplace(ipc::to_string(transition));
  }
  return names;
}

TEST(LeasePointsTest, EveryTransitionOfTheLeaseIsAPointThatIsKilledAt) {
  std::set<std::string> struck;
  for (const Cell& cell : lease_cells()) {
    if (cell.blow == Blow::kKill && !cell.inapplicable()) struck.emplace(to_string(cell.point));
  }
  EXPECT_THAT(struck, testing::ContainerEq(of_the_lease()));
}

TEST(LeasePointsTest, EveryPointIsStruckWhoeverOwns) {
  // A mover that cannot drain exits, one that does not let go is killed, and no deadline ends a
  // worker: these points exist on one side only.
  const std::set<std::string> worker_owns = {"owner.stuck", "owner.kill"};
  const std::set<std::string> mover_owns = {"attacher.stuck", "owner.keep", "owner.quarantined",
                                            "owner.reap"};
  for (const std::string owner : {"worker", "mover"}) {
    std::set<std::string> expected = of_the_lease();
    for (const std::string& name : owner == "worker" ? mover_owns : worker_owns) {
      expected.erase(name);
    }
    std::set<std::string> struck;
    for (const Cell& cell : lease_cells()) {
      if (cell.owner == owner && cell.blow == Blow::kKill && !cell.inapplicable()) {
        struck.emplace(to_string(cell.point));
      }
    }
    EXPECT_THAT(struck, testing::ContainerEq(expected)) << owner << " owns";
  }
}

}  // namespace
}  // namespace kvferry::test
