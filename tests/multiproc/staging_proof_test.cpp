// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"
#include "multiproc/worker_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

namespace kvferry {
namespace {

using ipc::CopyDirection;
using ipc::Deadline;
using ipc::ErrorCode;
using ipc::MessageKind;
using ipc::MoverJobDone;
using ipc::ProcessKind;
using std::chrono_literals::operator""ms;
using test::soon;
using testing::AnyOf;
using testing::Each;

constexpr std::uint32_t kBlocks = 3;
constexpr std::uint64_t kSlotStride = 64 << 10;  // of a block in the pool, parts included
constexpr std::uint64_t kReplicatedBytes = 1024;

std::uint8_t code(ErrorCode error) { return static_cast<std::uint8_t>(error); }

/// A real worker, whose kernels the test holds up, and a real mover that stages over it. The test
/// is their manager: it must not hear that a job is over while the worker may still touch its
/// blocks, whatever became of the connection between the two.
class StagingProofTest : public test::WorkerFixture {
 protected:
  void SetUp() override {
    pool_.bytes = 1 << 20;
    auto fd = ipc::SharedMemory::create_pool("kvferry-proof-test", pool_.bytes, true);
    ASSERT_TRUE(fd.has_value()) << fd.error().to_string();
    pool_fd_ = std::move(fd).value();
    pool_.fd = pool_fd_.get();
    worker_program_ = "kvferry_gated_worker_child";
    start_all();
    start_mover();
  }
  void TearDown() override {
    WorkerFixture::TearDown();
    if (worker_) worker_->write_line("open");
  }
  void start_mover() {
    mover_.emplace(test::ChildOptions{
        .program = test::sibling_program("kvferry_mover_child"),
        .arguments = {temp_.path().string(), device_text_, "worker", "vmm", "staged"}});
    wait_mover_mapped();
  }
  void wait_mover_mapped() {
    std::unique_lock lock(shared_.mutex);
    ASSERT_TRUE(shared_.changed.wait_until(lock, soon().when(), [this] {
      return shared_.mover_state && shared_.mover_state->mapped;
    })) << mover_->stderr_text();
  }

  // ---- jobs ----

  void start_job(std::uint64_t job, CopyDirection direction) {
    ipc::MoverJob message;
    message.job = ipc::JobId{job};
    message.session = arena_.session;
    message.epoch = arena_.epoch;
    message.direction = direction;
    for (std::uint32_t block = 0; block < kBlocks; ++block) {
      const std::uint64_t at = block * kSlotStride;
      message.items.push_back(
          {ipc::GroupId{0}, ipc::BlockId{block}, at, at + kReplicatedBytes, true});
    }
    tell(ProcessKind::kMover, MessageKind::kMoverJob, message);
  }
  void store(std::uint64_t job) { start_job(job, CopyDirection::kDeviceToHost); }
  void load(std::uint64_t job) { start_job(job, CopyDirection::kHostToDevice); }
  MoverJobDone wait_answer(std::uint64_t job) {
    std::unique_lock lock(shared_.mutex);
    const auto answered = [&] { return find_answer(job) != nullptr; };
    EXPECT_TRUE(shared_.changed.wait_until(lock, soon().when(), answered))
        << "job " << job << " was never answered; mover says: " << mover_->stderr_text();
    return answered() ? *find_answer(job) : MoverJobDone{};
  }
  bool is_answered(std::uint64_t job) {
    const std::lock_guard lock(shared_.mutex);
    return find_answer(job) != nullptr;
  }
  [[nodiscard]] const MoverJobDone* find_answer(std::uint64_t job) const {
    for (const MoverJobDone& answer : shared_.answers) {
      if (answer.job.value == job) return &answer;
    }
    return nullptr;
  }
  static auto all_are(ErrorCode error) { return Each(code(error)); }
  void expect_ok(std::uint64_t job) { EXPECT_THAT(wait_answer(job).results, Each(0)); }

  // ---- what the worker's kernels do ----

  void hold_kernels() {
    worker_->write_line("hold");
    ASSERT_TRUE(worker_->wait_line("holding", soon()));
  }
  void wait_held() { ASSERT_TRUE(worker_->wait_line("held", soon())) << worker_->stderr_text(); }
  void sever() {
    worker_->write_line("sever");
    ASSERT_TRUE(worker_->wait_line("severed", soon()));
  }
  void fill(std::uint64_t seed) {
    ipc::Step step = make_step();
    step.fills = seeded(0, kBlocks, seed);
    run_ok(step);
  }
  std::vector<std::uint64_t> verify(std::uint64_t seed) {
    ipc::Step step = make_step();
    step.verifies = seeded(0, kBlocks, seed);
    return run_ok(step).mismatches;
  }

  /// Blocks of this seed in the pool, and a scatter of them that runs and does not end.
  void begin_held_load(std::uint64_t job) {
    fill(100);
    store(1);
    expect_ok(1);
    fill(200);
    hold_kernels();
    load(job);
    wait_held();
  }
  /// The lane has given the job before it up, and cannot hand anything over: the next one fails,
  /// which tells that the lane is beyond the moment where it might have answered too early. Either
  /// it waited for the worker's greeting, or it was under way already when the loss was seen.
  void expect_lane_waits(std::uint64_t job, CopyDirection direction) {
    start_job(job, direction);
    EXPECT_THAT(wait_answer(job).results,
                AnyOf(all_are(ErrorCode::kTimeout), all_are(ErrorCode::kPeerDied)));
  }

  ipc::UniqueFd pool_fd_;
  std::optional<test::ChildProcess> mover_;
};

TEST_F(StagingProofTest, LoadIsAnsweredAfterItsScatterEndedAlthoughTheConnectionWasLost) {
  begin_held_load(2);
  sever();
  expect_lane_waits(3, CopyDirection::kHostToDevice);
  EXPECT_FALSE(is_answered(2)) << "its scatter still runs";
  worker_->write_line("open");
  EXPECT_THAT(wait_answer(2).results, all_are(ErrorCode::kPeerDied));
  // Now the blocks may be given on: nothing writes them any more.
  fill(300);
  EXPECT_THAT(verify(300), Each(0U));
  load(4);
  expect_ok(4);
  EXPECT_THAT(verify(100), Each(0U));
}

TEST_F(StagingProofTest, RingSlotIsNotUsedAgainWhileALostGatherWritesIt) {
  fill(100);
  hold_kernels();
  store(1);
  wait_held();
  sever();
  expect_lane_waits(2, CopyDirection::kDeviceToHost);
  EXPECT_FALSE(is_answered(1)) << "its gather still runs";
  worker_->write_line("open");
  EXPECT_THAT(wait_answer(1).results, all_are(ErrorCode::kPeerDied));
  // No slot is lost by it: what comes next has the whole ring.
  store(3);
  expect_ok(3);
  fill(200);
  load(4);
  expect_ok(4);
  EXPECT_THAT(verify(100), Each(0U));
}

TEST_F(StagingProofTest, WorkersDeathIsTheProofToo) {
  begin_held_load(2);
  sever();
  expect_lane_waits(3, CopyDirection::kHostToDevice);
  EXPECT_FALSE(is_answered(2));
  worker_->kill();
  EXPECT_THAT(wait_answer(2).results, all_are(ErrorCode::kPeerDied));
}

TEST_F(StagingProofTest, StalledWorkerKeepsTheBlocksUntilItGoesOn) {
  begin_held_load(2);
  sever();
  expect_lane_waits(3, CopyDirection::kHostToDevice);
  EXPECT_TRUE(worker_->stop());
  worker_->write_line("open");
  expect_lane_waits(4, CopyDirection::kHostToDevice);
  EXPECT_FALSE(is_answered(2)) << "nothing is known of a stopped process";
  worker_->signal(SIGCONT);
  EXPECT_THAT(wait_answer(2).results, all_are(ErrorCode::kPeerDied));
  load(5);
  expect_ok(5);
}

TEST_F(StagingProofTest, MoverThatDiesWhileItWaitsLeavesTheProofToTheManager) {
  begin_held_load(2);
  ipc::IncarnationId mover;
  {
    const auto state = wait_state([](const ipc::RankState& s) { return !s.lease_holders.empty(); });
    ASSERT_EQ(state.lease_holders.size(), 1U);
    mover = state.lease_holders.front();
  }
  sever();
  expect_lane_waits(3, CopyDirection::kHostToDevice);
  mover_->kill();
  ASSERT_TRUE(mover_->wait(soon()).has_value());
  const auto early = ask(MessageKind::kQuiesceStaging, ipc::QuiesceStaging{mover, false, 100ms});
  ASSERT_TRUE(early.error.has_value()) << "its scatter still runs";
  EXPECT_EQ(early.error->code, ErrorCode::kTimeout);
  // So does the next mover's: its ring slots may be in use.
  const auto others = ask(MessageKind::kQuiesceStaging,
                          ipc::QuiesceStaging{ipc::IncarnationId::random(), true, 100ms});
  EXPECT_EQ(others.error.value_or(ipc::Error{}).code, ErrorCode::kTimeout);
  worker_->write_line("open");
  EXPECT_FALSE(ask(MessageKind::kQuiesceStaging, ipc::QuiesceStaging{mover, false, 15000ms}).error);
}

TEST_F(StagingProofTest, RevokedJobIsAnsweredAfterItsScatterEndedAlthoughTheMoverHasLetGo) {
  begin_held_load(2);
  const auto cleared =
      ask(MessageKind::kRankClear, ipc::RankClear{arena_.session, arena_.epoch, 15000ms},
          ProcessKind::kMover);
  ASSERT_FALSE(cleared.error.has_value())
      << "a mover lets go without waiting for the worker: " << cleared.error->to_string();
  EXPECT_FALSE(is_answered(2)) << "its scatter still runs";
  worker_->write_line("open");
  EXPECT_THAT(wait_answer(2).results, all_are(ErrorCode::kRevoked));
}

TEST_F(StagingProofTest, CancelledJobIsAnsweredAfterItsScatterEnded) {
  begin_held_load(2);
  tell(ProcessKind::kMover, MessageKind::kMoverCancel, ipc::MoverCancel{ipc::JobId{2}});
  sever();
  expect_lane_waits(3, CopyDirection::kHostToDevice);
  EXPECT_FALSE(is_answered(2)) << "its scatter still runs";
  worker_->write_line("open");
  EXPECT_EQ(wait_answer(2).results.size(), kBlocks);
}

TEST_F(StagingProofTest, AnotherClientOnTheLaneNeitherProvesAnythingNorGetsIn) {
  begin_held_load(2);
  // Somebody who pretends to be the next connection of the lane: the mover's ends by that.
  auto stranger = ipc::PacketSocket::connect(dir_.rank_socket(test::kEngine, 0, "agent"), soon());
  ASSERT_TRUE(stranger.has_value());
  ipc::AgentHello hello;
  hello.mover = ipc::IncarnationId::random();
  hello.engine = test::kEngine;
  hello.lane = 1;
  ASSERT_TRUE(stranger->send(ipc::encode(hello)).has_value());
  // The mover comes back, and by that ends the stranger's connection, which gets no answer.
  const auto greeting = stranger->receive(soon());
  ASSERT_FALSE(greeting.has_value()) << "what is running was not asked by it";
  EXPECT_EQ(greeting.error().code, ErrorCode::kPeerDied);
  expect_lane_waits(3, CopyDirection::kHostToDevice);
  EXPECT_FALSE(is_answered(2)) << "its scatter still runs";
  worker_->write_line("open");
  EXPECT_THAT(wait_answer(2).results, all_are(ErrorCode::kPeerDied));
  load(4);
  expect_ok(4);
}

TEST_F(StagingProofTest, RequestBeforeTheGreetingEndsTheConnection) {
  begin_held_load(2);
  auto eager = ipc::PacketSocket::connect(dir_.rank_socket(test::kEngine, 0, "agent"), soon());
  ASSERT_TRUE(eager.has_value());
  ipc::AgentHello hello;
  hello.mover = ipc::IncarnationId::random();
  hello.engine = test::kEngine;
  hello.lane = 1;
  ASSERT_TRUE(eager->send(ipc::encode(hello)).has_value());
  ipc::StageRequest request;
  request.session = arena_.session;
  request.epoch = arena_.epoch;
  request.blocks = {0};
  // On a busy machine the mover may have come back, and ended this connection, before that.
  const ipc::Status sent = eager->send(ipc::encode(request));
  EXPECT_TRUE(sent || sent.error().code == ErrorCode::kPeerDied) << sent.error().to_string();
  const auto greeting = eager->receive(soon());
  ASSERT_FALSE(greeting.has_value());
  EXPECT_EQ(greeting.error().code, ErrorCode::kPeerDied);
  worker_->write_line("open");
  EXPECT_EQ(wait_answer(2).results.size(), kBlocks);
}

TEST_F(StagingProofTest, MoverJoinsANewManagerOnlyWhenNothingItAskedRunsAnyMore) {
  begin_held_load(2);
  sever();
  expect_lane_waits(3, CopyDirection::kHostToDevice);
  manager_.reset();
  {
    const std::lock_guard lock(shared_.mutex);
    shared_.mover_state.reset();
    shared_.state.reset();
  }
  start_manager();
  wait_mapped();
  {
    // A mover that came too early would be seen here; one that does not is never waited for long.
    std::unique_lock lock(shared_.mutex);
    EXPECT_FALSE(shared_.changed.wait_until(lock, Deadline::after(1500ms).when(), [this] {
      return shared_.mover_state.has_value();
    })) << "the blocks of its job are not free";
  }
  worker_->write_line("open");
  wait_mover_mapped();
  EXPECT_FALSE(is_answered(2)) << "of a lost manager: nobody knows the job any more";
  load(4);
  expect_ok(4);
}

}  // namespace
}  // namespace kvferry
