// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/manager/manager_fixture.hpp"

#include "support/instance_checks.hpp"

#include <unistd.h>

#include <array>
#include <cstdlib>

namespace kvferry::test {

void ManagerTest::SetUp() {
  std::string pattern = (std::filesystem::temp_directory_path() / "kvferry-mgr-XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  dir_ = pattern;
}

void ManagerTest::TearDown() {
  // A manager that has ended in order took its records with it.
  const auto instance = ipc::RuntimeDir::find(dir_.string(), "default");
  if (instance && std::filesystem::exists(instance->transitions_folder())) {
    for (const std::string& breach : find_breaches(*instance)) ADD_FAILURE() << breach;
  }
  client_.reset();
  operator_.reset();
  workers_.clear();
  movers_.clear();
  if (manager_) {
    manager_->signal(SIGTERM);
    const auto exit = manager_->wait(soon());
    EXPECT_TRUE(exit.has_value()) << "the manager did not end";
    if (exit && !HasFailure()) {
      EXPECT_EQ(*exit, ChildExit::exited(0)) << manager_->stderr_text();
    }
    if (HasFailure()) {
      std::fprintf(stderr, "%s", manager_->stderr_text().c_str());
    }
  }
  std::filesystem::remove_all(dir_);
}

void ManagerTest::start_manager(std::chrono::milliseconds job_deadline) {
  manager_.emplace(
      ChildOptions{.program = sibling_program("kvferry_manager_child"),
                   .arguments = {dir_.string(), std::to_string(job_deadline.count()),
                                 std::to_string(max_jobs_), std::to_string(pool_bytes_),
                                 verify_loads_, std::to_string(late_sums_deadline_.count())}});
  // It is ready when it answers: try until it does or dies.
  const ipc::Deadline deadline = soon();
  while (operator_ == nullptr && !deadline.expired()) {
    try {
      operator_ = peer(ipc::ProcessKind::kOperator, "operator");
    } catch (const ipc::Exception& error) {
      ASSERT_EQ(error.error().code, ipc::ErrorCode::kNoManager) << error.what();
      ASSERT_FALSE(manager_->wait(ipc::Deadline::after(std::chrono::milliseconds(20))).has_value())
          << manager_->stderr_text();
    }
  }
  ASSERT_NE(operator_, nullptr) << "no manager";
}

std::unique_ptr<ScriptedPeer> ManagerTest::peer(ipc::ProcessKind kind, const std::string& name) {
  return std::make_unique<ScriptedPeer>(dir_.string(), kind, name);
}

ChildProcess ManagerTest::peer_child(const std::string& kind,
                                     std::uint32_t rank,
                                     std::uint32_t ranks) {
  return ChildProcess(ChildOptions{
      .program = sibling_program("kvferry_peer_child"),
      .arguments = {dir_.string(), kind, std::to_string(rank), std::to_string(ranks)}});
}

void ManagerTest::add_worker(std::uint32_t rank) {
  workers_[rank] = peer(ipc::ProcessKind::kWorker, "worker chat/" + std::to_string(rank));
  const auto hello = workers_[rank]->rank_hello(rank, tiny_geometry());
  ASSERT_TRUE(hello.has_value()) << hello.error().to_string();
  workers_[rank]->report_mapped(rank, 1);
  if (movers_[rank]) settle(rank);
}

void ManagerTest::add_mover(std::uint32_t rank) {
  movers_[rank] = peer(ipc::ProcessKind::kMover, "mover chat/" + std::to_string(rank));
  const auto hello = movers_[rank]->rank_hello(rank, tiny_geometry());
  ASSERT_TRUE(hello.has_value()) << hello.error().to_string();
  movers_[rank]->report_mapped(rank, 1);
  if (workers_[rank]) settle(rank);
}

void ManagerTest::settle(std::uint32_t rank) { settle(*workers_[rank]); }

void ManagerTest::settle(ScriptedPeer& worker) {
  const auto request = worker.next(ipc::MessageKind::kQuiesceStaging);
  ASSERT_TRUE(request.has_value()) << "the worker was not asked whether others are worked for";
  const auto quiesce = ipc::decode<ipc::QuiesceStaging>(request->body, "QuiesceStaging");
  ASSERT_TRUE(quiesce.has_value());
  EXPECT_TRUE(quiesce->others);
  worker.reply(*request, ipc::Empty{});
}

ipc::EngineHello ManagerTest::client_hello(std::uint32_t ranks) {
  ipc::EngineHello hello;
  hello.engine = "chat";
  hello.model = "tiny";
  hello.weights = ipc::Digest::from_words(1, 1);
  hello.ranks = ranks;
  hello.fingerprint = tiny_geometry(ranks).fingerprint(ipc::ArenaOrder::kLayerFirst);
  return hello;
}

void ManagerTest::connect_client() {
  client_ = peer(ipc::ProcessKind::kEngine, "engine");
  const auto state =
      client_->call<ipc::EngineState>(ipc::MessageKind::kEngineHello, client_hello());
  ASSERT_TRUE(state.has_value()) << state.error().to_string();
  state_ = *state;
}

bool ManagerTest::wait_state(ipc::CachePhase phase, bool offload_ready) {
  while (state_.phase != phase || state_.offload_ready != offload_ready) {
    const auto event = client_->next_body<ipc::EngineState>(ipc::MessageKind::kEngineState);
    if (!event) {
      ADD_FAILURE() << event.error().to_string();
      return false;
    }
    state_ = *event;
  }
  return true;
}

void ManagerTest::start_engine() {
  start_manager();
  ASSERT_NO_FATAL_FAILURE(connect_client());
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(add_worker(rank));
    ASSERT_NO_FATAL_FAILURE(add_mover(rank));
  }
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
}

std::vector<std::uint64_t> ManagerTest::reserve(const std::vector<ipc::StoreKey>& keys) {
  const auto reply = client_->call<ipc::ReserveStoreReply>(ipc::MessageKind::kReserveStore,
                                                           ipc::ReserveStore{keys, state_.weights});
  std::vector<std::uint64_t> slots;
  EXPECT_TRUE(reply.has_value()) << reply.error().to_string();
  for (const ipc::ReservedSlot& slot : reply->slots) {
    EXPECT_EQ(slot.outcome, ipc::ReserveOutcome::kReserved);
    slots.push_back(slot.slot);
  }
  return slots;
}

void ManagerTest::submit_store(std::uint64_t job, const std::vector<ipc::StoreItem>& items) {
  client_->notify(ipc::MessageKind::kSubmitStore,
                  ipc::SubmitStore{ipc::JobId{job}, state_.generation, std::nullopt, items});
}

void ManagerTest::submit_load(std::uint64_t job, const std::vector<ipc::LoadItem>& items) {
  client_->notify(ipc::MessageKind::kSubmitLoad,
                  ipc::SubmitLoad{ipc::JobId{job}, state_.generation, {1}, std::nullopt, items});
}

ipc::JobDone ManagerTest::wait_done() {
  const auto done = client_->next_body<ipc::JobDone>(ipc::MessageKind::kJobDone);
  EXPECT_TRUE(done.has_value()) << "no completion came";
  return done ? *done : ipc::JobDone{};
}

void ManagerTest::movers_finish() {
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(ipc::MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    mover->finish(*job);
  }
}

void ManagerTest::store(std::uint64_t block_key, std::uint32_t block, std::uint32_t group) {
  const auto slots = reserve({{ipc::GroupId{group}, key(block_key)}});
  ASSERT_EQ(slots.size(), 1U);
  const std::uint64_t job = next_job_++;
  submit_store(job, {{ipc::GroupId{group}, ipc::BlockId{block}, slots[0]}});
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  const ipc::JobDone done = wait_done();
  ASSERT_EQ(done.job.value, job);
  ASSERT_EQ(done.results, std::vector<std::uint8_t>{0}) << done.message;
}

ipc::LookupReply ManagerTest::lookup(const std::vector<std::uint64_t>& keys) {
  ipc::Lookup message;
  for (const std::uint64_t value : keys) {
    message.blocks.push_back(key(value));
  }
  const auto reply = client_->call<ipc::LookupReply>(ipc::MessageKind::kLookup, message);
  EXPECT_TRUE(reply.has_value()) << reply.error().to_string();
  return reply ? *reply : ipc::LookupReply{};
}

nlohmann::json ManagerTest::status() {
  const auto reply = operator_->call<ipc::StatusReply>(ipc::MessageKind::kStatus, ipc::Empty{});
  EXPECT_TRUE(reply.has_value()) << reply.error().to_string();
  return nlohmann::json::parse(reply->json);
}

void ManagerTest::answer_clears(std::uint64_t epoch, std::optional<std::uint32_t> failing) {
  for (const std::uint32_t rank : {0U, 1U}) {
    for (ScriptedPeer* target : {workers_[rank].get(), movers_[rank].get()}) {
      const auto request = target->next(ipc::MessageKind::kRankClear);
      ASSERT_TRUE(request.has_value()) << "no clear came";
      const auto clear = ipc::decode<ipc::RankClear>(request->body, "RankClear");
      ASSERT_TRUE(clear.has_value());
      EXPECT_EQ(clear->session, ScriptedPeer::session_of(rank));
      EXPECT_EQ(clear->epoch.value, epoch);
      if (failing == rank && target == workers_[rank].get()) {
        target->reply_error(*request, KVFERRY_ERROR(kCuda, "the scripted device is broken"));
        continue;
      }
      target->report_cleared(rank, epoch);
      ipc::RankClearReply reply;
      reply.epoch = clear->epoch;
      reply.free_before = 1000;
      reply.free_after = 5000;
      target->reply(*request, reply);
    }
  }
}

}  // namespace kvferry::test
