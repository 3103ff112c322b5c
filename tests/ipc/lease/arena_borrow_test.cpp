// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "ipc/device/host_fixture.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "support/lease_geometry.hpp"
#include "support/region_source.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace kvferry::ipc {
namespace {

using test::RegionSource;
using testing::AllOf;
using testing::HasSubstr;
using Regions = std::vector<RegionMemory>;

class ArenaBorrowTest : public HostDeviceFixture, public testing::WithParamInterface<HandleKind> {
 protected:
  [[nodiscard]] Result<Arena> borrow(std::uint64_t epoch = 1) {
    return Arena::borrow(*device_, Epoch{epoch}, plan_, kind_, source_);
  }
  Arena borrow_ok(std::uint64_t epoch = 1) {
    auto arena = borrow(epoch);
    if (!arena) throw Exception(arena.error());
    return std::move(arena).value();
  }
  /// The error, after which nothing may be left.
  Error refused(std::function<void(Regions&)> mend) {
    source_.mend = std::move(mend);
    const auto arena = borrow();
    EXPECT_FALSE(arena.has_value());
    EXPECT_EQ(source_.release_count(1), 1);
    EXPECT_EQ(used(), 0U);
    return arena ? Error{} : arena.error();
  }

  static std::string test_name(std::string_view suffix) {
    std::string name = device_name(suffix);
    std::replace(name.begin(), name.end(), '/', '.');
    return name;
  }
  static std::unique_ptr<Device> open_named(std::uint64_t capacity, std::string_view suffix) {
    DeviceSpec named = spec(capacity);
    named.host_name = test_name(suffix);
    return open_device(named);
  }
  static std::uint64_t used() { return host_device_used_bytes(test_name("")).value(); }

  const HandleKind kind_ = GetParam();
  const Geometry geometry_ = test::small_geometry(2, 1);  // four regions of 64 blocks of 4 KiB
  ArenaLayout plan_ = plan_arena(geometry_, {ArenaOrder::kLayerFirst, 64, 16'384, 2}).value();
  std::unique_ptr<Device> device_ = open_named(64 * kMiB, "");
  RegionSource source_{*device_, kind_, 3};
};

TEST_P(ArenaBorrowTest, EachAllocationIsOneSegmentHoweverManyRegionsShareIt) {
  const Arena arena = borrow_ok();
  const ArenaLayout& layout = arena.layout();
  ASSERT_TRUE(layout.validate(geometry_).has_value());
  EXPECT_EQ(arena.borrowed().size(), 2U);
  EXPECT_EQ(layout.segment_bytes.size(), 3U) << "two of the engine, one for the staging ring";
  EXPECT_EQ(layout.regions[0].offset, RegionSource::kMargin);
  EXPECT_EQ(layout.regions[1].segment, 0U);
  EXPECT_EQ(layout.regions[2].segment, 0U);
  EXPECT_EQ(layout.regions[3].segment, 1U);
  EXPECT_EQ(layout.staging.segment, 2U);
  EXPECT_EQ(arena.export_handles()->size(), 3U);
}

TEST_P(ArenaBorrowTest, AttacherFindsEveryRegionWhereTheEngineHasIt) {
  Arena arena = borrow_ok();
  for (const Region& region : arena.layout().regions) {
    std::memset((arena.segment(region.segment) + region.offset).raw(),
                static_cast<int>(0x10 + region.layer * 2 + (region.kind == RegionKind::kValue)),
                region.block_bytes);
  }
  {
    auto seen = Arena::import(*device_, Epoch{1}, arena.layout(), *arena.export_handles(), nullptr);
    ASSERT_TRUE(seen.has_value()) << seen.error().to_string();
    for (const Region& region : seen->layout().regions) {
      const auto* first =
          static_cast<const unsigned char*>((seen->segment(region.segment) + region.offset).raw());
      EXPECT_EQ(*first, 0x10 + region.layer * 2 + (region.kind == RegionKind::kValue));
    }
  }
  EXPECT_TRUE(arena.release().has_value());
}

TEST_P(ArenaBorrowTest, ReleaseIsAskedForOnceAndTheMemoryIsGoneAfterIt) {
  Arena arena = borrow_ok();
  EXPECT_TRUE(*arena.borrowed().front()->still_allocated());
  EXPECT_GT(used(), 0U);
  EXPECT_TRUE(arena.release().has_value());
  EXPECT_FALSE(arena.mapped());
  EXPECT_EQ(used(), 0U);
  for (const auto& memory : arena.borrowed()) EXPECT_FALSE(*memory->still_allocated());
  EXPECT_TRUE(arena.release().has_value());
  EXPECT_EQ(source_.release_count(1), 1);
}

TEST_P(ArenaBorrowTest, DestructorReleasesToo) {
  { const Arena arena = borrow_ok(); }
  EXPECT_EQ(source_.release_count(1), 1);
  EXPECT_EQ(used(), 0U);
}

TEST_P(ArenaBorrowTest, MovedArenaIsReleasedOnce) {
  Arena first = borrow_ok();
  Arena second = std::move(first);
  first = borrow_ok(2);
  EXPECT_TRUE(second.release().has_value());
  EXPECT_EQ(source_.release_count(1), 1);
  EXPECT_EQ(source_.release_count(2), 0);
  first = std::move(second);
  EXPECT_EQ(source_.release_count(2), 1);
  EXPECT_EQ(used(), 0U);
}

TEST_P(ArenaBorrowTest, MemoryThatTheEngineKeepsIsSeen) {
  source_.keeps_memory = true;
  Arena arena = borrow_ok();
  EXPECT_TRUE(arena.release().has_value());
  EXPECT_TRUE(*arena.borrowed().front()->still_allocated());
  source_.free_all();
  EXPECT_FALSE(*arena.borrowed().front()->still_allocated());
}

TEST_P(ArenaBorrowTest, ReleaseThatFailsOrThrowsIsAnErrorAndNotCalledAgain) {
  source_.before_release = [] { return KVFERRY_ERROR(kBusy, "tensors are in use"); };
  Arena arena = borrow_ok();
  const Status failed = arena.release();
  ASSERT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().code, ErrorCode::kBusy);
  EXPECT_THAT(failed.error().message, AllOf(HasSubstr("epoch 1"), HasSubstr("the engine")));
  EXPECT_TRUE(arena.release().has_value());
  EXPECT_EQ(source_.release_count(1), 1);

  source_.before_release = []() -> Status { throw std::runtime_error("no such tensor"); };
  Arena next = borrow_ok(2);
  const Status threw = next.release();
  ASSERT_FALSE(threw.has_value());
  EXPECT_THAT(threw.error().message, AllOf(HasSubstr("epoch 2"), HasSubstr("no such tensor")));
  source_.before_release = []() -> Status { throw 7; };
  Arena third = borrow_ok(3);
  EXPECT_FALSE(third.release().has_value());
  source_.free_all();
  EXPECT_EQ(used(), 0U);
}

TEST_P(ArenaBorrowTest, AllocateThatFailsOrThrowsIsAnErrorAndNothingIsReleased) {
  source_.before_allocate = [] { return KVFERRY_ERROR(kNoDeviceMemory, "none left"); };
  const auto failed = borrow();
  ASSERT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().code, ErrorCode::kNoDeviceMemory);
  source_.before_allocate = []() -> Status { throw std::runtime_error("out of tensors"); };
  const auto threw = borrow();
  ASSERT_FALSE(threw.has_value());
  EXPECT_THAT(threw.error().message, HasSubstr("out of tensors"));
  EXPECT_TRUE(source_.releases.empty());
}

TEST_P(ArenaBorrowTest, RegionsMustBeAsManyAsTheGeometrySays) {
  const Error error = refused([](Regions& regions) { regions.pop_back(); });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.message, AllOf(HasSubstr("3 regions"), HasSubstr("geometry has 4")));
}

TEST_P(ArenaBorrowTest, BasesMustBeAligned) {
  EXPECT_THAT(refused([](Regions& regions) { regions[2].base = {}; }).message,
              AllOf(HasSubstr("region 2 (key of layer 1"), HasSubstr("null")));
  source_.releases.clear();
  EXPECT_THAT(refused([](Regions& regions) { regions[1].base.address += 8; }).message,
              AllOf(HasSubstr("region 1 (value of layer 0"), HasSubstr("16 bytes")));
}

TEST_P(ArenaBorrowTest, BlockBytesMustBeThoseOfTheGeometry) {
  const Error error = refused([](Regions& regions) { regions[1].block_bytes = 2048; });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.message, AllOf(HasSubstr("region 1"), HasSubstr("2048"), HasSubstr("4096")));
}

TEST_P(ArenaBorrowTest, StridesMustHoldABlock) {
  EXPECT_THAT(refused([](Regions& regions) { regions[3].block_stride = 4095; }).message,
              AllOf(HasSubstr("region 3"), HasSubstr("4096"), HasSubstr("4095")));
}

TEST_P(ArenaBorrowTest, AllBlocksMustFitTheRegion) {
  EXPECT_THAT(refused([](Regions& regions) { regions[0].size_bytes -= 1; }).message,
              AllOf(HasSubstr("region 0"), HasSubstr("64 blocks"), HasSubstr("262143 bytes")));
  source_.releases.clear();
  // Wraps around 2^64.
  EXPECT_THAT(refused([](Regions& regions) { regions[0].block_stride = 1ULL << 60; }).message,
              HasSubstr("region 0"));
}

TEST_P(ArenaBorrowTest, RegionsMustEndInsideTheirAllocation) {
  const Error error = refused([](Regions& regions) {
    regions[3].base = regions[3].base + (2 * kMiB - 8192);
    regions[3].size_bytes = kMiB;
  });
  EXPECT_THAT(error.message, AllOf(HasSubstr("region 3"), HasSubstr("262144 bytes"),
                                   HasSubstr("ends after 4096")));
}

TEST_P(ArenaBorrowTest, RegionsMustNotOverlap) {
  const Error error = refused([](Regions& regions) { regions[1].base = regions[0].base + 4096; });
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.message, AllOf(HasSubstr("overlaps"), HasSubstr("region 0 (key of layer 0"),
                                   HasSubstr("region 1 (value of layer 0")));
}

TEST_P(ArenaBorrowTest, RegionsMayBeInterleavedInOneStride) {
  source_.mend = [](Regions& regions) {
    // K and V of a block side by side, as [blocks, 2, ...] tensors have them.
    regions[1].base = regions[0].base + 4096;
    for (const std::size_t i : {0U, 1U}) {
      regions[i].block_stride = 8192;
      regions[i].size_bytes = 64 * 8192 - i * 4096;
    }
    regions[2].base = regions[0].base + 64 * 8192;
  };
  Arena arena = borrow_ok();
  EXPECT_EQ(arena.strided(GroupId{0}, RegionSet::kAll, Rank{0})[1].block_stride, 8192U);
  EXPECT_TRUE(arena.layout().validate(geometry_).has_value());
}

TEST_P(ArenaBorrowTest, BlockFirstRegionsMustFormOneRun) {
  plan_ = plan_arena(geometry_, {ArenaOrder::kBlockFirst, 64, 0, 0}).value();
  EXPECT_THAT(refused([](Regions&) {}).message, HasSubstr("block-first group 0"));
}

TEST_P(ArenaBorrowTest, MemoryOfTheOtherKindOfHandlesIsRefusedWithTheRemedy) {
  const HandleKind other = kind_ == HandleKind::kVmm ? HandleKind::kLegacy : HandleKind::kVmm;
  const auto memory = allocate(*device_, kMiB, other);
  source_.mend = [&](Regions& regions) { regions[3].base = memory->address(); };
  const auto arena = borrow();
  ASSERT_FALSE(arena.has_value());
  EXPECT_EQ(arena.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(
      arena.error().message,
      AllOf(HasSubstr("region 3"), HasSubstr(fmt::format("--handles {}", to_string(other)))));
  EXPECT_EQ(source_.release_count(1), 1);
}

TEST_P(ArenaBorrowTest, MemoryOfAnotherDeviceIsRefusedNamingBoth) {
  const auto elsewhere = open_named(16 * kMiB, "x");
  const auto memory = allocate(*elsewhere, kMiB, kind_);
  source_.mend = [&](Regions& regions) { regions[2].base = memory->address(); };
  const auto arena = borrow();
  ASSERT_FALSE(arena.has_value());
  EXPECT_THAT(arena.error().message,
              AllOf(HasSubstr("region 2"), HasSubstr(elsewhere->spec().host_name),
                    HasSubstr(device_->spec().host_name)));
  EXPECT_EQ(used(), 0U);
}

TEST_P(ArenaBorrowTest, MemoryThatIsNoDeviceMemoryIsRefused) {
  std::vector<std::byte> heap(kMiB + 16);
  const auto address = reinterpret_cast<std::uintptr_t>(heap.data());
  EXPECT_THAT(refused([&](Regions& regions) {
                regions[0].base = DevicePtr{(address + 15) / 16 * 16};
              }).message,
              AllOf(HasSubstr("region 0"), HasSubstr("no memory that this process allocated")));
}

TEST_P(ArenaBorrowTest, ImportedMemoryCannotBeLentOn) {
  const auto owned = allocate(*device_, kMiB, kind_);
  const auto imported = device_->import(owned->export_handle().value(), nullptr).value();
  ASSERT_NE(imported->address(), owned->address());
  EXPECT_FALSE(device_->borrow(imported->address()).has_value());
  EXPECT_TRUE(device_->borrow(owned->address()).has_value());
}

TEST_P(ArenaBorrowTest, FreedMemoryIsNotExportedUnderItsOldAddress) {
  auto owned = allocate(*device_, kMiB, kind_);
  const auto lent = device_->borrow(owned->address() + 4096).value();
  EXPECT_EQ(lent->address(), owned->address());
  EXPECT_EQ(lent->size_bytes(), owned->size_bytes());
  ASSERT_TRUE(owned->release().has_value());
  EXPECT_FALSE(lent->export_handle().has_value());
  EXPECT_FALSE(*lent->still_allocated());
  // Most likely at the same address again, and not the same memory.
  const auto next = allocate(*device_, kMiB, kind_);
  EXPECT_FALSE(lent->export_handle().has_value());
  EXPECT_NE(device_->borrow(next->address()).value()->id(), lent->id());
}

TEST_P(ArenaBorrowTest, OverlapOfTwoEpochsIsFound) {
  const Arena first = borrow_ok();
  const Arena second = borrow_ok(2);
  EXPECT_EQ(first.overlap_with(second), "");
  source_.mend = [&](Regions& regions) {
    regions[3].base = first.segment(1) + first.layout().regions[3].offset;
  };
  const Arena third = borrow_ok(3);
  EXPECT_EQ(third.overlap_with(first), "region 3 of epoch 3 and region 3 of epoch 1");
}

INSTANTIATE_TEST_SUITE_P(Handles,
                         ArenaBorrowTest,
                         testing::Values(HandleKind::kVmm, HandleKind::kLegacy),
                         [](const auto& param) { return std::string(to_string(param.param)); });

}  // namespace
}  // namespace kvferry::ipc
