// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Jobs of lanes that may begin so many bytes a second.
#include "cache_manager/faulty_engine_fixture.hpp"
#include "cache_manager/serving_agent.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using ipc::ErrorCode;
using std::chrono_literals::operator""ms;
using testing::Each;

constexpr std::uint64_t kStoreRate = 64ULL << 20;
constexpr std::uint64_t kLoadRate = 1ULL << 20;

/// Stores are slower than a job of theirs is tested for, loads so slow that none of them ends.
class PacedJobsTest : public FaultyEngineFixture, public testing::WithParamInterface<CopyStrategy> {
 protected:
  static constexpr std::uint32_t kBlocks = 64;  // Of a job: two chunks at least.

  void adjust(TransferEngine::Options& options) override {
    options.strategy = GetParam();
    options.store_bytes_per_second = kStoreRate;
    options.load_bytes_per_second = kLoadRate;
  }
  void adjust_arena(ipc::ArenaOptions& options) override { options.gpu_blocks = 2 * kBlocks; }
  void SetUp() override {
    FaultyEngineFixture::SetUp();
    agent_.emplace(*listener_, *arena_, *device_);
  }
  void TearDown() override {
    FaultyEngineFixture::TearDown();
    agent_.reset();
  }

  void submit_blocks(std::uint64_t id,
                     CopyDirection direction,
                     std::uint32_t first,
                     std::uint32_t count,
                     std::uint8_t priority) {
    std::vector<Move> moves;
    for (std::uint32_t i = first; i < first + count; ++i) {
      moves.push_back({i, i});
      put_source(direction, moves.back(), contents(i));
    }
    ipc::MoverJob made = job(id, direction, moves);
    made.urgency.priority = priority;
    engine_->submit(std::move(made));
  }
  void expect_moved(std::uint64_t id,
                    CopyDirection direction,
                    std::uint32_t first,
                    std::uint32_t count) {
    const ipc::MoverJobDone done = wait_answer(id);
    ASSERT_EQ(done.results.size(), count);
    EXPECT_THAT(done.results, Each(0)) << done.message;
    for (std::uint32_t i = first; i < first + count; ++i) {
      EXPECT_TRUE(target(direction, {i, i}) == contents(i)) << "block " << i;
    }
  }

  std::optional<ServingAgent> agent_;
};

TEST_P(PacedJobsTest, TakesAsLongAsItsBytesMayTake) {
  const ipc::TimePoint began = ipc::MonotonicClock::now();
  submit_blocks(1, CopyDirection::kDeviceToHost, 0, kBlocks, 0);
  expect_moved(1, CopyDirection::kDeviceToHost, 0, kBlocks);
  // The last chunk has begun, and what was saved up is gone: at most half of the job.
  constexpr auto kLeast = 1000ms * (kBlocks / 2 * kBlockBytes) / kStoreRate - RateBudget::kSaved;
  EXPECT_GE(ipc::MonotonicClock::now() - began, kLeast);
}

TEST_P(PacedJobsTest, UrgentLoadDoesNotWaitForWhatHasATime) {
  submit_blocks(1, CopyDirection::kHostToDevice, 0, kBlocks, 1);
  for (std::uint64_t id = 2; id < 20; ++id) {  // every eighth turn is the oldest's
    submit_blocks(id, CopyDirection::kHostToDevice, kBlocks, 1, 2);
    expect_moved(id, CopyDirection::kHostToDevice, kBlocks, 1);
  }
  EXPECT_FALSE(is_answered(1));
  engine_->cancel(ipc::JobId{1});
  const ipc::MoverJobDone done = wait_answer(1);
  EXPECT_EQ(done.results.back(), static_cast<std::uint8_t>(ErrorCode::kCancelled));
}

TEST_P(PacedJobsTest, WhatWaitsForItsTimeDoesNotHoldUpADrainOrTheOtherDirection) {
  submit_blocks(1, CopyDirection::kHostToDevice, 0, kBlocks, 1);
  submit_blocks(2, CopyDirection::kDeviceToHost, kBlocks, 1, 0);
  expect_moved(2, CopyDirection::kDeviceToHost, kBlocks, 1);
  EXPECT_FALSE(is_answered(1));
  ASSERT_TRUE(engine_->quiesce(ipc::Epoch{1}, test::soon()).has_value());
  const ipc::MoverJobDone done = wait_answer(1);
  EXPECT_EQ(done.results.back(), static_cast<std::uint8_t>(ErrorCode::kRevoked));
}

INSTANTIATE_TEST_SUITE_P(Ways,
                         PacedJobsTest,
                         testing::Values(CopyStrategy::kStaged, CopyStrategy::kMemcpy),
                         [](const auto& param) { return std::string(to_string(param.param)); });

}  // namespace
}  // namespace kvferry::cache_manager
