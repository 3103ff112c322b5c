// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Layer-wise loads and stores: manager, worker and mover are real processes, this one is the
// engine.
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "kvferry/ipc/wire/codec.hpp"
#include "multiproc/layers_fixture.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <csignal>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::LayerTicket;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

TEST_P(LayersTest, ComputeMayStartBeforeItsLoadAndFindsEachLayer) {
  constexpr std::uint32_t kCount = 12;
  fill_host(kCount);
  for (std::uint64_t use = 1; use <= 6; ++use) {
    const LayerTicket ticket{3, use};
    ipc::Step verify = awaiting(ticket, 20, kCount);
    verify.recorded = use % 2 == 0;
    // What lies there now is what an earlier use loaded.
    ipc::Step wipe = step();
    wipe.fills = seeded(20, kCount, 1);
    expect_clean(send(wipe));
    std::shared_ptr<Answer> answer;
    if (use % 3 != 0) answer = send(verify);
    const ipc::JobId load = submit_load(20, kCount, ticket);
    if (use % 3 == 0) {
      expect_done(load);
      answer = send(verify);
    }
    expect_clean(answer);
    expect_done(load);
  }
}

TEST_P(LayersTest, StoreFollowsTheComputeThatItsEngineHasOnlyEnqueued) {
  constexpr std::uint32_t kCount = 12;
  for (std::uint8_t round = 1; round <= 4; ++round) {
    ipc::Step fill = step();
    fill.fills = seeded(0, kCount, kSeed + round);
    fill.recorded = round % 2 == 0;
    fill.computes = LayerTicket{5, round};
    std::shared_ptr<Answer> filled;
    if (round > 2) filled = send(fill);
    const ipc::JobId store = submit_store(0, kCount, fill.computes, round);
    if (round <= 2) filled = send(fill);
    expect_done(store);
    expect_clean(filled);
    expect_done(submit_load(30, kCount, std::nullopt, round));
    ipc::Step verify = step();
    verify.verifies = seeded(30, kCount, kSeed + round);
    expect_clean(send(verify));
  }
}

// The store waits for a step that itself waits for a load: neither is early, whoever is late.
TEST_P(LayersTest, StoreBehindAStepThatWaitsForALoadBeginsAfterIt) {
  constexpr std::uint32_t kCount = 6;
  fill_host(kCount);
  const LayerTicket loads{0, 1};
  const LayerTicket stores{1, 1};
  const ipc::JobId store = submit_store(40, kCount, stores, 2);
  // Another step is before it in the stream, and waits for a load.
  const auto first = send(awaiting(loads, 20, kCount));
  ipc::Step fill = step();
  fill.fills = seeded(40, kCount, 500);
  fill.computes = stores;
  const auto second = send(fill);
  expect_done(submit_load(10, kCount, std::nullopt));  // traffic beside them goes on
  EXPECT_FALSE(first->reply.has_value());
  EXPECT_FALSE(completion(store).has_value());
  expect_done(submit_load(20, kCount, loads));
  expect_clean(first);
  expect_clean(second);
  expect_done(store);
  expect_done(submit_load(50, kCount, std::nullopt, 2));
  ipc::Step verify = step();
  verify.verifies = seeded(50, kCount, 500);
  expect_clean(send(verify));
}

TEST_P(LayersTest, LoadOfWhatIsNotThereFailsTheStepThatWaits) {
  const LayerTicket ticket{7, 1};
  const auto answer = send(awaiting(ticket, 20, 3));
  const ipc::JobId load = submit_load(20, 3, ticket);
  expect_job_failed(load, ErrorCode::kNotFound);
  expect_failed(answer, ErrorCode::kNotFound);
}

// What is computed of blocks that never came is found under no key.
TEST_P(LayersTest, StoreOfAStepWhoseLoadFailsFailsWithIt) {
  const LayerTicket loads{33, 1};
  const LayerTicket stores{34, 1};
  ipc::Step computes = awaiting(loads, 20, 3);
  computes.fills = seeded(40, 3, 900);
  computes.computes = stores;
  const auto answer = send(computes);
  const ipc::JobId store = submit_store(40, 3, stores, 2);
  const ipc::JobId load = submit_load(20, 3, loads);
  expect_job_failed(load, ErrorCode::kNotFound);
  expect_failed(answer, ErrorCode::kNotFound);
  expect_job_failed(store, ErrorCode::kCancelled);
  expect_job_failed(submit_load(50, 3, std::nullopt, 2), ErrorCode::kNotFound);
}

TEST_P(LayersTest, StepWhoseLoadNeverComesEndsAtItsDeadline) {
  ipc::Step verify = awaiting({9, 1}, 20, 3);
  verify.patience = 100ms;
  expect_failed(send(verify), ErrorCode::kTimeout);
  // The slot serves on.
  fill_host(3);
  const LayerTicket ticket{9, 2};
  const auto answer = send(awaiting(ticket, 20, 3));
  expect_done(submit_load(20, 3, ticket));
  expect_clean(answer);
}

TEST_P(LayersTest, LaterUseOfASlotIsBusyAndLeavesTheStepThatRunsAlone) {
  constexpr std::uint32_t kCount = 4;
  fill_host(kCount);
  ipc::Step wipe = step();
  wipe.fills = seeded(20, kCount, 1);
  expect_clean(send(wipe));
  for (std::uint64_t use = 1; use < 100; use += 3) {
    const auto answer = send(awaiting({33, use}, 20, kCount));
    const auto later = send(awaiting({33, use + 1}, 20, kCount));
    // It would say that all layers of these blocks are there.
    const ipc::JobId early = submit_load(40, kCount, LayerTicket{33, use + 2});
    if (!is_refused(early, fmt::format("begin use {} in another slot", use + 2))) {
      expect_failed(answer, ErrorCode::kStaleEpoch);
      expect_failed(later, ErrorCode::kStaleEpoch);
      continue;
    }
    EXPECT_FALSE(answer->reply.has_value());
    expect_done(submit_load(20, kCount, LayerTicket{33, use}));
    expect_clean(answer);
    expect_failed(later, ErrorCode::kBusy);
    const auto next = send(awaiting({33, use + 3}, 40, kCount));
    expect_done(submit_load(40, kCount, LayerTicket{33, use + 3}));
    return expect_clean(next);
  }
  FAIL() << "no step began before the load of a later use";
}

// What is told of a use before its slot is free for it is kept for its step.
TEST_P(LayersTest, StepOfAUseThatWasRefusedWhileItsSlotWasBusyFailsAtOnce) {
  constexpr std::uint32_t kCount = 4;
  fill_host(kCount);
  for (std::uint64_t use = 1; use < 100; use += 2) {
    const std::string text = fmt::format("begin use {} in another slot", use + 1);
    const auto answer = send(awaiting({34, use}, 20, kCount));
    if (!is_refused(submit_load(40, kCount, LayerTicket{34, use + 1}), text)) {
      expect_failed(answer, ErrorCode::kStaleEpoch);
      continue;
    }
    expect_done(submit_load(20, kCount, LayerTicket{34, use}));
    expect_clean(answer);
    ipc::Step next = awaiting({34, use + 1}, 40, kCount);
    next.patience = kForEver;
    const auto refused = send(next);
    ASSERT_TRUE(run_until([&] { return refused->reply.has_value(); }));
    ASSERT_FALSE(refused->reply->has_value());
    EXPECT_THAT(refused->reply->error().message, testing::HasSubstr(text));
    return;
  }
  FAIL() << "no step began before the load of a later use";
}

TEST_P(LayersTest, StoreOfAStepThatIsNotLaunchedFailsWithIt) {
  fill_host(2);
  const auto runs = send(awaiting({35, 1}, 20, 2));
  ipc::Step computes = awaiting({35, 2}, 20, 2);
  computes.fills = seeded(40, 2, 800);
  computes.computes = LayerTicket{36, 1};
  const auto refused = send(computes);
  const ipc::JobId store = submit_store(40, 2, computes.computes, 4);
  expect_done(submit_load(20, 2, LayerTicket{35, 1}));
  expect_clean(runs);
  expect_failed(refused, ErrorCode::kBusy);
  expect_job_failed(store, ErrorCode::kBusy);
}

TEST_P(LayersTest, KilledMoverFailsTheStepThatWaitsAndTheNextOneServes) {
  constexpr std::uint32_t kCount = 8;
  fill_host(kCount);
  mover_->signal(SIGSTOP);
  const LayerTicket ticket{11, 1};
  const auto answer = send(awaiting(ticket, 20, kCount));
  const ipc::JobId load = submit_load(20, kCount, ticket);
  mover_->kill();
  expect_job_failed(load, ErrorCode::kPeerDied);
  expect_failed(answer, ErrorCode::kPeerDied);
  ASSERT_TRUE(sees_offload(false)) << "the answers came before the news";
  start_mover();
  ASSERT_TRUE(sees_offload(true));
  const LayerTicket again{11, 2};
  const auto second = send(awaiting(again, 20, kCount));
  expect_done(submit_load(20, kCount, again));
  expect_clean(second);
}

TEST_P(LayersTest, KilledManagerFailsTheStepThatWaitsAndTheNextOneServes) {
  constexpr std::uint32_t kCount = 8;
  fill_host(kCount);
  ASSERT_TRUE(mover_->stop());
  const LayerTicket ticket{12, 1};
  ipc::Step waits = awaiting(ticket, 20, kCount);
  waits.patience = kForEver;
  const auto answer = send(waits);
  (void)submit_load(20, kCount, ticket);
  // Compute that would have been stored goes on without.
  ipc::Step computes = step();
  computes.fills = seeded(40, 2, 800);
  computes.computes = LayerTicket{18, 1};
  computes.patience = kForEver;
  const auto beside = send(computes);
  manager_->kill();
  expect_failed(answer, ErrorCode::kPeerDied);
  expect_clean(beside);
  mover_->signal(SIGCONT);
  ASSERT_TRUE(run_until([&] {
    (void)client_->poll(0);
    return !client_->state().manager_connected;
  }));
  manager_.emplace(start({"manager", "--host-memory=64MiB"}));
  ASSERT_TRUE(run_until([&] {
    (void)client_->poll(0);
    return client_->state().manager_connected && client_->state().offload_ready;
  }));
  // Contents of their own: those of before may be there again.
  ipc::Step fill = step();
  fill.fills = seeded(0, kCount, 700);
  expect_clean(send(fill));
  expect_done(submit_store(0, kCount, std::nullopt, 3));
  const LayerTicket again{12, 2};
  ipc::Step verify = step();
  verify.awaits = again;
  verify.verifies = seeded(20, kCount, 700);
  const auto second = send(verify);
  expect_done(submit_load(20, kCount, again, 3));
  expect_clean(second);
}

// It may have been sent while there was one.
TEST_P(LayersTest, StepThatComesAfterItsManagersEndFailsAtOnce) {
  manager_->kill();
  ASSERT_TRUE(run_until([&] {
    return worker_->stderr_text().find("the manager is gone") != std::string::npos;
  })) << worker_->stderr_text();
  ipc::Step both = awaiting({12, 1}, 20, 4);
  both.fills = seeded(40, 2, 800);
  both.computes = LayerTicket{18, 1};
  both.patience = kForEver;
  expect_failed(send(both), ErrorCode::kPeerDied);
  ipc::Step computes = step();
  computes.fills = seeded(40, 2, 800);
  computes.computes = LayerTicket{18, 2};
  computes.patience = kForEver;
  expect_clean(send(computes));
}

TEST_P(LayersTest, KilledEngineLetsOthersStepsGoOn) {
  const LayerTicket ticket{14, 1};
  ipc::Step waits = awaiting(ticket, 20, 4);
  waits.patience = kForEver;
  std::string hex;
  for (const auto byte : ipc::encode(waits)) {
    hex += fmt::format("{:02x}", static_cast<unsigned>(byte));
  }
  test::ChildProcess engine({.program = test::sibling_program("kvferry_layers_engine_child"),
                             .arguments = {temp_.path().string(), hex}});
  ASSERT_TRUE(engine.wait_line("begun", test::soon())) << engine.stderr_text();
  ipc::Step fill = step();
  fill.fills = seeded(0, 4);
  const auto behind = send(fill);  // in the stream that waits for a load which nobody asked for
  EXPECT_FALSE(behind->reply.has_value());
  engine.kill();
  expect_clean(behind);
}

// Nobody computes any more what an engine that ended wanted stored: neither may its places stay
// taken, nor may a mover be ended for what keeps it.
TEST_P(LayersTest, StoreOfAnEngineThatEndsDoesNotWaitForComputeThatNeverComes) {
  constexpr std::chrono::seconds kPromptly{5};
  const std::vector<worker::StoreTarget> targets = {{GroupId{0}, hash(0, 9)}};
  const auto gathers = [this] {
    const auto dir = ipc::RuntimeDir::open(temp_.path().string(), "default").value();
    const auto trace = ipc::read_transitions(dir).value();
    return std::count_if(trace.records.begin(), trace.records.end(), [](const auto& record) {
      return record.transition == ipc::Transition::kStagingLaunch;
    });
  };
  auto doomed = worker::Client::connect(client_options(), test::soon()).value();
  ASSERT_TRUE(doomed->wait_ready(true, test::soon()).has_value());
  const auto slots = doomed->reserve_store(targets, test::soon()).value();
  const std::vector<worker::StoreItem> items = {{GroupId{0}, BlockId{0}, slots.at(0).slot}};
  ASSERT_TRUE(doomed->submit_store(items, LayerTicket{17, 1}).has_value());
  ASSERT_TRUE(run_until([&] { return gathers() > 0; }));
  const ipc::TimePoint ended = ipc::MonotonicClock::now();
  doomed.reset();
  bool is_free = false;
  EXPECT_TRUE(run_until([&] {
    if (is_free) return true;
    const auto again = client_->reserve_store(targets, test::soon()).value();
    is_free = again.at(0).outcome == worker::Reservation::kReserved;
    return is_free;
  }));
  EXPECT_LT(ipc::MonotonicClock::now() - ended, kPromptly);
  EXPECT_FALSE(mover_->wait_zombie(ipc::Deadline::after({})));
}

TEST_P(LayersTest, CancelledStoreDoesNotWaitForComputeThatNeverComes) {
  const ipc::JobId store = submit_store(0, 4, LayerTicket{13, 1});
  ASSERT_TRUE(client_->cancel(store).has_value());
  expect_job_failed(store, ErrorCode::kCancelled);
}

TEST_P(LayersTest, ClearEndsStepsAndStoresThatWait) {
  ipc::Step verify = awaiting({15, 1}, 20, 3);
  verify.patience = 60s;
  const auto answer = send(verify);
  // Answered in the order of the channel: the step has begun then.
  bool begun = false;
  ASSERT_TRUE(channel_->ask_memory([&](const auto&) { begun = true; }).has_value());
  ASSERT_TRUE(run_until([&] { return begun; }));
  const ipc::JobId store = submit_store(0, 4, LayerTicket{16, 1});
  const auto cleared = client_->clear(worker::HostPolicy::kDrop, test::soon());
  ASSERT_TRUE(cleared.has_value()) << cleared.error().to_string();
  expect_failed(answer, ErrorCode::kRevoked);
  ASSERT_TRUE(run_until([&] { return completion(store).has_value(); }));
  EXPECT_FALSE(completion(store)->all_ok());
}

TEST_P(LayersTest, OrdinaryJobsGoOnBesideStoresThatWait) {
  constexpr std::uint32_t kCount = 6;
  fill_host(kCount);
  std::vector<ipc::JobId> waiting;
  for (std::uint32_t i = 0; i < 12; ++i) {
    std::vector<worker::StoreTarget> targets;
    std::vector<worker::StoreItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      targets.push_back({GroupId{group}, hash(i, 2)});
    }
    const auto slots = client_->reserve_store(targets, test::soon()).value();
    for (std::uint32_t group = 0; group < groups_; ++group) {
      items.push_back({GroupId{group}, BlockId{i}, slots.at(group).slot});
    }
    waiting.push_back(client_->submit_store(items, LayerTicket{20 + i, 1}).value());
  }
  std::vector<worker::SequenceItem> swapped;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    swapped.push_back({GroupId{0}, BlockId{40 + i}, i});
  }
  expect_done(client_->swap_out(1, swapped).value());
  expect_done(client_->swap_in(1, swapped).value());
  expect_done(submit_load(50, kCount, std::nullopt));
  for (const ipc::JobId job : waiting) {
    EXPECT_FALSE(completion(job).has_value());
    EXPECT_TRUE(client_->cancel(job).has_value());
  }
  for (const ipc::JobId job : waiting) expect_job_failed(job, ErrorCode::kCancelled);
}

INSTANTIATE_TEST_SUITE_P(Ways,
                         LayersTest,
                         testing::ValuesIn(layers_ways()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace kvferry
