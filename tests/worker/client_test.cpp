// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/client.hpp"

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/os/name_watch.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/wire/store_messages.hpp"
#include "worker/scripted_manager.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <future>
#include <optional>

namespace kvferry::worker {
namespace {

using ipc::Envelope;
using ipc::Epoch;
using ipc::IncarnationId;
using ipc::MessageKind;
using ipc::SessionId;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::ManagerThread;
using test::ScriptedManager;
using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

const Digest kHashA = Digest::from_words(1, 1);
const Digest kHashB = Digest::from_words(1, 2);
constexpr auto kDied = static_cast<std::uint8_t>(ErrorCode::kPeerDied);

ipc::EngineState ready_state(std::uint64_t generation = 7) {
  ipc::EngineState state;
  state.generation = generation;
  state.phase = ipc::CachePhase::kReady;
  state.offload_ready = true;
  for (const std::uint64_t rank : {3U, 4U}) {
    state.ranks.push_back({SessionId::from_words(3, rank), Epoch{generation}, ipc::LeaseId{1},
                           IncarnationId::from_words(9, rank)});
  }
  state.group_blocks = {64};
  return state;
}

template <typename T> T body(const Envelope& envelope) {
  return ipc::decode<T>(envelope.body, "test").value();
}

/// Leaves a request without an answer.
void ignore(ScriptedManager& /*manager*/, const IncarnationId& /*from*/, const Envelope& /*m*/) {}

class ClientTest : public ::testing::Test {
 protected:
  void start_manager(ipc::EngineState state = ready_state(),
                     std::optional<ipc::Error> refuse = std::nullopt) {
    manager_.emplace(*dir_, [&](ScriptedManager& manager) {
      manager.state = state;
      manager.refuse_hello = refuse;
    });
  }
  void script(MessageKind kind, ScriptedManager::Script script) {
    manager_->run([&](ScriptedManager& manager) { manager.scripts[kind] = script; });
  }
  Result<std::unique_ptr<Client>> connect(Deadline deadline = Deadline::after(20s)) {
    ClientOptions options;
    options.runtime_dir = temp_.path().string();
    options.engine = "chat";
    options.ranks = 2;
    options.identity.model = "m";
    return Client::connect(options, deadline);
  }
  std::unique_ptr<Client> connect_ready() {
    auto client = connect();
    EXPECT_TRUE(client.has_value()) << client.error().to_string();
    const auto ready = (*client)->wait_ready(true, Deadline::after(20s));
    EXPECT_TRUE(ready.has_value()) << ready.error().to_string();
    return std::move(client).value();
  }
  static bool fd_readable(const Client& client, int timeout_ms = 0) {
    pollfd entry{client.fd(), POLLIN, 0};
    return ::poll(&entry, 1, timeout_ms) > 0;
  }
  /// Polls the client as an engine's event loop would; completions are collected.
  bool run_until(Client& client, const std::function<bool()>& condition) {
    const Deadline deadline = Deadline::after(20s);
    while (!deadline.expired()) {
      for (Completion& completion : client.poll(100)) done_.push_back(std::move(completion));
      if (condition()) return true;
      pollfd entry{client.fd(), POLLIN, 0};
      ::poll(&entry, 1, deadline.poll_timeout_ms());
    }
    return false;
  }
  static JobId submit_load(Client& client, std::uint32_t first_block = 0) {
    const std::vector<LoadItem> items{{GroupId{0}, BlockId{first_block}, kHashA},
                                      {GroupId{0}, BlockId{first_block + 1}, kHashB}};
    auto job = client.submit_load(items, 1);
    EXPECT_TRUE(job.has_value()) << job.error().to_string();
    return *job;
  }

  test::ShortTempDir temp_;
  std::optional<ipc::RuntimeDir> dir_ =
      ipc::RuntimeDir::open(temp_.path().string(), "default").value();
  std::optional<ManagerThread> manager_;
  std::vector<Completion> done_;
};

TEST_F(ClientTest, ConnectWaitsForAManagerToItsDeadline) {
  const auto refused = connect(Deadline::after(100ms));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kNoManager);
  EXPECT_THAT(refused.error().message, testing::HasSubstr("kvferry manager --instance default"));
}

TEST_F(ClientTest, ConnectFindsAManagerThatComesLater) {
  dir_.reset();  // The client makes it again, which shows that it has begun.
  auto begun = ipc::NameWatch::open(temp_ / "default");
  ASSERT_TRUE(begun) << begun.error().to_string();
  auto connected = std::async(std::launch::async, [this] { return connect(); });
  const Deadline deadline = Deadline::after(20s);
  while (!begun->drain() && !deadline.expired()) {
    pollfd entry{begun->fd(), POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_timeout_ms());
  }
  dir_ = ipc::RuntimeDir::open(temp_.path().string(), "default").value();
  start_manager();
  const auto client = connected.get();
  ASSERT_TRUE(client) << client.error().to_string();
  EXPECT_TRUE((*client)->wait_ready(true, Deadline::after(20s)));
}

TEST_F(ClientTest, ConnectReturnsTheManagersRefusal) {
  start_manager(ready_state(), KVFERRY_ERROR(kGeometryMismatch, "fingerprints differ"));
  EXPECT_EQ(connect().error().code, ErrorCode::kGeometryMismatch);
}

TEST_F(ClientTest, ConnectTimesOutWhenTheHelloIsNotAnswered) {
  start_manager();
  script(MessageKind::kEngineHello, ignore);
  ClientOptions options;
  options.runtime_dir = temp_.path().string();
  const auto client = Client::connect(options, Deadline::after(50ms));
  EXPECT_EQ(client.error().code, ErrorCode::kTimeout);
}

TEST_F(ClientTest, ConnectRefusesAManagerThatAnswersTheHelloWithSomethingElse) {
  start_manager();
  script(MessageKind::kEngineHello,
         [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
           (void)m.server().reply(from, e, ipc::Empty{});
         });
  EXPECT_EQ(connect().error().code, ErrorCode::kProtocol);
}

TEST_F(ClientTest, AStateBehindTheAnswerToTheHelloCountsMoreThanTheAnswer) {
  start_manager();
  script(MessageKind::kEngineHello,
         [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
           auto before = m.state;
           before.offload_ready = false;
           (void)m.server().reply(from, e, before);
           m.send_state();
         });
  for (int round = 0; round < 20; ++round) {
    const auto client = connect().value();
    ASSERT_TRUE(client->wait_ready(true, Deadline::after(20s)).has_value()) << "round " << round;
  }
}

TEST_F(ClientTest, HelloNamesTheEngineAndItsModel) {
  start_manager();
  const auto client = connect_ready();
  manager_->run([](ScriptedManager& manager) {
    const auto hello = body<ipc::EngineHello>(manager.seen.at(0));
    EXPECT_EQ(hello.engine, "chat");
    EXPECT_EQ(hello.model, "m");
    EXPECT_EQ(hello.ranks, 2U);
  });
}

TEST_F(ClientTest, WaitReadyFollowsTheManagersState) {
  auto state = ready_state();
  state.phase = ipc::CachePhase::kDetached;
  state.offload_ready = false;
  start_manager(state);
  const auto client = connect().value();
  EXPECT_EQ(client->wait_ready(false, Deadline::after(20ms)).error().code, ErrorCode::kTimeout);
  state.phase = ipc::CachePhase::kReady;
  manager_->run([&state](ScriptedManager& manager) {
    manager.state = state;
    manager.send_state();
  });
  EXPECT_TRUE(client->wait_ready(false, Deadline::after(20s)).has_value());
  EXPECT_EQ(client->wait_ready(true, Deadline::after(20ms)).error().code, ErrorCode::kTimeout);
  EXPECT_EQ(client->state().group_blocks, std::vector<std::uint32_t>{64});
  EXPECT_EQ(client->state().ranks.at(1).epoch, Epoch{7});
}

TEST_F(ClientTest, StateWithTheWrongNumberOfRanksIsDropped) {
  start_manager();
  const auto client = connect_ready();
  manager_->run([](ScriptedManager& manager) {
    manager.state = ready_state(99);
    manager.state.ranks.pop_back();
    manager.send_state();
    manager.state = ready_state(8);
    manager.send_state();
  });
  EXPECT_TRUE(run_until(*client, [&] { return client->state().generation != 7; }));
  EXPECT_EQ(client->state().generation, 8U);
}

TEST_F(ClientTest, LookupReturnsPresencePerGroup) {
  start_manager();
  const auto client = connect_ready();
  script(MessageKind::kLookup,
         [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
           EXPECT_THAT(body<ipc::Lookup>(e).blocks, ElementsAre(kHashA, kHashB));
           (void)m.server().reply(from, e, ipc::LookupReply{1, {3, 2, 3, 1}});
         });
  const std::vector hashes{kHashA, kHashB};
  const auto found = client->lookup(hashes, Deadline::after(20s));
  ASSERT_TRUE(found.has_value()) << found.error().to_string();
  EXPECT_EQ(found->usable_prefix, 1U);
  EXPECT_THAT(found->presence, ElementsAre(ElementsAre(Presence::kHit, Presence::kHitPending),
                                           ElementsAre(Presence::kHit, Presence::kMiss)));
}

TEST_F(ClientTest, LookupRefusesRepliesThatDoNotFit) {
  start_manager();
  const auto client = connect_ready();
  const std::vector hashes{kHashA, kHashB};
  const std::vector<ipc::LookupReply> bad{{3, {3, 3}}, {2, {3, 3, 3}}, {0, {3, 0}}, {0, {4, 1}}};
  for (const auto& reply : bad) {
    script(MessageKind::kLookup,
           [&reply](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
             (void)m.server().reply(from, e, reply);
           });
    EXPECT_EQ(client->lookup(hashes, Deadline::after(20s)).error().code, ErrorCode::kProtocol);
  }
  script(MessageKind::kLookup,
         [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
           (void)m.server().reply(from, e, ipc::PinReply{1});
         });
  EXPECT_EQ(client->lookup(hashes, Deadline::after(20s)).error().code, ErrorCode::kProtocol);
}

TEST_F(ClientTest, ReserveStoreRefusesAReplyOfTheWrongLength) {
  start_manager();
  const auto client = connect_ready();
  script(MessageKind::kReserveStore,
         [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
           ipc::ReserveStoreReply reply;
           reply.slots = {{ipc::ReserveOutcome::kReserved, 5}};
           (void)m.server().reply(from, e, reply);
         });
  const std::vector<StoreTarget> two{{GroupId{0}, kHashA}, {GroupId{0}, kHashB}};
  EXPECT_EQ(client->reserve_store(two, Deadline::after(20s)).error().code, ErrorCode::kProtocol);
  const auto slots = client->reserve_store(std::span(two).first(1), Deadline::after(20s));
  ASSERT_TRUE(slots.has_value());
  EXPECT_EQ(slots->at(0).slot, 5U);
  EXPECT_EQ(slots->at(0).outcome, Reservation::kReserved);
}

TEST_F(ClientTest, AcceptedJobCompletesOnceWithItsResults) {
  start_manager();
  const auto client = connect_ready();
  const JobId job = submit_load(*client);
  manager_->run([job](ScriptedManager& manager) { manager.send_done(job, {0, kDied}, 4096); });
  EXPECT_TRUE(run_until(*client, [&] { return !done_.empty(); }));
  ASSERT_EQ(done_.size(), 1U);
  EXPECT_EQ(done_[0].job, job);
  EXPECT_THAT(done_[0].results, ElementsAre(0, kDied));
  EXPECT_EQ(done_[0].bytes, 4096U);
  EXPECT_EQ(client->stats().jobs_submitted, 1U);
  EXPECT_EQ(client->stats().jobs_completed, 1U);
  EXPECT_EQ(client->stats().jobs_failed, 1U);
}

TEST_F(ClientTest, RefusedJobCompletesWithTheRefusalForEveryItem) {
  start_manager();
  const auto client = connect_ready();
  script(MessageKind::kSubmitLoad,
         [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
           (void)m.server().reply_error(from, e, KVFERRY_ERROR(kBusy, "queue is full"));
         });
  const JobId job = submit_load(*client);
  const auto done = client->wait(std::vector{job}, Deadline::after(20s));
  ASSERT_TRUE(done.has_value()) << done.error().to_string();
  EXPECT_THAT(done->at(0).results, Each(static_cast<std::uint8_t>(ErrorCode::kBusy)));
  EXPECT_EQ(done->at(0).results.size(), 2U);
  EXPECT_EQ(done->at(0).message, "queue is full");
}

TEST_F(ClientTest, SubmitsNameTheGenerationThatTheEngineHasSeen) {
  start_manager();
  const auto client = connect_ready();
  manager_->run([](ScriptedManager& manager) {
    manager.state = ready_state(8);
    manager.send_state();
  });
  // status() takes the new state in, but the engine has not looked at it yet.
  script(MessageKind::kStatus,
         [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
           (void)m.server().reply(from, e, ipc::StatusReply{"{}"});
         });
  EXPECT_EQ(client->status(Deadline::after(20s)).value(), "{}");
  submit_load(*client);
  EXPECT_EQ(client->state().generation, 8U);
  submit_load(*client);
  // Answered after the submits, which travel in order.
  EXPECT_TRUE(client->status(Deadline::after(20s)).has_value());
  manager_->run([](ScriptedManager& manager) {
    std::vector<std::uint64_t> named;
    for (const Envelope& envelope : manager.seen) {
      if (envelope.kind != MessageKind::kSubmitLoad) continue;
      named.push_back(body<ipc::SubmitLoad>(envelope).generation);
    }
    EXPECT_THAT(named, ElementsAre(7U, 8U));
  });
}

TEST_F(ClientTest, DescriptorIsReadableExactlyWhileCompletionsWait) {
  start_manager();
  const auto client = connect_ready();
  const JobId first = submit_load(*client, 0);
  const JobId second = submit_load(*client, 2);
  const JobId third = submit_load(*client, 4);
  manager_->run([&](ScriptedManager& manager) {
    for (const JobId job : {first, second, third}) manager.send_done(job, {0, 0});
  });
  // wait() takes one and keeps the others for poll(), which an event loop must hear of.
  EXPECT_EQ(client->wait(std::vector{third}, Deadline::after(20s))->at(0).job, third);
  EXPECT_TRUE(fd_readable(*client));
  EXPECT_EQ(client->poll(1).size(), 1U);
  EXPECT_TRUE(fd_readable(*client));
  EXPECT_EQ(client->poll(1).size(), 1U);
  EXPECT_TRUE(client->poll(1).empty());
  // And then no longer: for a moment the connection's own signals may wait there, which poll()
  // takes.
  EXPECT_TRUE(run_until(*client, [&] { return !fd_readable(*client); }));
  EXPECT_THAT(done_, IsEmpty());
}

TEST_F(ClientTest, WaitKeepsCompletionsWhenItsDeadlinePasses) {
  start_manager();
  const auto client = connect_ready();
  const std::vector jobs{submit_load(*client, 0), submit_load(*client, 2)};
  manager_->run([&](ScriptedManager& manager) { manager.send_done(jobs[0], {0, 0}); });
  EXPECT_EQ(client->wait(jobs, Deadline::after(30ms)).error().code, ErrorCode::kTimeout);
  manager_->run([&](ScriptedManager& manager) { manager.send_done(jobs[1], {0, 0}); });
  EXPECT_EQ(client->wait(jobs, Deadline::after(20s))->size(), 2U);
  EXPECT_EQ(client->wait(jobs, Deadline::after(20s)).error().code, ErrorCode::kNotFound);
}

TEST_F(ClientTest, ReleaseCallsBackFromPollWhenTheLastJobEnds) {
  start_manager();
  const auto client = connect_ready();
  const JobId job = submit_load(*client);
  int released = 0;
  const std::vector touched{BlockId{1}, BlockId{40}};
  EXPECT_FALSE(client->release_when_done(GroupId{0}, touched, [&released] { ++released; }));
  EXPECT_TRUE(client->release_when_done(GroupId{1}, touched, [] { FAIL(); }));
  EXPECT_TRUE(client->poll(10).empty());
  EXPECT_EQ(released, 0);
  manager_->run([job](ScriptedManager& manager) { manager.send_done(job, {0, 0}); });
  EXPECT_TRUE(run_until(*client, [&] { return released == 1; }));
  EXPECT_TRUE(client->release_when_done(GroupId{0}, touched, [] { FAIL(); }));
}

TEST_F(ClientTest, RequestFailsAtOnceWhenTheManagerIsLost) {
  start_manager();
  const auto client = connect_ready();
  script(MessageKind::kLookup,
         [](ScriptedManager&, const IncarnationId&, const Envelope&) { throw std::exception(); });
  const std::vector hashes{kHashA};
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  EXPECT_EQ(client->lookup(hashes, Deadline::after(20s)).error().code, ErrorCode::kPeerDied);
  EXPECT_LT(ipc::MonotonicClock::now() - start, 10s);
}

TEST_F(ClientTest, SubmitWithoutAManagerSendsNothing) {
  start_manager();
  const auto client = connect_ready();
  manager_.reset();
  ASSERT_TRUE(run_until(*client, [&] { return !client->state().manager_connected; }));
  const std::vector<LoadItem> items{{GroupId{0}, BlockId{0}, kHashA}};
  EXPECT_EQ(client->submit_load(items, 1).error().code, ErrorCode::kNoManager);
  EXPECT_EQ(client->stats().jobs_submitted, 0U);
  EXPECT_TRUE(client->release_when_done(GroupId{0}, std::vector{BlockId{0}}, [] { FAIL(); }));
}

TEST_F(ClientTest, ReconnectsToANewManagerOnTheSameDescriptor) {
  start_manager();
  const auto client = connect_ready();
  const int fd = client->fd();
  for (std::uint64_t round = 1; round <= 3; ++round) {
    manager_.reset();
    ASSERT_TRUE(run_until(*client, [&] { return !client->state().manager_connected; }));
    start_manager(ready_state(7 + round));
    ASSERT_TRUE(client->wait_ready(true, Deadline::after(20s)).has_value());
    EXPECT_EQ(client->stats().reconnects, round);
    EXPECT_EQ(client->state().generation, 7 + round);
  }
  EXPECT_EQ(client->fd(), fd);
  const JobId job = submit_load(*client);
  manager_->run([job](ScriptedManager& manager) { manager.send_done(job, {0, 0}); });
  EXPECT_TRUE(run_until(*client, [&] { return done_.size() == 1; }));
}

TEST_F(ClientTest, ReconnectGoesOnAfterARefusedHello) {
  start_manager();
  const auto client = connect_ready();
  manager_.reset();
  ASSERT_TRUE(run_until(*client, [&] { return !client->state().manager_connected; }));
  start_manager(ready_state(), KVFERRY_ERROR(kBusy, "still starting"));
  const auto refused_twice = [&] {
    std::size_t hellos = 0;
    manager_->run([&](ScriptedManager& m) { hellos = m.count(MessageKind::kEngineHello); });
    return hellos >= 2;
  };
  ASSERT_TRUE(run_until(*client, refused_twice));
  manager_->run([](ScriptedManager& manager) { manager.refuse_hello.reset(); });
  EXPECT_TRUE(client->wait_ready(true, Deadline::after(20s)).has_value());
}

TEST_F(ClientTest, JobsOfALostManagerEndOnlyWhenTheNewOneHasAllMovers) {
  start_manager();
  const auto client = connect_ready();
  const JobId job = submit_load(*client);
  int released = 0;
  const std::vector touched{BlockId{0}};
  ASSERT_FALSE(client->release_when_done(GroupId{0}, touched, [&released] { ++released; }));
  manager_.reset();
  ASSERT_TRUE(run_until(*client, [&] { return !client->state().manager_connected; }));
  auto state = ready_state();
  state.offload_ready = false;
  start_manager(state);
  ASSERT_TRUE(client->wait_ready(false, Deadline::after(20s)).has_value());
  // Movers may still work for the old manager: nothing may be concluded yet.
  EXPECT_EQ(client->wait(std::vector{job}, Deadline::after(30ms)).error().code,
            ErrorCode::kTimeout);
  EXPECT_TRUE(client->poll(10).empty());
  EXPECT_EQ(released, 0);
  manager_->run([](ScriptedManager& manager) {
    manager.state.offload_ready = true;
    manager.send_state();
  });
  EXPECT_TRUE(run_until(*client, [&] { return !done_.empty(); }));
  EXPECT_EQ(done_.at(0).job, job);
  EXPECT_THAT(done_.at(0).results, ElementsAre(kDied, kDied));
  EXPECT_EQ(released, 1);
}

TEST_F(ClientTest, JobsOfALostManagerEndWhenTheirArenasAreGone) {
  start_manager();
  const auto client = connect_ready();
  const JobId job = submit_load(*client);
  manager_.reset();
  ASSERT_TRUE(run_until(*client, [&] { return !client->state().manager_connected; }));
  auto state = ready_state(8);
  state.offload_ready = false;
  start_manager(state);
  const auto done = client->wait(std::vector{job}, Deadline::after(20s));
  ASSERT_TRUE(done.has_value()) << done.error().to_string();
  EXPECT_THAT(done->at(0).results, ElementsAre(kDied, kDied));
}

TEST_F(ClientTest, JobsOfALostConnectionEndWhenTheSameManagerGreetsAgain) {
  start_manager();
  const auto client = connect_ready();
  const JobId job = submit_load(*client);
  Envelope hello;
  const ipc::EventFd asked;
  script(MessageKind::kEngineHello,
         [&](ScriptedManager&, const IncarnationId&, const Envelope& envelope) {
           hello = envelope;
           asked.signal();
         });
  manager_->run([](ScriptedManager& manager) {
    (void)manager.server().notify(manager.engine, MessageKind::kBye, ipc::Empty{});
  });
  ASSERT_TRUE(run_until(*client, [&] { return !client->state().manager_connected; }));
  pollfd either[2] = {{client->fd(), POLLIN, 0}, {asked.fd(), POLLIN, 0}};
  while ((either[1].revents & POLLIN) == 0) {
    ASSERT_GT(::poll(either, 2, 20'000), 0);
    ASSERT_TRUE(client->poll(10).empty());
  }
  // Not greeted yet: the old job may still copy.
  EXPECT_EQ(client->wait(std::vector{job}, Deadline::after(30ms)).error().code,
            ErrorCode::kTimeout);
  manager_->run([&hello](ScriptedManager& manager) {
    (void)manager.server().reply(manager.engine, hello, manager.state);
  });
  const auto done = client->wait(std::vector{job}, Deadline::after(20s));
  ASSERT_TRUE(done.has_value()) << done.error().to_string();
  EXPECT_THAT(done->at(0).results, ElementsAre(kDied, kDied));
  EXPECT_TRUE(client->state().manager_connected);
}

TEST_F(ClientTest, PollDoesNotWaitForAManagerThatDoesNotGreet) {
  start_manager();
  const auto client = connect_ready();
  manager_.reset();
  // Somebody takes the name and accepts nothing: connecting to it must not hold up the engine.
  const auto silent = ipc::PacketListener::listen(dir_->registry_socket());
  ASSERT_TRUE(silent.has_value());
  ASSERT_TRUE(run_until(*client, [&] { return !client->state().manager_connected; }));
  pollfd knock{silent->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&knock, 1, 20'000), 1);
  // An attempt to connect lasts 2 s. A machine that is busy may take the processor from us for
  // long.
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(client->poll(10).empty());
  EXPECT_LT(ipc::MonotonicClock::now() - start, 1500ms);
}

TEST_F(ClientTest, ClearAndReinitCarryTheirOutcome) {
  start_manager();
  const auto client = connect_ready();
  script(MessageKind::kClear, [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
    const auto request = body<ipc::ClearRequest>(e);
    EXPECT_EQ(request.engine, "chat");
    EXPECT_EQ(request.host, ipc::HostPolicy::kKeep);
    EXPECT_GT(request.deadline, 0ms);
    EXPECT_LT(request.deadline, 10s);
    ipc::ClearReply reply;
    reply.host_blocks_dropped = 3;
    reply.ranks.resize(2);
    reply.ranks[0].outcome.free_before = 10;
    reply.ranks[0].outcome.free_after = 100;
    reply.ranks[1].rank = ipc::Rank{1};
    reply.ranks[1].outcome.kind = ipc::ClearKind::kQuarantined;
    reply.ranks[1].outcome.detail = "pid 9 holds it";
    reply.ranks[1].outcome.free_after = 50;
    (void)m.server().reply(from, e, reply);
  });
  const auto cleared = client->clear(HostPolicy::kKeep, Deadline::after(10s));
  ASSERT_TRUE(cleared.has_value()) << cleared.error().to_string();
  EXPECT_TRUE(cleared->quarantined);
  EXPECT_EQ(cleared->detail, "rank 1: pid 9 holds it");
  EXPECT_EQ(cleared->free_before, 10U);
  EXPECT_EQ(cleared->free_after, 150U);
  EXPECT_EQ(cleared->host_blocks_dropped, 3U);
  script(MessageKind::kReinit,
         [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
           EXPECT_EQ(body<ipc::ReinitRequest>(e).gpu_blocks, 96U);
           (void)m.server().reply(from, e, ipc::ReinitReply{11, {}});
         });
  EXPECT_EQ(client->reinit(96, Deadline::after(20s)).value(), 11U);
}

TEST_F(ClientTest, ClearReportsTheFailingRank) {
  start_manager();
  const auto client = connect_ready();
  script(MessageKind::kClear, [](ScriptedManager& m, const IncarnationId& from, const Envelope& e) {
    (void)m.server().reply_error(from, e, KVFERRY_ERROR(kTimeout, "rank 1: deadline"));
  });
  const auto cleared = client->clear(HostPolicy::kDrop, Deadline::after(10s));
  EXPECT_EQ(cleared.error().code, ErrorCode::kTimeout);
  EXPECT_EQ(cleared.error().message, "rank 1: deadline");
}

TEST_F(ClientTest, RefusesEmptySubmits) {
  start_manager();
  const auto client = connect_ready();
  EXPECT_EQ(client->submit_load({}, 1).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(client->submit_store({}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(client->swap_out(1, {}).error().code, ErrorCode::kInvalidArgument);
}

TEST_F(ClientTest, CloseEndsEverythingAndIsFinal) {
  start_manager();
  const auto client = connect_ready();
  submit_load(*client);
  client->close();
  client->close();
  EXPECT_FALSE(client->state().manager_connected);
  const std::vector hashes{kHashA};
  EXPECT_EQ(client->lookup(hashes, Deadline::after(1s)).error().code, ErrorCode::kCancelled);
  EXPECT_EQ(client->wait_ready(false, Deadline::after(1s)).error().code, ErrorCode::kCancelled);
}

}  // namespace
}  // namespace kvferry::worker
