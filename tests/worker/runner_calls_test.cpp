// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The runner's loop is run by the tests, so that nothing ends before they want it to.
#include "runner_calls.hpp"

#include "ipc/os/temp_dir.hpp"
#include "step_runner.hpp"
#include "worker/host_device.hpp"
#include "worker_arena.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::Epoch;
using ipc::ErrorCode;
using ipc::SessionId;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::HasSubstr;

constexpr std::uint64_t kMiB = 1ULL << 20;
const SessionId kSession = SessionId::from_words(1, 2);

ipc::RankConfig make_config() {
  ipc::RankConfig config;
  config.engine = "chat";
  config.geometry.name = "test";
  config.geometry.tokens_per_block = 16;
  ipc::GroupSpec group;
  group.name = "main";
  group.regions = {{ipc::RegionKind::kKey, ipc::DataType::kFp16, 0, false, 1024}};
  config.geometry.groups = {group};
  config.arena.gpu_blocks = 8;
  return config;
}

class RunnerCallsTest : public testing::Test {
 protected:
  RunnerCallsTest() {
    EXPECT_TRUE(user_.on_mapped(kSession, arena_, ipc::ArenaContents::kUndefined).has_value());
    runner_.emplace(
        loop_, dir_, config_, ipc::Duration::zero(), *device_,
        [this](const SessionId& session, Epoch epoch) { return user_.enter(session, epoch); },
        allocator_, tables_, layers_, activity_, graph_bytes_,
        [](const ipc::Error& error) { ADD_FAILURE() << error.to_string(); });
  }
  ~RunnerCallsTest() override {
    end_runner();
    EXPECT_TRUE(user_.quiesce(Epoch{1}, Deadline::after(20s)).has_value());
    user_.on_unmapped(Epoch{1});
    EXPECT_TRUE(arena_.release().has_value());
  }
  /// A pass that the graph computes: the graph is busy until the loop takes its end.
  void launch_pass() {
    ipc::Decode pass;
    pass.session = kSession;
    pass.epoch = Epoch{1};
    pass.sequences = 1;
    ipc::Envelope request;
    request.kind = ipc::MessageKind::kDecode;
    request.body = ipc::encode(pass);
    ipc::Peer engine;
    engine.name = "engine";
    runner_->on_message(engine, std::move(request));
    ASSERT_GT(graph_bytes_, 0U) << "the graph did not take it";
  }
  void run_until_graph_rests() {
    bool rests = false;
    runner_->when_graph_rests([&rests] { rests = true; });
    const Deadline deadline = Deadline::after(20s);
    while (!rests && !deadline.expired()) loop_.run_once(deadline);
    EXPECT_TRUE(rests) << "the pass did not end";
  }
  void end_runner() {
    if (runner_ && graph_bytes_ > 0) run_until_graph_rests();
    runner_.reset();
  }
  /// The call is taken at once.
  [[nodiscard]] RunnerCalls::Post at_once() {
    return [this](const std::function<void(StepRunner&)>& call) { call(*runner_); };
  }
  /// Counts itself.
  [[nodiscard]] RunnerCalls::Call counted() {
    return [this](StepRunner& runner) -> ipc::Result<std::uint64_t> {
      runner.release_graph();  // Under a launch it would end this process.
      return ++runs_;
    };
  }

  const test::ShortTempDir temp_;
  const ipc::RuntimeDir dir_ = ipc::RuntimeDir::open(temp_.path().string(), "test").value();
  const ipc::RankConfig config_ = make_config();
  ipc::EventLoop loop_;
  const std::unique_ptr<ipc::Device> device_ = test::open_host_device(64 * kMiB);
  CachingAllocator allocator_{*device_};
  ModelTables tables_{*device_, allocator_};
  LayerWords layers_{*device_};
  ipc::ComputeActivity activity_;
  std::atomic<std::uint64_t> graph_bytes_{0};
  WorkerArena user_{*device_, ipc::Rank{0}};
  ipc::Arena arena_ = ipc::Arena::allocate(*device_,
                                           Epoch{1},
                                           ipc::plan_arena(config_.geometry, config_.arena).value(),
                                           ipc::HandleKind::kVmm,
                                           nullptr)
                          .value();
  std::uint64_t runs_ = 0;
  std::optional<StepRunner> runner_;
};

TEST_F(RunnerCallsTest, ACallRunsAtOnceWhileTheGraphRests) {
  const RunnerCalls calls(at_once());
  EXPECT_EQ(calls.run(counted(), Deadline::after(0ms)).value(), 1U);
  EXPECT_EQ(calls.run_when_graph_rests(counted(), Deadline::after(0ms)).value(), 2U);
}

TEST_F(RunnerCallsTest, OneThatNeedsTheGraphWaitsForTheLaunchThatIsUnderWay) {
  ASSERT_NO_FATAL_FAILURE(launch_pass());
  const RunnerCalls calls([this](const std::function<void(StepRunner&)>& call) {
    call(*runner_);
    EXPECT_EQ(runs_, 0U) << "the graph is busy";
    run_until_graph_rests();
  });
  EXPECT_EQ(calls.run_when_graph_rests(counted(), Deadline::after(20s)).value(), 1U);
  EXPECT_EQ(graph_bytes_, 0U);
}

TEST_F(RunnerCallsTest, OneThatDoesNotDoesNotWait) {
  ASSERT_NO_FATAL_FAILURE(launch_pass());
  const RunnerCalls calls(at_once());
  const auto call = [](StepRunner& /*runner*/) -> ipc::Result<std::uint64_t> { return 7; };
  EXPECT_EQ(calls.run(call, Deadline::after(0ms)).value(), 7U);
}

TEST_F(RunnerCallsTest, OneWhoseCallerHasGivenUpNeverRuns) {
  ASSERT_NO_FATAL_FAILURE(launch_pass());
  const RunnerCalls calls(at_once());
  const auto late = calls.run_when_graph_rests(counted(), Deadline::after(20ms));
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(late.error().message, HasSubstr("by the deadline"));
  run_until_graph_rests();
  EXPECT_EQ(runs_, 0U);
  // The next one is not kept from it.
  EXPECT_EQ(calls.run_when_graph_rests(counted(), Deadline::after(0ms)).value(), 1U);
}

TEST_F(RunnerCallsTest, TheErrorOfACallIsItsOwn) {
  const RunnerCalls calls(at_once());
  const auto failed = calls.run_when_graph_rests(
      [](StepRunner& /*runner*/) -> ipc::Result<std::uint64_t> {
        return KVFERRY_ERROR(kBusy, "steps run");
      },
      Deadline::after(20s));
  EXPECT_EQ(failed.error().code, ErrorCode::kBusy);
}

TEST_F(RunnerCallsTest, ARunnerThatHasEndedIsSaidAtOnce) {
  const RunnerCalls calls([](const std::function<void(StepRunner&)>& /*call*/) {});
  const Deadline deadline = Deadline::after(20s);
  EXPECT_EQ(calls.run(counted(), deadline).error().code, ErrorCode::kCancelled);
  EXPECT_EQ(calls.run_when_graph_rests(counted(), deadline).error().code, ErrorCode::kCancelled);
  EXPECT_FALSE(deadline.expired());
  EXPECT_EQ(runs_, 0U);
}

TEST_F(RunnerCallsTest, SoIsOneThatEndsWhileACallWaitsForItsGraph) {
  ASSERT_NO_FATAL_FAILURE(launch_pass());
  const RunnerCalls calls([this](const std::function<void(StepRunner&)>& call) {
    call(*runner_);
    runner_.reset();
  });
  const Deadline deadline = Deadline::after(20s);
  EXPECT_EQ(calls.run_when_graph_rests(counted(), deadline).error().code, ErrorCode::kCancelled);
  EXPECT_FALSE(deadline.expired());
  EXPECT_EQ(runs_, 0U);
}

}  // namespace
}  // namespace kvferry::worker
