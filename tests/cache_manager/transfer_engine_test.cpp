// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/transfer_engine.hpp"

#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "support/child_process.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>

namespace kvferry::cache_manager {
namespace {

using ipc::ArenaOrder;
using ipc::BlockId;
using ipc::CopyDirection;
using ipc::Deadline;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::JobId;
using ipc::MoverItem;
using ipc::MoverJob;
using ipc::MoverJobDone;

constexpr std::uint64_t kPoolBytes = 96ULL << 20;  // two registered pieces

// Collects answers and lets the test wait for them.
class Answers {
 public:
  void add(MoverJobDone done) {
    {
      std::unique_lock lock(mutex_);
      order_.push_back(done.job.value);
      changed_.notify_all();
      // On the lane's thread: the lane stands still while an answer is held.
      changed_.wait(lock, [&] { return done.job.value != held_; });
      EXPECT_TRUE(answers_.emplace(done.job.value, std::move(done)).second) << "answered twice";
    }
    changed_.notify_all();
  }
  MoverJobDone wait(std::uint64_t job) {
    std::unique_lock lock(mutex_);
    const bool arrived =
        changed_.wait_until(lock, test::soon().when(), [&] { return answers_.contains(job); });
    EXPECT_TRUE(arrived) << "job " << job << " was never answered";
    return arrived ? answers_.at(job) : MoverJobDone{};
  }

  /// The lane that answers this job does not go on until release().
  void hold(std::uint64_t job) {
    const std::lock_guard lock(mutex_);
    held_ = job;
  }
  bool wait_held() {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, test::soon().when(),
                               [&] { return !order_.empty() && order_.back() == held_; });
  }
  void release() {
    const std::lock_guard lock(mutex_);
    held_ = 0;
    changed_.notify_all();
  }
  std::vector<std::uint64_t> order() {
    const std::lock_guard lock(mutex_);
    return order_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> order_;
  std::uint64_t held_ = 0;
  std::map<std::uint64_t, MoverJobDone> answers_;
};

struct Setting {
  const char* geometry;
  ArenaOrder order;
  CopyStrategy strategy;
};

class TransferEngineTest : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    auto spec =
        ipc::DeviceSpec::parse("host:transfer-engine-" + std::to_string(::getpid()) + ":512MiB");
    ASSERT_TRUE(spec.has_value());
    device_ = ipc::open_device(*spec);
    auto geometry = ipc::load_geometry(GetParam().geometry, 2);
    ASSERT_TRUE(geometry.has_value()) << geometry.error().to_string();
    geometry_ = *geometry;
    ipc::ArenaOptions options;
    options.order = GetParam().order;
    options.gpu_blocks = 64;
    auto layout = ipc::plan_arena(geometry_, options);
    ASSERT_TRUE(layout.has_value());
    auto arena =
        ipc::Arena::allocate(*device_, ipc::Epoch{5}, *layout, ipc::HandleKind::kVmm, nullptr);
    ASSERT_TRUE(arena.has_value()) << arena.error().to_string();
    arena_ = std::make_unique<ipc::Arena>(std::move(arena).value());
    auto fd = ipc::SharedMemory::create_pool("kvferry-test-pool", kPoolBytes, false);
    ASSERT_TRUE(fd.has_value());
    auto view = ipc::SharedMemory::map_pool(*fd, kPoolBytes);
    ASSERT_TRUE(view.has_value());
    pool_view_ = std::move(view).value();
    auto pool = ipc::PoolMapping::map(*device_, std::move(fd).value(), kPoolBytes);
    ASSERT_TRUE(pool.has_value());
    TransferEngine::Options engine_options;
    engine_options.strategy = GetParam().strategy;
    engine_ = std::make_unique<TransferEngine>(
        *device_, engine_options, [this](MoverJobDone done) { answers_.add(std::move(done)); },
        [](const ipc::Error& error) { ADD_FAILURE() << error.to_string(); });
    engine_->set_pool(std::move(pool).value());
  }

  void map() {
    ASSERT_TRUE(engine_->on_mapped(session_, *arena_, ipc::ArenaContents::kUndefined).has_value());
  }

  MoverJob job(std::uint64_t id, CopyDirection direction, std::vector<MoverItem> items) const {
    MoverJob made;
    made.job = JobId{id};
    made.session = session_;
    made.epoch = arena_->epoch();
    made.direction = direction;
    made.items = std::move(items);
    return made;
  }

  // Item for block b of group g whose parts lie in odd places of the pool.
  MoverItem item(std::uint32_t group,
                 std::uint32_t block,
                 std::uint64_t place,
                 bool with_replicated = true) const {
    const auto shape = ipc::host_block_shape(geometry_, GroupId{group});
    MoverItem made{GroupId{group}, BlockId{block}, 0, 0, with_replicated};
    // Around the boundary of the pool's pieces, so that runs are cut there.
    made.replicated_offset = ipc::PoolMapping::kPieceBytes - 100'000 + place * 300'000;
    made.shard_offset = made.replicated_offset + shape.replicated_bytes + 13 * place;
    return made;
  }

  std::unique_ptr<ipc::Device> device_;
  ipc::Geometry geometry_;
  std::unique_ptr<ipc::Arena> arena_;
  ipc::SessionId session_ = ipc::Digest::random();
  ipc::SharedMapping pool_view_;
  Answers answers_;
  std::unique_ptr<TransferEngine> engine_;
};

// The packed image of a block, straight from device memory of the host backend.
std::vector<unsigned char> image(const ipc::Arena& arena,
                                 std::uint32_t group,
                                 std::uint32_t block,
                                 ipc::RegionSet set) {
  std::vector<unsigned char> bytes(arena.packed_bytes(GroupId{group}, set));
  for (const auto& region : arena.strided(GroupId{group}, set, ipc::Rank{0})) {
    std::memcpy(bytes.data() + region.packed_offset, region.base + block * region.block_stride,
                region.block_bytes);
  }
  return bytes;
}

void fill(const ipc::Arena& arena, std::uint32_t group, std::uint32_t block, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (const auto& region : arena.strided(GroupId{group}, ipc::RegionSet::kAll, ipc::Rank{0})) {
    for (std::uint64_t i = 0; i < region.block_bytes; ++i) {
      region.base[block * region.block_stride + i] = static_cast<unsigned char>(random());
    }
  }
}

TEST_P(TransferEngineTest, BlocksComeBackBitForBitInOtherPlaces) {
  map();
  std::vector<MoverItem> stores;
  std::vector<MoverItem> loads;
  std::vector<std::vector<unsigned char>> expected;
  std::uint64_t place = 0;
  for (std::uint32_t group = 0; group < geometry_.groups.size(); ++group) {
    for (std::uint32_t block = 0; block < 20; ++block, ++place) {
      fill(*arena_, group, block, place);
      stores.push_back(item(group, block, place));
      loads.push_back(item(group, 63 - block, place));
      expected.push_back(image(*arena_, group, block, ipc::RegionSet::kAll));
    }
  }
  engine_->submit(job(1, CopyDirection::kDeviceToHost, stores));
  const MoverJobDone stored = answers_.wait(1);
  EXPECT_EQ(stored.results, std::vector<std::uint8_t>(stores.size(), 0)) << stored.message;
  engine_->submit(job(2, CopyDirection::kHostToDevice, loads));
  const MoverJobDone loaded = answers_.wait(2);
  EXPECT_EQ(loaded.results, std::vector<std::uint8_t>(loads.size(), 0)) << loaded.message;
  EXPECT_EQ(loaded.bytes, stored.bytes);
  std::size_t i = 0;
  for (std::uint32_t group = 0; group < geometry_.groups.size(); ++group) {
    for (std::uint32_t block = 0; block < 20; ++block, ++i) {
      EXPECT_EQ(image(*arena_, group, 63 - block, ipc::RegionSet::kAll), expected[i]);
    }
  }
}

TEST_P(TransferEngineTest, AnItemOutOfRangeFailsAlone) {
  map();
  fill(*arena_, 0, 1, 1);
  std::vector<MoverItem> items = {item(0, 1, 1), item(0, 4000, 2), item(0, 2, 3)};
  items.push_back(item(0, 3, 4));
  items.back().shard_offset = kPoolBytes - 1;
  items.back().replicated_offset = kPoolBytes - 1;
  items.push_back(item(0, 0, 5));
  items.back().group = GroupId{9};
  engine_->submit(job(1, CopyDirection::kDeviceToHost, items));
  const auto invalid = static_cast<std::uint8_t>(ErrorCode::kInvalidArgument);
  EXPECT_EQ(answers_.wait(1).results, (std::vector<std::uint8_t>{0, invalid, 0, invalid, invalid}));
}

TEST_P(TransferEngineTest, AnotherRanksReplicatedPartIsNotWritten) {
  map();
  const auto shape = ipc::host_block_shape(geometry_, GroupId{0});
  if (shape.replicated_bytes == 0) GTEST_SKIP() << "no replicated regions";
  const MoverItem one = item(0, 1, 1, false);
  std::memset(pool_view_.data() + one.replicated_offset, 0x77, shape.replicated_bytes);
  fill(*arena_, 0, 1, 1);
  engine_->submit(job(1, CopyDirection::kDeviceToHost, {one}));
  EXPECT_EQ(answers_.wait(1).results, std::vector<std::uint8_t>{0});
  for (std::uint64_t i = 0; i < shape.replicated_bytes; ++i) {
    ASSERT_EQ(pool_view_.data()[one.replicated_offset + i], std::byte{0x77});
  }
}

TEST_P(TransferEngineTest, RefusesWorkForAnotherEpochOrWithoutArena) {
  engine_->submit(job(1, CopyDirection::kDeviceToHost, {item(0, 0, 0)}));
  EXPECT_EQ(answers_.wait(1).results,
            std::vector<std::uint8_t>{static_cast<std::uint8_t>(ErrorCode::kNotReady)});
  map();
  MoverJob stale = job(2, CopyDirection::kDeviceToHost, {item(0, 0, 0)});
  stale.epoch = ipc::Epoch{4};
  engine_->submit(stale);
  stale.job = JobId{3};
  stale.epoch = arena_->epoch();
  stale.session = ipc::Digest::random();
  engine_->submit(stale);
  for (const std::uint64_t id : {2U, 3U}) {
    EXPECT_EQ(answers_.wait(id).results,
              std::vector<std::uint8_t>{static_cast<std::uint8_t>(ErrorCode::kStaleEpoch)});
  }
}

TEST_P(TransferEngineTest, QuiesceAnswersEveryJobAndAdmitsNoMore) {
  map();
  constexpr std::uint64_t kJobs = 60;
  for (std::uint64_t id = 1; id <= kJobs; ++id) {
    // Loads and stores at the same time, but of different places: whoever submits sees to that.
    const bool loads = id % 2 == 0;
    std::vector<MoverItem> items;
    for (std::uint32_t i = 0; i < 32; ++i) {
      const std::uint32_t block = loads ? i : 32 + i;
      items.push_back(item(0, block, block));
    }
    engine_->submit(
        job(id, loads ? CopyDirection::kHostToDevice : CopyDirection::kDeviceToHost, items));
  }
  ASSERT_TRUE(engine_->quiesce(arena_->epoch(), test::soon()).has_value());
  // From here on nothing may touch the arena: it is unmapped, a touch would fault.
  engine_->on_unmapped(arena_->epoch());
  ASSERT_TRUE(arena_->release().has_value());
  for (std::uint64_t id = 1; id <= kJobs; ++id) {
    for (const std::uint8_t result : answers_.wait(id).results) {
      EXPECT_TRUE(result == 0 || result == static_cast<std::uint8_t>(ErrorCode::kRevoked));
    }
  }
  engine_->submit(job(999, CopyDirection::kDeviceToHost, {item(0, 0, 0)}));
  EXPECT_EQ(answers_.wait(999).results,
            std::vector<std::uint8_t>{static_cast<std::uint8_t>(ErrorCode::kNotReady)});
}

TEST_P(TransferEngineTest, OfJobsOfOnePriorityWhatIsDueFirstGoesFirst) {
  map();
  answers_.hold(1);
  engine_->submit(job(1, CopyDirection::kHostToDevice, {item(0, 1, 0)}));
  ASSERT_TRUE(answers_.wait_held());
  const auto submit = [this](std::uint64_t id, std::optional<std::uint64_t> due_ns) {
    MoverJob next = job(id, CopyDirection::kHostToDevice, {item(0, 3, 2)});
    if (due_ns) next.urgency.due_ns = *due_ns;
    engine_->submit(std::move(next));
  };
  submit(2, std::nullopt);
  submit(3, 900);
  submit(4, 500);
  answers_.release();
  (void)answers_.wait(2);
  EXPECT_THAT(answers_.order(), testing::ElementsAre(1, 4, 3, 2));
}

TEST_P(TransferEngineTest, BetterJobsDoNotHoldOneBackForEver) {
  map();
  answers_.hold(1);
  engine_->submit(job(1, CopyDirection::kHostToDevice, {item(0, 1, 0)}));
  ASSERT_TRUE(answers_.wait_held());
  engine_->submit(job(2, CopyDirection::kHostToDevice, {item(0, 2, 1)}));
  constexpr std::uint64_t kBetter = 20;
  for (std::uint64_t i = 0; i < kBetter; ++i) {
    MoverJob better = job(10 + i, CopyDirection::kHostToDevice, {item(0, 3, 2)});
    better.urgency.priority = 9;
    engine_->submit(std::move(better));
  }
  answers_.release();
  (void)answers_.wait(10 + kBetter - 1);
  const std::vector<std::uint64_t> order = answers_.order();
  const auto oldest = std::find(order.begin(), order.end(), 2U);
  ASSERT_NE(oldest, order.end()) << "still behind all others";
  EXPECT_LE(oldest - order.begin(), TransferLane::kFairShare);
  EXPECT_GT(oldest - order.begin(), 1) << "priority counts, too";
}

TEST_P(TransferEngineTest, CancelledAndPoolLessJobsAreAnswered) {
  map();
  for (std::uint64_t id = 1; id <= 40; ++id) {
    std::vector<MoverItem> items;
    for (std::uint32_t block = 0; block < 64; ++block) items.push_back(item(0, block, block));
    engine_->submit(job(id, CopyDirection::kDeviceToHost, items));
  }
  for (std::uint64_t id = 1; id <= 40; id += 3) engine_->cancel(JobId{id});
  engine_->cancel(JobId{12345});  // unknown: nothing happens
  engine_->drop_pool();
  for (std::uint64_t id = 1; id <= 40; ++id) {
    for (const std::uint8_t result : answers_.wait(id).results) {
      EXPECT_TRUE(result == 0 || result == static_cast<std::uint8_t>(ErrorCode::kCancelled));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Settings,
    TransferEngineTest,
    testing::Values(Setting{"tiny", ArenaOrder::kLayerFirst, CopyStrategy::kBatch},
                    Setting{"tiny", ArenaOrder::kLayerFirstMany, CopyStrategy::kMemcpy},
                    Setting{"tiny", ArenaOrder::kBlockFirst, CopyStrategy::kAuto},
                    Setting{"tiny-mla", ArenaOrder::kLayerFirst, CopyStrategy::kBatch},
                    Setting{"tiny-mla", ArenaOrder::kBlockFirst, CopyStrategy::kDirect},
                    Setting{"tiny-window", ArenaOrder::kBlockFirst, CopyStrategy::kDirect},
                    Setting{"tiny", ArenaOrder::kLayerFirst, CopyStrategy::kStrided},
                    Setting{"tiny", ArenaOrder::kLayerFirstMany, CopyStrategy::kStrided},
                    Setting{"tiny-mla", ArenaOrder::kLayerFirst, CopyStrategy::kStrided},
                    Setting{"tiny-window", ArenaOrder::kLayerFirst, CopyStrategy::kStrided},
                    Setting{"tiny-mla", ArenaOrder::kBlockFirst, CopyStrategy::kStrided},
                    Setting{"tiny", ArenaOrder::kLayerFirst, CopyStrategy::kKernel},
                    Setting{"tiny", ArenaOrder::kLayerFirstMany, CopyStrategy::kKernel},
                    Setting{"tiny-mla", ArenaOrder::kLayerFirst, CopyStrategy::kKernel},
                    Setting{"tiny-window", ArenaOrder::kBlockFirst, CopyStrategy::kKernel}));

TEST(ChooseStrategyTest, RefusesWhatTheArenaCannotDo) {
  auto geometry = ipc::load_geometry("tiny", 1);
  ASSERT_TRUE(geometry.has_value());
  ipc::ArenaOptions options;
  options.gpu_blocks = 4;
  auto layout = ipc::plan_arena(*geometry, options);
  ASSERT_TRUE(layout.has_value());
  EXPECT_EQ(*choose_strategy(CopyStrategy::kAuto, *layout), CopyStrategy::kBatch);
  EXPECT_EQ(choose_strategy(CopyStrategy::kDirect, *layout).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(choose_strategy(CopyStrategy::kStaged, *layout).error().code,
            ErrorCode::kInvalidArgument);
  options.staging_slots = 4;
  options.staging_slot_bytes = 1 << 20;
  layout = ipc::plan_arena(*geometry, options);
  ASSERT_TRUE(layout.has_value());
  EXPECT_EQ(*choose_strategy(CopyStrategy::kAuto, *layout), CopyStrategy::kStaged);
}

}  // namespace
}  // namespace kvferry::cache_manager
