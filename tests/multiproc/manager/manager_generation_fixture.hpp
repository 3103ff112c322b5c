// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>

#include <optional>
#include <string>
#include <utility>

namespace kvferry::test {

using ipc::BlockPresence;
using ipc::EmptyReason;
using ipc::ErrorCode;
using ipc::MessageKind;
using ipc::PauseMode;
using ipc::ProcessKind;
using ipc::ScheduleOrder;

/// A request that a peer got and has not answered.
struct Order {
  ipc::Envelope request;
  ipc::Schedule schedule;
};

class ManagerGenerationTest : public ManagerTest {
 protected:
  /// The engine, whose client obeys orders.
  void start_scheduling() {
    ASSERT_NO_FATAL_FAILURE(start_engine());
    ASSERT_NO_FATAL_FAILURE(say_hello(*client_));
  }
  static void say_hello(ScriptedPeer& client,
                        std::optional<PauseMode> paused = {},
                        bool paused_by_release = false) {
    ipc::EngineHello hello = client_hello();
    hello.schedules = true;
    hello.paused = paused;
    hello.paused_by_release = paused_by_release;
    const auto state = client.call<ipc::EngineState>(MessageKind::kEngineHello, hello);
    ASSERT_TRUE(state.has_value()) << state.error().to_string();
  }
  [[nodiscard]] static Order next_order(ScriptedPeer& client) {
    Order order;
    auto request = client.next(MessageKind::kSchedule);
    if (!request) {
      ADD_FAILURE() << "no order came";
      return order;
    }
    const auto schedule = ipc::decode<ipc::Schedule>(request->body, "Schedule");
    EXPECT_TRUE(schedule.has_value());
    if (schedule) order.schedule = *schedule;
    order.request = std::move(*request);
    return order;
  }
  void obey(ScheduleOrder expected, ipc::SchedulerLoad load = {}) {
    const Order order = next_order(*client_);
    EXPECT_EQ(order.schedule.order, expected);
    client_->reply(order.request, load);
  }
  /// Every worker answers the next emptying; rank 1 fails when told to.
  void empty(EmptyReason reason, bool fail = false) {
    for (const std::uint32_t rank : {0U, 1U}) {
      const auto request = workers_[rank]->next(MessageKind::kRankEmpty);
      ASSERT_TRUE(request.has_value()) << "rank " << rank << " was not asked";
      const auto empty = ipc::decode<ipc::RankEmpty>(request->body, "RankEmpty");
      ASSERT_TRUE(empty.has_value());
      EXPECT_EQ(empty->reason, reason);
      if (fail && rank == 1) {
        workers_[rank]->reply_error(*request, KVFERRY_ERROR(kCuda, "the device is gone"));
      } else {
        workers_[rank]->reply(*request, ipc::AllocatorMemory{100 + rank, 60, 50, 7});
      }
    }
  }
  void pause(PauseMode mode, ScheduleOrder order) {
    operator_->ask(MessageKind::kPause, ipc::PauseRequest{"chat", mode});
    ASSERT_NO_FATAL_FAILURE(obey(order));
    const auto reply = operator_->next_body<ipc::PauseReply>(MessageKind::kPause);
    ASSERT_TRUE(reply.has_value());
  }
  /// Every worker reports these tags as released, with its arena as it was.
  void report_released(ipc::MemoryTags tags) {
    for (const std::uint32_t rank : {0U, 1U}) report_released(rank, tags);
  }
  void report_released(std::uint32_t rank, ipc::MemoryTags tags) {
    ipc::RankState state = ScriptedPeer::mapped_state(rank);
    state.released = tags;
    workers_[rank]->notify(MessageKind::kRankState, state);
    (void)workers_[rank]->has(MessageKind::kRankState);  // It has been handled.
  }
  [[nodiscard]] ErrorCode refusal(MessageKind kind) {
    const auto reply = operator_->next(kind);
    if (!reply || !reply->error) {
      ADD_FAILURE() << "not refused";
      return ErrorCode::kSystem;
    }
    refusal_ = reply->error->message;
    return reply->error->code;
  }
  [[nodiscard]] BlockPresence presence_of(std::uint64_t key) {
    return static_cast<BlockPresence>(lookup({key}).presence.at(0));
  }

  std::string refusal_;
};

}  // namespace kvferry::test
