// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// An engine that is killed between two layers of its load, and the next one of its name, which
// comes to the same worker and uses the same layer slot, while the dead one's load is still under
// way. A fault stops the mover right before it asks for the last hand-over of that load.
#include "multiproc/layers_killed_fixture.hpp"

#include <gtest/gtest.h>

#include <charconv>
#include <string>

namespace kvferry {
namespace {

using ipc::ErrorCode;
using ipc::LayerTicket;
using ipc::Transition;

constexpr std::uint32_t kTarget = 20;
constexpr std::uint32_t kSharedSlot = 31;

class LayersRestartTest : public LayersKilledTest {
 protected:
  [[nodiscard]] std::string hold() const override { return "stop"; }

  /// An engine with a step that waits for a load of the blocks from kTarget on.
  void start_engine() {
    loop_.unwatch(client_->fd());
    channel_.reset();
    client_.reset();
    completions_.clear();  // The next client counts its jobs anew.
    const auto& arguments = GetParam().rank_arguments;
    const bool block_first =
        std::count(arguments.begin(), arguments.end(), "--arena=block-first") > 0;
    std::string weights;
    for (const auto byte : weights_.bytes) {
      weights += fmt::format("{:02x}", static_cast<unsigned>(byte));
    }
    engine_.emplace(test::ChildOptions{
        .program = test::sibling_program("kvferry_layers_load_child"),
        .arguments = {temp_.path().string(), GetParam().geometry,
                      block_first ? "block-first" : "layer-first", weights, std::to_string(kTarget),
                      std::to_string(kCount), std::to_string(kSharedSlot), std::to_string(kSeed)}});
    const auto asked = engine_->read_line(test::soon());
    ASSERT_TRUE(asked && asked->starts_with("asked ")) << engine_->stderr_text();
    ticket_ = {kSharedSlot, 0};
    std::from_chars(asked->data() + 6, asked->data() + asked->size(), ticket_.use);
    ASSERT_GT(ticket_.use, 0U);
  }
  /// Kills it. With other contents in the blocks: its step is over then, which is before in the
  /// stream.
  void kill_engine() {
    engine_->kill();
    ipc::Step wipe = step();
    wipe.fills = seeded(kTarget, kCount, 1);
    expect_clean(send(wipe));
  }
  /// Steps that were sent before have begun.
  void wait_begun() {
    bool answered = false;
    ASSERT_TRUE(channel_->ask_memory([&](const auto&) { answered = true; }).has_value());
    ASSERT_TRUE(run_until([&] { return answered; }));
  }

  std::optional<test::ChildProcess> engine_;
  LayerTicket ticket_;  ///< Of its load.
};

// One that came before its death: others are greeted when nothing of it is under way any more.
TEST_P(LayersRestartTest, LateHandOverOfAKilledEngineDoesNotTouchTheNextOnesUseOfItsSlot) {
  const std::size_t answered = count(*worker_, Transition::kStagingAnswer);
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ASSERT_TRUE(run_until([&] { return is_held(answered); })) << mover_->stderr_text();
  ASSERT_NO_FATAL_FAILURE(connect());
  // The dead one's step is not over before its stream is: until then the slot is not given on.
  const auto early = send(awaiting(client_->layer_ticket(kSharedSlot), kTarget, kCount));
  ASSERT_NO_FATAL_FAILURE(wait_begun());
  EXPECT_FALSE(engine_->read_line(ipc::Deadline::after({})).has_value()) << "its step has ended";
  ASSERT_NO_FATAL_FAILURE(kill_engine());
  expect_failed(early, ErrorCode::kBusy);
  const LayerTicket ticket = client_->layer_ticket(kSharedSlot);
  EXPECT_GT(ticket.use, ticket_.use);
  ipc::Step waits = awaiting(ticket, kTarget, kCount);
  waits.patience = kForEver;
  const auto answer = send(waits);
  ASSERT_NO_FATAL_FAILURE(wait_begun());
  ASSERT_FALSE(answer->reply.has_value()) << answer->reply->error().to_string();

  // The last layers, says the dead one's load, are there.
  mover_->signal(SIGCONT);
  ASSERT_TRUE(run_until([&] {
    return count(*worker_, Transition::kStagingAnswer) == answered + hand_overs_;
  })) << "the late hand-over is not answered";
  const std::string refused =
      fmt::format("use {} of layer slot {} is over", ticket_.use, ticket_.slot);
  EXPECT_TRUE(run_until([&] { return worker_->stderr_text().find(refused) != std::string::npos; }))
      << worker_->stderr_text();
  ASSERT_NO_FATAL_FAILURE(wait_begun());
  EXPECT_FALSE(answer->reply.has_value()) << "it took the dead engine's layers for its own";

  expect_done(submit_load(kTarget, kCount, ticket));
  expect_clean(answer);
  // So is a job that names the dead one's use.
  expect_job_refused(submit_load(kTarget, kCount, ticket_), refused);
  // Counted on from a ticket is as good as another one.
  const LayerTicket next{ticket.slot, ticket.use + 1};
  const auto second = send(awaiting(next, kTarget, kCount));
  expect_done(submit_load(kTarget, kCount, next));
  expect_clean(second);
}

TEST_P(LayersRestartTest, EngineThatComesAfterAKilledOneBeginsAnewInItsSlot) {
  const std::size_t answered = count(*worker_, Transition::kStagingAnswer);
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ASSERT_TRUE(run_until([&] { return is_held(answered); })) << mover_->stderr_text();
  engine_->kill();
  mover_->signal(SIGCONT);
  ASSERT_NO_FATAL_FAILURE(connect());
  ipc::Step wipe = step();
  wipe.fills = seeded(kTarget, kCount, 1);
  expect_clean(send(wipe));
  const LayerTicket first = client_->layer_ticket(kSharedSlot);
  const auto answer = send(awaiting(first, kTarget, kCount));
  expect_done(submit_load(kTarget, kCount, first));
  expect_clean(answer);
  store_by_layers(40, 900, client_->layer_ticket(30), 2);
  // With the killed one all that was kept for it has gone.
  EXPECT_TRUE(engine_->wait(test::soon()).has_value());
  expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(Ways,
                         LayersRestartTest,
                         testing::ValuesIn(layers_ways()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace kvferry
