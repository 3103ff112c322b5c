// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "multiproc/worker_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <csignal>
#include <set>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::Envelope;
using ipc::Epoch;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::MessageKind;
using ipc::Step;
using std::chrono_literals::operator""ms;
using test::ChildExit;
using test::soon;
using testing::Each;
using testing::ElementsAre;
using testing::Gt;
using testing::IsEmpty;

using WorkerProcessTest = test::WorkerFixture;

TEST_F(WorkerProcessTest, StepChannelsThatCloseLeaveNothingWhileTheirProcessLives) {
  start_all();
  const std::string folder = fmt::format("/proc/{}/fd", worker_->pid());
  const auto open_descriptors = [&folder] {
    return std::distance(std::filesystem::directory_iterator(folder), {});
  };
  Step step = make_step();
  step.fills = seeded(0, 1, 100);
  run_ok(step);
  const auto before = open_descriptors();
  for (int round = 0; round < 50; ++round) {
    ASSERT_NO_FATAL_FAILURE(connect_steps());
    run_ok(step);
  }
  const ipc::Deadline deadline = soon();
  while (open_descriptors() > before && !deadline.expired()) run_ok(step);
  EXPECT_LE(open_descriptors(), before);
}

TEST_F(WorkerProcessTest, VerifiesWhatItFilledAndNothingElse) {
  start_all();
  Step step = make_step();
  step.fills = seeded(0, 4, 100);
  step.verifies = seeded(0, 4, 100);
  EXPECT_THAT(run_ok(step).mismatches, ElementsAre(0, 0, 0, 0));
  Step other = make_step();
  other.verifies = seeded(0, 5, 900);
  // 4 regions of 4096 and one of 1024 bytes: every word differs, or nearly.
  EXPECT_THAT(run_ok(other).mismatches, Each(Gt(2000U)));
}

TEST_F(WorkerProcessTest, KeepsGroupsApart) {
  start_all();
  Step step = make_step();
  step.fills = seeded(3, 1, 7, 0);
  step.fills.push_back(seeded(3, 1, 8, 1)[0]);
  run_ok(step);
  Step check = make_step();
  check.verifies = {seeded(3, 1, 8, 1)[0], seeded(3, 1, 7, 0)[0], seeded(3, 1, 7, 1)[0]};
  EXPECT_THAT(run_ok(check).mismatches, ElementsAre(0, 0, Gt(0U)));
}

TEST_F(WorkerProcessTest, DecodingReadsTheSameUntilSomethingIsWritten) {
  start_all();
  Step fill = make_step();
  fill.fills = seeded(0, 8, 1);
  run_ok(fill);
  Step decode = make_step();
  decode.decode_steps = 5;
  for (std::uint32_t i = 0; i < 8; ++i) decode.reads.push_back({GroupId{0}, BlockId{i}});
  const std::uint64_t first = run_ok(decode).checksum;
  EXPECT_NE(first, 0U);
  EXPECT_EQ(run_ok(decode).checksum, first);
  Step change = make_step();
  change.fills = seeded(7, 1, 999);
  run_ok(change);
  EXPECT_NE(run_ok(decode).checksum, first);
}

TEST_F(WorkerProcessTest, FreshArenaIsZero) {
  start_all();
  Step decode = make_step();
  decode.decode_steps = 1;
  decode.reads = {{GroupId{0}, BlockId{0}}};
  const std::uint64_t zero = run_ok(decode).checksum;
  for (std::uint32_t i = 1; i < test::kGpuBlocks; ++i) {
    decode.reads = {{GroupId{0}, BlockId{i}}};
    EXPECT_EQ(run_ok(decode).checksum, zero) << "block " << i;
  }
}

TEST_F(WorkerProcessTest, RefusesAnotherEpochAndAnotherSession) {
  start_all();
  Step step = make_step();
  step.epoch = Epoch{arena_.epoch.value + 1};
  EXPECT_EQ(run(step).error().code, ErrorCode::kStaleEpoch);
  step = make_step();
  step.session = ipc::SessionId::random();
  EXPECT_EQ(run(step).error().code, ErrorCode::kStaleEpoch);
}

TEST_F(WorkerProcessTest, RefusesBadIdsAndServesOn) {
  start_all();
  Step block = make_step();
  block.fills = seeded(test::kGpuBlocks, 1, 1);
  Step group = make_step();
  group.verifies = seeded(0, 1, 1, 2);
  Step twice = make_step();
  twice.fills = {seeded(1, 1, 1)[0], seeded(1, 1, 2)[0]};
  for (const Step& step : {block, group, twice}) {
    EXPECT_EQ(run(step).error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(steps_->request(MessageKind::kStep, ipc::Bytes{1, 2, 3}, soon()).error().code,
            ErrorCode::kProtocol);
  EXPECT_EQ(steps_->request(MessageKind::kLookup, ipc::encode(ipc::Lookup{}), soon()).error().code,
            ErrorCode::kProtocol);
  Step good = make_step();
  good.fills = seeded(0, 1, 1);
  good.verifies = good.fills;
  EXPECT_THAT(run_ok(good).mismatches, ElementsAre(0));
}

TEST_F(WorkerProcessTest, AnswersPipelinedStepsInOrder) {
  start_all();
  constexpr std::uint64_t kSteps = 60;
  for (std::uint64_t i = 1; i <= kSteps; ++i) {
    Step step = make_step();
    // Each step sees what the one before it wrote.
    if (i > 1) step.verifies = seeded(0, 8, (i - 1) * 1000);
    step.fills = i > 1 ? std::vector<ipc::SeededItem>{} : seeded(0, 8, 1000);
    Envelope envelope;
    envelope.kind = MessageKind::kStep;
    envelope.request = ipc::RequestId{1'000'000 + 2 * i};
    envelope.body = ipc::encode(step);
    ASSERT_TRUE(steps_->send(envelope).has_value());
    step = make_step();
    step.fills = seeded(0, 8, i * 1000);
    envelope.request = ipc::RequestId{1'000'000 + 2 * i + 1};
    envelope.body = ipc::encode(step);
    ASSERT_TRUE(steps_->send(envelope).has_value());
  }
  const ipc::Deadline deadline = soon();
  for (std::uint64_t id = 1'000'002; id <= 1'000'001 + 2 * kSteps;) {
    auto reply = steps_->try_receive();
    ASSERT_TRUE(reply.has_value());
    if (!reply->has_value()) {
      pollfd entry{steps_->fd(), POLLIN, 0};
      ASSERT_EQ(::poll(&entry, 1, deadline.poll_timeout_ms()), 1) << "no reply to " << id;
      continue;
    }
    ASSERT_EQ((*reply)->request.value, id++);
    ASSERT_FALSE((*reply)->error.has_value()) << (*reply)->error->to_string();
    EXPECT_THAT(ipc::decode<ipc::StepReply>((*reply)->body, "reply")->mismatches, Each(0U));
  }
}

TEST_F(WorkerProcessTest, ClearGivesEverythingBackAndReinitStartsFromZero) {
  for (const std::string handles : {"vmm", "legacy"}) {
    SCOPED_TRACE(handles);
    start_all(handles);
    Step step = make_step();
    step.fills = seeded(0, 8, 5);
    step.decode_steps = 2;
    step.reads = {{GroupId{0}, BlockId{0}}};
    run_ok(step);
    // The arena, and the workspace that the allocator keeps.
    EXPECT_GT(device_used(), arena_.group_blocks.size());
    const Envelope cleared =
        ask(MessageKind::kRankClear, ipc::RankClear{arena_.session, arena_.epoch, 15000ms});
    ASSERT_FALSE(cleared.error.has_value()) << cleared.error->to_string();
    EXPECT_EQ(ipc::decode<ipc::RankClearReply>(cleared.body, "reply")->kind,
              ipc::ClearKind::kCleared);
    EXPECT_EQ(device_used(), 0U);
    EXPECT_EQ(run(step).error().code, ErrorCode::kNotReady);
    const Envelope made =
        ask(MessageKind::kRankReinit,
            ipc::RankReinit{arena_.session, Epoch{arena_.epoch.value + 1}, 0, 15000ms});
    ASSERT_FALSE(made.error.has_value()) << made.error->to_string();
    const Step old = make_step();
    arena_ = wait_mapped(arena_.epoch.value + 1);
    EXPECT_EQ(run(old).error().code, ErrorCode::kStaleEpoch);
    Step decode = make_step();
    decode.decode_steps = 1;
    decode.reads = {{GroupId{0}, BlockId{0}}};
    const std::uint64_t first = run_ok(decode).checksum;
    decode.reads = {{GroupId{0}, BlockId{31}}};
    EXPECT_EQ(run_ok(decode).checksum, first);
    steps_.reset();
    worker_->signal(SIGTERM);
    EXPECT_EQ(worker_->wait(soon()), ChildExit::exited(0)) << worker_->stderr_text();
    const std::lock_guard lock(shared_.mutex);
    shared_.state.reset();
    manager_.reset();
  }
}

TEST_F(WorkerProcessTest, ClearUnderStepsEndsAndAnswersAllOfThem) {
  start_all();
  constexpr std::uint64_t kSteps = 200;
  Step step = make_step();
  step.decode_steps = 20;
  for (std::uint32_t i = 0; i < test::kGpuBlocks; ++i) {
    step.reads.push_back({GroupId{0}, BlockId{i}});
  }
  for (std::uint64_t i = 0; i < kSteps; ++i) {
    Envelope envelope;
    envelope.kind = MessageKind::kStep;
    envelope.request = ipc::RequestId{1'000'000 + i};
    envelope.body = ipc::encode(step);
    ASSERT_TRUE(steps_->send(envelope).has_value());
  }
  const Envelope cleared =
      ask(MessageKind::kRankClear, ipc::RankClear{arena_.session, arena_.epoch, 15000ms});
  ASSERT_FALSE(cleared.error.has_value()) << cleared.error->to_string();
  EXPECT_EQ(device_used(), 0U);
  std::set<std::uint64_t> answered;
  const ipc::Deadline deadline = soon();
  while (answered.size() < kSteps) {
    auto reply = steps_->try_receive();
    ASSERT_TRUE(reply.has_value());
    if (!reply->has_value()) {
      pollfd entry{steps_->fd(), POLLIN, 0};
      ASSERT_EQ(::poll(&entry, 1, deadline.poll_timeout_ms()), 1) << answered.size();
      continue;
    }
    if ((*reply)->error) {
      EXPECT_TRUE((*reply)->error->code == ErrorCode::kRevoked ||
                  (*reply)->error->code == ErrorCode::kNotReady)
          << (*reply)->error->to_string();
    }
    answered.insert((*reply)->request.value);
  }
}

TEST_F(WorkerProcessTest, StepThatRunsOutOfMemoryFailsAloneAndEmptiesTheCache) {
  start_all();
  const std::uint64_t arena_bytes = device_used();
  Step step = make_step();
  step.decode_steps = 1;
  step.reads.assign(1000, {GroupId{0}, BlockId{0}});
  run_ok(step);
  EXPECT_GT(device_used(), arena_bytes + 15 * kMiB);
  // Its workspace is larger than the device.
  Step large = step;
  large.reads.assign(6000, {GroupId{0}, BlockId{0}});
  const auto failed = run(large);
  ASSERT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().code, ErrorCode::kNoDeviceMemory);
  EXPECT_THAT(failed.error().message,
              testing::AllOf(testing::HasSubstr("emptied: reserved "),
                             testing::HasSubstr(" free on the device; "),
                             testing::HasSubstr("lower the number of GPU blocks")));
  EXPECT_EQ(device_used(), arena_bytes);
  run_ok(step);
}

TEST_F(WorkerProcessTest, GivesItsCachedMemoryBackWhenTold) {
  start_all();
  Step step = make_step();
  step.fills = seeded(0, 4, 100);
  for (std::uint32_t block = 0; block < 4; ++block) {
    step.reads.push_back({GroupId{0}, BlockId{block}});
  }
  step.decode_steps = 1;
  run_ok(step);  // Its workspace stays cached.
  const std::uint64_t used = device_used();
  const auto empty = [this] {
    const Envelope reply =
        ask(MessageKind::kRankEmpty, ipc::RankEmpty{ipc::EmptyReason::kContinue});
    EXPECT_FALSE(reply.error.has_value());
    return ipc::decode<ipc::AllocatorMemory>(reply.body, "AllocatorMemory").value();
  };
  const ipc::AllocatorMemory first = empty();
  EXPECT_GT(first.reserved_before, 0U);
  EXPECT_EQ(first.reserved_after, 0U);
  EXPECT_EQ(first.used_after, 0U);
  EXPECT_EQ(device_used(), used - first.reserved_before);
  EXPECT_EQ(empty().reserved_before, 0U) << "there is nothing left to give";
  for (int i = 0; i < 50; ++i) {
    run_ok(step);
    ASSERT_EQ(empty().used_after, 0U) << "an answered step holds memory, after " << i << " others";
  }
  EXPECT_THAT(worker_->stderr_text(), testing::HasSubstr("continue: reserved"));
  EXPECT_THAT(run_ok(step).mismatches, IsEmpty());
}

TEST_F(WorkerProcessTest, TerminationLeavesNothingBehind) {
  start_all();
  Step step = make_step();
  step.fills = seeded(0, 4, 1);
  run_ok(step);
  EXPECT_GT(device_used(), 0U);
  worker_->signal(SIGTERM);
  EXPECT_EQ(worker_->wait(soon()), ChildExit::exited(0)) << worker_->stderr_text();
  EXPECT_EQ(device_used(), 0U);
  EXPECT_THAT(worker_names(), IsEmpty());
}

TEST_F(WorkerProcessTest, KilledWorkerLeavesNoMemoryAndItsNamesCanBeTaken) {
  start_all();
  worker_->kill();
  EXPECT_EQ(worker_->wait(soon()), ChildExit::killed_by(SIGKILL));
  EXPECT_EQ(device_used(), 0U);
  const ipc::SessionId killed = arena_.session;
  steps_.reset();
  start_worker();
  arena_ = wait_state(
      [&killed](const ipc::RankState& state) { return state.mapped && state.session != killed; });
  connect_steps();
  Step step = make_step();
  step.fills = seeded(0, 4, 1);
  step.verifies = step.fills;
  EXPECT_THAT(run_ok(step).mismatches, Each(0U));
}

TEST_F(WorkerProcessTest, ServesStepsWithoutAManager) {
  start_all();
  manager_.reset();
  Step step = make_step();
  step.fills = seeded(0, 4, 1);
  step.verifies = step.fills;
  EXPECT_THAT(run_ok(step).mismatches, Each(0U));
  start_manager();
  {
    const std::lock_guard lock(shared_.mutex);
    shared_.state.reset();
  }
  // The same arena is reported to the new manager.
  EXPECT_EQ(wait_mapped().session, arena_.session);
}

TEST_F(WorkerProcessTest, WaitsForTheMemoryThatAnEarlierLifeLeftPinned) {
  // As a mover does that has not let go of a dead worker's arena yet.
  const auto device = ipc::open_device(ipc::DeviceSpec::parse(device_text_).value());
  auto pinned = device->allocate(64 * kMiB, ipc::HandleKind::kVmm, nullptr).value();
  start_manager();
  start_worker();
  const ipc::RankState waiting = wait_state([](const ipc::RankState&) { return true; });
  EXPECT_FALSE(waiting.mapped);
  EXPECT_EQ(waiting.epoch.value, 0U);
  ASSERT_TRUE(pinned->release().has_value());
  arena_ = wait_mapped();
  connect_steps();
  run_ok(make_step());
}

TEST_F(WorkerProcessTest, EndsWhenItsArenaCannotFitTheDevice) {
  start_manager();
  worker_.emplace(test::ChildOptions{
      .program = test::sibling_program("kvferry_worker_child"),
      .arguments = {temp_.path().string(), fmt::format("host:{}-s:64KiB", device_name_), "worker",
                    "vmm"}});
  const auto end = worker_->wait(soon());
  ASSERT_TRUE(end.has_value());
  EXPECT_NE(*end, ChildExit::exited(0));
}

TEST_F(WorkerProcessTest, SecondWorkerOfARankIsRefused) {
  start_all();
  test::ChildProcess second({.program = test::sibling_program("kvferry_worker_child"),
                             .arguments = {temp_.path().string(), device_text_, "worker", "vmm"}});
  EXPECT_EQ(second.wait(soon()), ChildExit::exited(1));
  EXPECT_NE(second.stderr_text().find("already_exists"), std::string::npos) << second.stderr_text();
  // The first one was not disturbed.
  Step step = make_step();
  step.fills = seeded(0, 1, 1);
  run_ok(step);
}

}  // namespace
}  // namespace kvferry
