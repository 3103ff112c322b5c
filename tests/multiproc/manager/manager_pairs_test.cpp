// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Commands that come while another one runs: every pair has one outcome.
#include "kvferry/ipc/wire/component_messages.hpp"
#include "multiproc/manager/manager_generation_fixture.hpp"

#include <fmt/format.h>

namespace kvferry::test {
namespace {

using testing::HasSubstr;

/// The command that runs, the one that comes meanwhile from somebody else.
using Pair = std::pair<MessageKind, MessageKind>;

class ManagerPairsTest : public ManagerGenerationTest, public testing::WithParamInterface<Pair> {
 protected:
  static ipc::RequestId ask(ScriptedPeer& from, MessageKind kind) {
    switch (kind) {
      case MessageKind::kPause:
        return from.ask(kind, ipc::PauseRequest{"chat", PauseMode::kRetract});
      case MessageKind::kContinue: return from.ask(kind, ipc::ContinueRequest{"chat"});
      case MessageKind::kFlush: return from.ask(kind, ipc::FlushRequest{"chat"});
      case MessageKind::kUpdateWeights: {
        ipc::UpdateWeightsRequest update;
        update.engine = "chat";
        return from.ask(kind, update);
      }
      case MessageKind::kReleaseMemory: {
        ipc::ReleaseRequest release;
        release.engine = "chat";
        return from.ask(kind, release);
      }
      case MessageKind::kResumeMemory: {
        ipc::ResumeRequest resume;
        resume.engine = "chat";
        return from.ask(kind, resume);
      }
      case MessageKind::kClear: return from.ask(kind, ipc::ClearRequest{"chat"});
      default: return from.ask(kind, ipc::ReinitRequest{"chat"});
    }
  }
  /// As a refusal says it.
  static std::string name_of(MessageKind kind) {
    switch (kind) {
      case MessageKind::kReleaseMemory: return "release";
      case MessageKind::kResumeMemory: return "resume";
      default: return std::string(to_string(kind));
    }
  }
};

TEST_P(ManagerPairsTest, HaveOneOutcome) {
  const auto [running, coming] = GetParam();
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  if (running == MessageKind::kContinue) {
    ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kRetract, ScheduleOrder::kRetract));
  }
  if (running == MessageKind::kResumeMemory) report_released({ipc::MemoryTag::kWeights});
  if (running == MessageKind::kReinit) {
    for (const std::uint32_t rank : {0U, 1U}) {
      workers_[rank]->report_cleared(rank, 1);
      (void)workers_[rank]->has(MessageKind::kRankReinit);  // It has been handled.
    }
  }
  ask(*operator_, running);
  // It has begun when it has asked somebody.
  const MessageKind begun = running == MessageKind::kClear          ? MessageKind::kRankClear
                            : running == MessageKind::kReinit       ? MessageKind::kRankReinit
                            : running == MessageKind::kContinue     ? MessageKind::kRankEmpty
                            : running == MessageKind::kResumeMemory ? MessageKind::kRankResume
                                                                    : MessageKind::kSchedule;
  ScriptedPeer& asked = begun == MessageKind::kSchedule ? *client_ : *workers_[0];
  ASSERT_TRUE(asked.next(begun).has_value());
  auto second = peer(ProcessKind::kOperator, "second");
  ask(*second, coming);
  // What the ranks have begun to change is never left half-way.
  const bool changes = running == MessageKind::kClear || running == MessageKind::kReinit ||
                       running == MessageKind::kResumeMemory;
  if (coming == MessageKind::kClear && !changes) {
    EXPECT_EQ(refusal(running), ErrorCode::kCancelled);
    EXPECT_THAT(refusal_, HasSubstr("cleared instead"));
    EXPECT_TRUE(workers_[0]->next(MessageKind::kRankClear).has_value());
    if (running == MessageKind::kFlush || running == MessageKind::kUpdateWeights ||
        running == MessageKind::kReleaseMemory) {
      ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
    }
    return;
  }
  // Looks at components, and their releases, run beside all of them.
  ipc::ComponentsRequest components;
  components.engine = "chat";
  components.release.all = true;
  auto third = peer(ProcessKind::kOperator, "third");
  third->ask(MessageKind::kComponents, components);
  for (const std::uint32_t rank : {0U, 1U}) {
    const auto request = workers_[rank]->next(MessageKind::kRankComponents);
    ASSERT_TRUE(request.has_value());
    workers_[rank]->reply(*request, ipc::RankComponentsReply{});
  }
  EXPECT_TRUE(third->next_body<ipc::ComponentsReply>(MessageKind::kComponents).has_value());
  const auto refused = second->next(coming);
  ASSERT_TRUE(refused && refused->error);
  EXPECT_EQ(refused->error->code, ErrorCode::kBusy) << refused->error->to_string();
  EXPECT_THAT(refused->error->message, HasSubstr("runs a " + name_of(running)));
  EXPECT_FALSE(operator_->has(running)) << "the one that runs goes on";
}

constexpr auto kCommands = {MessageKind::kPause,         MessageKind::kContinue,
                            MessageKind::kFlush,         MessageKind::kUpdateWeights,
                            MessageKind::kReleaseMemory, MessageKind::kResumeMemory,
                            MessageKind::kClear,         MessageKind::kReinit};

std::vector<Pair> all_pairs() {
  std::vector<Pair> pairs;
  for (const MessageKind running : kCommands) {
    for (const MessageKind coming : kCommands) pairs.emplace_back(running, coming);
  }
  return pairs;
}

INSTANTIATE_TEST_SUITE_P(
    OfCommands, ManagerPairsTest, testing::ValuesIn(all_pairs()), [](const auto& pair) {
      return fmt::format("{}_while_{}", to_string(pair.param.second), to_string(pair.param.first));
    });

}  // namespace
}  // namespace kvferry::test
