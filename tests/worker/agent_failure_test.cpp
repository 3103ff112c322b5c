// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A staging agent whose device fails: what it was asked for and has launched may still write, so
// that it is never answered; nor is anybody told that it has ended. A launch that is refused has
// ended.
#include "worker/agent_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::ErrorCode;
using ipc::StageKind;
using ipc::Status;
using std::chrono_literals::operator""s;
using test::DeviceCall;
using test::FaultKind;
using testing::HasSubstr;

using AgentFailureTest = AgentFixture;

TEST_F(AgentFailureTest, LaunchThatIsRefusedIsAnsweredAndTheNextOneServed) {
  ASSERT_TRUE(connect().has_value());
  lend();
  for (const auto& [kind, call] : {std::pair{StageKind::kGather, DeviceCall::kGather},
                                   std::pair{StageKind::kStore, DeviceCall::kGather},
                                   std::pair{StageKind::kLoad, DeviceCall::kScatter}}) {
    plan_.fail({call, 1, FaultKind::kOnce, "refused"});
    ask(kind);
    const auto refused = receive();
    ASSERT_TRUE(refused.has_value()) << refused.error().to_string();
    EXPECT_EQ(refused->id, last_id_);
    ASSERT_TRUE(refused->error.has_value());
    EXPECT_THAT(refused->error->message, HasSubstr("refused"));
    ask(kind);
    const auto served = receive();
    ASSERT_TRUE(served.has_value()) << served.error().to_string();
    EXPECT_FALSE(served->error.has_value());
  }
  EXPECT_THAT(failures_, testing::IsEmpty());
}

TEST_F(AgentFailureTest, PoolThatCannotBePinnedIsSaidAndRingsServeOn) {
  ASSERT_TRUE(connect().has_value());
  lend();
  plan_.fail({DeviceCall::kRegisterHost, 1, FaultKind::kOnce, "no memory to pin"});
  ask(StageKind::kStore);
  ask(StageKind::kGather);  // is not held up
  bool has_refused = false;
  for (int i = 0; i < 2; ++i) {
    const auto reply = receive();
    ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
    if (!reply->error) continue;
    has_refused = true;
    EXPECT_EQ(reply->id, last_id_ - 1);
    EXPECT_THAT(reply->error->message, HasSubstr("no memory to pin"));
  }
  EXPECT_TRUE(has_refused);
}

class BrokenAgentTest : public AgentFailureTest, public ::testing::WithParamInterface<StageKind> {};

TEST_P(BrokenAgentTest, NothingIsAnsweredNorGreetedNorSaidToHaveEnded) {
  ASSERT_TRUE(connect().has_value());
  lend();
  const bool gathers = GetParam() == StageKind::kGather || GetParam() == StageKind::kStore;
  plan_.fail({gathers ? DeviceCall::kGather : DeviceCall::kScatter, 1, FaultKind::kBreaks,
              "uncorrectable memory error"});
  ask(GetParam());
  const auto reply = receive();
  ASSERT_FALSE(reply.has_value()) << "it was answered, request " << reply->id;
  EXPECT_EQ(reply.error().code, ErrorCode::kPeerDied);
  ASSERT_TRUE(run_until([this] { return !failures_.empty(); }));
  EXPECT_THAT(failures_.front().message, HasSubstr("uncorrectable"));
  const Status greeted = connect();
  ASSERT_FALSE(greeted.has_value());
  EXPECT_EQ(greeted.error().code, ErrorCode::kCuda);
  EXPECT_THAT(greeted.error().message, HasSubstr("uncorrectable"));
  std::optional<Status> quiesced;
  agent_->quiesce({id_, false, std::chrono::milliseconds(1000)}, Deadline::after(1s),
                  [&](Status status) { quiesced = std::move(status); });
  ASSERT_TRUE(run_until([&] { return quiesced.has_value(); }));
  ASSERT_FALSE(quiesced->has_value());
  EXPECT_EQ(quiesced->error().code, ErrorCode::kCuda);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    BrokenAgentTest,
    testing::Values(StageKind::kGather, StageKind::kScatter, StageKind::kStore, StageKind::kLoad));

}  // namespace
}  // namespace kvferry::worker
