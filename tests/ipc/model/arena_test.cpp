// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/lease/arena.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr std::uint32_t kBlocks = 12;
constexpr std::array kOrders = {ArenaOrder::kLayerFirst, ArenaOrder::kLayerFirstMany,
                                ArenaOrder::kBlockFirst};
constexpr std::array kTiny = {"tiny",       "tiny-mla",    "tiny-fp8",
                              "tiny-draft", "tiny-window", "tiny-state"};

class ArenaTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    DeviceSpec spec;
    spec.kind = DeviceKind::kHost;
    spec.host_name = fmt::format("a-{}-{}", ::getpid(), info->name()).substr(0, 64);
    spec.host_capacity_bytes = 64U << 20;
    device_ = open_device(spec);
  }

  [[nodiscard]] std::uint64_t used_bytes() const {
    const Result<std::uint64_t> used = host_device_used_bytes(device_->spec().host_name);
    EXPECT_TRUE(used.has_value()) << (used ? "" : used.error().to_string());
    return used.value_or(~0ULL);
  }

  static ArenaLayout plan(const Geometry& geometry,
                          ArenaOrder order,
                          std::uint32_t blocks = kBlocks) {
    return *plan_arena(geometry, ArenaOptions{order, blocks, 131'072, 2});
  }

  Arena allocate(const ArenaLayout& layout,
                 HandleKind kind = HandleKind::kVmm,
                 AddressRanges* ranges = nullptr,
                 std::uint64_t epoch = 1) {
    Result<Arena> arena = Arena::allocate(*device_, Epoch{epoch}, layout, kind, ranges);
    if (!arena) throw Exception(arena.error());
    return *std::move(arena);
  }

  static void finish(Stream& stream) {
    const UniqueFd done(::eventfd(0, EFD_CLOEXEC));
    ASSERT_TRUE(stream.notify(done.get()).has_value());
    pollfd waiter{done.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&waiter, 1, 20'000), 1);
    ASSERT_TRUE(stream.query().has_value());  // orders memory, which the eventfd does not promise
  }

  std::unique_ptr<Device> device_;
};

/// The packed form of a block that was filled with `seed`, built from the pattern alone.
std::vector<unsigned char> expected_packed(const Geometry& geometry,
                                           GroupId group,
                                           RegionSet set,
                                           Rank rank,
                                           std::uint64_t seed,
                                           const std::vector<kernels::StridedRegion>& regions) {
  std::vector<unsigned char> bytes;
  std::size_t next = 0;
  for (const bool replicated : {true, false}) {
    if (set == (replicated ? RegionSet::kSharded : RegionSet::kReplicated)) continue;
    for (const RegionSpec& spec : geometry.groups[group.value].regions) {
      if (spec.replicated != replicated) continue;
      const kernels::StridedRegion& region = regions.at(next++);
      EXPECT_EQ(region.packed_offset, bytes.size()) << rank.value;
      EXPECT_EQ(region.block_bytes, spec.block_bytes);
      for (std::uint64_t i = 0; i < spec.block_bytes; ++i) {
        const std::uint64_t word = kernels::pattern_word(seed, region.salt, i / 8);
        bytes.push_back(static_cast<unsigned char>(word >> (8 * (i % 8))));
      }
    }
  }
  EXPECT_EQ(next, regions.size());
  return bytes;
}

TEST_F(ArenaTest, GatheredBlocksAreInPackedOrderForEveryGeometryOrderAndSet) {
  const std::unique_ptr<Stream> stream = *device_->make_stream(StreamPriority::kNormal);
  for (const char* name : kTiny) {
    const Geometry geometry = *load_geometry(name, 2);
    for (const ArenaOrder order : kOrders) {
      Arena arena = allocate(plan(geometry, order));
      for (std::uint32_t g = 0; g < geometry.groups.size(); ++g) {
        for (const RegionSet set : {RegionSet::kAll, RegionSet::kSharded, RegionSet::kReplicated}) {
          const GroupId group{g};
          const auto regions = arena.strided(group, set, Rank{1});
          const std::uint64_t bytes = arena.packed_bytes(group, set);
          if (bytes == 0) {
            EXPECT_TRUE(regions.empty());
            continue;
          }
          const auto table = *device_->make_region_table(regions);
          const kernels::SeededBlock block{77 + g, 3, 0};
          const std::array<std::uint32_t, 1> ids = {3};
          ASSERT_TRUE(stream->fill_pattern(*table, std::span(&block, 1)).has_value());
          ASSERT_TRUE(stream->gather(*table, ids, arena.staging_slot(1), bytes).has_value());
          std::vector<unsigned char> packed(bytes);
          const CopyOp op{packed.data(), arena.staging_slot(1), bytes};
          ASSERT_TRUE(stream->copy(CopyDirection::kDeviceToHost, std::span(&op, 1), CopyMode::kEach)
                          .has_value());
          finish(*stream);
          EXPECT_EQ(packed, expected_packed(geometry, group, set, Rank{1}, block.seed, regions))
              << name << " " << to_string(order);
        }
      }
      ASSERT_TRUE(arena.release().has_value());
    }
  }
  EXPECT_EQ(used_bytes(), 0U);
}

TEST_F(ArenaTest, BlockFirstBlockIsItsPackedFormInPlace) {
  const std::unique_ptr<Stream> stream = *device_->make_stream(StreamPriority::kNormal);
  for (const char* name : kTiny) {
    const Geometry geometry = *load_geometry(name, 2);
    Arena arena = allocate(plan(geometry, ArenaOrder::kBlockFirst));
    for (std::uint32_t g = 0; g < geometry.groups.size(); ++g) {
      const auto regions = arena.strided(GroupId{g}, RegionSet::kAll, Rank{0});
      const auto table = *device_->make_region_table(regions);
      const kernels::SeededBlock block{5, 2, 0};
      ASSERT_TRUE(stream->fill_pattern(*table, std::span(&block, 1)).has_value());
      std::vector<unsigned char> run(arena.packed_bytes(GroupId{g}, RegionSet::kAll));
      const DevicePtr first{reinterpret_cast<std::uintptr_t>(regions.front().base) +
                            2 * regions.front().block_stride};
      const CopyOp op{run.data(), first, run.size()};
      ASSERT_TRUE(stream->copy(CopyDirection::kDeviceToHost, std::span(&op, 1), CopyMode::kEach)
                      .has_value());
      finish(*stream);
      EXPECT_EQ(run, expected_packed(geometry, GroupId{g}, RegionSet::kAll, Rank{0}, 5, regions));
    }
  }
}

TEST_F(ArenaTest, SaltsOfShardsDependOnTheRankAndThoseOfReplicasDoNot) {
  Geometry geometry = *load_geometry("tiny-window", 2);
  geometry.groups[0].regions[2].replicated = true;
  const Arena arena = allocate(plan(geometry, ArenaOrder::kLayerFirst));
  std::set<std::uint64_t> salts;
  for (const GroupId group : {GroupId{0}, GroupId{1}}) {
    for (const auto& region : arena.strided(group, RegionSet::kSharded, Rank{0})) {
      EXPECT_TRUE(salts.insert(region.salt).second);
    }
    for (const auto& region : arena.strided(group, RegionSet::kSharded, Rank{1})) {
      EXPECT_TRUE(salts.insert(region.salt).second);
    }
  }
  const auto here = arena.strided(GroupId{0}, RegionSet::kReplicated, Rank{0});
  const auto there = arena.strided(GroupId{0}, RegionSet::kReplicated, Rank{1});
  ASSERT_EQ(here.size(), 1U);
  EXPECT_EQ(here[0].salt, there[0].salt);
  EXPECT_TRUE(salts.insert(here[0].salt).second);
  // The same region has the same salt in every set: a store by parts verifies as a whole.
  EXPECT_EQ(arena.strided(GroupId{0}, RegionSet::kAll, Rank{1})[0].salt, here[0].salt);
}

TEST_F(ArenaTest, ImportSeesTheOwnersBytesAndKeepsThemAlive) {
  for (const HandleKind kind : {HandleKind::kVmm, HandleKind::kLegacy}) {
    const ArenaLayout layout = plan(*load_geometry("tiny", 1), ArenaOrder::kLayerFirstMany);
    Arena owner = allocate(layout, kind);
    Result<std::vector<ExportedHandle>> handles = owner.export_handles();
    ASSERT_TRUE(handles.has_value());
    Result<Arena> attacher =
        Arena::import(*device_, Epoch{1}, layout, *std::move(handles), nullptr);
    ASSERT_TRUE(attacher.has_value()) << attacher.error().to_string();
    for (std::uint32_t i = 0; i < layout.segment_bytes.size(); ++i) {
      std::memset(owner.segment(i).raw(), static_cast<int>(i + 1), layout.segment_bytes[i]);
      const auto* seen = static_cast<const unsigned char*>(attacher->segment(i).raw());
      EXPECT_EQ(seen[0], i + 1);
      EXPECT_EQ(seen[layout.segment_bytes[i] - 1], i + 1);
    }
    EXPECT_FALSE(attacher->export_handles().has_value());
    if (kind == HandleKind::kVmm) {
      ASSERT_TRUE(owner.release().has_value());
      EXPECT_GT(used_bytes(), 0U);
      ASSERT_TRUE(attacher->release().has_value());
    } else {
      ASSERT_TRUE(attacher->release().has_value());
      ASSERT_TRUE(owner.release().has_value());
    }
    EXPECT_FALSE(owner.mapped());
    EXPECT_EQ(used_bytes(), 0U);
  }
}

TEST_F(ArenaTest, ImportThatFailsPartWayClosesWhatItOpened) {
  const ArenaLayout layout = plan(*load_geometry("tiny", 1), ArenaOrder::kLayerFirstMany);
  struct Fault {
    const char* name;
    std::function<void(std::vector<ExportedHandle>&)> apply;
  };
  const std::vector<Fault> faults = {
      {"no descriptor", [](auto& h) { h[3].fd.reset(); }},
      {"wrong object", [](auto& h) { h[3].fd = UniqueFd(::eventfd(0, EFD_CLOEXEC)); }},
      {"too small", [](auto& h) { h[3].size_bytes = 4096; }},
      {"larger than the object", [](auto& h) { h[3].size_bytes *= 1024; }},
      {"other kind", [](auto& h) { h[3].kind = HandleKind::kLegacy; }},
      {"one too few", [](auto& h) { h.pop_back(); }},
      {"none", [](auto& h) { h.clear(); }},
  };
  for (const Fault& fault : faults) {
    Arena owner = allocate(layout);
    std::vector<ExportedHandle> handles = *owner.export_handles();
    fault.apply(handles);
    AddressRanges ranges;
    const Result<Arena> attacher =
        Arena::import(*device_, Epoch{9}, layout, std::move(handles), &ranges);
    ASSERT_FALSE(attacher.has_value()) << fault.name;
    EXPECT_THAT(attacher.error().message, HasSubstr("epoch 9")) << fault.name;
    ASSERT_TRUE(owner.release().has_value());
    // Memory is counted as long as anything maps it.
    EXPECT_EQ(used_bytes(), 0U) << fault.name;
  }
}

TEST_F(ArenaTest, AllocationThatFailsPartWayGivesEverythingBack) {
  const ArenaLayout layout = plan(*load_geometry("tiny", 1), ArenaOrder::kLayerFirstMany, 3000);
  ASSERT_GT(layout.total_bytes(), device_->spec().host_capacity_bytes);
  ASSERT_LT(layout.segment_bytes[0], device_->spec().host_capacity_bytes);
  const Result<Arena> arena =
      Arena::allocate(*device_, Epoch{1}, layout, HandleKind::kVmm, nullptr);
  ASSERT_FALSE(arena.has_value());
  EXPECT_EQ(arena.error().code, ErrorCode::kNoDeviceMemory);
  EXPECT_EQ(used_bytes(), 0U);
}

TEST_F(ArenaTest, AddressesStayOverEpochsAndWhenTheArenaGrows) {
  const Geometry geometry = *load_geometry("tiny", 1);
  const ArenaLayout layout = plan(geometry, ArenaOrder::kLayerFirstMany);
  const ArenaLayout larger = plan(geometry, ArenaOrder::kLayerFirstMany, 600);
  AddressRanges owner_ranges;
  AddressRanges attacher_ranges;
  std::vector<DevicePtr> owner_addresses;
  std::vector<DevicePtr> attacher_addresses;
  for (std::uint64_t epoch = 1; epoch <= 6; ++epoch) {
    const ArenaLayout& now = epoch == 4 ? larger : layout;
    Arena owner = allocate(now, HandleKind::kVmm, &owner_ranges, epoch);
    Arena attacher =
        *Arena::import(*device_, Epoch{epoch}, now, *owner.export_handles(), &attacher_ranges);
    for (std::uint32_t i = 0; i < now.segment_bytes.size(); ++i) {
      if (owner_addresses.size() <= i) {
        owner_addresses.push_back(owner.segment(i));
        attacher_addresses.push_back(attacher.segment(i));
      }
      EXPECT_EQ(owner.segment(i), owner_addresses[i]) << epoch;
      EXPECT_EQ(attacher.segment(i), attacher_addresses[i]) << epoch;
      std::memset(attacher.segment(i).raw(), 1, now.segment_bytes[i]);
    }
  }
  EXPECT_EQ(used_bytes(), 0U);
}

TEST_F(ArenaTest, DestructorAndMoveAssignmentRelease) {
  const ArenaLayout layout = plan(*load_geometry("tiny", 1), ArenaOrder::kLayerFirst);
  {
    Arena arena = allocate(layout);
    const std::uint64_t one = used_bytes();
    EXPECT_GE(one, layout.total_bytes());
    arena = allocate(layout, HandleKind::kVmm, nullptr, 2);
    EXPECT_EQ(used_bytes(), one);
    EXPECT_EQ(arena.epoch(), Epoch{2});
    const Arena moved = std::move(arena);
    EXPECT_EQ(used_bytes(), one);
  }
  EXPECT_EQ(used_bytes(), 0U);
}

/// Memory whose release fails, as a device in trouble makes it; no real backend does on demand.
class StubbornMemory final : public DeviceMemory {
 public:
  StubbornMemory(bool fails, int& releases) : fails_(fails), releases_(releases) {}
  [[nodiscard]] DevicePtr address() const noexcept override { return DevicePtr{4096}; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override { return 4096; }
  [[nodiscard]] HandleKind kind() const noexcept override { return HandleKind::kVmm; }
  [[nodiscard]] Result<ExportedHandle> export_handle() override {
    return KVFERRY_ERROR(kCuda, "no handle");
  }
  [[nodiscard]] Status release() override {
    ++releases_;
    if (fails_) return KVFERRY_ERROR(kCuda, "unmap {} refused", releases_);
    return ok();
  }

 private:
  bool fails_;
  int& releases_;
};

TEST(ArenaReleaseTest, ReleasesEverySegmentAndReportsEveryFailure) {
  int releases = 0;
  ArenaLayout layout;
  std::vector<std::unique_ptr<DeviceMemory>> segments;
  for (const bool fails : {true, false, true, false}) {
    layout.segment_bytes.push_back(4096);
    segments.push_back(std::make_unique<StubbornMemory>(fails, releases));
  }
  Arena arena(Epoch{5}, layout, std::move(segments));
  EXPECT_FALSE(arena.export_handles().has_value());
  const Status status = arena.release();
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(releases, 4);
  EXPECT_EQ(status.error().code, ErrorCode::kCuda);
  EXPECT_THAT(status.error().message,
              AllOf(HasSubstr("epoch 5"), HasSubstr("segment 0 of 4"), HasSubstr("unmap 1 refused"),
                    HasSubstr("segment 2 of 4"), HasSubstr("unmap 3 refused")));
  EXPECT_FALSE(arena.mapped());
  EXPECT_TRUE(arena.release().has_value());
  EXPECT_EQ(releases, 4);
}

TEST(ArenaDeathTest, AddressesOfAReleasedArenaAreNotGivenOut) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  int releases = 0;
  ArenaLayout layout;
  layout.segment_bytes.push_back(4096);
  std::vector<std::unique_ptr<DeviceMemory>> segments;
  segments.push_back(std::make_unique<StubbornMemory>(false, releases));
  Arena arena(Epoch{5}, layout, std::move(segments));
  ASSERT_TRUE(arena.release().has_value());
  EXPECT_DEATH((void)arena.segment(0), "segment 0 of 0 mapped");
}

}  // namespace
}  // namespace kvferry::ipc
