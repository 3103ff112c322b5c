// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A replay as one of several tenants.
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace kvferry::test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class ReplayNamespaceTest : public ReplayTest {
 protected:
  [[nodiscard]] std::string key_file(mode_t mode) const {
    const std::string file = path("key");
    std::ofstream(file) << "5ec4e75ec4e75ec4e75ec4e75ec4e75e\n";
    EXPECT_EQ(::chmod(file.c_str(), mode), 0);
    return file;
  }
  /// What the status has of a namespace; null when it has nothing.
  [[nodiscard]] json account(const std::string& name) const {
    const json now = status();
    if (!now.is_object()) return {};
    for (const json& one : now["namespaces"]) {
      if (one["name"] == name) return one;
    }
    return {};
  }
};

TEST_F(ReplayNamespaceTest, IsAccountedUnderItsNameAndStaysUnderItsQuota) {
  constexpr int kRequests = 400;
  constexpr int kSessions = 20;  // More blocks than the half of the pool has room for.
  constexpr int kGapMs = 10;
  start_replay(write_trace(kRequests, kSessions, kGapMs),
               {"--speed=1", "--host-memory=16MiB", "--namespace=tenant",
                "--namespace-key-file=" + key_file(0600), "--namespace-quota=tenant=10%:50%"});
  json seen;
  EXPECT_TRUE(wait_until([&] {
    const json now = account("tenant");
    if (!now.is_object()) return false;
    seen = now;
    EXPECT_LE(seen["bytes"], seen["hard_bytes"]);
    return seen["evicted"] > 0;
  })) << seen
      << running_->stderr_text();
  EXPECT_EQ(seen["hard_bytes"], 8 << 20);
  EXPECT_EQ(seen["has_key"], true);
  EXPECT_GT(seen["blocks"], 0);
  EXPECT_TRUE(account("default").is_null() || account("default")["blocks"] == 0);
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_EQ(report()["requests"], kRequests);
  EXPECT_EQ(report()["namespace"], "tenant");
  EXPECT_GT(report()["hits_host"], 0);
  const json pool = report()["samples"].back()["pool"];
  EXPECT_GE(pool["free"], 8 << 20) << "the other half of the pool was nobody's";
}

TEST_F(ReplayNamespaceTest, AKeyThatOthersCanReadIsRefusedBeforeAnythingStarts) {
  const std::string file = key_file(0644);
  const Finished run =
      replay(write_trace(10), {"--namespace=tenant", "--namespace-key-file=" + file});
  EXPECT_EQ(run.exit, ChildExit::exited(2));
  EXPECT_THAT(run.complaints, AllOf(HasSubstr("--namespace-key-file: " + file + " has mode 0644"),
                                    HasSubstr("chmod 600 " + file), Not(HasSubstr("5ec4e7"))));
}

TEST_F(ReplayNamespaceTest, AQuotaThatThePoolHasNoRoomForIsRefusedBeforeAnythingStarts) {
  const Finished run =
      replay(write_trace(10), {"--host-memory=16MiB", "--namespace-quota=tenant=0:1TiB"});
  EXPECT_EQ(run.exit, ChildExit::exited(2)) << "an option is wrong, as for a manager";
  EXPECT_THAT(run.complaints, HasSubstr("the quota of namespace tenant is 0%:1.00 TiB, the host "
                                        "pool has 16.0 MiB"));
}

}  // namespace
}  // namespace kvferry::test
