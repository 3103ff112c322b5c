// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/shape.hpp"
#include "ipc/os/temp_dir.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

using testing::ElementsAre;

class BenchShapeTest : public testing::Test {
 protected:
  const test::ShortTempDir temp_;
};

TEST_F(BenchShapeTest, EvenShapesHaveTheirChunkOnEveryRank) {
  const auto shape = make_even_shape(6144, 5, 2, temp_.path());
  ASSERT_TRUE(shape) << shape.error().to_string();
  EXPECT_EQ(shape->regions(), 5U);
  EXPECT_EQ(shape->rank_bytes(), 5U * 6144);
  EXPECT_EQ(shape->moved_bytes(), 2U * 5 * 6144);
  const BenchPoint point = shape->point(3, Way::kBoth, Locality::kRandom);
  EXPECT_EQ(point.chunk_bytes, 6144U);
  EXPECT_TRUE(point.geometry.empty());
}

TEST_F(BenchShapeTest, JobsSpanWhatIsAskedForAndAreBoundedInFlight) {
  const auto shape = make_even_shape(4096, 4, 1, temp_.path());
  ASSERT_TRUE(shape);
  const JobPlan small = plan_jobs(*shape, 1, 1 << 20);
  EXPECT_EQ(small.jobs, 64U);
  EXPECT_EQ(small.in_flight, 16U);
  const JobPlan large = plan_jobs(*shape, 1000, 1 << 20);
  EXPECT_EQ(large.jobs, 2U);
  EXPECT_EQ(large.in_flight, 2U);
}

TEST_F(BenchShapeTest, NoTwoJobsShareADeviceBlockAndAllAreInTheArena) {
  const auto shape = make_model_shape("tiny", 1);
  ASSERT_TRUE(shape);
  for (const Locality locality : {Locality::kSequential, Locality::kRandom}) {
    const JobPlan plan = plan_jobs(*shape, 3, 10 * 3 * shape->moved_bytes());
    const auto gpu_blocks = gpu_blocks_for(*shape, {plan});
    ASSERT_TRUE(gpu_blocks);
    std::vector<std::uint32_t> group_blocks;
    for (const ipc::GroupSpec& group : shape->geometry.groups) {
      group_blocks.push_back(*gpu_blocks * group.blocks_percent / 100);
    }
    std::set<std::pair<std::uint32_t, std::uint32_t>> blocks;
    std::size_t items = 0;
    for (const std::uint32_t lane : {0U, 1U}) {
      for (const auto& job : job_blocks(*shape, plan, locality, lane, group_blocks)) {
        std::set<std::pair<std::uint32_t, std::uint32_t>> places;
        for (const worker::SequenceItem& item : job) {
          ++items;
          EXPECT_LT(item.block.value, group_blocks.at(item.group.value));
          blocks.emplace(item.group.value, item.block.value);
          places.emplace(item.group.value, item.index);
        }
        EXPECT_EQ(places.size(), job.size()) << "two blocks at one place of a sequence";
      }
    }
    EXPECT_EQ(blocks.size(), items);
    EXPECT_EQ(items, 2U * plan.jobs * plan.blocks * group_blocks.size());
  }
}

TEST_F(BenchShapeTest, SequentialJobsAreNeighbours) {
  const auto shape = make_even_shape(4096, 2, 1, temp_.path());
  ASSERT_TRUE(shape);
  const auto jobs = job_blocks(*shape, {3, 2, 2}, Locality::kSequential, 1, {12});
  std::vector<std::uint32_t> ids;
  for (const auto& item : jobs.at(1)) ids.push_back(item.block.value);
  EXPECT_THAT(ids, ElementsAre(9, 10, 11));
}

}  // namespace
}  // namespace kvferry::cli
