// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Looks at components and releases of them: a real manager between scripted workers and operators.
#include "kvferry/ipc/wire/component_messages.hpp"
#include "multiproc/manager/manager_generation_fixture.hpp"

#include <csignal>

namespace kvferry::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class ManagerComponentsTest : public ManagerGenerationTest {
 protected:
  void ask_components(const std::vector<std::string>& release = {}) {
    ipc::ComponentsRequest request;
    request.engine = "chat";
    request.release.names = release;
    operator_->ask(MessageKind::kComponents, request);
  }
  /// The rank's worker is asked for these, and answers.
  void answer(std::uint32_t rank,
              const std::vector<std::string>& asked,
              std::optional<ipc::Error> error = {}) {
    const auto request = workers_[rank]->next(MessageKind::kRankComponents);
    ASSERT_TRUE(request.has_value()) << "rank " << rank << " was not asked";
    const auto order = ipc::decode<ipc::RankComponents>(request->body, "RankComponents");
    ASSERT_TRUE(order.has_value());
    EXPECT_EQ(order->release.names, asked);
    ipc::RankComponentsReply reply;
    ipc::ComponentOutcome& one = reply.components.emplace_back();
    one.outcome.component.name = "draft";
    one.outcome.component.device_bytes = 10 + rank;
    one.released = !asked.empty() && !error;
    one.error = std::move(error);
    workers_[rank]->reply(*request, reply);
  }
};

TEST_F(ManagerComponentsTest, AreThoseOfAllRanksAndNeedNoScheduler) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ask_components();
  ASSERT_NO_FATAL_FAILURE(answer(1, {}));
  EXPECT_FALSE(operator_->has(MessageKind::kComponents)) << "rank 0 has not answered";
  ASSERT_NO_FATAL_FAILURE(answer(0, {}));
  const auto reply = operator_->next_body<ipc::ComponentsReply>(MessageKind::kComponents);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  ASSERT_EQ(reply->ranks.size(), 2U);
  for (const std::uint32_t rank : {0U, 1U}) {
    EXPECT_EQ(reply->ranks[rank].rank, ipc::Rank{rank});
    ASSERT_EQ(reply->ranks[rank].reply.components.size(), 1U);
    EXPECT_EQ(reply->ranks[rank].reply.components[0].outcome.component.device_bytes, 10 + rank);
  }
  EXPECT_EQ(status()["engines"][0]["phase"], "ready");
}

TEST_F(ManagerComponentsTest, OneThatFailsIsNamedAndTheOthersAreTold) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ask_components({"draft"});
  ASSERT_NO_FATAL_FAILURE(answer(0, {"draft"}));
  ASSERT_NO_FATAL_FAILURE(answer(1, {"draft"}, KVFERRY_ERROR(kBusy, "it is in use")));
  const auto answered = operator_->next(MessageKind::kComponents);
  ASSERT_TRUE(answered && answered->error);
  EXPECT_EQ(answered->error->code, ErrorCode::kBusy);
  EXPECT_THAT(answered->error->message, HasSubstr("engine chat rank 1: component draft: it is in"));
  const auto reply = ipc::decode<ipc::ComponentsReply>(answered->body, "ComponentsReply");
  ASSERT_TRUE(reply.has_value());
  EXPECT_TRUE(reply->ranks[0].reply.components[0].released);
}

TEST_F(ManagerComponentsTest, ARankThatDiesOrIsNotThereIsNamed) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  workers_[1].reset();
  const ipc::Deadline deadline = soon();
  while (status()["engines"][0]["ranks"][1]["worker"]["connected"] == true) {
    ASSERT_FALSE(deadline.expired());
  }
  ask_components();
  ASSERT_NO_FATAL_FAILURE(answer(0, {}));
  EXPECT_EQ(refusal(MessageKind::kComponents), ErrorCode::kNotReady);
  EXPECT_THAT(refusal_, HasSubstr("engine chat rank 1: its worker is not there"));
  auto worker = peer_child("worker", 1);
  ASSERT_TRUE(worker.wait_line("ready", soon()));
  ask_components();
  ASSERT_NO_FATAL_FAILURE(answer(0, {}));
  EXPECT_FALSE(operator_->has(MessageKind::kComponents)) << "rank 1 may still answer";
  worker.kill();
  EXPECT_EQ(refusal(MessageKind::kComponents), ErrorCode::kPeerDied);
  EXPECT_THAT(refusal_, HasSubstr("rank 1"));
}

TEST_F(ManagerComponentsTest, WhatIsWrongIsRefusedBeforeAnybodyIsAsked) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ipc::ComponentsRequest request;
  request.engine = "other";
  operator_->ask(MessageKind::kComponents, request);
  EXPECT_EQ(refusal(MessageKind::kComponents), ErrorCode::kNotFound);
  request.engine = "chat";
  request.release.all = true;
  request.release.names = {"draft"};
  operator_->ask(MessageKind::kComponents, request);
  EXPECT_EQ(refusal(MessageKind::kComponents), ErrorCode::kInvalidArgument);
  request.release.all = false;
  request.release.names.assign(ipc::ComponentNames::kMost + 1, "x");
  operator_->ask(MessageKind::kComponents, request);
  EXPECT_EQ(refusal(MessageKind::kComponents), ErrorCode::kInvalidArgument);
  request.release.names = {""};
  operator_->ask(MessageKind::kComponents, request);
  EXPECT_EQ(refusal(MessageKind::kComponents), ErrorCode::kInvalidArgument);
  request.release.names = {"draft"};
  request.deadline = std::chrono::milliseconds(0);
  operator_->ask(MessageKind::kComponents, request);
  EXPECT_EQ(refusal(MessageKind::kComponents), ErrorCode::kInvalidArgument);
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankComponents));
}

TEST_F(ManagerComponentsTest, AManagerThatEndsMeanwhileAnswers) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ask_components({"draft"});
  ASSERT_TRUE(workers_[0]->next(MessageKind::kRankComponents).has_value());
  manager_->signal(SIGTERM);
  EXPECT_EQ(refusal(MessageKind::kComponents), ErrorCode::kCancelled);
  EXPECT_EQ(manager_->wait(soon()), ChildExit::exited(0));
}

// Which says more than that somebody did not answer.
TEST_F(ManagerComponentsTest, ARanksOwnTimeOutIsWhatIsHandedOn) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ipc::ComponentsRequest request;
  request.engine = "chat";
  request.release.names = {"draft"};
  request.deadline = std::chrono::milliseconds(200);
  operator_->ask(MessageKind::kComponents, request);
  ASSERT_NO_FATAL_FAILURE(answer(0, {"draft"}));
  EXPECT_FALSE(
      operator_->next(MessageKind::kComponents, ipc::Deadline::after(2 * request.deadline)))
      << "rank 1 has only just come to its deadline";
  ASSERT_NO_FATAL_FAILURE(answer(1, {"draft"}, KVFERRY_ERROR(kTimeout, "it is in use")));
  EXPECT_EQ(refusal(MessageKind::kComponents), ErrorCode::kTimeout);
  EXPECT_THAT(refusal_, HasSubstr("engine chat rank 1: component draft: it is in use"));
}

TEST_F(ManagerComponentsTest, ASecondReleaseIsBusyAndLooksAreFree) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ask_components({"draft"});
  ASSERT_NO_FATAL_FAILURE(answer(0, {"draft"}));
  auto second = peer(ProcessKind::kOperator, "second");
  ipc::ComponentsRequest request;
  request.engine = "chat";
  request.release.all = true;
  second->ask(MessageKind::kComponents, request);
  const auto busy = second->next(MessageKind::kComponents);
  ASSERT_TRUE(busy && busy->error);
  EXPECT_EQ(busy->error->code, ErrorCode::kBusy);
  EXPECT_THAT(busy->error->message, HasSubstr("engine chat runs a release of components already"));
  request.release.all = false;
  second->ask(MessageKind::kComponents, request);
  ASSERT_NO_FATAL_FAILURE(answer(0, {}));
  ASSERT_NO_FATAL_FAILURE(answer(1, {"draft"}));
  EXPECT_TRUE(operator_->next_body<ipc::ComponentsReply>(MessageKind::kComponents).has_value());
  ASSERT_NO_FATAL_FAILURE(answer(1, {}));
  EXPECT_TRUE(second->next_body<ipc::ComponentsReply>(MessageKind::kComponents).has_value());
  ask_components({"draft"});
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, {"draft"}));
  }
  EXPECT_TRUE(operator_->next_body<ipc::ComponentsReply>(MessageKind::kComponents).has_value());
}

// A command that runs is neither waited for nor disturbed.
TEST_F(ManagerComponentsTest, RunBesideAnyCommand) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  operator_->ask(MessageKind::kPause, ipc::PauseRequest{"chat", PauseMode::kRetract});
  const Order order = next_order(*client_);
  auto second = peer(ProcessKind::kOperator, "second");
  ipc::ComponentsRequest request;
  request.engine = "chat";
  request.release.all = true;
  second->ask(MessageKind::kComponents, request);
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, {}));
  }
  EXPECT_TRUE(second->next_body<ipc::ComponentsReply>(MessageKind::kComponents).has_value());
  EXPECT_FALSE(operator_->has(MessageKind::kPause)) << "the pause goes on";
  client_->reply(order.request, ipc::SchedulerLoad{});
  EXPECT_TRUE(operator_->next_body<ipc::PauseReply>(MessageKind::kPause).has_value());
}

}  // namespace
}  // namespace kvferry::test
