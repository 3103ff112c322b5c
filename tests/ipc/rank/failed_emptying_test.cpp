// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What commands say of an allocator that cannot be emptied.
#include "ipc/rank/no_arena_user.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "rank/component_commands.hpp"
#include "rank/empty_command.hpp"
#include "worker/host_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

using testing::HasSubstr;

class FailedEmptyingTest : public testing::Test {
 protected:
  void SetUp() override {
    testing::internal::CaptureStderr();
    init_logging("test", LogLevel::kInfo);
  }
  void TearDown() override { (void)said(); }
  std::string said() {
    if (!std::exchange(captures_, false)) return {};
    return testing::internal::GetCapturedStderr();
  }

 private:
  bool captures_ = true;
};

TEST_F(FailedEmptyingTest, ACommandLogsItsReasonAndLooksAtTheDevice) {
  const auto device = kvferry::test::open_host_device(64ULL << 20);
  NoArenaUser arena;
  const EmptyingUser user(arena, [](EmptyReason) -> Result<EmptiedCache> {
    return KVFERRY_ERROR(kCuda, "the device is gone");
  });
  Envelope request;
  request.kind = MessageKind::kRankEmpty;
  request.body = encode(RankEmpty{EmptyReason::kFlush});
  const auto done = EmptyCommand(user, *device).run(request);
  ASSERT_TRUE(done.reply.error.has_value());
  EXPECT_EQ(done.reply.error->code, ErrorCode::kCuda);
  ASSERT_TRUE(done.memory.has_value()) << "what it had before is told on";
  EXPECT_EQ(done.memory->free_bytes, device->memory_info()->free_bytes);
  EXPECT_THAT(said(), HasSubstr("W test flush: the allocator was not emptied: "));
}

TEST_F(FailedEmptyingTest, AThrownErrorOfAClearIsLoggedOnce) {
  NoArenaUser arena;
  EmptyingUser user(arena, [](EmptyReason) -> Result<EmptiedCache> {
    throw std::runtime_error("no such device");
  });
  user.on_freed(Epoch{1});
  const std::string log = said();
  const std::string line = "W test clear: the allocator was not emptied: ";
  const auto at = log.find(line);
  ASSERT_NE(at, std::string::npos) << log;
  EXPECT_EQ(log.find("not emptied", at + line.size()), std::string::npos) << log;
  EXPECT_THAT(log, HasSubstr("could not be emptied: no such device"));
}

/// Gives all up, and cannot empty its allocator.
class Draft final : public ComponentUser {
 public:
  [[nodiscard]] std::vector<ComponentState> components() const override {
    return {{"draft", ComponentStrategy::kOffloaded, true, bytes_}};
  }
  [[nodiscard]] Result<ComponentRelease> release(std::string_view /*name*/,
                                                 Deadline /*deadline*/) override {
    bytes_ = 0;
    return KVFERRY_ERROR(kCuda, "the allocator was not emptied");
  }

 private:
  std::uint64_t bytes_ = 9000;
};

TEST_F(FailedEmptyingTest, AComponentsOutcomeShowsWhatItHasNow) {
  Draft draft;
  Envelope request;
  request.kind = MessageKind::kRankComponents;
  request.body = encode(RankComponents{{.all = true, .names = {}}});
  const Envelope answer = ComponentCommands(&draft).run(request, MonotonicClock::now());
  const auto reply = decode<RankComponentsReply>(answer.body, "RankComponentsReply");
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  ASSERT_EQ(reply->components.size(), 1U);
  const ComponentOutcome& one = reply->components[0];
  EXPECT_FALSE(one.released);
  EXPECT_TRUE(one.error.has_value());
  EXPECT_EQ(one.outcome.device_bytes_before, 9000U);
  EXPECT_EQ(one.outcome.component.device_bytes, 0U);
}

}  // namespace
}  // namespace kvferry::ipc
