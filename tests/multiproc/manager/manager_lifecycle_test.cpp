// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>

#include <fstream>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::CachePhase;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::MessageKind;
using ipc::ProcessKind;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class ManagerLifecycleTest : public ManagerTest {
 protected:
  /// Answers the next re-init of each worker and mover as done, or fails one rank's worker.
  void answer_reinits(std::uint64_t epoch, std::optional<std::uint32_t> failing = {}) {
    for (const std::uint32_t rank : {0U, 1U}) {
      for (ScriptedPeer* target : {workers_[rank].get(), movers_[rank].get()}) {
        const auto request = target->next(MessageKind::kRankReinit);
        ASSERT_TRUE(request.has_value()) << "no reinit came";
        const auto reinit = ipc::decode<ipc::RankReinit>(request->body, "RankReinit");
        ASSERT_TRUE(reinit.has_value());
        EXPECT_EQ(reinit->epoch.value, epoch);
        if (failing == rank) {
          target->reply_error(*request, KVFERRY_ERROR(kNoDeviceMemory, "the device is full"));
          break;  // Nobody is told to wait for an arena that there is not.
        }
        target->report_mapped(rank, epoch);
        target->reply(*request,
                      ipc::RankReinitReply{ScriptedPeer::session_of(rank), reinit->epoch, {}});
      }
    }
  }
  void clear_engine(std::uint64_t epoch) {
    operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
    ASSERT_NO_FATAL_FAILURE(answer_clears(epoch));
    const auto reply = operator_->next(MessageKind::kClear);
    ASSERT_TRUE(reply.has_value());
    ASSERT_FALSE(reply->error.has_value()) << reply->error->to_string();
  }
};

TEST_F(ManagerLifecycleTest, SecondManagerOnTheInstanceIsRefused) {
  start_manager();
  ChildProcess second(ChildOptions{.program = sibling_program("kvferry_manager_child"),
                                   .arguments = {dir_.string(), "1000", "1"}});
  EXPECT_EQ(second.wait(soon()), ChildExit::exited(1));
  EXPECT_THAT(second.stderr_text(), HasSubstr("already_exists"));
  EXPECT_EQ(status()["pid"], manager_->pid()) << "the first one goes on";
}

TEST_F(ManagerLifecycleTest, EndsOnSigtermAndLeavesNothingBehind) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  manager_->signal(SIGTERM);
  EXPECT_TRUE(client_->next(MessageKind::kBye).has_value());
  EXPECT_EQ(manager_->wait(soon()), ChildExit::exited(0)) << manager_->stderr_text();
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir_)) {
    if (!entry.is_directory()) {
      left.push_back(entry.path().string());
    }
  }
  EXPECT_THAT(left, IsEmpty());
}

TEST_F(ManagerLifecycleTest, KilledManagersNamesAreTakenOver) {
  start_manager();
  operator_.reset();
  manager_->kill();
  ASSERT_TRUE(manager_->wait(soon()).has_value());
  start_manager();
  EXPECT_EQ(status()["pid"], manager_->pid());
}

TEST_F(ManagerLifecycleTest, WhoLeavesLastRemovesTheNamesOfAKilledManager) {
  start_manager();
  {
    const auto last = ipc::RuntimeDir::open(dir_.string(), "default");
    ASSERT_TRUE(last.has_value());
    operator_.reset();
    manager_->kill();
    ASSERT_TRUE(manager_->wait(soon()).has_value());
    manager_.reset();
    EXPECT_TRUE(std::filesystem::exists(last->control_socket()));
  }
  EXPECT_FALSE(std::filesystem::exists(dir_ / "default"));
}

TEST_F(ManagerLifecycleTest, NamesOfKilledProcessesAreSweptAtTheNextStart) {
  start_manager();
  const auto directory = ipc::RuntimeDir::open(dir_.string(), "default");
  ASSERT_TRUE(directory.has_value());
  operator_.reset();
  manager_->kill();
  ASSERT_TRUE(manager_->wait(soon()).has_value());
  // Of a worker without a successor: its lock is free, and so its content counts for nothing.
  std::ofstream(directory->path() / "gone.3.step.lock") << "1 1 1\n";
  const auto living = ipc::NameLock::acquire(directory->path() / "living");
  ASSERT_TRUE(living.has_value());
  start_manager();
  EXPECT_FALSE(std::filesystem::exists(directory->path() / "gone.3.step.lock"));
  EXPECT_TRUE(std::filesystem::exists(directory->path() / "living.lock"));
}

TEST_F(ManagerLifecycleTest, RunningJobIsAnsweredBeforeTheManagerEnds) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}});
  std::vector<ipc::MoverJob> jobs;
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    jobs.push_back(*job);
  }
  submit_load(3, {{GroupId{0}, BlockId{5}, key(1)}});
  ASSERT_FALSE(client_->has(MessageKind::kJobDone));
  manager_->signal(SIGTERM);
  const ipc::JobDone queued = wait_done();
  EXPECT_EQ(queued.job, ipc::JobId{3});
  EXPECT_THAT(queued.results, ElementsAre(code(ErrorCode::kCancelled)));
  movers_[0]->finish(jobs[0]);
  movers_[1]->finish(jobs[1]);
  const ipc::JobDone running = wait_done();
  EXPECT_EQ(running.job, ipc::JobId{2});
  EXPECT_THAT(running.results, ElementsAre(0));
  EXPECT_EQ(manager_->wait(soon()), ChildExit::exited(0));
}

TEST_F(ManagerLifecycleTest, ClearReachesAllRanksThenReinitStartsAnotherGeneration) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  const std::uint64_t before = state_.generation;
  operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
  ASSERT_TRUE(wait_state(CachePhase::kClearing, false));
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kNotReady)));
  EXPECT_FALSE(operator_->has(MessageKind::kClear)) << "answered before any rank was";
  ASSERT_NO_FATAL_FAILURE(answer_clears(1));
  const auto reply = operator_->next(MessageKind::kClear);
  ASSERT_TRUE(reply.has_value());
  ASSERT_FALSE(reply->error.has_value()) << reply->error->to_string();
  const auto cleared = ipc::decode<ipc::ClearReply>(reply->body, "ClearReply");
  ASSERT_TRUE(cleared.has_value());
  ASSERT_EQ(cleared->ranks.size(), 2U);
  EXPECT_EQ(cleared->ranks[1].outcome.free_after, 5000U);
  EXPECT_EQ(cleared->host_blocks_dropped, 1U);
  ASSERT_TRUE(wait_state(CachePhase::kCleared, false));
  EXPECT_EQ(lookup({1}).usable_prefix, 0U);

  operator_->ask(MessageKind::kReinit, ipc::ReinitRequest{"chat"});
  ASSERT_NO_FATAL_FAILURE(answer_reinits(2));
  const auto reinit = operator_->next_body<ipc::ReinitReply>(MessageKind::kReinit);
  ASSERT_TRUE(reinit.has_value());
  EXPECT_GT(reinit->generation, before);
  ASSERT_TRUE(wait_state(CachePhase::kReady, true));
  EXPECT_EQ(state_.generation, reinit->generation);
  EXPECT_EQ(status()["engines"][0]["clears"], 1);
  EXPECT_EQ(status()["engines"][0]["reinits"], 1);
  store(1, 1);
}

// Such as after a manager's restart: the ranks, which come a moment later, hold all that they held.
TEST_F(ManagerLifecycleTest, ClearIsNotDoneWhileNoRankHasRegistered) {
  start_manager();
  ASSERT_NO_FATAL_FAILURE(connect_client());
  const auto early = client_->call<ipc::ClearReply>(MessageKind::kClear, ipc::ClearRequest{"chat"});
  ASSERT_FALSE(early.has_value()) << "nothing was cleared";
  EXPECT_EQ(early.error().code, ErrorCode::kNotReady) << early.error().to_string();
  EXPECT_THAT(early.error().message, HasSubstr("registered"));
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(add_worker(rank));
    ASSERT_NO_FATAL_FAILURE(add_mover(rank));
  }
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  ASSERT_NO_FATAL_FAILURE(clear_engine(1));
}

TEST_F(ManagerLifecycleTest, ClearThatKeepsTheHostTierKeepsItsPrefixes) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  store(1, 1, 1);
  operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat", ipc::HostPolicy::kKeep});
  ASSERT_NO_FATAL_FAILURE(answer_clears(1));
  const auto cleared = operator_->next_body<ipc::ClearReply>(MessageKind::kClear);
  ASSERT_TRUE(cleared.has_value());
  EXPECT_EQ(cleared->host_blocks_dropped, 0U);
  EXPECT_EQ(lookup({1}).usable_prefix, 1U);
}

TEST_F(ManagerLifecycleTest, FailingRankIsNamedAndTheOthersOutcomesAreTold) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
  ASSERT_NO_FATAL_FAILURE(answer_clears(1, 1));
  const auto reply = operator_->next(MessageKind::kClear);
  ASSERT_TRUE(reply.has_value());
  ASSERT_TRUE(reply->error.has_value());
  EXPECT_EQ(reply->error->code, ErrorCode::kCuda);
  EXPECT_THAT(reply->error->message, HasSubstr("rank 1"));
  const auto cleared = ipc::decode<ipc::ClearReply>(reply->body, "ClearReply");
  ASSERT_TRUE(cleared.has_value());
  EXPECT_FALSE(cleared->ranks.at(0).error.has_value());
  EXPECT_TRUE(cleared->ranks.at(1).error.has_value());
  EXPECT_EQ(cleared->host_blocks_dropped, 1U) << "no tier is left out";
  ASSERT_TRUE(wait_state(CachePhase::kDetached, false)) << "not called cleared";
}

TEST_F(ManagerLifecycleTest, OwnerThatDiesDuringAClearIsATypedError) {
  start_manager();
  ASSERT_NO_FATAL_FAILURE(connect_client());
  ASSERT_NO_FATAL_FAILURE(add_worker(0));
  ASSERT_NO_FATAL_FAILURE(add_mover(0));
  ASSERT_NO_FATAL_FAILURE(add_mover(1));
  ChildProcess worker = peer_child("worker", 1);
  ASSERT_TRUE(worker.wait_line("ready", soon()));
  ASSERT_TRUE(wait_state(CachePhase::kReady, true));
  operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
  ASSERT_TRUE(wait_state(CachePhase::kClearing, false));
  worker.kill();
  for (ScriptedPeer* target : {workers_[0].get(), movers_[0].get(), movers_[1].get()}) {
    const auto request = target->next(MessageKind::kRankClear);
    ASSERT_TRUE(request.has_value());
    target->reply(*request, ipc::RankClearReply{});
  }
  const auto reply = operator_->next(MessageKind::kClear);
  ASSERT_TRUE(reply.has_value());
  ASSERT_TRUE(reply->error.has_value());
  EXPECT_EQ(reply->error->code, ErrorCode::kPeerDied);
  EXPECT_THAT(reply->error->message, HasSubstr("rank 1"));
}

TEST_F(ManagerLifecycleTest, AttacherThatDiesDuringAClearIsNoErrorWhenTheOwnerHasCleared) {
  start_manager();
  ASSERT_NO_FATAL_FAILURE(connect_client());
  ASSERT_NO_FATAL_FAILURE(add_worker(0));
  ASSERT_NO_FATAL_FAILURE(add_worker(1));
  ASSERT_NO_FATAL_FAILURE(add_mover(0));
  ChildProcess mover = peer_child("mover", 1);
  ASSERT_TRUE(mover.wait_line("ready", soon()));
  ASSERT_NO_FATAL_FAILURE(settle(1));
  ASSERT_TRUE(wait_state(CachePhase::kReady, true));
  operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
  ASSERT_TRUE(wait_state(CachePhase::kClearing, false));
  mover.kill();
  for (ScriptedPeer* target : {workers_[0].get(), movers_[0].get(), workers_[1].get()}) {
    const auto request = target->next(MessageKind::kRankClear);
    ASSERT_TRUE(request.has_value());
    ipc::RankClearReply outcome;
    outcome.kind =
        target == workers_[1].get() ? ipc::ClearKind::kClearedPeerDead : ipc::ClearKind::kCleared;
    target->reply(*request, outcome);
  }
  const auto cleared = operator_->next_body<ipc::ClearReply>(MessageKind::kClear);
  ASSERT_TRUE(cleared.has_value());
  ASSERT_EQ(cleared->ranks.size(), 2U);
  EXPECT_FALSE(cleared->ranks[1].error.has_value());
  EXPECT_EQ(cleared->ranks[1].outcome.kind, ipc::ClearKind::kClearedPeerDead);
}

TEST_F(ManagerLifecycleTest, OneOperationAtATime) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  EXPECT_EQ(operator_->call<ipc::ReinitReply>(MessageKind::kReinit, ipc::ReinitRequest{"chat"})
                .error()
                .code,
            ErrorCode::kBusy)
      << "mapped already";
  operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
  ASSERT_TRUE(wait_state(CachePhase::kClearing, false));
  EXPECT_EQ(
      client_->call<ipc::ClearReply>(MessageKind::kClear, ipc::ClearRequest{"chat"}).error().code,
      ErrorCode::kBusy);
  EXPECT_EQ(client_->call<ipc::ReinitReply>(MessageKind::kReinit, ipc::ReinitRequest{"chat"})
                .error()
                .code,
            ErrorCode::kBusy);
  ASSERT_NO_FATAL_FAILURE(answer_clears(1));
  EXPECT_TRUE(operator_->next(MessageKind::kClear).has_value());
}

TEST_F(ManagerLifecycleTest, ReinitThatOneRankRefusesCanBeRepeated) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ASSERT_NO_FATAL_FAILURE(clear_engine(1));
  operator_->ask(MessageKind::kReinit, ipc::ReinitRequest{"chat"});
  ASSERT_NO_FATAL_FAILURE(answer_reinits(2, 1));
  EXPECT_FALSE(movers_[1]->has(MessageKind::kRankReinit));
  const auto failed = operator_->next(MessageKind::kReinit);
  ASSERT_TRUE(failed.has_value());
  ASSERT_TRUE(failed->error.has_value());
  EXPECT_EQ(failed->error->code, ErrorCode::kNoDeviceMemory);
  EXPECT_THAT(failed->error->message, HasSubstr("rank 1"));

  operator_->ask(MessageKind::kReinit, ipc::ReinitRequest{"chat"});
  for (ScriptedPeer* target : {workers_[1].get(), movers_[1].get()}) {
    const auto request = target->next(MessageKind::kRankReinit);
    ASSERT_TRUE(request.has_value());
    target->report_mapped(1, 2);
    target->reply(*request, ipc::RankReinitReply{ScriptedPeer::session_of(1), ipc::Epoch{2}, {}});
  }
  EXPECT_TRUE(operator_->next_body<ipc::ReinitReply>(MessageKind::kReinit).has_value());
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankReinit)) << "rank 0 is mapped already";
}

TEST_F(ManagerLifecycleTest, StateReportOfAClearedEpochDoesNotReviveIt) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ASSERT_NO_FATAL_FAILURE(clear_engine(1));
  for (const std::uint32_t rank : {0U, 1U}) {
    workers_[rank]->report_mapped(rank, 1);
    ASSERT_FALSE(workers_[rank]->has(MessageKind::kRankClear));
  }
  EXPECT_EQ(status()["engines"][0]["phase"], "cleared");
}

TEST_F(ManagerLifecycleTest, ContradictoryRolesGeometriesAndDoublesAreRefused) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  auto late = peer(ProcessKind::kMover, "late mover");
  EXPECT_EQ(late->rank_hello(1, tiny_geometry()).error().code, ErrorCode::kAlreadyExists);
  EXPECT_EQ(late->rank_hello(1, tiny_geometry(), ipc::CacheOwner::kMover).error().code,
            ErrorCode::kRoleConflict);
  ipc::Geometry other = tiny_geometry();
  other.groups[0].regions[0].block_bytes = 8192;
  EXPECT_EQ(late->rank_hello(1, other).error().code, ErrorCode::kGeometryMismatch);
  other = tiny_geometry();
  other.ranks = 3;
  EXPECT_EQ(late->rank_hello(1, other).error().code, ErrorCode::kGeometryMismatch);
  EXPECT_EQ(late->rank_hello(2, tiny_geometry()).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(status()["engines"][0]["phase"], "ready");
}

TEST_F(ManagerLifecycleTest, ClientOfAnotherGeometryIsRefusedEarlyOrLate) {
  start_manager();
  auto early = peer(ProcessKind::kEngine, "early engine");
  ipc::EngineHello hello = client_hello();
  hello.ranks = 4;
  const auto state = early->call<ipc::EngineState>(MessageKind::kEngineHello, hello);
  ASSERT_TRUE(state.has_value()) << "the engine is not known yet";
  EXPECT_EQ(state->phase, CachePhase::kDetached);
  EXPECT_EQ(early->call<ipc::LookupReply>(MessageKind::kLookup, ipc::Lookup{}).error().code,
            ErrorCode::kNotReady);
  ASSERT_NO_FATAL_FAILURE(add_worker(0));
  EXPECT_EQ(early->call<ipc::LookupReply>(MessageKind::kLookup, ipc::Lookup{}).error().code,
            ErrorCode::kGeometryMismatch);
  auto late = peer(ProcessKind::kEngine, "late engine");
  EXPECT_EQ(late->call<ipc::EngineState>(MessageKind::kEngineHello, hello).error().code,
            ErrorCode::kGeometryMismatch);
}

TEST_F(ManagerLifecycleTest, BadMessagesAreAnsweredAndCountedAndHurtNobody) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  // A body of another message, and a body that is no message at all.
  EXPECT_EQ(
      client_->call<ipc::LookupReply>(MessageKind::kLookup, ipc::DropSequence{7}).error().code,
      ErrorCode::kProtocol);
  ipc::Envelope garbage;
  garbage.kind = MessageKind::kSubmitLoad;
  garbage.request = client_->link().next_request();
  garbage.body = {0xC1, 0xFF, 0x00, 0x93};
  client_->send(garbage);
  const auto refused = client_->next(MessageKind::kSubmitLoad);
  ASSERT_TRUE(refused.has_value());
  ASSERT_TRUE(refused->error.has_value());
  EXPECT_EQ(refused->error->code, ErrorCode::kProtocol);
  // The wrong kind of peer.
  EXPECT_EQ(operator_->call<ipc::LookupReply>(MessageKind::kLookup, ipc::Lookup{}).error().code,
            ErrorCode::kProtocol);
  EXPECT_EQ(
      movers_[0]->call<ipc::ClearReply>(MessageKind::kClear, ipc::ClearRequest{}).error().code,
      ErrorCode::kProtocol);
  EXPECT_EQ(
      workers_[0]->call<ipc::Empty>(MessageKind::kMoverJobDone, ipc::MoverJobDone{}).error().code,
      ErrorCode::kProtocol);
  // An engine name that would escape into a path.
  auto sly = peer(ProcessKind::kEngine, "sly engine");
  ipc::EngineHello hello = client_hello();
  hello.engine = "../chat";
  EXPECT_EQ(sly->call<ipc::EngineState>(MessageKind::kEngineHello, hello).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_GE(status()["protocol_errors"].get<int>(), 3);
  EXPECT_EQ(operator_->call<ipc::ClearReply>(MessageKind::kClear, ipc::ClearRequest{"nobody"})
                .error()
                .code,
            ErrorCode::kNotFound);
  store(1, 1);
}

TEST_F(ManagerLifecycleTest, StatusIsAPureObservation) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  nlohmann::json first = status();
  nlohmann::json second = status();
  first.erase("uptime");
  second.erase("uptime");
  EXPECT_EQ(first, second);
  EXPECT_EQ(first["instance"], "default");
  EXPECT_EQ(first["pool"]["bytes"], 4U << 20U);
  EXPECT_EQ(first["index"]["blocks"], 1);
  const nlohmann::json& engine = first["engines"][0];
  EXPECT_EQ(engine["name"], "chat");
  EXPECT_EQ(engine["geometry"], "tiny");
  EXPECT_EQ(engine["phase"], "ready");
  EXPECT_EQ(engine["offload_ready"], true);
  EXPECT_EQ(engine["jobs"]["done"], 1);
  EXPECT_EQ(engine["bytes_to_host"], 8192);
  EXPECT_EQ(engine["to_host"]["answers"], 2);
  EXPECT_EQ(engine["to_device"]["answers"], 0);
  EXPECT_EQ(engine["ranks"][1]["worker"]["epoch"], 1);
  EXPECT_EQ(engine["ranks"][1]["mover"]["mapped"], true);
}

TEST_F(ManagerLifecycleTest, EngineIsForgottenWhenNobodyIsLeft) {
  start_manager();
  ChildProcess worker = peer_child("worker", 0);
  ASSERT_TRUE(worker.wait_line("ready", soon()));
  EXPECT_EQ(status()["engines"].size(), 1U);
  worker.kill();
  ASSERT_TRUE(worker.wait(soon()).has_value());
  const ipc::Deadline deadline = soon();
  while (!status()["engines"].empty() && !deadline.expired()) {
    // Each round is an answer of the manager.
  }
  EXPECT_TRUE(status()["engines"].empty());
  // Another geometry may take the name.
  auto other = peer(ProcessKind::kWorker, "other");
  ipc::Geometry geometry = tiny_geometry();
  geometry.ranks = 1;
  EXPECT_TRUE(other->rank_hello(0, geometry).has_value());
}

}  // namespace
}  // namespace kvferry::test
