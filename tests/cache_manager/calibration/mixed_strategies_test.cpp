// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Jobs of one lane by different strategies at the same time, as a calibration chooses them: every
// byte comes where it belongs.
#include "cache_manager/calibration/curves.hpp"
#include "cache_manager/staged_fixture.hpp"
#include "kvferry/cache_manager/calibration_file.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;

class MixedStrategiesTest : public StagedFixture {
 protected:
  void SetUp() override {
    StagedFixture::SetUp();
    thread_ = std::thread([this] { serve(); });
  }
  void TearDown() override {
    StagedFixture::TearDown();
    ended_ = true;
    thread_.join();
  }

  // Strided is best for up to two blocks, staged for more.
  void adjust(TransferEngine::Options& options) override {
    const ipc::Geometry geometry = ipc::load_geometry("llama-3-8b", 8).value();
    options.strategy = CopyStrategy::kAuto;
    options.calibration = Calibrator::Options{geometry, dir_.path()};
    Calibration kept;
    kept.key = calibration_key(*device_, geometry, ipc::ArenaOrder::kLayerFirst).value();
    kept.to_host = {samples::curves({{0, 10}, {0, 100}, {0, 9e6}, {0, 9e6}}, kSlotBytes)};
    kept.to_host[0].blocks = {1, 2, 16, 32};
    kept.to_host[0].strategies[0].us = {10, 20, 160, 320};
    kept.to_host[0].strategies[1].us = {5, 10, 16e6, 32e6};
    kept.to_device = kept.to_host;
    ASSERT_TRUE(save_calibration(calibration_file(dir_.path(), kept.key), kept).has_value());
  }

  /// The worker's agent: gathers and scatters for every connection, for real.
  void serve() {
    std::vector<ipc::PacketSocket> agents;
    while (!ended_) {
      std::vector<pollfd> waited{{listener_->fd(), POLLIN, 0}};
      for (const ipc::PacketSocket& agent : agents) {
        waited.push_back({holds_slots_ ? -1 : agent.fd(), POLLIN, 0});
      }
      ::poll(waited.data(), waited.size(), 5);
      for (std::size_t i = 1; i < waited.size(); ++i) {
        if (waited[i].revents != 0 && !holds_slots_) answer_one(agents[i - 1]);
      }
      if (waited[0].revents == 0) continue;
      auto accepted = listener_->try_accept();
      if (!accepted || !accepted->has_value()) continue;
      if (!(**accepted).receive(test::soon())) continue;
      greet(**accepted);
      agents.push_back(std::move(**accepted));
    }
  }
  void answer_one(ipc::PacketSocket& agent) {
    const auto packet = agent.receive(test::soon());
    if (!packet) return;
    const auto request = ipc::decode<ipc::StageRequest>(packet->bytes, "StageRequest");
    ASSERT_TRUE(request.has_value());
    ++handed_over_;
    auto* slot = static_cast<unsigned char*>(arena_->staging_slot(request->slot).raw());
    for (const std::uint32_t block : request->blocks) {
      for (const auto& region : arena_->strided(request->group, request->set, ipc::Rank{0})) {
        unsigned char* in_arena = region.base + block * region.block_stride;
        unsigned char* packed = slot + region.packed_offset;
        const bool gathers = request->kind == ipc::StageKind::kGather;
        std::memcpy(gathers ? packed : in_arena, gathers ? in_arena : packed, region.block_bytes);
      }
      slot += arena_->packed_bytes(request->group, request->set);
    }
    reply(agent, *request);
  }

  std::vector<unsigned char> block(std::uint32_t number) {
    std::vector<unsigned char> bytes;
    for (const auto& region :
         arena_->strided(ipc::GroupId{0}, ipc::RegionSet::kAll, ipc::Rank{0})) {
      const unsigned char* start = region.base + number * region.block_stride;
      bytes.insert(bytes.end(), start, start + region.block_bytes);
    }
    return bytes;
  }
  void fill(std::uint32_t number, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const auto& region :
         arena_->strided(ipc::GroupId{0}, ipc::RegionSet::kAll, ipc::Rank{0})) {
      for (std::uint64_t i = 0; i < region.block_bytes; i += 8) {
        const std::uint64_t word = random();
        std::memcpy(region.base + number * region.block_stride + i, &word, 8);
      }
    }
  }
  void copy(std::uint64_t id,
            CopyDirection direction,
            const std::vector<std::pair<std::uint32_t, std::uint64_t>>& blocks,
            std::uint8_t priority = 0) {
    ipc::MoverJob job;
    job.job = ipc::JobId{id};
    job.session = session_;
    job.epoch = ipc::Epoch{1};
    job.direction = direction;
    job.urgency.priority = priority;
    for (const auto& [number, place] : blocks) {
      job.items.push_back(
          {ipc::GroupId{0}, ipc::BlockId{number}, place * kSlotBytes, place * kSlotBytes, true});
    }
    engine_->submit(std::move(job));
  }
  /// Until the calibration has been read: a block goes without the worker.
  void wait_calibrated(std::uint64_t& id) {
    const ipc::Deadline deadline = test::soon();
    while (!deadline.expired()) {
      const std::uint32_t before = handed_over_;
      copy(++id, CopyDirection::kDeviceToHost, {{0, 0}});
      ASSERT_EQ(wait_answer(id).results, std::vector<std::uint8_t>{0});
      if (handed_over_ == before) return;
    }
    FAIL() << "it was never calibrated";
  }

  std::atomic<std::uint32_t> handed_over_ = 0;
  std::atomic<bool> holds_slots_ = false;  ///< The agent answers nothing.
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

TEST_F(MixedStrategiesTest, SmallJobsGoWithoutTheWorkerBesideLargeOnesAndAllBytesAreRight) {
  std::uint64_t id = 0;
  wait_calibrated(id);
  std::mt19937_64 random(1);
  for (int round = 0; round < 30; ++round) {
    std::array<std::vector<unsigned char>, 8> expected;
    std::vector<std::uint32_t> order{0, 1, 2, 3, 4, 5, 6, 7};
    for (std::uint32_t b = 0; b < 8; ++b) fill(b, 100U * static_cast<unsigned>(round) + b);
    for (std::uint32_t b = 0; b < 8; ++b) expected.at(b) = block(b);
    std::shuffle(order.begin(), order.end(), random);
    // Jobs of 1, 2 and 5 blocks, all at once; then back into other blocks.
    const std::array<std::pair<std::size_t, std::size_t>, 3> parts{{{0, 1}, {1, 3}, {3, 8}}};
    const std::uint32_t before = handed_over_;
    for (const auto way : {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
      const std::uint64_t first = id + 1;
      for (const auto& [from, to] : parts) {
        std::vector<std::pair<std::uint32_t, std::uint64_t>> blocks;
        for (std::size_t i = from; i < to; ++i) {
          const std::uint32_t to_block =
              way == CopyDirection::kDeviceToHost ? order[i] : 7 - order[i];
          blocks.emplace_back(to_block, 16 + order[i]);
        }
        copy(++id, way, blocks);
      }
      for (std::uint64_t job = first; job <= id; ++job) {
        const ipc::MoverJobDone done = wait_answer(job);
        for (const std::uint8_t result : done.results) ASSERT_EQ(result, 0) << done.message;
      }
    }
    for (std::uint32_t b = 0; b < 8; ++b) ASSERT_EQ(block(7 - b), expected.at(b)) << round;
    EXPECT_EQ(handed_over_ - before, 10U) << "five blocks each way";
  }
}

// Every kFairShare-th chunk is the oldest job's, which has more to do and no slot to do it in.
TEST_F(MixedStrategiesTest, ATurnWithoutASlotDoesNotHoldUpWhatNeedsNone) {
  std::uint64_t id = 0;
  wait_calibrated(id);
  holds_slots_ = true;
  std::vector<std::pair<std::uint32_t, std::uint64_t>> large;
  for (std::uint32_t i = 0; i < 8; ++i) large.emplace_back(i, 16 + i);
  copy(++id, CopyDirection::kDeviceToHost, large);
  const std::uint64_t held = id;
  for (std::uint32_t i = 0; i < 3 * TransferLane::kFairShare; ++i) {
    copy(++id, CopyDirection::kDeviceToHost, {{0, 0}}, ipc::Urgency::kOrdinary + 1);
    ASSERT_EQ(wait_answer(id).results, std::vector<std::uint8_t>{0});
  }
  EXPECT_FALSE(is_answered(held));
  holds_slots_ = false;
  EXPECT_EQ(wait_answer(held).results, std::vector<std::uint8_t>(8, 0));
}

}  // namespace
}  // namespace kvferry::cache_manager
