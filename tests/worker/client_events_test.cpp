// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "ipc/os/temp_dir.hpp"
#include "kvferry/worker/client.hpp"
#include "worker/scripted_manager.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""s;
using test::ManagerThread;
using test::ScriptedManager;
using testing::ElementsAre;

ipc::EngineState ready_state(std::uint64_t generation = 7) {
  ipc::EngineState state;
  state.generation = generation;
  state.phase = ipc::CachePhase::kReady;
  state.offload_ready = true;
  state.ranks = {{ipc::SessionId::from_words(3, 3), ipc::Epoch{generation}, {}, {}}};
  state.group_blocks = {64};
  return state;
}

class ClientEventsTest : public ::testing::Test {
 protected:
  void start_manager(const ipc::EngineState& state = ready_state()) {
    manager_.emplace(dir_, [&](ScriptedManager& manager) { manager.state = state; });
  }
  std::unique_ptr<Client> connect(bool events) {
    ClientOptions options;
    options.runtime_dir = temp_.path().string();
    options.engine = "chat";
    options.events = events;
    auto client = Client::connect(options, Deadline::after(20s));
    EXPECT_TRUE(client.has_value()) << client.error().to_string();
    return std::move(client).value();
  }
  static bool fd_readable(const Client& client) {
    pollfd entry{client.fd(), POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
  }
  /// Polls the client as an engine's event loop would. Events that wait keep its descriptor
  /// readable, so that this may go round without a pause.
  static bool run_until(Client& client, const std::function<bool()>& condition) {
    const Deadline deadline = Deadline::after(20s);
    while (!deadline.expired()) {
      (void)client.poll(100);
      if (condition()) return true;
      pollfd entry{client.fd(), POLLIN, 0};
      ::poll(&entry, 1, deadline.poll_timeout_ms());
    }
    return false;
  }

  const test::ShortTempDir temp_;
  const ipc::RuntimeDir dir_ = ipc::RuntimeDir::open(temp_.path().string(), "default").value();
  std::optional<ManagerThread> manager_;
};

TEST_F(ClientEventsTest, EventsTellEveryChangeInOrderAlsoWhatIsOverByTheNextPoll) {
  start_manager();
  const auto client = connect(true);
  EXPECT_TRUE(client->events().empty()) << "what was found at first is no change";
  // Cleared and re-created in one go: the state alone would show only another generation.
  manager_->run([](ScriptedManager& manager) {
    manager.state.offload_ready = false;
    manager.state.phase = ipc::CachePhase::kClearing;
    manager.send_state();
    manager.state = ready_state(8);
    manager.send_state();
  });
  std::vector<CacheEvent> events;
  ASSERT_TRUE(run_until(*client, [&] { return client->state().generation == 8; }));
  EXPECT_TRUE(fd_readable(*client)) << "events wait to be taken";
  for (const CacheEvent& event : client->events()) events.push_back(event);
  // But for the connection's own signals, which poll() takes.
  EXPECT_TRUE(run_until(*client, [&] { return !fd_readable(*client); }));
  manager_.reset();
  ASSERT_TRUE(run_until(*client, [&] { return !client->state().manager_connected; }));
  start_manager(ready_state(8));
  ASSERT_TRUE(run_until(*client, [&] { return client->state().manager_connected; }));
  for (const CacheEvent& event : client->events()) events.push_back(event);
  std::vector<CacheEventKind> kinds;
  for (const CacheEvent& event : events) kinds.push_back(event.kind);
  EXPECT_THAT(kinds, ElementsAre(CacheEventKind::kPhase, CacheEventKind::kOffload,
                                 CacheEventKind::kGeneration, CacheEventKind::kContents,
                                 CacheEventKind::kPhase, CacheEventKind::kOffload,
                                 CacheEventKind::kManagerLost, CacheEventKind::kManagerFound,
                                 CacheEventKind::kOffload));
  EXPECT_EQ(events[0].phase, CachePhase::kClearing);
  EXPECT_EQ(events[2].generation, 8U);
  EXPECT_EQ(events[1].contents, 1U);
  EXPECT_EQ(events[3].contents, 2U);
  EXPECT_TRUE(events[8].offload_ready);
}

TEST_F(ClientEventsTest, AnotherGenerationOfOneManagerIsOtherContentsAndAnotherWorkerIsNot) {
  start_manager();
  const auto client = connect(false);
  EXPECT_EQ(client->state().contents, 1U);
  manager_->run([](ScriptedManager& manager) {
    manager.state.phase = ipc::CachePhase::kDetached;
    manager.state.offload_ready = false;
    manager.state.ranks.clear();
    manager.send_state();
    manager.state = ready_state();
    manager.state.ranks[0].worker = ipc::IncarnationId::from_words(4, 4);
    manager.send_state();
  });
  ASSERT_TRUE(run_until(*client, [&] {
    return !client->state().ranks.empty() && !client->state().ranks[0].worker.is_zero();
  }));
  EXPECT_EQ(client->state().contents, 1U);
  manager_->run([](ScriptedManager& manager) {
    ++manager.state.generation;
    manager.send_state();
  });
  ASSERT_TRUE(run_until(*client, [&] { return client->state().generation == 8; }));
  EXPECT_EQ(client->state().contents, 2U);
}

TEST_F(ClientEventsTest, AnotherManagersGenerationsSayNothingOfTheContents) {
  start_manager();
  const auto client = connect(false);
  const std::vector<ipc::RankArena> ranks = ready_state().ranks;
  for (const std::uint64_t generation : {20U, 30U}) {
    manager_.reset();
    ASSERT_TRUE(run_until(*client, [&] { return !client->state().manager_connected; }));
    // It does not know the ranks at first, and counts on as it comes to know them.
    ipc::EngineState young = ready_state(generation);
    young.phase = ipc::CachePhase::kDetached;
    young.offload_ready = false;
    young.ranks.clear();
    start_manager(young);
    ASSERT_TRUE(run_until(*client, [&] { return client->state().manager_connected; }));
    EXPECT_EQ(client->state().contents, 1U);
    manager_->run([&](ScriptedManager& manager) {
      manager.state = ready_state(generation + 1);
      manager.state.ranks = ranks;
      manager.send_state();
    });
    ASSERT_TRUE(run_until(*client, [&] { return client->state().generation == generation + 1; }));
    EXPECT_EQ(client->state().contents, 1U);
  }
}

TEST_F(ClientEventsTest, WithoutAskingForEventsNoneAreKept) {
  start_manager();
  const auto client = connect(false);
  manager_->run([](ScriptedManager& manager) {
    manager.state = ready_state(8);
    manager.send_state();
  });
  ASSERT_TRUE(run_until(*client, [&] { return client->state().generation == 8; }));
  EXPECT_TRUE(client->events().empty());
  EXPECT_TRUE(run_until(*client, [&] { return !fd_readable(*client); }));
}

}  // namespace
}  // namespace kvferry::worker
