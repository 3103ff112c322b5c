// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "mover/transfer_engine.hpp"
#include "support/child_process.hpp"
#include "support/faulty_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <mutex>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;
using ipc::Status;

constexpr std::uint64_t kPoolBytes = 16ULL << 20;

using test::DeviceCall;
using test::DeviceFault;
using test::FaultKind;

class StreamFailureTest : public testing::TestWithParam<DeviceFault> {
 protected:
  [[nodiscard]] static ErrorCode expected() {
    return GetParam().kind == FaultKind::kHangs ? ErrorCode::kTimeout : ErrorCode::kCuda;
  }

  void SetUp() override {
    auto spec = ipc::DeviceSpec::parse(fmt::format("host:stream-failure-{}:64MiB", ::getpid()));
    ASSERT_TRUE(spec.has_value());
    plan_.fail(GetParam());
    device_ = std::make_unique<test::FaultyDevice>(ipc::open_device(*spec), plan_);
    auto geometry = ipc::load_geometry("tiny", 1);
    ASSERT_TRUE(geometry.has_value()) << geometry.error().to_string();
    ipc::ArenaOptions options;
    options.gpu_blocks = 16;
    auto layout = ipc::plan_arena(*geometry, options);
    ASSERT_TRUE(layout.has_value());
    auto arena =
        ipc::Arena::allocate(*device_, ipc::Epoch{3}, *layout, ipc::HandleKind::kVmm, nullptr);
    ASSERT_TRUE(arena.has_value()) << arena.error().to_string();
    arena_ = std::make_unique<ipc::Arena>(std::move(arena).value());
    auto fd = ipc::SharedMemory::create_pool("kvferry-test-pool", kPoolBytes, false);
    ASSERT_TRUE(fd.has_value());
    auto pool = ipc::PoolMapping::map(*device_, std::move(fd).value(), kPoolBytes);
    ASSERT_TRUE(pool.has_value());
    TransferEngine::Options engine_options;
    engine_options.strategy = CopyStrategy::kBatch;
    // One look: nothing of the test depends on how long it is.
    engine_options.device_hang = std::chrono::milliseconds(1);
    engine_ = std::make_unique<TransferEngine>(
        *device_, engine_options,
        [this](const ipc::MoverJobDone& done) {
          const std::lock_guard lock(mutex_);
          answered_.push_back(done.job.value);
        },
        [this](const ipc::Error& error) {
          EXPECT_EQ(error.code, expected());
          failed_.set_value();  // throws when told twice
        });
    engine_->set_pool(std::move(pool).value());
    ASSERT_TRUE(engine_->on_mapped(session_, *arena_, ipc::ArenaContents::kUndefined).has_value());
  }

  void load(std::uint64_t id) {
    ipc::MoverJob job;
    job.job = ipc::JobId{id};
    job.session = session_;
    job.epoch = arena_->epoch();
    job.direction = ipc::CopyDirection::kHostToDevice;
    job.items = {ipc::MoverItem{ipc::GroupId{0}, ipc::BlockId{1}, 0, 0, true}};
    engine_->submit(std::move(job));
  }
  bool wait_failed() {
    return failed_.get_future().wait_until(test::soon().when()) == std::future_status::ready;
  }
  std::vector<std::uint64_t> answered() {
    const std::lock_guard lock(mutex_);
    return answered_;
  }

  test::FaultPlan plan_;
  std::unique_ptr<test::FaultyDevice> device_;
  std::unique_ptr<ipc::Arena> arena_;
  ipc::SessionId session_ = ipc::Digest::random();
  std::mutex mutex_;
  std::vector<std::uint64_t> answered_;
  std::promise<void> failed_;
  std::unique_ptr<TransferEngine> engine_;
};

TEST_P(StreamFailureTest, TheJobIsAnsweredByTheMoversDeathAlone) {
  load(1);
  ASSERT_TRUE(wait_failed());
  EXPECT_FALSE(engine_->idle()) << "a new manager would be told that nothing is under way";
  // The epoch cannot be let go: a mover whose user does not drain exits.
  const Status idle = engine_->quiesce(arena_->epoch(), test::soon());
  ASSERT_FALSE(idle.has_value());
  EXPECT_EQ(idle.error().code, expected()) << idle.error().to_string();
  engine_.reset();
  EXPECT_THAT(answered(), testing::IsEmpty()) << "its blocks would be given on under the copy";
}

TEST_P(StreamFailureTest, NothingRunsAfterIt) {
  load(1);
  ASSERT_TRUE(wait_failed());
  load(2);
  EXPECT_FALSE(engine_->quiesce(arena_->epoch(), test::soon()).has_value());
  EXPECT_THAT(answered(), testing::ElementsAre(2)) << "it never began, so it is told so";
}

TEST_P(StreamFailureTest, NewJobsThatKeepComingDoNotHideIt) {
  const std::future<void> failed = failed_.get_future();
  const ipc::Deadline deadline = test::soon();
  std::uint64_t id = 1;
  load(id);
  // More often than the lane looks at a device that says nothing.
  while (failed.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready &&
         !deadline.expired()) {
    load(++id);
  }
  EXPECT_FALSE(deadline.expired());
}

// The same whatever tells of it first: the copy itself, or a look at what was enqueued.
INSTANTIATE_TEST_SUITE_P(
    Faults,
    StreamFailureTest,
    testing::Values(DeviceFault{DeviceCall::kQuery, 1, FaultKind::kBreaks, "memory error"},
                    DeviceFault{DeviceCall::kCopy, 1, FaultKind::kBreaks, "memory error"},
                    DeviceFault{DeviceCall::kCopy, 1, FaultKind::kHangs, ""}),
    [](const auto& instance) {
      if (instance.param.kind == FaultKind::kHangs) return "DeviceHangs";
      return instance.param.call == DeviceCall::kCopy ? "DeviceBreaksAtTheCopy" : "DeviceBreaks";
    });

}  // namespace
}  // namespace kvferry::cache_manager
