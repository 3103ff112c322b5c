// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::CachePhase;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::JobId;
using ipc::MessageKind;
using ipc::ProcessKind;
using testing::ElementsAre;

class ManagerSequencesTest : public ManagerTest {
 protected:
  static ipc::SwapSequence swap(std::uint64_t job,
                                std::uint64_t generation,
                                std::uint64_t sequence,
                                std::uint32_t block) {
    return {JobId{job}, generation, sequence, {{GroupId{0}, BlockId{block}, 0}}};
  }
  /// Swaps one block of the sequence out.
  void swap_out(ScriptedPeer& client, std::uint64_t job, std::uint64_t sequence) {
    client.notify(MessageKind::kSwapOut, swap(job, state_.generation, sequence, 2));
    ASSERT_NO_FATAL_FAILURE(movers_finish());
    const auto done = client.next_body<ipc::JobDone>(MessageKind::kJobDone);
    ASSERT_TRUE(done.has_value());
    ASSERT_THAT(done->results, ElementsAre(0)) << done->message;
  }
  /// The result of swapping it in again, and the block that it came from.
  [[nodiscard]] std::uint8_t swap_in(ScriptedPeer& client,
                                     std::uint64_t job,
                                     std::uint64_t sequence) {
    client.notify(MessageKind::kSwapIn, swap(job, state_.generation, sequence, 5));
    const auto done = client.next_body<ipc::JobDone>(MessageKind::kJobDone);
    EXPECT_TRUE(done.has_value());
    return done && done->results.size() == 1 ? done->results.front() : 0xFF;
  }
  [[nodiscard]] std::unique_ptr<ScriptedPeer> another_client(const std::string& name,
                                                             const ipc::IncarnationId& id) {
    auto another = std::make_unique<ScriptedPeer>(dir_.string(), ProcessKind::kEngine, name, id);
    EXPECT_TRUE(another->call<ipc::EngineState>(MessageKind::kEngineHello, client_hello()));
    return another;
  }
};

TEST_F(ManagerSequencesTest, OneHandleOfTwoClientsIsTwoSequences) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  const auto second = another_client("second engine", ipc::Digest::random());
  ASSERT_NO_FATAL_FAILURE(swap_out(*client_, 1, 42));
  EXPECT_EQ(swap_in(*second, 1, 42), code(ErrorCode::kNotFound)) << "the other one's blocks";
  const auto dropped = second->call<ipc::Empty>(MessageKind::kDropSequence, ipc::DropSequence{42});
  ASSERT_FALSE(dropped.has_value());
  EXPECT_EQ(dropped.error().code, ErrorCode::kNotFound);
  ASSERT_NO_FATAL_FAILURE(swap_out(*second, 2, 42));
  EXPECT_EQ(status()["sequences"]["count"], 2);

  // The end of one leaves the other's alone.
  second->notify(MessageKind::kBye, ipc::Empty{});
  EXPECT_FALSE(second->has(MessageKind::kJobDone));
  EXPECT_EQ(status()["sequences"]["count"], 1);
  client_->notify(MessageKind::kSwapIn, swap(3, state_.generation, 42, 5));
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  EXPECT_THAT(wait_done().results, ElementsAre(0));
}

TEST_F(ManagerSequencesTest, ClientThatConnectsAgainKeepsItsSequences) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ASSERT_NO_FATAL_FAILURE(swap_out(*client_, 1, 42));
  const ipc::IncarnationId same = client_->id();
  client_.reset();
  client_ = another_client("engine again", same);
  client_->notify(MessageKind::kSwapIn, swap(2, state_.generation, 42, 5));
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  EXPECT_THAT(wait_done().results, ElementsAre(0));
}

TEST_F(ManagerSequencesTest, SequencesOutliveTheEndOfEverybodyButTheirOwner) {
  start_manager();
  const auto start_ranks = [this] {
    std::vector<ChildProcess> ranks;
    for (const char* kind : {"worker", "copier"}) {
      ranks.push_back(peer_child(kind, 0, 1));
      EXPECT_TRUE(ranks.back().wait_line("ready", soon())) << ranks.back().stderr_text();
    }
    return ranks;
  };
  const auto join = [this](const ipc::IncarnationId& id) {
    client_ = std::make_unique<ScriptedPeer>(dir_.string(), ProcessKind::kEngine, "engine", id);
    const auto seen = client_->call<ipc::EngineState>(MessageKind::kEngineHello, client_hello(1));
    ASSERT_TRUE(seen.has_value()) << seen.error().to_string();
    state_ = *seen;
    ASSERT_TRUE(wait_state(CachePhase::kReady, true));
  };
  const ipc::IncarnationId owner = ipc::Digest::random();
  std::vector<ChildProcess> ranks = start_ranks();
  ASSERT_NO_FATAL_FAILURE(join(owner));
  client_->notify(MessageKind::kSwapOut, swap(1, state_.generation, 7, 2));
  ASSERT_THAT(wait_done().results, ElementsAre(0));
  client_.reset();
  for (ChildProcess& rank : ranks) {
    rank.kill();
  }
  const ipc::Deadline deadline = soon();
  while (!status()["engines"][0]["geometry"].is_null() && !deadline.expired()) {
    // Each round is an answer of the manager.
  }
  ranks = start_ranks();
  ASSERT_NO_FATAL_FAILURE(join(owner));
  EXPECT_EQ(swap_in(*client_, 2, 7), 0);
}

// A client that stays connected while its engine is started anew with another geometry.
TEST_F(ManagerSequencesTest, SequencesAndBlocksOfAnEarlierGeometryAreNeverReadAndAreDropped) {
  start_manager();
  const ipc::EngineHello old_hello = client_hello(1);
  const auto old_client = peer(ProcessKind::kEngine, "engine of one rank");
  ASSERT_TRUE(old_client->call<ipc::EngineState>(MessageKind::kEngineHello, old_hello));
  ChildProcess worker = peer_child("worker", 0, 1);
  ASSERT_TRUE(worker.wait_line("ready", soon())) << worker.stderr_text();
  ChildProcess mover = peer_child("copier", 0, 1);
  ASSERT_TRUE(mover.wait_line("ready", soon())) << mover.stderr_text();
  client_ = std::make_unique<ScriptedPeer>(dir_.string(), ProcessKind::kEngine, "watcher");
  const auto seen = client_->call<ipc::EngineState>(MessageKind::kEngineHello, old_hello);
  ASSERT_TRUE(seen.has_value());
  state_ = *seen;
  ASSERT_TRUE(wait_state(CachePhase::kReady, true));
  client_.reset();

  // One swapped-out block, one visible block, one reservation.
  old_client->notify(MessageKind::kSwapOut, swap(1, state_.generation, 7, 2));
  auto done = old_client->next_body<ipc::JobDone>(MessageKind::kJobDone);
  ASSERT_TRUE(done.has_value());
  ASSERT_THAT(done->results, ElementsAre(0)) << done->message;
  const auto reserved = old_client->call<ipc::ReserveStoreReply>(
      MessageKind::kReserveStore,
      ipc::ReserveStore{{{GroupId{0}, key(1)}, {GroupId{0}, key(2)}}, {}});
  ASSERT_TRUE(reserved.has_value());
  old_client->notify(MessageKind::kSubmitStore,
                     ipc::SubmitStore{JobId{2},
                                      state_.generation,
                                      std::nullopt,
                                      {{GroupId{0}, BlockId{3}, reserved->slots.at(0).slot}}});
  done = old_client->next_body<ipc::JobDone>(MessageKind::kJobDone);
  ASSERT_TRUE(done.has_value());
  ASSERT_THAT(done->results, ElementsAre(0)) << done->message;

  worker.kill();
  mover.kill();
  const ipc::Deadline deadline = soon();
  while (!status()["engines"][0]["geometry"].is_null() && !deadline.expired()) {
    // Each round is an answer of the manager, which learns of the deaths from the kernel.
  }
  EXPECT_EQ(status()["sequences"]["count"], 1) << "the same geometry may come back";
  EXPECT_EQ(status()["index"]["blocks"], 1);

  ASSERT_NO_FATAL_FAILURE(connect_client());
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(add_worker(rank));
    ASSERT_NO_FATAL_FAILURE(add_mover(rank));
  }
  ASSERT_TRUE(wait_state(CachePhase::kReady, true));
  EXPECT_EQ(swap_in(*client_, 1, 7), code(ErrorCode::kNotFound));
  EXPECT_EQ(swap_in(*old_client, 3, 7), code(ErrorCode::kGeometryMismatch));
  EXPECT_EQ(status()["sequences"]["count"], 0);
  EXPECT_EQ(status()["pool"]["used"], 0) << "nothing can ever use blocks of that geometry";

  // Even one that changes its mind brings nothing of before with it.
  ASSERT_TRUE(old_client->call<ipc::EngineState>(MessageKind::kEngineHello, client_hello()));
  EXPECT_EQ(swap_in(*old_client, 4, 7), code(ErrorCode::kNotFound));
  old_client->notify(MessageKind::kSubmitStore,
                     ipc::SubmitStore{JobId{5},
                                      state_.generation,
                                      std::nullopt,
                                      {{GroupId{0}, BlockId{3}, reserved->slots.at(1).slot}}});
  done = old_client->next_body<ipc::JobDone>(MessageKind::kJobDone);
  ASSERT_TRUE(done.has_value());
  EXPECT_THAT(done->results, ElementsAre(code(ErrorCode::kInvalidArgument)));
}

TEST_F(ManagerSequencesTest, ASequenceThatDoesNotFitEvictsNothingHoweverOftenItIsTried) {
  pool_bytes_ = 256ULL << 10U;  // 16 host blocks.
  ASSERT_NO_FATAL_FAILURE(start_engine());
  for (const std::uint64_t cached : {1U, 2U, 3U, 4U}) {
    ASSERT_NO_FATAL_FAILURE(store(cached, static_cast<std::uint32_t>(cached)));
  }
  const auto ask = [this](std::uint64_t job, std::uint64_t sequence, std::uint32_t blocks) {
    ipc::SwapSequence wanted{JobId{job}, state_.generation, sequence, {}};
    for (std::uint32_t i = 0; i < blocks; ++i) {
      wanted.items.push_back({GroupId{0}, BlockId{i}, i});
    }
    client_->notify(MessageKind::kSwapOut, wanted);
  };
  ask(1, 1, 12);
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  ASSERT_THAT(wait_done().results, testing::Each(0));
  // Of a sequence that is there already the old blocks stay until the new ones are whole.
  for (const std::uint64_t sequence : {2U, 2U, 1U}) {
    ask(1 + next_job_++, sequence, 5);
    const ipc::JobDone refused = wait_done();
    EXPECT_THAT(refused.results, testing::Each(code(ErrorCode::kNoHostMemory)));
    EXPECT_THAT(refused.message, testing::HasSubstr("no room for 5 blocks"));
    ASSERT_EQ(status()["index"]["evicted"], 0);
  }
  EXPECT_EQ(status()["index"]["blocks"], 4);
  ask(1 + next_job_++, 1, 4);
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  EXPECT_THAT(wait_done().results, testing::Each(0));
  EXPECT_EQ(status()["index"]["evicted"], 4);
}

}  // namespace
}  // namespace kvferry::test
