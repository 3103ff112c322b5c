// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "multiproc/manager/manager_restart_fixture.hpp"

#include <gmock/gmock.h>

#include <cstring>
#include <future>
#include <set>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::BlockPresence;
using ipc::ErrorCode;
using ipc::MessageKind;
using ipc::ProcessKind;
using testing::ElementsAre;

TEST_F(ManagerRestartTest, WhatAKilledManagerHadIsServedByTheNextFromTheSamePlaces) {
  const std::uint64_t place = place_of_store(1, 3);
  (void)place_of_store(2, 4);
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["adopted"], 2);
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  EXPECT_EQ(presence(2), BlockPresence::kHit);
  EXPECT_EQ(presence(3), BlockPresence::kMiss);
  submit_load(5, {{kMain, BlockId{7}, key(1)}});
  const auto job = movers_[0]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(job.has_value());
  EXPECT_EQ(job->items.at(0).shard_offset, place);
  movers_[0]->finish(*job);
  movers_[1]->finish(*movers_[1]->next_body<ipc::MoverJob>(MessageKind::kMoverJob));
  EXPECT_THAT(wait_done().results, ElementsAre(0));
  EXPECT_TRUE(ipc::is_same_memory(memory_.pool, movers_[0]->link().take_pool().pool));
}

TEST_F(ManagerRestartTest, WhatNamespacesHaveAndWhoMayUseThemIsKnownToTheNextManager) {
  // The engine's client is of a namespace with a key from now on.
  ipc::EngineHello hello = client_hello();
  hello.name_space = "secret";
  hello.name_space_key = ipc::Digest::from_words(4, 2);
  const auto say_hello = [&](ScriptedPeer& from, const ipc::EngineHello& said) {
    return from.call<ipc::EngineState>(MessageKind::kEngineHello, said);
  };
  const auto state = say_hello(*client_, hello);
  ASSERT_TRUE(state.has_value()) << state.error().to_string();
  state_ = *state;
  (void)place_of_store(1, 3);
  (void)place_of_store(2, 4);
  const auto account = [&] {
    const nlohmann::json all = status();
    for (const nlohmann::json& one : all["namespaces"]) {
      if (one["name"] == "secret") return one;
    }
    return nlohmann::json();
  };
  const nlohmann::json before = account();
  ASSERT_EQ(before["blocks"], 2);
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  ASSERT_NO_FATAL_FAILURE(start_manager());
  (void)kept();
  EXPECT_EQ(account()["blocks"], 2);
  EXPECT_EQ(account()["bytes"], before["bytes"]);
  EXPECT_EQ(account()["has_key"], true);
  const auto stranger = peer(ProcessKind::kEngine, "stranger");
  ipc::EngineHello other = hello;
  other.name_space_key = ipc::Digest::from_words(4, 3);
  EXPECT_EQ(say_hello(*stranger, other).error().code, ErrorCode::kPermission);
  other.name_space_key.reset();
  EXPECT_EQ(say_hello(*stranger, other).error().code, ErrorCode::kPermission);
  client_ = again(client_, ProcessKind::kEngine, "engine");
  const auto greeted = say_hello(*client_, hello);
  ASSERT_TRUE(greeted.has_value()) << greeted.error().to_string();
  state_ = *greeted;
  ASSERT_NO_FATAL_FAILURE(ranks_again());
  EXPECT_EQ(presence(1), BlockPresence::kHit);
}

TEST_F(ManagerRestartTest, AThirdManagerServesWhatTheFirstTwoStored) {
  (void)place_of_store(1, 3);
  ASSERT_NO_FATAL_FAILURE(restart());
  (void)kept();
  (void)place_of_store(2, 4);
  keeper_.reset();
  keeper_ = std::make_unique<Keeper>(keeper_name(), movers_[0]->link().take_pool());
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["adopted"], 2);
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  EXPECT_EQ(presence(2), BlockPresence::kHit);
}

TEST_F(ManagerRestartTest,
       ABlockThatWasBeingStoredIsNotThereAndItsPlaceIsNobodysUntilTheMoverComes) {
  (void)place_of_store(1, 3);
  const auto slots = reserve({{kMain, key(2)}});
  submit_store(50, {{kMain, BlockId{4}, slots.at(0)}});
  const auto job = movers_[0]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(job.has_value());
  const std::uint64_t doubtful = job->items.at(0).shard_offset;
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  ASSERT_NO_FATAL_FAILURE(start_manager());
  ASSERT_NO_FATAL_FAILURE(client_again());
  EXPECT_EQ(kept()["doubtful"], 1);
  // The workers alone: their movers may still be copying.
  for (const std::uint32_t rank : {0U, 1U}) {
    workers_[rank] = again(workers_[rank], ProcessKind::kWorker, "worker");
    ASSERT_TRUE(workers_[rank]->rank_hello(rank, tiny_geometry()).has_value());
    workers_[rank]->report_mapped(rank, 1);
  }
  EXPECT_EQ(kept()["doubtful"], 1);
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  EXPECT_EQ(presence(2), BlockPresence::kMiss);
  for (const std::uint32_t rank : {0U, 1U}) {
    movers_[rank] = again(movers_[rank], ProcessKind::kMover, "mover");
    ASSERT_TRUE(movers_[rank]->rank_hello(rank, tiny_geometry()).has_value());
    EXPECT_EQ(kept()["doubtful"], 1) << "a worker may still gather for an earlier mover";
    movers_[rank]->report_mapped(rank, 1);
    settle(rank);
  }
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  EXPECT_EQ(kept()["doubtful"], 0);
  EXPECT_EQ(place_of_store(9, 5), doubtful) << "the first place that is free";
}

TEST_F(ManagerRestartTest, ABlockWhoseChecksumsWereNotToldIsDropped) {
  (void)place_of_store(1, 3);
  tells_sums_ = false;
  (void)place_of_store(2, 4);
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(status()["pool"]["kept"]["awaited"], 1);
  ASSERT_NO_FATAL_FAILURE(tell_kept(0, {}, /*is_last=*/true));
  ASSERT_NO_FATAL_FAILURE(tell_kept(1, {}, /*is_last=*/true));
  EXPECT_EQ(kept()["adopted"], 1);
  EXPECT_EQ(kept()["dropped"], 1);
  EXPECT_EQ(kept()["unsummed"], 1);
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  EXPECT_EQ(presence(2), BlockPresence::kMiss);
}

TEST_F(ManagerRestartTest, TheFirstLoadOfWhatAnEarlierManagerStoredIsChecked) {
  const std::uint64_t place = place_of_store(1, 3);
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["adopted"], 1);
  for (const bool is_first : {true, false}) {
    submit_load(is_first ? 5 : 6, {{kMain, BlockId{7}, key(1)}});
    for (const auto& mover : movers_) {
      const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
      ASSERT_TRUE(job.has_value());
      EXPECT_EQ(job->items.at(0).shard_sum != 0, is_first);
      EXPECT_EQ(job->items.at(0).replicated_sum != 0, is_first);
      if (is_first && mover == movers_[0]) {
        EXPECT_EQ(job->items.at(0).shard_sum, place + 1);
      }
      mover->finish(*job);
    }
    EXPECT_THAT(wait_done().results, ElementsAre(0));
  }
  EXPECT_EQ(status()["pool"]["integrity"]["checked"], 1);
}

TEST_F(ManagerRestartTest, ADamagedBlockIsAMissAndIsCounted) {
  (void)place_of_store(1, 3);
  (void)place_of_store(2, 4);
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["adopted"], 2);
  submit_load(5, {{kMain, BlockId{7}, key(1)}, {kMain, BlockId{8}, key(2)}});
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    ipc::MoverJobDone done;
    done.job = job->job;
    done.results = {mover == movers_[1] ? code(ErrorCode::kCorrupt) : std::uint8_t{0}, 0};
    mover->notify(MessageKind::kMoverJobDone, done);
  }
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kNotFound), 0));
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  EXPECT_EQ(presence(2), BlockPresence::kHit);
  const nlohmann::json all = status();
  EXPECT_EQ(all["pool"]["integrity"]["corrupt"], 1);
  EXPECT_EQ(all["pool"]["blocks"], 1) << "its slot is free";
  std::size_t accounts = 0;
  for (const nlohmann::json& one : all["namespaces"]) {
    if (one["blocks"] != 1) continue;
    ++accounts;
    EXPECT_EQ(one["hits"], 1) << one;
    EXPECT_EQ(one["misses"], 1) << one;
  }
  EXPECT_EQ(accounts, 1U);
}

TEST_F(ManagerRestartTest, AUnitComesBackWithThePartsThatItHadAndEachIsCheckedOnce) {
  unit_blocks_ = 4;
  ASSERT_NO_FATAL_FAILURE(say_hello());
  const auto slots = reserve({{kMain, key(1)}});
  submit_store(next_job_++,
               {{kMain, BlockId{3}, slots.at(0), 0}, {kMain, BlockId{4}, slots.at(0), 2}});
  std::vector<std::uint64_t> places;
  for (const std::uint32_t rank : {0U, 1U}) {
    const auto job = movers_[rank]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    if (rank == 0) places = {job->items.at(0).shard_offset, job->items.at(1).shard_offset};
    movers_[rank]->finish(*job);
    tell_sums(rank, *job);
  }
  EXPECT_THAT(wait_done().results, ElementsAre(0, 0));
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["adopted"], 1);
  EXPECT_EQ(presence(1), BlockPresence::kHit);
  struct Load {
    std::uint32_t part;
    std::uint64_t sum;
  };
  for (const Load& load : {Load{2, places[1] + 1}, Load{0, places[0] + 1}, Load{2, 0}}) {
    submit_load(next_job_++, {{kMain, BlockId{7}, key(1), load.part}});
    for (const std::uint32_t rank : {0U, 1U}) {
      const auto job = movers_[rank]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
      ASSERT_TRUE(job.has_value());
      if (rank == 0) {
        EXPECT_EQ(job->items.at(0).shard_offset, places[load.part / 2]);
        EXPECT_EQ(job->items.at(0).shard_sum, load.sum);
      }
      movers_[rank]->finish(*job);
    }
    EXPECT_THAT(wait_done().results, ElementsAre(0));
  }
  for (const std::uint32_t part : {1U, 3U}) {
    submit_load(next_job_++, {{kMain, BlockId{7}, key(1), part}});
    EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kNotFound)));
  }
  unit_blocks_ = 1;
  ASSERT_NO_FATAL_FAILURE(say_hello());
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
}

TEST_F(ManagerRestartTest, ADamagedPartIsTheEndOfItsUnit) {
  unit_blocks_ = 4;
  ASSERT_NO_FATAL_FAILURE(say_hello());
  const auto slots = reserve({{kMain, key(1)}});
  submit_store(next_job_++,
               {{kMain, BlockId{3}, slots.at(0), 0}, {kMain, BlockId{4}, slots.at(0), 1}});
  for (const std::uint32_t rank : {0U, 1U}) {
    const auto job = movers_[rank]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    movers_[rank]->finish(*job);
    tell_sums(rank, *job);
  }
  EXPECT_THAT(wait_done().results, ElementsAre(0, 0));
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["adopted"], 1);
  submit_load(next_job_++, {{kMain, BlockId{7}, key(1), 0}, {kMain, BlockId{8}, key(1), 1}});
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    ipc::MoverJobDone done;
    done.job = job->job;
    done.results = {0, mover == movers_[1] ? code(ErrorCode::kCorrupt) : std::uint8_t{0}};
    mover->notify(MessageKind::kMoverJobDone, done);
  }
  EXPECT_THAT(wait_done().results, ElementsAre(0, code(ErrorCode::kNotFound)));
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  EXPECT_EQ(status()["pool"]["integrity"]["corrupt"], 1);
  EXPECT_EQ(status()["pool"]["blocks"], 0);
}

TEST_F(ManagerRestartTest, BlocksOfAnotherIdentityAreMisses) {
  (void)place_of_store(1, 3);
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["adopted"], 1);
  client_.reset();
  client_ = peer(ProcessKind::kEngine, "other weights");
  ipc::EngineHello hello = client_hello();
  hello.weights = ipc::Digest::from_words(1, 2);
  ASSERT_TRUE(client_->call<ipc::EngineState>(MessageKind::kEngineHello, hello).has_value());
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
}

TEST_F(ManagerRestartTest, AClearFindsTheBlocksOfAnEngineThatOnlyTheEarlierManagerKnew) {
  (void)place_of_store(1, 3);
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  ASSERT_NO_FATAL_FAILURE(start_manager());
  EXPECT_EQ(kept()["adopted"], 1);
  ipc::ClearRequest clear;
  clear.host = ipc::HostPolicy::kDrop;
  const auto reply = operator_->call<ipc::ClearReply>(MessageKind::kClear, clear);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_EQ(status()["pool"]["blocks"], 0);
}

TEST_F(ManagerRestartTest, ASequenceIsItsOwnersAgain) {
  client_->notify(
      MessageKind::kSwapOut,
      ipc::SwapSequence{ipc::JobId{1}, state_.generation, 42, {{kMain, BlockId{2}, 0}}});
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    mover->finish(*job);
    ASSERT_NO_FATAL_FAILURE(tell_sums(mover == movers_[0] ? 0 : 1, *job));
  }
  ASSERT_THAT(wait_done().results, ElementsAre(0));
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["sequence_blocks"], 1);
  const auto swap_in = [&](std::uint64_t job, std::uint64_t handle) {
    client_->notify(
        MessageKind::kSwapIn,
        ipc::SwapSequence{ipc::JobId{job}, state_.generation, handle, {{kMain, BlockId{5}, 0}}});
  };
  swap_in(2, 42);
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  EXPECT_THAT(wait_done().results, ElementsAre(0));
  swap_in(3, 43);
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kNotFound)));
  ASSERT_TRUE(client_->call<ipc::Empty>(MessageKind::kDropSequence, ipc::DropSequence{42}));
  EXPECT_EQ(status()["pool"]["blocks"], 0);
}

// It comes first in its slab, which is none any more once it is dropped alone.
TEST_F(ManagerRestartTest, ASequenceThatIsDroppedDoesNotTakeItsNeighboursWithIt) {
  for (const std::uint64_t handle : {41U, 42U, 43U}) {
    client_->notify(
        MessageKind::kSwapOut,
        ipc::SwapSequence{ipc::JobId{handle},
                          state_.generation,
                          handle,
                          {{kMain, BlockId{static_cast<std::uint32_t>(handle % 16)}, 0}}});
    for (const auto& mover : movers_) {
      const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
      ASSERT_TRUE(job.has_value());
      mover->finish(*job);
      if (handle != 41) {
        ASSERT_NO_FATAL_FAILURE(tell_sums(mover == movers_[0] ? 0 : 1, *job));
      }
    }
    ASSERT_THAT(wait_done().results, ElementsAre(0));
  }
  ASSERT_NO_FATAL_FAILURE(restart());
  EXPECT_EQ(kept()["sequence_blocks"], 2);
  EXPECT_EQ(status()["pool"]["blocks"], 2);
  EXPECT_EQ(status()["pool"]["slabs"], 1);
}

TEST_F(ManagerRestartTest, APoolOfAnotherFormatIsLetGo) {
  (void)place_of_store(1, 3);
  {
    const auto mapping =
        ipc::SharedMemory::map_pool(memory_.catalogue, memory_.catalogue_bytes).value();
    const std::uint32_t unknown = 9'999;
    std::memcpy(mapping.data() + 16, &unknown, sizeof(unknown));  // version
  }
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  ASSERT_NO_FATAL_FAILURE(start_manager());
  EXPECT_TRUE(kept().is_null());
  EXPECT_TRUE(keeper_->has_dropped());
  EXPECT_EQ(status()["pool"]["blocks"], 0);
  ASSERT_NO_FATAL_FAILURE(client_again());
  ASSERT_NO_FATAL_FAILURE(ranks_again());
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  (void)place_of_store(1, 3);
}

TEST_F(ManagerRestartTest, APoolOfAnotherSizeIsThrownAwayAndTheLogSaysWhatWentAndWhy) {
  (void)place_of_store(1, 3);
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  pool_bytes_ /= 2;
  ASSERT_NO_FATAL_FAILURE(start_manager());
  EXPECT_TRUE(kept().is_null());
  EXPECT_TRUE(keeper_->has_dropped());
  EXPECT_EQ(status()["pool"]["blocks"], 0);
  EXPECT_THAT(manager_->stderr_text(),
              testing::ContainsRegex(" W manager the pool of 4.00 MiB .4194304 bytes. that .* kept "
                                     "is thrown away, and with it all blocks that it had: .* "
                                     "--host-memory makes 2.00 MiB .2097152 bytes."));
}

TEST_F(ManagerRestartTest, AManagerThatCannotHaveItsMemoryLeavesThePoolToTheNext) {
  (void)place_of_store(1, 3);
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  ChildProcess greedy({.program = sibling_program("kvferry_manager_child"),
                       .arguments = {dir_.string(), "30000", std::to_string(max_jobs_),
                                     std::to_string(1ULL << 44U), verify_loads_, "60000"}});
  const auto exit = greedy.wait(soon());
  ASSERT_TRUE(exit.has_value());
  EXPECT_NE(*exit, ChildExit::exited(0));
  EXPECT_THAT(greedy.stderr_text(), testing::HasSubstr("was asked"));
  EXPECT_FALSE(keeper_->has_dropped());
  ASSERT_NO_FATAL_FAILURE(start_manager());
  EXPECT_EQ(kept()["adopted"], 1);
}

TEST_F(ManagerRestartTest, WithoutAKeeperTheNextManagerBeginsAnew) {
  (void)place_of_store(1, 3);
  keeper_.reset();
  manager_->signal(SIGKILL);
  ASSERT_TRUE(manager_->wait(soon()).has_value());
  operator_.reset();
  ASSERT_NO_FATAL_FAILURE(start_manager());
  EXPECT_TRUE(kept().is_null());
}

TEST_F(ManagerRestartTest, AKeeperThatNoticesTheDeathLateIsWaitedFor) {
  (void)place_of_store(1, 3);
  manager_->signal(SIGKILL);
  ASSERT_TRUE(manager_->wait(soon()).has_value());
  operator_.reset();
  // It answers who comes meanwhile once it has noticed: the manager asks before it serves.
  auto started = std::async(std::launch::async, [this] { start_manager(); });
  const auto instance = ipc::RuntimeDir::find(dir_.string(), "default");
  ASSERT_TRUE(instance.has_value());
  for (;;) {
    const auto names = instance->held_names();
    ASSERT_TRUE(names.has_value());
    if (std::any_of(names->begin(), names->end(),
                    [](const auto& held) { return held.name == "manager"; })) {
      break;
    }
  }
  keeper_->offer();
  started.get();
  EXPECT_EQ(kept()["adopted"], 1);
}

TEST_F(ManagerRestartTest, OfTwoPoolsTheOneThatWasServedFromLastIsAdopted) {
  (void)place_of_store(1, 3);
  manager_->signal(SIGKILL);
  ASSERT_TRUE(manager_->wait(soon()).has_value());
  operator_.reset();
  // The keeper does not notice: the second manager has a pool of its own.
  ASSERT_NO_FATAL_FAILURE(start_manager());
  ASSERT_NO_FATAL_FAILURE(client_again());
  ASSERT_NO_FATAL_FAILURE(ranks_again());
  ASSERT_EQ(presence(1), BlockPresence::kMiss);
  (void)place_of_store(2, 3);
  ipc::PoolMemory later = movers_[0]->link().take_pool();
  ASSERT_TRUE(later.valid());
  ASSERT_NE(later.id, memory_.id);
  const auto instance = ipc::RuntimeDir::find(dir_.string(), "default");
  Keeper other(instance->rank_socket("chat", 1, ipc::PoolKeeper::kSocket), std::move(later));
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  other.offer();
  ASSERT_NO_FATAL_FAILURE(start_manager());
  ASSERT_NO_FATAL_FAILURE(client_again());
  ASSERT_NO_FATAL_FAILURE(ranks_again());
  EXPECT_EQ(kept()["adopted"], 1);
  EXPECT_EQ(presence(1), BlockPresence::kMiss);
  EXPECT_EQ(presence(2), BlockPresence::kHit);
  EXPECT_TRUE(keeper_->has_dropped());
  EXPECT_FALSE(other.has_dropped());
}

TEST_F(ManagerRestartTest, APoolWhoseManagerLivesIsNotGiven) {
  const auto instance = ipc::RuntimeDir::find(dir_.string(), "default");
  ASSERT_TRUE(instance.has_value());
  const auto found = ipc::find_kept_pools(*instance, /*succeeds=*/false, soon()).pools;
  ASSERT_EQ(found.size(), 1U);
  EXPECT_TRUE(found[0].in_use);
  EXPECT_FALSE(found[0].memory.pool.valid());
  EXPECT_EQ(found[0].memory.id, memory_.id);
  EXPECT_EQ(ipc::drop_kept_pool(found[0], soon()).error().code, ErrorCode::kBusy);
  EXPECT_FALSE(keeper_->has_dropped());
}

}  // namespace
}  // namespace kvferry::test
