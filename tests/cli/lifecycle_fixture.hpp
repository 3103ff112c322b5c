// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cli/serve_fixture.hpp"
#include "kvferry/ipc/rank/emptied_cache.hpp"

#include <gmock/gmock.h>

#include <array>
#include <map>
#include <string>
#include <vector>

namespace kvferry::test {

/// A serving engine of two ranks, and what each rank's allocator was emptied for.
class LifecycleRowsTest : public ServeTest {
 protected:
  static constexpr std::uint32_t kRanks = 2;
  /// Long enough to be stopped in the middle.
  static constexpr std::uint32_t kLong = 1500;

  /// How often each rank's allocator was emptied for each reason since the last look.
  using Emptied = std::map<ipc::EmptyReason, std::uint64_t>;

  void start_rows(const std::vector<std::string>& workers = {},
                  const std::vector<std::string>& both = {}) {
    gpu_blocks_ = 160;
    ASSERT_NO_FATAL_FAILURE(start_engine(kRanks, workers, both));
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) seen_[rank] = memory_of(rank).empties;
  }
  void expect_emptied(const Emptied& expected) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const std::vector<std::uint64_t> now = memory_of(rank).empties;
      ASSERT_EQ(now.size(), ipc::kEmptyReasons);
      Emptied emptied;
      for (std::size_t i = 0; i < now.size(); ++i) {
        if (now[i] != seen_[rank][i]) {
          emptied[static_cast<ipc::EmptyReason>(i + 1)] = now[i] - seen_[rank][i];
        }
      }
      EXPECT_EQ(emptied, expected) << "rank " << rank;
      seen_[rank] = now;
    }
  }
  void done(const std::string& command, const std::vector<std::string>& options = {}) {
    const Finished finished = ask(command, options);
    ASSERT_EQ(finished.exit, ChildExit::exited(0)) << command << ": " << finished.complaints;
  }
  void refused(const std::string& command,
               const std::vector<std::string>& options,
               const char* why) {
    const Finished finished = ask(command, options);
    EXPECT_EQ(finished.exit, ChildExit::exited(1)) << command << ": " << finished.output;
    EXPECT_THAT(finished.complaints, testing::HasSubstr(why));
  }
  [[nodiscard]] nlohmann::json engine() const {
    return nlohmann::json::parse(ask("status", {"--json"}).output)["engines"][0];
  }
  [[nodiscard]] std::uint64_t epoch_of(std::uint32_t rank) const {
    return engine()["ranks"][rank]["worker"]["epoch"].get<std::uint64_t>();
  }
  [[nodiscard]] std::uint64_t device_bytes() const {
    return ipc::host_device_used_bytes(device_name_).value();
  }
  GenerateReply wait_for(Answer& answer) {
    EXPECT_TRUE(run_until([&answer] { return answer.has_value(); }));
    if (!answer || !*answer) return {};
    return **answer;
  }

  const std::vector<std::uint32_t> prompt_ = prompt_of(1000, 40);
  std::array<std::vector<std::uint64_t>, kRanks> seen_;
};

}  // namespace kvferry::test
