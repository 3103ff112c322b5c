// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A mover that is killed between two layers: some are where they belong, and nobody will bring the
// others. A fault holds it right before it asks for its last hand-over.
#include "multiproc/layers_killed_fixture.hpp"

#include <gtest/gtest.h>

namespace kvferry {
namespace {

using ipc::ErrorCode;
using ipc::LayerTicket;
using ipc::Transition;

TEST_P(LayersKilledTest, LoadFailsWithTheStepThatWaitsForItsLastLayers) {
  const LayerTicket ticket{31, 2};
  ipc::Step wipe = step();
  wipe.fills = seeded(20, kCount, 1);
  expect_clean(send(wipe));
  const std::size_t answered = count(*worker_, Transition::kStagingAnswer);
  const std::size_t launched = count(*worker_, Transition::kStagingLaunch);
  ipc::Step waits = awaiting(ticket, 20, kCount);
  waits.patience = kForEver;
  const auto answer = send(waits);
  const ipc::JobId load = submit_load(20, kCount, ticket);
  ASSERT_TRUE(run_until([&] { return is_held(answered); })) << mover_->stderr_text();
  EXPECT_FALSE(answer->reply.has_value()) << "the last layers are not there";
  EXPECT_FALSE(completion(load).has_value());

  ASSERT_NO_FATAL_FAILURE(kill_mover({load}, answer));
  EXPECT_EQ(count(*worker_, Transition::kStagingLaunch), launched + hand_overs_ - 1)
      << "layers were announced that nobody has loaded";
  const LayerTicket again{31, 3};
  const auto second = send(awaiting(again, 20, kCount));
  expect_done(submit_load(20, kCount, again));
  expect_clean(second);
  store_by_layers(40, 900, {30, 2}, 2);
  expect_nothing_left();
}

// Compute that needs no more than what was there has it.
TEST_P(LayersKilledTest, FirstLayersOfALoadAreRightAlthoughTheOthersNeverCome) {
  const LayerTicket ticket{31, 2};
  ipc::Step wipe = step();
  wipe.fills = seeded(20, kCount, 1);
  expect_clean(send(wipe));
  const std::size_t answered = count(*worker_, Transition::kStagingAnswer);
  ipc::Step first = awaiting(ticket, 20, kCount);
  first.layers = 1;
  first.patience = kForEver;
  const auto answer = send(first);
  const ipc::JobId load = submit_load(20, kCount, ticket);
  expect_clean(answer);
  ASSERT_TRUE(run_until([&] { return is_held(answered); })) << mover_->stderr_text();
  EXPECT_FALSE(completion(load).has_value());
  ASSERT_NO_FATAL_FAILURE(kill_mover({load}, nullptr));
  const LayerTicket again{31, 3};
  expect_done(submit_load(20, kCount, again));
  expect_clean(send(awaiting(again, 20, kCount)));
}

// The compute stands between its layers, too: it waits for a load that stands there.
TEST_P(LayersKilledTest, StoreFailsWithTheStepThatItFollowsAndLeavesNothing) {
  const LayerTicket loads{31, 2};
  const LayerTicket stores{30, 2};
  const std::size_t answered = count(*worker_, Transition::kStagingAnswer);
  ipc::Step computes = awaiting(loads, 20, kCount);
  computes.fills = seeded(40, kCount, 900);
  computes.computes = stores;
  computes.patience = kForEver;
  const auto answer = send(computes);
  const ipc::JobId load = submit_load(20, kCount, loads);
  ASSERT_TRUE(run_until([&] { return is_held(answered); })) << mover_->stderr_text();
  const std::size_t copied = count(*mover_, Transition::kMoverCopied);
  const ipc::JobId store = submit_store(40, kCount, stores, 2);
  ASSERT_TRUE(run_until([&] { return count(*mover_, Transition::kMoverCopied) > copied; }))
      << "the first layers are not stored while the others are computed";
  EXPECT_FALSE(answer->reply.has_value());
  EXPECT_FALSE(completion(store).has_value());

  ASSERT_NO_FATAL_FAILURE(kill_mover({load, store}, answer));
  expect_job_failed(submit_load(50, kCount, std::nullopt, 2), ErrorCode::kNotFound);
  // Its places can be had again, and the compute's word.
  store_by_layers(40, 950, {30, 3}, 2);
  expect_done(submit_load(50, kCount, LayerTicket{31, 3}, 2));
  verify(50, 950);
  expect_done(submit_load(20, kCount, std::nullopt));
  verify(20, kSeed);
  expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(Ways,
                         LayersKilledTest,
                         testing::ValuesIn(layers_ways()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace kvferry
