// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "worker_arena.hpp"

#include "worker/host_device.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <optional>
#include <thread>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::Epoch;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::Rank;
using ipc::RegionSet;
using ipc::SessionId;
using std::chrono_literals::operator""s;

constexpr std::uint64_t kMiB = 1ULL << 20;
const SessionId kSession = SessionId::from_words(1, 2);
constexpr auto kUndefined = ipc::ArenaContents::kUndefined;
constexpr auto kPrepared = ipc::ArenaContents::kPrepared;

/// One group with a sharded and a replicated region, one with sharded regions only.
ipc::Geometry make_geometry() {
  ipc::Geometry geometry;
  geometry.name = "test";
  geometry.tokens_per_block = 16;
  geometry.ranks = 2;
  ipc::GroupSpec main;
  main.name = "main";
  main.regions = {{ipc::RegionKind::kKey, ipc::DataType::kFp16, 0, false, 1024},
                  {ipc::RegionKind::kLatent, ipc::DataType::kFp16, 0, true, 512}};
  ipc::GroupSpec draft;
  draft.name = "draft";
  draft.regions = {{ipc::RegionKind::kKey, ipc::DataType::kFp16, 0, false, 256}};
  geometry.groups = {main, draft};
  return geometry;
}

ipc::ArenaLayout make_layout() {
  ipc::ArenaOptions options;
  options.gpu_blocks = 8;
  options.staging_slots = 3;
  options.staging_slot_bytes = 8192;
  return ipc::plan_arena(make_geometry(), options).value();
}

class WorkerArenaTest : public ::testing::Test {
 protected:
  ipc::Arena allocate(Epoch epoch) {
    return ipc::Arena::allocate(*device_, epoch, make_layout(), ipc::HandleKind::kVmm, nullptr)
        .value();
  }

  std::unique_ptr<ipc::Device> device_ = test::open_host_device(64 * kMiB);
  WorkerArena user_{*device_, Rank{1}};
};

TEST_F(WorkerArenaTest, ZeroesEverySegmentBeforeItIsUsed) {
  ipc::Arena arena = allocate(Epoch{1});
  const auto& sizes = arena.layout().segment_bytes;
  for (std::uint32_t i = 0; i < sizes.size(); ++i) {
    std::memset(arena.segment(i).raw(), 0xEE, sizes[i]);
  }
  ASSERT_TRUE(user_.on_mapped(kSession, arena, kUndefined).has_value());
  for (std::uint32_t i = 0; i < sizes.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(arena.segment(i).raw());
    EXPECT_TRUE(std::all_of(bytes, bytes + sizes[i], [](unsigned char byte) { return byte == 0; }));
  }
  ASSERT_TRUE(user_.quiesce(Epoch{1}, Deadline::after(20s)).has_value());
  user_.on_unmapped(Epoch{1});
}

TEST_F(WorkerArenaTest, KeepsWhatAnEarlierLifeHasPrepared) {
  ipc::Arena arena = allocate(Epoch{1});
  const auto& sizes = arena.layout().segment_bytes;
  for (std::uint32_t i = 0; i < sizes.size(); ++i) {
    std::memset(arena.segment(i).raw(), 0xEE, sizes[i]);
  }
  ASSERT_TRUE(user_.on_mapped(kSession, arena, kPrepared).has_value());
  EXPECT_TRUE(user_.enter(kSession, Epoch{1}).has_value());
  for (std::uint32_t i = 0; i < sizes.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(arena.segment(i).raw());
    EXPECT_TRUE(
        std::all_of(bytes, bytes + sizes[i], [](unsigned char byte) { return byte == 0xEE; }));
  }
  ASSERT_TRUE(user_.quiesce(Epoch{1}, Deadline::after(20s)).has_value());
  user_.on_unmapped(Epoch{1});
}

TEST_F(WorkerArenaTest, OffersTablesOfEverySetThatExists) {
  ipc::Arena arena = allocate(Epoch{1});
  ASSERT_TRUE(user_.on_mapped(kSession, arena, kUndefined).has_value());
  {
    const auto use = user_.enter(kSession, Epoch{1});
    ASSERT_TRUE(use.has_value());
    const MappedArena& mapped = use->arena();
    ASSERT_EQ(mapped.groups.size(), 2U);
    EXPECT_EQ(mapped.groups[0].block_count, 8U);
    ASSERT_NE(mapped.groups[0].table(RegionSet::kReplicated), nullptr);
    EXPECT_EQ(mapped.groups[0].packed(RegionSet::kReplicated), 512U);
    EXPECT_EQ(mapped.groups[0].packed(RegionSet::kSharded), 1024U);
    EXPECT_EQ(mapped.groups[0].table(RegionSet::kAll)->regions().size(), 2U);
    EXPECT_EQ(mapped.groups[1].table(RegionSet::kReplicated), nullptr);
    ASSERT_EQ(mapped.slots.size(), 3U);
    EXPECT_EQ(mapped.slots[2], arena.staging_slot(2));
  }
  user_.on_unmapped(Epoch{1});
}

TEST_F(WorkerArenaTest, RefusesEveryoneBeforeMappingAndAfterUnmapping) {
  EXPECT_EQ(user_.enter(kSession, Epoch{1}).error().code, ErrorCode::kNotReady);
  ipc::Arena arena = allocate(Epoch{1});
  ASSERT_TRUE(user_.on_mapped(kSession, arena, kUndefined).has_value());
  user_.on_unmapped(Epoch{1});
  EXPECT_EQ(user_.enter(kSession, Epoch{1}).error().code, ErrorCode::kNotReady);
}

TEST_F(WorkerArenaTest, RefusesAnotherSessionAndAnotherEpoch) {
  ipc::Arena arena = allocate(Epoch{4});
  ASSERT_TRUE(user_.on_mapped(kSession, arena, kUndefined).has_value());
  EXPECT_TRUE(user_.enter(kSession, Epoch{4}).has_value());
  EXPECT_EQ(user_.enter(kSession, Epoch{3}).error().code, ErrorCode::kStaleEpoch);
  EXPECT_EQ(user_.enter(kSession, Epoch{5}).error().code, ErrorCode::kStaleEpoch);
  EXPECT_EQ(user_.enter(SessionId::random(), Epoch{4}).error().code, ErrorCode::kStaleEpoch);
  user_.on_unmapped(Epoch{4});
}

TEST_F(WorkerArenaTest, QuiesceTimesOutWhileSomebodyIsInside) {
  ipc::Arena arena = allocate(Epoch{1});
  ASSERT_TRUE(user_.on_mapped(kSession, arena, kUndefined).has_value());
  {
    const auto use = user_.enter(kSession, Epoch{1});
    const auto status = user_.quiesce(Epoch{1}, Deadline::after(std::chrono::milliseconds(5)));
    ASSERT_FALSE(status.has_value());
    EXPECT_EQ(status.error().code, ErrorCode::kTimeout);
    // Nobody new gets in meanwhile.
    EXPECT_EQ(user_.enter(kSession, Epoch{1}).error().code, ErrorCode::kNotReady);
  }
  EXPECT_TRUE(user_.quiesce(Epoch{1}, Deadline::after(20s)).has_value());
  user_.on_unmapped(Epoch{1});
}

TEST_F(WorkerArenaTest, QuiesceEndsWhenTheLastUserLeaves) {
  ipc::Arena arena = allocate(Epoch{1});
  std::promise<void> revoked;
  user_.add_revoke_listener([&revoked] { revoked.set_value(); });
  ASSERT_TRUE(user_.on_mapped(kSession, arena, kUndefined).has_value());
  std::optional<ArenaUse> use(user_.enter(kSession, Epoch{1}).value());
  std::optional<ArenaUse> second(user_.enter(kSession, Epoch{1}).value());
  std::thread leaver([&] {
    // Admission has ended once the listeners are told.
    revoked.get_future().wait();
    EXPECT_FALSE(user_.enter(kSession, Epoch{1}).has_value());
    use.reset();
    second.reset();
  });
  EXPECT_TRUE(user_.quiesce(Epoch{1}, Deadline::after(20s)).has_value());
  leaver.join();
  user_.on_unmapped(Epoch{1});
}

TEST_F(WorkerArenaTest, NextEpochOpensAgain) {
  for (std::uint64_t epoch = 1; epoch <= 3; ++epoch) {
    ipc::Arena arena = allocate(Epoch{epoch});
    ASSERT_TRUE(user_.on_mapped(kSession, arena, kUndefined).has_value());
    EXPECT_TRUE(user_.enter(kSession, Epoch{epoch}).has_value());
    ASSERT_TRUE(user_.quiesce(Epoch{epoch}, Deadline::after(20s)).has_value());
    user_.on_unmapped(Epoch{epoch});
    ASSERT_TRUE(arena.release().has_value());
    EXPECT_EQ(test::device_used_bytes(), 0U);
  }
}

TEST_F(WorkerArenaTest, QuiesceOfAnEpochThatIsNotMappedIsDone) {
  EXPECT_TRUE(user_.quiesce(Epoch{7}, Deadline::after(20s)).has_value());
}

using WorkerArenaDeathTest = WorkerArenaTest;

TEST_F(WorkerArenaDeathTest, UnmappingUnderAUserAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ipc::Arena arena = allocate(Epoch{1});
  ASSERT_TRUE(user_.on_mapped(kSession, arena, kUndefined).has_value());
  const auto use = user_.enter(kSession, Epoch{1});
  EXPECT_DEATH(user_.on_unmapped(Epoch{1}), "launches of this worker use it");
}

}  // namespace
}  // namespace kvferry::worker
