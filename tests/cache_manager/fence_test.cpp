// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Jobs by kernels, of the mover and of the worker's agent, and jobs by layers: what comes after a
// point does not come before it, whoever is held there, and the bytes are right.
#include "cache_manager/faulty_engine_fixture.hpp"
#include "cache_manager/serving_agent.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using ipc::PacketSocket;
using ipc::StageKind;
using ipc::StageRequest;
using test::DeviceCall;
using testing::Each;

class FenceFixture : public FaultyEngineFixture, public testing::WithParamInterface<CopyStrategy> {
 protected:
  static constexpr auto kStores = CopyDirection::kDeviceToHost;
  static constexpr auto kLoads = CopyDirection::kHostToDevice;

  void adjust(TransferEngine::Options& options) override { options.strategy = GetParam(); }
  static Bytes untouched() { return Bytes(kBlockBytes, 0xEE); }
  void expect_whole(std::uint64_t id, CopyDirection direction, const Move& move) {
    const ipc::MoverJobDone done = wait_answer(id);
    EXPECT_THAT(done.results, Each(0)) << done.message;
    EXPECT_TRUE(target(direction, move) == contents(move.block)) << "block " << move.block;
  }
};

/// Kernels that pack straight from or into the pool.
class KernelFenceTest : public FenceFixture {
 protected:
  void SetUp() override {
    FenceFixture::SetUp();
    if (!is_agents()) return;
    agent_device_.emplace(ipc::open_device(spec_), agent_plan_);
    agent_.emplace(*listener_, *arena_, *agent_device_);
  }
  void TearDown() override {
    agent_plan_.let_all_go();
    FenceFixture::TearDown();
    agent_.reset();
  }
  static bool is_agents() { return GetParam() == CopyStrategy::kAgent; }
  test::FaultPlan& kernels() { return is_agents() ? agent_plan_ : plan_; }

  void submit_block(std::uint64_t id, CopyDirection direction, const Move& move) {
    put_source(direction, move, contents(move.block));
    engine_->submit(job(id, direction, {move}));
  }
  void answers_come_after_their_kernels(CopyDirection direction) {
    const Move first{0, 0};
    const Move second{1, 1};
    kernels().hold_kernels();
    submit_block(1, direction, first);
    ASSERT_TRUE(kernels().wait_held(1, test::soon()));
    submit_block(2, direction, second);
    ASSERT_NO_FATAL_FAILURE(wait_lane(direction));
    EXPECT_FALSE(is_answered(1));
    EXPECT_FALSE(is_answered(2));
    EXPECT_TRUE(target(direction, first) == untouched()) << "it is held";
    kernels().let_go();
    expect_whole(1, direction, first);
    ASSERT_TRUE(kernels().wait_held(2, test::soon()));
    ASSERT_NO_FATAL_FAILURE(wait_lane(direction));
    EXPECT_FALSE(is_answered(2));
    kernels().let_all_go();
    expect_whole(2, direction, second);
  }

  test::FaultPlan agent_plan_;  ///< Of the worker, whose device is the same.
  std::optional<test::FaultyDevice> agent_device_;
  std::optional<ServingAgent> agent_;
};

TEST_P(KernelFenceTest, StoreIsAnsweredOnlyAfterItsKernelHasEnded) {
  answers_come_after_their_kernels(kStores);
}

TEST_P(KernelFenceTest, LoadIsAnsweredOnlyAfterItsKernelHasEnded) {
  answers_come_after_their_kernels(kLoads);
}

// What computed the blocks has ended before a store is asked for: one job's contents are the ones
// of its submit, also behind a job that is held, and the next compute comes after its answer.
TEST_P(KernelFenceTest, StoreTakesWhatWasComputedBeforeItAndNothingOfWhatIsAfterItsAnswer) {
  const Move again{0, 1};
  kernels().hold_kernels();
  submit_block(1, kStores, {0, 0});
  ASSERT_TRUE(kernels().wait_held(1, test::soon()));
  kernels().let_go();
  expect_whole(1, kStores, {0, 0});
  put_block(0, contents(77));  // computed anew
  put_place(1, untouched());
  engine_->submit(job(2, kStores, {again}));
  ASSERT_TRUE(kernels().wait_held(2, test::soon()));
  kernels().let_all_go();
  EXPECT_THAT(wait_answer(2).results, Each(0));
  EXPECT_TRUE(place(0) == contents(0)) << "it was answered before the compute";
  EXPECT_TRUE(place(1) == contents(77));
}

TEST_P(KernelFenceTest, DrainEndsOnlyAfterTheKernelsHaveEnded) {
  kernels().hold_kernels();
  submit_block(1, kStores, {0, 0});
  ASSERT_TRUE(kernels().wait_held(1, test::soon()));
  if (!is_agents()) {
    const ipc::Status early =
        engine_->quiesce(ipc::Epoch{1}, ipc::Deadline::after(ipc::Duration::zero()));
    ASSERT_FALSE(early.has_value());
    EXPECT_EQ(early.error().code, ipc::ErrorCode::kTimeout);
    EXPECT_FALSE(is_answered(1));
  }
  kernels().let_all_go();
  expect_whole(1, kStores, {0, 0});
  EXPECT_TRUE(engine_->quiesce(ipc::Epoch{1}, test::soon()).has_value());
}

INSTANTIATE_TEST_SUITE_P(Strategies,
                         KernelFenceTest,
                         testing::Values(CopyStrategy::kKernel, CopyStrategy::kAgent),
                         [](const auto& instance) {
                           return std::string(to_string(instance.param));
                         });

/// Jobs that go layer by layer, which no kernel of the mover moves; the agent is the test.
class LayeredFenceTest : public FenceFixture {
 protected:
  static constexpr std::uint64_t kNew = 5;
  static constexpr Move kMove{0, 0};

  /// Puts the layers of that range, of block 0, into the device's block.
  void put_layers(const ipc::LayerRange& range, const Bytes& bytes) {
    for_layers(range, [&](unsigned char* device, std::size_t packed, std::size_t size) {
      std::memcpy(device, &bytes[packed], size);
      return true;
    });
  }
  bool has_layers(const ipc::LayerRange& range, const Bytes& bytes) {
    return for_layers(range, [&](unsigned char* device, std::size_t packed, std::size_t size) {
      return std::memcmp(device, &bytes[packed], size) == 0;
    });
  }
  template <typename Call> bool for_layers(const ipc::LayerRange& range, Call call) {
    const auto regions = arena_->strided(ipc::GroupId{0}, ipc::RegionSet::kAll, ipc::Rank{0});
    const auto layers = arena_->layers(ipc::GroupId{0}, ipc::RegionSet::kAll);
    bool all = true;
    for (std::size_t i = 0; i < regions.size(); ++i) {
      if (!range.contains(layers[i])) continue;
      all = call(regions[i].base, regions[i].packed_offset, regions[i].block_bytes) && all;
    }
    return all;
  }
  PacketSocket submit_layered(CopyDirection direction) {
    ipc::MoverJob layered = job(1, direction, {kMove});
    layered.layers = ipc::LayerTicket{3, 1};
    engine_->submit(layered);
    PacketSocket agent = next_hello();
    greet(agent);
    return agent;
  }
  std::uint64_t copies() {
    return plan_.calls(DeviceCall::kCopy) + plan_.calls(DeviceCall::kCopyRows) +
           plan_.calls(DeviceCall::kGather);
  }
};

TEST_P(LayeredFenceTest, StoreTakesNoLayerBeforeItsComputeIsSaidToHaveEnded) {
  const Bytes wanted = contents(kNew);
  put_source(kStores, kMove, contents(1));  // what an early copy would take
  PacketSocket agent = submit_layered(kStores);
  std::uint32_t there = 0;
  int parts = 0;
  for (bool last = false; !last; ++parts) {
    const StageRequest request = next_request(agent);
    ASSERT_TRUE(request.layers.has_value());
    ASSERT_EQ(request.kind, StageKind::kAwait);
    const std::uint32_t through = request.layers->through;
    ASSERT_GT(through, there);
    ASSERT_NO_FATAL_FAILURE(wait_lane(kStores));
    EXPECT_LE(copies(), static_cast<std::uint64_t>(parts)) << "of layers that are not computed";
    EXPECT_FALSE(is_answered(1));
    put_layers({there, through}, wanted);
    there = through;
    last = request.layers->last;
    reply(agent, request);
  }
  EXPECT_GT(parts, 1) << "it went as a whole";
  EXPECT_THAT(wait_answer(1).results, Each(0));
  EXPECT_TRUE(place(kMove.place) == wanted);
}

TEST_P(LayeredFenceTest, LoadTellsOfNoLayerBeforeItsCopyHasEnded) {
  const Bytes wanted = contents(kNew);
  put_source(kLoads, kMove, wanted);
  plan_.hold_copies();
  PacketSocket agent = submit_layered(kLoads);
  std::uint32_t there = 0;
  std::uint32_t parts = 0;
  for (bool last = false; !last; ++parts) {
    ASSERT_TRUE(plan_.wait_held(parts + 1, test::soon()));
    ASSERT_NO_FATAL_FAILURE(wait_lane(kLoads));
    const auto early = agent.try_receive();
    ASSERT_TRUE(early.has_value());
    EXPECT_FALSE(early->has_value()) << "its copy is held";
    EXPECT_FALSE(is_answered(1));
    plan_.let_go();
    const StageRequest request = next_request(agent);
    ASSERT_TRUE(request.layers.has_value());
    EXPECT_EQ(request.kind, StageKind::kPublish);
    const std::uint32_t through = request.layers->through;
    ASSERT_GT(through, there);
    EXPECT_TRUE(has_layers({there, through}, wanted)) << "compute reads them from now on";
    there = through;
    last = request.layers->last;
    EXPECT_TRUE(has_layers({through, through + 1}, untouched())) << "their copy is held";
    EXPECT_FALSE(is_answered(1));
    reply(agent, request);
  }
  EXPECT_GT(parts, 1U) << "it went as a whole";
  EXPECT_THAT(wait_answer(1).results, Each(0));
  EXPECT_TRUE(block(kMove.block) == wanted);
}

INSTANTIATE_TEST_SUITE_P(Strategies,
                         LayeredFenceTest,
                         testing::Values(CopyStrategy::kKernel,
                                         CopyStrategy::kAgent,
                                         CopyStrategy::kBatch,
                                         CopyStrategy::kStrided),
                         [](const auto& instance) {
                           return std::string(to_string(instance.param));
                         });

}  // namespace
}  // namespace kvferry::cache_manager
