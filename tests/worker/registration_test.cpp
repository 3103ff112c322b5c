// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/registration.hpp"

#include "ipc/os/temp_dir.hpp"
#include "support/lease_geometry.hpp"
#include "support/region_source.hpp"
#include "worker/host_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

namespace kvferry::worker {
namespace {

using ipc::ErrorCode;
using ipc::RegionMemory;
using test::RegionSource;
using testing::AllOf;
using testing::HasSubstr;

constexpr std::uint64_t kMiB = 1ULL << 20;

class RegistrationTest : public ::testing::Test {
 protected:
  RegistrationTest() {
    identity_.runtime_dir = temp_.path().string();
    identity_.geometry = test::small_geometry(2, 1);
    identity_.arena.gpu_blocks = 64;
    identity_.arena.staging_slot_bytes = 16'384;
    identity_.arena.staging_slots = 2;
  }

  test::ShortTempDir temp_;
  ipc::RankConfig identity_;
  std::unique_ptr<ipc::Device> device_ = test::open_host_device(64 * kMiB);
  RegionSource source_{*device_, ipc::HandleKind::kVmm, 4};
};

TEST_F(RegistrationTest, EngineMemoryIsUsedWhereItIsAndReleasedOnClose) {
  std::vector<RegionMemory> given;
  source_.mend = [&](std::vector<RegionMemory>& regions) { given = regions; };
  auto worker = register_worker(*device_, identity_, source_);
  ASSERT_TRUE(worker.has_value()) << worker.error().to_string();
  EXPECT_EQ((*worker)->view().phase, ipc::LeasePhase::kReady);
  EXPECT_EQ((*worker)->view().group_blocks, std::vector<std::uint32_t>{64});
  {
    const auto use = (*worker)->enter();
    ASSERT_TRUE(use.has_value()) << use.error().to_string();
    const auto regions = use->arena().groups[0].table(ipc::RegionSet::kAll)->regions();
    ASSERT_EQ(regions.size(), given.size());
    for (std::size_t i = 0; i < given.size(); ++i) EXPECT_EQ(regions[i].base, given[i].base.raw());
    EXPECT_EQ((*worker)->enter(use->arena().session, ipc::Epoch{9}).error().code,
              ErrorCode::kStaleEpoch);
  }
  (*worker)->close();
  EXPECT_EQ(source_.release_count(1), 1);
  EXPECT_EQ(test::device_used_bytes(), 0U);
  EXPECT_EQ((*worker)->view().phase, ipc::LeasePhase::kShutdown);
  EXPECT_EQ((*worker)->enter().error().code, ErrorCode::kNotReady);
  (*worker)->close();
}

TEST_F(RegistrationTest, OnlyTheBlocksAreZeroedNotWhatLiesAroundThem) {
  constexpr unsigned char kOther = 0xEE;
  std::vector<RegionMemory> given;
  source_.extra_bytes = 4 * kMiB;
  source_.mend = [&](std::vector<RegionMemory>& regions) {
    // Two regions with gaps between their blocks, which are somebody else's.
    for (const std::size_t i : {2U, 3U}) {
      regions[i].base = regions[0].base + i * kMiB;
      regions[i].block_stride = 4096 + 64;
      regions[i].size_bytes = 64 * regions[i].block_stride;
    }
    given = regions;
    const auto& memory = source_.memory_of(1).front();
    std::memset(memory->address().raw(), kOther, memory->size_bytes());
  };
  const auto worker = register_worker(*device_, identity_, source_);
  ASSERT_TRUE(worker.has_value()) << worker.error().to_string();
  const auto& memory = source_.memory_of(1).front();
  std::vector<unsigned char> expected(memory->size_bytes(), kOther);
  for (const RegionMemory& region : given) {
    const std::uint64_t start = region.base.address - memory->address().address;
    for (std::uint64_t b = 0; b < 64; ++b) {
      std::memset(expected.data() + start + b * region.block_stride, 0, region.block_bytes);
    }
  }
  EXPECT_EQ(std::memcmp(memory->address().raw(), expected.data(), expected.size()), 0);
}

TEST_F(RegistrationTest, RegionsThatDoNotFitAreATypedErrorAndAreReleased) {
  source_.mend = [](std::vector<RegionMemory>& regions) { regions[1].block_bytes = 2048; };
  const auto worker = register_worker(*device_, identity_, source_);
  ASSERT_FALSE(worker.has_value());
  EXPECT_EQ(worker.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(worker.error().message,
              AllOf(HasSubstr("region 1"), HasSubstr("2048"), HasSubstr("4096")));
  EXPECT_EQ(source_.release_count(1), 1);
  EXPECT_EQ(test::device_used_bytes(), 0U);
  source_.mend = nullptr;
  EXPECT_TRUE(register_worker(*device_, identity_, source_).has_value())
      << "the name is free again";
}

TEST_F(RegistrationTest, SecondWorkerOfARankIsRefused) {
  const auto first = register_worker(*device_, identity_, source_);
  ASSERT_TRUE(first.has_value());
  RegionSource other(*device_, ipc::HandleKind::kVmm);
  const auto second = register_worker(*device_, identity_, other);
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().code, ErrorCode::kAlreadyExists) << second.error().to_string();
  EXPECT_EQ(other.allocates, 0);
}

TEST_F(RegistrationTest, MoverOwnedCacheHasNoRegionsToRegister) {
  identity_.cache_owner = ipc::CacheOwner::kMover;
  const auto worker = register_worker(*device_, identity_, source_);
  ASSERT_FALSE(worker.has_value());
  EXPECT_EQ(worker.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(worker.error().message, HasSubstr("--cache-owner worker"));
  EXPECT_EQ(source_.allocates, 0);
}

}  // namespace
}  // namespace kvferry::worker
