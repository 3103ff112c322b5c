// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// An engine's scheduler under the orders of a manager, through its client.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "kvferry/worker/client.hpp"
#include "worker/scripted_manager.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::Envelope;
using ipc::MessageKind;
using ipc::ScheduleOrder;
using ipc::SchedulerLoad;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::ManagerThread;
using test::ScriptedManager;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// Writes down what it is told; what it has to do is up to the test.
class RecordingScheduler final : public SchedulerControl {
 public:
  void hold(PauseMode mode) override {
    told.push_back("hold " + std::string(to_string(static_cast<ipc::PauseMode>(mode))));
  }
  void resume() override { told.emplace_back("resume"); }
  [[nodiscard]] ScheduledWork count() const override { return work; }
  void reset_cache() override {
    told.emplace_back("reset");
    if (on_reset) on_reset();
  }

  ScheduledWork work;
  std::vector<std::string> told;
  std::function<void()> on_reset;
};

class ClientScheduleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    start_manager();
    ClientOptions options;
    options.runtime_dir = temp_.path().string();
    options.engine = "chat";
    options.scheduler = &scheduler_;
    auto client = Client::connect(options, Deadline::after(20s));
    ASSERT_TRUE(client.has_value()) << client.error().to_string();
    client_ = *std::move(client);
  }
  void start_manager() {
    manager_.emplace(*dir_, [this](ScriptedManager& manager) {
      manager.state.phase = ipc::CachePhase::kReady;
      manager.state.offload_ready = true;
      manager.state.ranks = {{ipc::SessionId::from_words(3, 3), ipc::Epoch{1}, {}, {}}};
      manager.state.group_blocks = {64};
      manager.scripts[MessageKind::kSchedule] =
          [this](ScriptedManager& /*from*/, const ipc::IncarnationId& /*peer*/,
                 const Envelope& answer) { answers_[answer.request.value] = answer; };
    });
  }
  std::uint64_t order(ScheduleOrder what, bool wait = true) {
    Envelope envelope;
    envelope.kind = MessageKind::kSchedule;
    envelope.request = ipc::RequestId{++last_request_};
    envelope.body = ipc::encode(ipc::Schedule{what, wait});
    manager_->run([&](ScriptedManager& manager) {
      ASSERT_TRUE(manager.server().send(manager.engine, envelope).has_value());
    });
    return last_request_;
  }
  /// The answer that has come by now, if any: the manager's thread answers in order.
  std::optional<Envelope> answer_to(std::uint64_t request) {
    std::optional<Envelope> found;
    manager_->run([&](ScriptedManager& /*manager*/) {
      if (const auto at = answers_.find(request); at != answers_.end()) found = at->second;
    });
    return found;
  }
  /// Polls, as an engine does when its client's descriptor is readable, until it is answered.
  Envelope await(std::uint64_t request) {
    const Deadline deadline = Deadline::after(20s);
    while (!deadline.expired()) {
      (void)client_->poll(10);
      if (auto answer = answer_to(request)) return *answer;
      pollfd entry{client_->fd(), POLLIN, 0};
      ::poll(&entry, 1, 5);
    }
    ADD_FAILURE() << "no answer came";
    return {};
  }
  SchedulerLoad load_of(const Envelope& answer) {
    EXPECT_FALSE(answer.error.has_value()) << answer.error->to_string();
    return ipc::decode<SchedulerLoad>(answer.body, "SchedulerLoad").value();
  }
  /// Polls until the order has been begun.
  void await_told(std::size_t calls) {
    const Deadline deadline = Deadline::after(20s);
    while (scheduler_.told.size() < calls && !deadline.expired()) {
      pollfd entry{client_->fd(), POLLIN, 0};
      ::poll(&entry, 1, deadline.poll_timeout_ms());
      (void)client_->poll(10);
    }
    ASSERT_GE(scheduler_.told.size(), calls);
  }
  ipc::EngineHello last_hello() {
    ipc::EngineHello hello;
    manager_->run([&](ScriptedManager& manager) {
      for (const Envelope& seen : manager.seen) {
        if (seen.kind != MessageKind::kEngineHello) continue;
        hello = ipc::decode<ipc::EngineHello>(seen.body, "EngineHello").value();
      }
    });
    return hello;
  }

  test::ShortTempDir temp_;
  std::optional<ipc::RuntimeDir> dir_ =
      ipc::RuntimeDir::open(temp_.path().string(), "default").value();
  std::map<std::uint64_t, Envelope> answers_;  ///< The manager thread's.
  std::optional<ManagerThread> manager_;
  RecordingScheduler scheduler_;
  std::unique_ptr<Client> client_;
  std::uint64_t last_request_ = 0;
};

TEST_F(ClientScheduleTest, TheManagerIsToldThatItObeys) {
  EXPECT_TRUE(last_hello().schedules);
  EXPECT_FALSE(last_hello().paused.has_value());
}

TEST_F(ClientScheduleTest, NothingIsDoneOutsideOfPoll) {
  const auto request = order(ScheduleOrder::kRetract);
  pollfd entry{client_->fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 20'000), 1) << "an order is a reason to poll";
  (void)client_->state();
  (void)client_->events();
  EXPECT_THAT(scheduler_.told, IsEmpty());
  (void)load_of(await(request));
  EXPECT_THAT(scheduler_.told, ElementsAre("hold retract"));
}

TEST_F(ClientScheduleTest, RetractAndAbortAreInEffectWhenNothingHoldsBlocks) {
  for (const auto& [what, words] : {std::pair(ScheduleOrder::kRetract, "hold retract"),
                                    std::pair(ScheduleOrder::kAbort, "hold abort")}) {
    scheduler_.told.clear();
    scheduler_.work = {.running = 2, .frozen = 1, .waiting = 4};
    const auto request = order(what);
    ASSERT_NO_FATAL_FAILURE(await_told(1));
    scheduler_.work.running = 0;
    (void)client_->poll(10);
    EXPECT_FALSE(answer_to(request).has_value()) << "one is frozen and keeps its blocks";
    scheduler_.work.frozen = 0;
    EXPECT_EQ(load_of(await(request)).waiting, 4U);
    EXPECT_THAT(scheduler_.told, ElementsAre(words));
  }
}

TEST_F(ClientScheduleTest, InPlaceIsInEffectWhenNothingRuns) {
  scheduler_.work = {.running = 1, .frozen = 2, .waiting = 0};
  const auto request = order(ScheduleOrder::kInPlace);
  ASSERT_NO_FATAL_FAILURE(await_told(1));
  EXPECT_FALSE(answer_to(request).has_value());
  scheduler_.work = {.running = 0, .frozen = 3, .waiting = 0};
  EXPECT_EQ(load_of(await(request)).frozen, 3U);
}

TEST_F(ClientScheduleTest, FlushOfAnIdleEngineHoldsItUntilItMayRun) {
  (void)load_of(await(order(ScheduleOrder::kFlush)));
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place", "reset"));
  (void)load_of(await(order(ScheduleOrder::kRun)));
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place", "reset", "resume"));
}

TEST_F(ClientScheduleTest, FlushOfABusyEngineTellsEveryTermAndTouchesNothing) {
  scheduler_.work = {.running = 3, .frozen = 2, .waiting = 9};
  const auto answer = await(order(ScheduleOrder::kFlush, /*wait=*/false));
  ASSERT_TRUE(answer.error.has_value());
  EXPECT_EQ(answer.error->code, ErrorCode::kNotIdle);
  EXPECT_THAT(answer.error->message,
              HasSubstr("3 requests run, 2 are frozen in place, 0 transfers"));
  EXPECT_THAT(scheduler_.told, IsEmpty());
  (void)load_of(await(order(ScheduleOrder::kRun)));
  EXPECT_THAT(scheduler_.told, IsEmpty()) << "it was never held";
}

TEST_F(ClientScheduleTest, FlushWorksAfterARetractAndLeavesItPaused) {
  scheduler_.work.waiting = 7;  // Retracted requests hold nothing.
  (void)load_of(await(order(ScheduleOrder::kRetract)));
  (void)load_of(await(order(ScheduleOrder::kFlush, /*wait=*/false)));
  (void)load_of(await(order(ScheduleOrder::kRetract)));
  EXPECT_THAT(scheduler_.told, ElementsAre("hold retract", "reset", "hold retract"));
}

TEST_F(ClientScheduleTest, FrozenRequestsKeepAPausedEngineFromBeingFlushed) {
  (void)load_of(await(order(ScheduleOrder::kInPlace)));
  scheduler_.work.frozen = 1;
  EXPECT_EQ(await(order(ScheduleOrder::kFlush, /*wait=*/false)).error->code, ErrorCode::kNotIdle);
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place"));
}

TEST_F(ClientScheduleTest, AFlushWaitsForItsTransfersAndTheirCompletionsToBeTaken) {
  const std::vector<LoadItem> items{{GroupId{0}, BlockId{1}, Digest::from_words(1, 1)}};
  const auto job = client_->submit_load(items, 1);
  ASSERT_TRUE(job.has_value());
  const auto now = await(order(ScheduleOrder::kFlush, /*wait=*/false));
  ASSERT_TRUE(now.error.has_value());
  EXPECT_THAT(now.error->message, HasSubstr("1 transfers"));
  const auto flush = order(ScheduleOrder::kFlush);
  manager_->run([&](ScriptedManager& manager) { manager.send_done(*job, {0}); });
  const Deadline deadline = Deadline::after(20s);
  std::size_t taken = 0;
  while (taken == 0 && !deadline.expired()) {
    pollfd entry{client_->fd(), POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_timeout_ms());
    taken = client_->poll(10).size();
    EXPECT_THAT(scheduler_.told, IsEmpty()) << "the engine has not handled its completion yet";
  }
  pollfd entry{client_->fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 20'000), 1) << "the flush is to be looked at again";
  (void)load_of(await(flush));
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place", "reset"));
}

TEST_F(ClientScheduleTest, ALaterOrderTakesThePlaceOfOneThatIsNotInEffect) {
  scheduler_.work.running = 1;
  const auto flush = order(ScheduleOrder::kFlush);
  const auto pause = order(ScheduleOrder::kRetract);
  const auto run = order(ScheduleOrder::kRun);
  (void)load_of(await(run));
  EXPECT_EQ(answer_to(flush)->error->code, ErrorCode::kNotIdle);
  EXPECT_EQ(answer_to(pause)->error->code, ErrorCode::kCancelled);
  EXPECT_THAT(scheduler_.told, ElementsAre("hold retract", "resume"));
}

TEST_F(ClientScheduleTest, APauseOutlivesItsManagerAndTheNextOneIsTold) {
  (void)load_of(await(order(ScheduleOrder::kInPlace)));
  manager_.reset();
  start_manager();
  ASSERT_TRUE(client_->wait_ready(true, Deadline::after(20s)).has_value());
  EXPECT_EQ(last_hello().paused, ipc::PauseMode::kInPlace);
  (void)client_->poll(10);
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place"));
}

TEST_F(ClientScheduleTest, TheHoldOfAFlushEndsWithItsManager) {
  (void)load_of(await(order(ScheduleOrder::kFlush)));
  manager_.reset();
  ASSERT_NO_FATAL_FAILURE(await_told(3));
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place", "reset", "resume"));
  start_manager();
  ASSERT_TRUE(client_->wait_ready(true, Deadline::after(20s)).has_value());
  EXPECT_FALSE(last_hello().paused.has_value());
}

TEST_F(ClientScheduleTest, AClosedClientLetsGoOfAFlushsHold) {
  (void)load_of(await(order(ScheduleOrder::kIdle)));
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place"));
  client_->close();
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place", "resume"));
}

TEST_F(ClientScheduleTest, RetractIsNotInEffectWhileACopyRuns) {
  const std::vector<LoadItem> items{{GroupId{0}, BlockId{1}, Digest::from_words(1, 1)}};
  const auto job = client_->submit_load(items, 1);
  ASSERT_TRUE(job.has_value());
  const auto request = order(ScheduleOrder::kRetract);
  ASSERT_NO_FATAL_FAILURE(await_told(1));
  (void)client_->poll(10);
  EXPECT_FALSE(answer_to(request).has_value());
  manager_->run([&](ScriptedManager& manager) { manager.send_done(*job, {0}); });
  EXPECT_EQ(load_of(await(request)).transfers, 0U) << "so that a flush works now";
}

// A scheduler may use its client, which meets whatever has come meanwhile: orders, or the manager's
// end.
TEST_F(ClientScheduleTest, CallsFromWithinAnOrderAreNotOrderedAbout) {
  const std::vector<std::uint64_t> slots{7};
  scheduler_.on_reset = [&] {
    (void)client_->poll(10);
    EXPECT_TRUE(client_->abandon_store(slots).has_value());
    (void)client_->flush({}, Deadline::after(50ms));
  };
  const auto first = order(ScheduleOrder::kFlush);
  const auto second = order(ScheduleOrder::kRun);
  (void)load_of(await(second));
  (void)load_of(await(first));
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place", "reset", "resume"));
  scheduler_.told.clear();
  scheduler_.on_reset = [&] {
    manager_.reset();
    while (client_->state().manager_connected) (void)client_->poll(10);
  };
  (void)order(ScheduleOrder::kFlush);
  ASSERT_NO_FATAL_FAILURE(await_told(3));
  EXPECT_THAT(scheduler_.told, ElementsAre("hold in_place", "reset", "resume"));
}

TEST_F(ClientScheduleTest, ItObeysWhileItAsksForAPauseItself) {
  manager_->run([&](ScriptedManager& manager) {
    manager.scripts[MessageKind::kPause] =
        [this](ScriptedManager& self, const ipc::IncarnationId& from, const Envelope& request) {
          Envelope told;
          told.kind = MessageKind::kSchedule;
          told.request = ipc::RequestId{99};
          told.body = ipc::encode(ipc::Schedule{ScheduleOrder::kRetract, true});
          ASSERT_TRUE(self.server().send(from, told).has_value());
          // Answered when the order is.
          self.scripts[MessageKind::kSchedule] = [request](ScriptedManager& later,
                                                           const ipc::IncarnationId& peer,
                                                           const Envelope& /*answer*/) {
            (void)later.server().reply(peer, request, ipc::PauseReply{1, {0, 0, 6, 0}, {}});
          };
        };
  });
  const auto paused = client_->pause(PauseMode::kRetract, Deadline::after(20s));
  ASSERT_TRUE(paused.has_value()) << paused.error().to_string();
  EXPECT_EQ(paused->work.waiting, 6U);
  EXPECT_THAT(scheduler_.told, ElementsAre("hold retract"));
}

TEST_F(ClientScheduleTest, AMalformedOrderIsRefused) {
  Envelope envelope;
  envelope.kind = MessageKind::kSchedule;
  envelope.request = ipc::RequestId{++last_request_};
  envelope.body = {0x93, 0x01};
  manager_->run([&](ScriptedManager& manager) {
    ASSERT_TRUE(manager.server().send(manager.engine, envelope).has_value());
  });
  EXPECT_EQ(await(last_request_).error->code, ErrorCode::kProtocol);
  EXPECT_THAT(scheduler_.told, IsEmpty());
}

}  // namespace
}  // namespace kvferry::worker
