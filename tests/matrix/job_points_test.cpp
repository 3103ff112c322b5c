// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The fault matrix of jobs strikes every transition that the one of the handshake does not.
#include "matrix/job_cells.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace kvferry::test {
namespace {

using ipc::Transition;

bool is_of_the_lease(const std::string& name) {
  return name.starts_with("hello.") || name.starts_with("owner.") || name.starts_with("attacher.");
}

TEST(JobPointsTest, EveryOtherTransitionIsAPointThatIsKilledAt) {
  std::set<std::string> expected;
  for (auto number = std::uint32_t{1}; number < static_cast<std::uint32_t>(Transition::kEnd);
       ++number) {
    const std::string name(ipc::to_string(static_cast<Transition>(number)));
    if (!is_of_the_lease(name) && name != "struck") expected.insert(name);
  }
  for (const std::string owner : {"worker", "mover"}) {
    std::set<std::string> struck;
    for (const JobCell& cell : job_cells()) {
      const std::string name(ipc::to_string(cell.point));
      if (cell.owner == owner && cell.blow == Blow::kKill && !cell.inapplicable() &&
          !is_of_the_lease(name)) {
        struck.insert(name);
      }
    }
    EXPECT_THAT(struck, testing::ContainerEq(expected)) << owner << " owns";
  }
}

}  // namespace
}  // namespace kvferry::test
