// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "mover/transfer_engine.hpp"
#include "support/child_process.hpp"
#include "support/forwarding_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <future>
#include <mutex>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::DevicePtr;
using ipc::ErrorCode;
using ipc::Result;
using ipc::Status;

constexpr std::uint64_t kPoolBytes = 16ULL << 20;

enum class Fault : std::uint8_t {
  kBreaks,  // As after an uncorrectable memory error: every call fails from then on.
  kHangs,   // Every call is taken, and nothing ever ends.
};

// A stream whose device fails at the first copy; nothing more is heard of what was enqueued.
class BreakingStream final : public ipc::Stream {
 public:
  BreakingStream(std::unique_ptr<Stream> real, Fault fault)
      : real_(std::move(real)), fault_(fault) {}

  Status copy(ipc::CopyDirection way,
              std::span<const ipc::CopyOp> ops,
              ipc::CopyMode mode) override {
    broken_ = true;
    return real_->copy(way, ops, mode);
  }
  Status copy_rows(ipc::CopyDirection way, std::span<const ipc::RowCopyOp> ops) override {
    broken_ = true;
    return real_->copy_rows(way, ops);
  }
  Status zero(DevicePtr target, std::uint64_t size_bytes) override {
    return real_->zero(target, size_bytes);
  }
  Status copy_within(ipc::DevicePtr source,
                     ipc::DevicePtr target,
                     std::uint64_t size_bytes) override {
    return real_->copy_within(source, target, size_bytes);
  }
  Status gather(const ipc::RegionTable& table,
                std::span<const std::uint32_t> ids,
                DevicePtr packed,
                std::uint64_t stride) override {
    return real_->gather(table, ids, packed, stride);
  }
  Status scatter(const ipc::RegionTable& table,
                 std::span<const std::uint32_t> ids,
                 DevicePtr packed,
                 std::uint64_t stride) override {
    return real_->scatter(table, ids, packed, stride);
  }
  Status fill_pattern(const ipc::RegionTable& table,
                      std::span<const kernels::SeededBlock> blocks) override {
    return real_->fill_pattern(table, blocks);
  }
  Status verify_pattern(const ipc::RegionTable& table,
                        std::span<const kernels::SeededBlock> blocks,
                        ipc::PinnedBuffer& results) override {
    return real_->verify_pattern(table, blocks, results);
  }
  Status checksum(const ipc::RegionTable& table,
                  std::span<const std::uint32_t> ids,
                  ipc::PinnedBuffer& results) override {
    return real_->checksum(table, ids, results);
  }
  Status decode(const ipc::RegionTable& table, const kernels::DecodePass& pass) override {
    return real_->decode(table, pass);
  }
  Status fold(ipc::DevicePtr source,
              std::uint64_t size_bytes,
              std::uint64_t seed,
              ipc::DevicePtr sums) override {
    return real_->fold(source, size_bytes, seed, sums);
  }
  Status expand(ipc::DevicePtr source,
                std::uint64_t source_bytes,
                ipc::DevicePtr target,
                std::uint64_t target_bytes) override {
    return real_->expand(source, source_bytes, target, target_bytes);
  }
  ipc::Result<std::unique_ptr<ipc::RecordedWork>> record(
      const std::function<Status(ipc::Stream&)>& body) override {
    return real_->record(body);
  }
  Status launch(const ipc::RecordedWork& work) override { return real_->launch(work); }
  Status notify(int event_fd) override {
    if (broken_) return fault_ == Fault::kHangs ? ipc::ok() : Status(broken());
    return real_->notify(event_fd);
  }
  Result<bool> query() override {
    if (broken_) return fault_ == Fault::kHangs ? Result<bool>(false) : Result<bool>(broken());
    return real_->query();
  }

 private:
  static ipc::Error broken() { return KVFERRY_ERROR(kCuda, "uncorrectable memory error"); }

  std::unique_ptr<Stream> real_;
  const Fault fault_;
  std::atomic<bool> broken_ = false;
};

class BreakingDevice final : public test::ForwardingDevice {
 public:
  BreakingDevice(std::unique_ptr<Device> real, Fault fault)
      : ForwardingDevice(std::move(real)), fault_(fault) {}

  Result<std::unique_ptr<ipc::Stream>> make_stream(ipc::StreamPriority priority) override {
    KVFERRY_ASSIGN(auto stream, ForwardingDevice::make_stream(priority));
    return std::unique_ptr<ipc::Stream>(
        std::make_unique<BreakingStream>(std::move(stream), fault_));
  }

 private:
  const Fault fault_;
};

class StreamFailureTest : public testing::TestWithParam<Fault> {
 protected:
  [[nodiscard]] static ErrorCode expected() {
    return GetParam() == Fault::kHangs ? ErrorCode::kTimeout : ErrorCode::kCuda;
  }

  void SetUp() override {
    auto spec = ipc::DeviceSpec::parse(fmt::format("host:stream-failure-{}:64MiB", ::getpid()));
    ASSERT_TRUE(spec.has_value());
    device_ = std::make_unique<BreakingDevice>(ipc::open_device(*spec), GetParam());
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
    auto pool = PoolMapping::map(*device_, std::move(fd).value(), kPoolBytes);
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

  std::unique_ptr<BreakingDevice> device_;
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

INSTANTIATE_TEST_SUITE_P(Faults,
                         StreamFailureTest,
                         testing::Values(Fault::kBreaks, Fault::kHangs),
                         [](const auto& instance) {
                           return instance.param == Fault::kHangs ? "DeviceHangs" : "DeviceBreaks";
                         });

}  // namespace
}  // namespace kvferry::cache_manager
