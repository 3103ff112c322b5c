// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/calibrator.hpp"

#include "cache_manager/calibration/curves.hpp"
#include "ipc/os/temp_dir.hpp"
#include "kvferry/cache_manager/calibration_file.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "support/child_process.hpp"
#include "support/forwarding_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>

namespace kvferry::cache_manager {
namespace {

using ipc::ArenaOrder;
using ipc::ErrorCode;

constexpr std::uint64_t kDeviceBytes = 1ULL << 30;

std::string device_text(std::uint64_t bytes = kDeviceBytes) {
  return "host:calibrator-" + std::to_string(::getpid()) + ":" + std::to_string(bytes);
}

ipc::Geometry geometry(const char* name) { return ipc::load_geometry(name, 1).value(); }

class MeasureTest : public testing::TestWithParam<std::pair<const char*, ArenaOrder>> {};

TEST_P(MeasureTest, KnowsEveryStrategyForEveryGroupAndGivesAllMemoryBack) {
  const auto [name, order] = GetParam();
  const auto device = ipc::open_device(ipc::DeviceSpec::parse(device_text()).value());
  const ipc::Geometry shape = geometry(name);
  const auto measured = measure_calibration(*device, shape, order);
  ASSERT_TRUE(measured.has_value()) << measured.error().to_string();
  ASSERT_TRUE(check_calibration(*measured).has_value());
  EXPECT_EQ(measured->key, calibration_key(*device, shape, order).value());
  ASSERT_EQ(measured->to_host.size(), shape.groups.size());
  for (const auto* way : {&measured->to_host, &measured->to_device}) {
    const GroupCurves& first = way->front();
    ASSERT_FALSE(first.blocks.empty());
    EXPECT_EQ(first.block_bytes,
              shape.sharded_bytes(ipc::GroupId{0}) + shape.replicated_bytes(ipc::GroupId{0}));
    EXPECT_EQ(first.regions, shape.groups[0].regions.size());
  }
  EXPECT_EQ(device->memory_info()->free_bytes, kDeviceBytes);
}

INSTANTIATE_TEST_SUITE_P(Geometries,
                         MeasureTest,
                         testing::Values(std::pair("tiny", ArenaOrder::kLayerFirst),
                                         std::pair("tiny-mla", ArenaOrder::kLayerFirst),
                                         std::pair("tiny-draft", ArenaOrder::kLayerFirstMany),
                                         std::pair("tiny-window", ArenaOrder::kLayerFirst),
                                         std::pair("tiny-fp8", ArenaOrder::kBlockFirst),
                                         std::pair("llama-3-8b", ArenaOrder::kLayerFirstMany)));

TEST(MeasureSpreadTest, ALinkThatOthersUseIsNotMeasured) {
  const auto device = ipc::open_device(ipc::DeviceSpec::parse(device_text()).value());
  CalibrationSteps steps;
  steps.most_spread = 0.5;  // less than any has: as if others used it
  const auto measured =
      measure_calibration(*device, geometry("tiny"), ArenaOrder::kLayerFirst, steps);
  ASSERT_FALSE(measured.has_value());
  EXPECT_EQ(measured.error().code, ErrorCode::kBusy);
  EXPECT_THAT(measured.error().message, testing::HasSubstr("others use the link"));
  EXPECT_EQ(device->memory_info()->free_bytes, kDeviceBytes);
}

/// Counts what is taken of the device at most.
class CountingDevice final : public test::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  ipc::Result<std::unique_ptr<ipc::DeviceMemory>> allocate(std::uint64_t size_bytes,
                                                           ipc::HandleKind kind,
                                                           ipc::AddressRange* at) override {
    allocated += size_bytes;
    return ForwardingDevice::allocate(size_bytes, kind, at);
  }
  ipc::Status register_host(void* data, std::uint64_t size_bytes) override {
    registered += size_bytes;
    return ForwardingDevice::register_host(data, size_bytes);
  }
  ipc::Status unregister_host(void* data) override {
    ++unregistered;
    return ForwardingDevice::unregister_host(data);
  }
  std::uint64_t allocated = 0;
  std::uint64_t registered = 0;
  std::uint64_t unregistered = 0;
};

TEST(MeasureLimitsTest, TakesASmallPartOfTheDeviceAndOfWhatIsFreeThere) {
  for (const std::uint64_t free_bytes : {1ULL << 30, 128ULL << 20}) {
    CountingDevice device(
        ipc::open_device(ipc::DeviceSpec::parse(device_text(free_bytes)).value()));
    ASSERT_TRUE(
        measure_calibration(device, geometry("llama-3-8b"), ArenaOrder::kLayerFirst).has_value());
    EXPECT_GT(device.allocated, 0U);
    EXPECT_LE(device.allocated, std::min<std::uint64_t>(64ULL << 20, free_bytes / 8));
    EXPECT_LE(device.registered, 64ULL << 20);
  }
}

// Whoever stops a measurement waits for that part of it only.
TEST(MeasureLimitsTest, TheDeviceIsTakenWhenAllElseIsThereAndGivenBackFirst) {
  CountingDevice device(ipc::open_device(ipc::DeviceSpec::parse(device_text()).value()));
  const auto free_bytes = [&device] { return device.memory_info()->free_bytes; };
  int taken = 0;
  int given_back = 0;
  CalibrationSteps steps;
  steps.take_device = [&] {
    EXPECT_EQ(device.allocated, 0U);
    EXPECT_GT(device.registered, 0U);
    return ++taken > 0;
  };
  steps.gave_device_back = [&] {
    ++given_back;
    EXPECT_EQ(free_bytes(), kDeviceBytes);
    EXPECT_EQ(device.unregistered, 0U);
  };
  const auto measure = [&] {
    return measure_calibration(device, geometry("tiny"), ArenaOrder::kLayerFirst, steps);
  };
  ASSERT_TRUE(measure().has_value());
  EXPECT_EQ(taken, 1);
  EXPECT_EQ(given_back, 1);
  EXPECT_EQ(device.unregistered, 1U);
  // Stopped while it is measured.
  steps.begin = [&, begun = 0]() mutable { return ++begun < 5; };
  device.allocated = device.unregistered = 0;
  EXPECT_EQ(measure().error().code, ErrorCode::kCancelled);
  EXPECT_EQ(given_back, 2);
  // And before anything was taken.
  steps.begin = [] { return true; };
  steps.take_device = [] { return false; };
  device.allocated = 0;
  EXPECT_EQ(measure().error().code, ErrorCode::kCancelled);
  EXPECT_EQ(device.allocated, 0U);
  EXPECT_EQ(given_back, 2);
}

TEST(MeasureLimitsTest, BlocksThatAreTooLargeForThatAreRefusedByName) {
  const auto device = ipc::open_device(ipc::DeviceSpec::parse(device_text(8ULL << 20)).value());
  const auto measured =
      measure_calibration(*device, geometry("llama-3-8b"), ArenaOrder::kLayerFirst);
  ASSERT_FALSE(measured.has_value());
  EXPECT_EQ(measured.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(measured.error().message, testing::HasSubstr("llama-3-8b"));
  EXPECT_EQ(device->memory_info()->free_bytes, 8ULL << 20);
}

TEST(MeasureLimitsTest, AStepThatJobsDisturbIsTakenAgainAndOneThatIsStoppedIsTheLast) {
  const auto device = ipc::open_device(ipc::DeviceSpec::parse(device_text()).value());
  int begun = 0;
  int disturbed = 0;
  CalibrationSteps steps;
  steps.begin = [&begun] { return ++begun > 0; };
  steps.counts = [&disturbed, &begun] { return begun % 2 == 0 || ++disturbed > 40; };
  ASSERT_TRUE(
      measure_calibration(*device, geometry("tiny"), ArenaOrder::kLayerFirst, steps).has_value());
  EXPECT_GT(disturbed, 40);
  const int all = begun;
  begun = 0;
  steps.begin = [&begun, all] { return ++begun < all / 2; };
  const auto stopped =
      measure_calibration(*device, geometry("tiny"), ArenaOrder::kLayerFirst, steps);
  ASSERT_FALSE(stopped.has_value());
  EXPECT_EQ(stopped.error().code, ErrorCode::kCancelled);
  EXPECT_EQ(begun, all / 2);
  steps.begin = [] { return true; };
  steps.counts = [] { return false; };
  const auto busy = measure_calibration(*device, geometry("tiny"), ArenaOrder::kLayerFirst, steps);
  ASSERT_FALSE(busy.has_value());
  EXPECT_EQ(busy.error().code, ErrorCode::kBusy);
  EXPECT_EQ(device->memory_info()->free_bytes, kDeviceBytes);
}

class CalibratorTest : public testing::Test {
 protected:
  CalibratorTest() : device_(ipc::open_device(ipc::DeviceSpec::parse(device_text()).value())) {
    ipc::ArenaOptions options;
    options.gpu_blocks = 8;
    layout_ = ipc::plan_arena(geometry("tiny"), options).value();
    file_ = calibration_file(dir_ / "cache", key());
  }
  [[nodiscard]] CalibrationKey key() const {
    return calibration_key(*device_, geometry("tiny"), ArenaOrder::kLayerFirst).value();
  }
  void make(ipc::Duration measured_within = std::chrono::minutes(1),
            ipc::Duration first_retry = std::chrono::hours(1)) {
    calibrator_.emplace(
        *device_,
        Calibrator::Options{geometry("tiny"), dir_ / "cache", measured_within, first_retry},
        [this] {
          const std::lock_guard lock(mutex_);
          ++looks_;
          looked_.notify_all();
          return quiet_ && looks_ <= quiet_looks_;
        },
        [this] { return jobs_.load(); });
  }
  /// It began to measure when jobs came, and has given up.
  bool wait_given_up() {
    const ipc::Deadline deadline = test::soon();
    while (!deadline.expired()) {
      std::unique_lock lock(mutex_);
      looked_.wait_for(lock, std::chrono::milliseconds(5));
      if (looks_ <= quiet_looks_) continue;
      lock.unlock();
      const auto turn = ipc::CacheLock::try_take(dir_ / "cache");
      if (turn && *turn) return true;
    }
    return false;
  }
  void set_quiet_looks(int count) {
    const std::lock_guard lock(mutex_);
    quiet_looks_ = count;
  }
  /// What it would copy a job by, once that is not the rule of thumb any more.
  std::optional<CopyStrategy> wait_choice(StrategyChooser& chooser) {
    ipc::MoverJob job;
    job.direction = ipc::CopyDirection::kDeviceToHost;
    job.items.push_back({ipc::GroupId{0}, ipc::BlockId{0}, 0, 0, true});
    const ipc::Deadline deadline = test::soon();
    while (!deadline.expired()) {
      const CopyStrategy chosen = chooser.choose(job, true, {}, {});
      if (chosen != CopyStrategy::kDirect) return chosen;
      std::unique_lock lock(mutex_);
      looked_.wait_for(lock, std::chrono::milliseconds(5));
    }
    return std::nullopt;
  }
  /// kDirect: nobody chooses it here.
  [[nodiscard]] std::shared_ptr<StrategyChooser> chooser() const {
    return std::make_shared<StrategyChooser>(CopyStrategy::kDirect, layout_);
  }
  /// As a device is that strided copies are best for.
  void keep_strided() {
    Calibration kept;
    kept.key = key();
    kept.to_host = {samples::curves({{0, 90}, {0, 10}, {0, 90}, {0, 90}})};
    kept.to_device = kept.to_host;
    ASSERT_TRUE(save_calibration(file_, kept).has_value());
  }

  test::ShortTempDir dir_;
  std::unique_ptr<ipc::Device> device_;
  ipc::ArenaLayout layout_;
  std::filesystem::path file_;
  std::mutex mutex_;  // guards quiet_, looks_
  std::condition_variable looked_;
  bool quiet_ = true;
  int looks_ = 0;
  int quiet_looks_ = std::numeric_limits<int>::max();  ///< From the next one on jobs run.
  std::atomic<std::uint64_t> jobs_ = 0;
  std::optional<Calibrator> calibrator_;
};

TEST_F(CalibratorTest, MeasuresKeepsAndServesEveryEpochAfterwards) {
  make();
  const auto first = chooser();
  calibrator_->start(first, ArenaOrder::kLayerFirst);
  EXPECT_TRUE(wait_choice(*first).has_value());
  EXPECT_TRUE(load_calibration(file_, key()).has_value());
  ASSERT_TRUE(calibrator_->stop(test::soon()).has_value());
  EXPECT_EQ(device_->memory_info()->free_bytes, kDeviceBytes);
  std::filesystem::remove(file_);
  const auto next = chooser();
  calibrator_->start(next, ArenaOrder::kLayerFirst);
  EXPECT_TRUE(wait_choice(*next).has_value());
  EXPECT_FALSE(std::filesystem::exists(file_)) << "it knew";
}

TEST_F(CalibratorTest, AMoverThatTurnsBusyGivesItsTurnAndMemoryBackAndMeasuresLater) {
  set_quiet_looks(2);
  make(std::chrono::seconds(2), std::chrono::milliseconds(20));
  const auto waits = chooser();
  calibrator_->start(waits, ArenaOrder::kLayerFirst);
  ASSERT_TRUE(wait_given_up());
  EXPECT_EQ(device_->memory_info()->free_bytes, kDeviceBytes);
  set_quiet_looks(std::numeric_limits<int>::max());
  EXPECT_TRUE(wait_choice(*waits).has_value());
}

TEST_F(CalibratorTest, WhatAnotherMoverKeptIsFoundBetweenTries) {
  set_quiet_looks(2);
  make(std::chrono::seconds(2), std::chrono::hours(1));
  calibrator_->start(chooser(), ArenaOrder::kLayerFirst);
  ASSERT_TRUE(wait_given_up());
  ASSERT_TRUE(calibrator_->stop(test::soon()).has_value());
  keep_strided();
  const auto next = chooser();
  calibrator_->start(next, ArenaOrder::kLayerFirst);
  EXPECT_EQ(wait_choice(*next), CopyStrategy::kStrided);
}

TEST_F(CalibratorTest, UsesWhatIsKept) {
  keep_strided();
  {
    const std::lock_guard lock(mutex_);
    quiet_ = false;  // measuring would have to wait
  }
  make();
  const auto kept = chooser();
  calibrator_->start(kept, ArenaOrder::kLayerFirst);
  EXPECT_EQ(wait_choice(*kept), CopyStrategy::kStrided);
}

TEST_F(CalibratorTest, WhatIsDamagedIsMeasuredAnewAndReplaced) {
  keep_strided();
  std::ofstream(file_) << "{\"kvferry_calibration\": 2, ";
  make();
  const auto anew = chooser();
  calibrator_->start(anew, ArenaOrder::kLayerFirst);
  EXPECT_TRUE(wait_choice(*anew).has_value());
  EXPECT_TRUE(load_calibration(file_, key()).has_value());
}

TEST_F(CalibratorTest, WaitsForAQuietMomentAndStopsAtOnce) {
  quiet_ = false;
  make();
  const auto waiting = chooser();
  calibrator_->start(waiting, ArenaOrder::kLayerFirst);
  {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(looked_.wait_until(lock, test::soon().when(), [this] { return looks_ >= 3; }));
  }
  EXPECT_EQ(device_->memory_info()->free_bytes, kDeviceBytes) << "no memory before that";
  ASSERT_TRUE(calibrator_->stop(test::soon()).has_value());
  EXPECT_FALSE(std::filesystem::exists(file_));
  // A later epoch begins again.
  {
    const std::lock_guard lock(mutex_);
    quiet_ = true;
  }
  calibrator_->start(waiting, ArenaOrder::kLayerFirst);
  EXPECT_TRUE(wait_choice(*waiting).has_value());
}

TEST_F(CalibratorTest, OneProcessMeasuresAtATimeAndTheNextOneUsesWhatItKept) {
  {
    auto turn = ipc::CacheLock::try_take(dir_ / "cache");
    ASSERT_TRUE(turn.has_value() && turn->has_value());
    EXPECT_FALSE(ipc::CacheLock::try_take(dir_ / "cache").value().has_value());
    make();
    const auto stopped = chooser();
    calibrator_->start(stopped, ArenaOrder::kLayerFirst);
    ASSERT_TRUE(calibrator_->stop(test::soon()).has_value());
    const auto waiting = chooser();
    calibrator_->start(waiting, ArenaOrder::kLayerFirst);
    keep_strided();
    turn->reset();
    EXPECT_EQ(wait_choice(*waiting), CopyStrategy::kStrided);
  }
}

TEST_F(CalibratorTest, WithoutAPlaceToKeepItItIsMeasuredAllTheSame) {
  std::ofstream(dir_ / "cache") << "no folder";
  make();
  const auto served = chooser();
  calibrator_->start(served, ArenaOrder::kLayerFirst);
  EXPECT_TRUE(wait_choice(*served).has_value());
}

/// A simulated device that is measured itself, as a GPU is.
class MeasuredDevice final : public test::ForwardingDevice {
 public:
  explicit MeasuredDevice(std::unique_ptr<ipc::Device> real)
      : ForwardingDevice(std::move(real)), spec_(ForwardingDevice::spec()) {
    spec_.kind = ipc::DeviceKind::kCuda;
  }
  [[nodiscard]] const ipc::DeviceSpec& spec() const noexcept override { return spec_; }

 private:
  ipc::DeviceSpec spec_;
};

class CalibratorStopTest : public CalibratorTest {
 protected:
  CalibratorStopTest() { device_ = std::make_unique<MeasuredDevice>(std::move(device_)); }
  void TearDown() override {
    go_on();
    calibrator_.reset();
  }
  /// Of which the first step that has memory of the device stands until go_on().
  void make_standing() {
    calibrator_.emplace(
        *device_,
        Calibrator::Options{geometry("tiny"), dir_ / "cache", std::chrono::minutes(1),
                            std::chrono::hours(1)},
        [this] {
          std::unique_lock lock(mutex_);
          if (device_->memory_info()->free_bytes == kDeviceBytes) return true;
          stands_ = true;
          looked_.notify_all();
          looked_.wait_until(lock, test::soon().when(), [this] { return goes_on_; });
          return true;
        },
        [] { return std::uint64_t{0}; });
  }
  [[nodiscard]] bool wait_standing() {
    std::unique_lock lock(mutex_);
    return looked_.wait_until(lock, test::soon().when(), [this] { return stands_; });
  }
  void go_on() {
    const std::lock_guard lock(mutex_);
    goes_on_ = true;
    looked_.notify_all();
  }

 private:
  bool stands_ = false;
  bool goes_on_ = false;
};

TEST_F(CalibratorStopTest, StopWaitsWhileTheDeviceIsHeldAndNextOneIsServed) {
  make_standing();
  const auto stopped = chooser();
  calibrator_->start(stopped, ArenaOrder::kLayerFirst);
  ASSERT_TRUE(wait_standing());
  EXPECT_LT(device_->memory_info()->free_bytes, kDeviceBytes);
  const auto held = calibrator_->stop(ipc::Deadline::after(std::chrono::milliseconds(20)));
  ASSERT_FALSE(held.has_value());
  EXPECT_EQ(held.error().code, ErrorCode::kTimeout);
  // The next epoch does not bring the stopped one back to life.
  keep_strided();
  const auto next = chooser();
  calibrator_->start(next, ArenaOrder::kLayerFirst);
  go_on();
  EXPECT_EQ(wait_choice(*next), CopyStrategy::kStrided);
  ASSERT_TRUE(calibrator_->stop(test::soon()).has_value());
  EXPECT_EQ(device_->memory_info()->free_bytes, kDeviceBytes);
  ipc::MoverJob job;
  job.items.push_back({ipc::GroupId{0}, ipc::BlockId{0}, 0, 0, true});
  EXPECT_EQ(stopped->choose(job, true, {}, {}), CopyStrategy::kDirect);
}

TEST_F(CalibratorStopTest, StopEndsWithTheStepAndTheDeviceIsFree) {
  make_standing();
  calibrator_->start(chooser(), ArenaOrder::kLayerFirst);
  ASSERT_TRUE(wait_standing());
  EXPECT_FALSE(calibrator_->stop(ipc::Deadline::after(ipc::Duration::zero())).has_value());
  go_on();
  ASSERT_TRUE(calibrator_->stop(test::soon()).has_value());
  EXPECT_EQ(device_->memory_info()->free_bytes, kDeviceBytes);
  EXPECT_FALSE(std::filesystem::exists(file_));
}

}  // namespace
}  // namespace kvferry::cache_manager
