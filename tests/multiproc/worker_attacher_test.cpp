// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "multiproc/mover_mapping.hpp"
#include "multiproc/worker_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstring>

namespace kvferry {
namespace {

using ipc::Epoch;
using ipc::ErrorCode;
using ipc::MessageKind;
using namespace std::chrono_literals;
using test::soon;
using testing::Each;

/// The roles turned round: the test process is the mover and owns the arena, the worker attaches.
class WorkerAttacherTest : public test::WorkerFixture,
                           public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    config_ = test::rank_config(temp_.path().string(), device_text_, "mover", GetParam());
    device_ = ipc::open_device(config_.device);
    make_owner();
    start_manager();
    start_worker("mover", GetParam());
    arena_ = wait_mapped();
    connect_steps();
  }
  /// A new session, after the one before has ended.
  void make_owner() {
    owner_.reset();
    ipc::LeaseOptions options;
    options.identity.instance = "default";
    options.identity.engine = config_.engine;
    options.identity.self = ipc::ProcessKind::kMover;
    options.identity.cache_owner = ipc::CacheOwner::kMover;
    options.identity.handles = config_.handles;
    options.identity.fingerprint = config_.geometry.fingerprint(config_.arena.order);
    options.identity.incarnation = ipc::IncarnationId::random();
    owner_ = std::make_unique<ipc::LeaseOwner>(options, dir_, *device_, mapping_,
                                               [](const ipc::LeaseView&) {});
    init();
  }
  /// With a deadline that is never the end of it: see kEndsSooner.
  [[nodiscard]] static ipc::RankReinit reinit_of(const ipc::SessionId& session,
                                                 std::uint64_t epoch) {
    return {session, Epoch{epoch}, 0, 300s};
  }
  /// The worker is killed, and another one has mapped and reported the arena.
  void replace_worker() {
    steps_.reset();
    worker_->kill();
    ASSERT_EQ(worker_->wait(soon()), test::ChildExit::killed_by(SIGKILL));
    {
      const std::lock_guard lock(shared_.mutex);
      shared_.state.reset();
    }
    start_worker("mover", GetParam());
    arena_ = wait_mapped();
    connect_steps();
  }
  void init() {
    const auto epoch =
        owner_->init(ipc::plan_arena(config_.geometry, config_.arena).value(), soon());
    ASSERT_TRUE(epoch.has_value()) << epoch.error().to_string();
  }

  static constexpr ipc::Duration kEndsSooner = 60s;

  ipc::RankConfig config_;
  std::unique_ptr<ipc::Device> device_;
  test::MoverMapping mapping_;
  std::unique_ptr<ipc::LeaseOwner> owner_;
};

TEST_P(WorkerAttacherTest, WorkerServesStepsOnTheMoversMemory) {
  ipc::Step step = make_step();
  step.fills = seeded(0, 4, 11);
  step.verifies = step.fills;
  EXPECT_THAT(run_ok(step).mismatches, Each(0U));
  // The owner sees the worker's writes: it is the same memory.
  const auto regions =
      mapping_.arena()->strided(ipc::GroupId{0}, ipc::RegionSet::kAll, ipc::Rank{0});
  std::uint64_t word = 0;
  std::memcpy(&word, regions[0].base, sizeof(word));
  EXPECT_EQ(word, kernels::pattern_word(11, regions[0].salt, 0));
}

TEST_P(WorkerAttacherTest, OwnersClearTakesTheArenaFromTheWorkerAndTheNextEpochReturns) {
  for (std::uint64_t epoch = 1; epoch <= 3; ++epoch) {
    ipc::Step step = make_step();
    step.fills = seeded(0, 4, epoch);
    step.verifies = step.fills;
    step.decode_steps = 1;  // the allocator keeps its workspace
    step.reads = {{ipc::GroupId{0}, ipc::BlockId{0}}};
    EXPECT_THAT(run_ok(step).mismatches, Each(0U));
    const auto cleared = owner_->clear(Epoch{epoch}, ipc::Deadline::after(20s));
    ASSERT_TRUE(cleared.has_value()) << cleared.error().to_string();
    EXPECT_EQ(cleared->kind, ipc::ClearKind::kCleared) << cleared->detail;
    EXPECT_EQ(device_used(), 0U);
    EXPECT_EQ(run(step).error().code, ErrorCode::kNotReady);
    init();
    arena_ = wait_mapped(epoch + 1);
  }
}

TEST_P(WorkerAttacherTest, NextWorkerTakesTheBlocksAsTheKilledOneLeftThem) {
  ipc::Step step = make_step();
  step.fills = seeded(0, 8, 21);
  run_ok(step);
  EXPECT_GT(arena_.prepared_by.value, 0U);
  const ipc::RankState before = arena_;
  ASSERT_NO_FATAL_FAILURE(replace_worker());
  EXPECT_EQ(arena_.session, before.session);
  EXPECT_EQ(arena_.epoch, before.epoch);
  EXPECT_EQ(arena_.prepared_by, before.prepared_by);
  ipc::Step check = make_step();
  check.verifies = seeded(0, 8, 21);
  EXPECT_THAT(run_ok(check).mismatches, Each(0U));
  // And it writes to the same memory.
  step = make_step();
  step.fills = seeded(2, 2, 77);
  step.verifies = step.fills;
  EXPECT_THAT(run_ok(step).mismatches, Each(0U));
}

// Epochs count from one again: the one that was asked for would come after as many clears.
TEST_P(WorkerAttacherTest, WaitForAnEpochOfAnOwnerThatWasReplacedEnds) {
  const ipc::SessionId first = arena_.session;
  const std::uint64_t waiting =
      tell(ipc::ProcessKind::kWorker, MessageKind::kRankReinit, reinit_of(first, 3));
  make_owner();
  const ipc::TimePoint replaced = ipc::MonotonicClock::now();
  arena_ = wait_state(
      [&first](const ipc::RankState& state) { return state.mapped && state.session != first; });
  EXPECT_EQ(arena_.epoch, Epoch{1});
  const auto code_of = [](const ipc::Envelope& reply) {
    return reply.error ? reply.error->code : ErrorCode{};
  };
  EXPECT_EQ(code_of(wait_reply(waiting)), ErrorCode::kPeerDied) << "while it was replaced";
  EXPECT_EQ(code_of(ask(MessageKind::kRankReinit, reinit_of(first, 3))), ErrorCode::kPeerDied)
      << "asked for after that";
  EXPECT_EQ(code_of(ask(MessageKind::kRankReinit, reinit_of(arena_.session, 1))), ErrorCode{});
  EXPECT_LT(ipc::MonotonicClock::now() - replaced, kEndsSooner);
}

// Its number is below that of the epochs of the session before.
TEST_P(WorkerAttacherTest, WaitEndsWhenAnEpochOfAYoungSessionIsRevoked) {
  for (std::uint64_t epoch = 1; epoch <= 3; ++epoch) {
    ASSERT_TRUE(owner_->clear(Epoch{epoch}, ipc::Deadline::after(20s)).has_value());
    init();
    arena_ = wait_mapped(epoch + 1);
  }
  make_owner();
  arena_ = wait_state([this](const ipc::RankState& state) {
    return state.mapped && state.session != arena_.session;
  });
  ASSERT_TRUE(owner_->clear(Epoch{1}, ipc::Deadline::after(20s)).has_value());
  const ipc::TimePoint asked = ipc::MonotonicClock::now();
  const std::uint64_t waiting =
      tell(ipc::ProcessKind::kWorker, MessageKind::kRankReinit, reinit_of(arena_.session, 2));
  init();
  ASSERT_TRUE(owner_->clear(Epoch{2}, ipc::Deadline::after(20s)).has_value());
  const ipc::Envelope reply = wait_reply(waiting);
  // Mapped for a moment, or revoked before that; never left waiting.
  if (reply.error) {
    EXPECT_EQ(reply.error->code, ErrorCode::kRevoked) << reply.error->to_string();
  }
  EXPECT_LT(ipc::MonotonicClock::now() - asked, kEndsSooner);
}

TEST_P(WorkerAttacherTest, NextEpochOfANextWorkerIsZeroedAgain) {
  ipc::Step step = make_step();
  step.fills = seeded(0, 8, 21);
  run_ok(step);
  const std::uint64_t first = arena_.prepared_by.value;
  ASSERT_NO_FATAL_FAILURE(replace_worker());
  const auto cleared = owner_->clear(Epoch{1}, ipc::Deadline::after(20s));
  ASSERT_TRUE(cleared.has_value()) << cleared.error().to_string();
  init();
  arena_ = wait_mapped(2);
  EXPECT_GT(arena_.prepared_by.value, first);
  const ipc::Arena& arena = *mapping_.arena();
  for (std::uint32_t i = 0; i < arena.layout().segment_bytes.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(arena.segment(i).raw());
    EXPECT_TRUE(std::all_of(bytes, bytes + arena.layout().segment_bytes[i],
                            [](unsigned char byte) { return byte == 0; }));
  }
}

TEST_P(WorkerAttacherTest, ManagersClearDetachesAndEmptiesTheAllocator) {
  ipc::Step step = make_step();
  step.decode_steps = 1;
  step.reads = {{ipc::GroupId{0}, ipc::BlockId{0}}};
  run_ok(step);
  // More than the arena is taken: the allocator keeps the step's workspace.
  const std::uint64_t before = device_used();
  const auto cleared =
      ask(MessageKind::kRankClear, ipc::RankClear{arena_.session, arena_.epoch, 15000ms});
  ASSERT_FALSE(cleared.error.has_value()) << cleared.error->to_string();
  EXPECT_EQ(device_used(), ipc::align_up(mapping_.arena()->total_bytes(), 2 * kMiB));
  EXPECT_GT(before, device_used());
}

// A clear that reached this side alone: the epoch will never be mapped here again, and whoever
// waits for it would be deaf to the clear that has to come.
TEST_P(WorkerAttacherTest, WaitForAnEpochThatWasLetGoOfEnds) {
  const auto cleared =
      ask(MessageKind::kRankClear, ipc::RankClear{arena_.session, arena_.epoch, 15000ms});
  ASSERT_FALSE(cleared.error.has_value()) << cleared.error->to_string();
  const ipc::TimePoint asked = ipc::MonotonicClock::now();
  const ipc::Envelope reply = ask(MessageKind::kRankReinit, reinit_of(arena_.session, 1));
  ASSERT_TRUE(reply.error.has_value());
  EXPECT_EQ(reply.error->code, ErrorCode::kRevoked) << reply.error->to_string();
  EXPECT_LT(ipc::MonotonicClock::now() - asked, kEndsSooner);
  // The rest of that clear, and all is well.
  ASSERT_TRUE(owner_->clear(Epoch{1}, ipc::Deadline::after(20s)).has_value());
  init();
  EXPECT_EQ(wait_mapped(2).epoch, Epoch{2});
}

TEST_P(WorkerAttacherTest, WorkerLetsGoWhenItsOwnerEnds) {
  owner_.reset();
  wait_state([](const ipc::RankState& state) { return !state.mapped; });
  EXPECT_EQ(device_used(), 0U);
  EXPECT_EQ(run(make_step()).error().code, ErrorCode::kNotReady);
}

INSTANTIATE_TEST_SUITE_P(Handles,
                         WorkerAttacherTest,
                         ::testing::Values("vmm", "legacy"),
                         [](const auto& handles) { return handles.param; });

}  // namespace
}  // namespace kvferry
