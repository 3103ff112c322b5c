// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Layer-wise loads and stores: manager, worker and mover are real processes, this one is the
// engine.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/codec.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/step_channel.hpp"
#include "support/child_process.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::LayerTicket;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using worker::Completion;

constexpr std::uint32_t kGpuBlocks = 160;
constexpr std::uint64_t kSeed = 7000;

/// Longer than any test waits.
constexpr std::chrono::minutes kForEver{5};

struct Case {
  std::string name;
  std::string geometry;
  std::vector<std::string> rank_arguments;  ///< Of worker and mover.
  std::vector<std::string> mover_arguments;
};

class LayersTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (is_cuda() && ipc::cuda_device_count() == 0) {
      if (ipc::environment("KVFERRY_REQUIRE_GPU") == "1") {
        FAIL() << "KVFERRY_REQUIRE_GPU=1, but no CUDA device is usable here";
      }
      GTEST_SKIP() << "no CUDA device";
    }
    manager_.emplace(start({"manager", "--host-memory=64MiB"}));
    worker_.emplace(start(rank("worker")));
    start_mover();
    connect();
  }
  void TearDown() override {
    if (HasFailure() && manager_) std::fputs(manager_->stderr_text().c_str(), stderr);
    if (client_ != nullptr) loop_.unwatch(client_->fd());
    channel_.reset();
    client_.reset();
  }

  static bool is_cuda() { return std::string(KVFERRY_TEST_DEVICE) != "host"; }
  test::ChildProcess start(std::vector<std::string> arguments) {
    // On another machine than that of the build it lies elsewhere.
    const std::string program = ipc::environment("KVFERRY_PROGRAM");
    return test::ChildProcess({.program = program.empty() ? KVFERRY_PROGRAM : program,
                               .arguments = std::move(arguments),
                               .environment = {"KVFERRY_RUNTIME_DIR=" + temp_.path().string()}});
  }
  std::vector<std::string> rank(const std::string& command) const {
    std::vector<std::string> arguments = {
        command, "--geometry=" + GetParam().geometry, fmt::format("--gpu-blocks={}", kGpuBlocks),
        "--device=" + (is_cuda()
                           ? std::string(KVFERRY_TEST_DEVICE)
                           : fmt::format("host:{}:256MiB", temp_.path().filename().string()))};
    const auto& more = GetParam().rank_arguments;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  void start_mover() {
    auto arguments = rank("mover");
    const auto& more = GetParam().mover_arguments;
    arguments.insert(arguments.end(), more.begin(), more.end());
    mover_.emplace(start(arguments));
  }

  bool run_until(const std::function<bool()>& done) {
    const ipc::Deadline deadline = test::soon();
    while (!done() && !deadline.expired()) {
      loop_.run_once(deadline.earlier(ipc::Deadline::after(20ms)));
    }
    return done();
  }

  void connect() {
    const ipc::Geometry geometry = ipc::load_geometry(GetParam().geometry, 1).value();
    groups_ = static_cast<std::uint32_t>(geometry.groups.size());
    worker::ClientOptions options;
    options.runtime_dir = temp_.path().string();
    options.identity.model = geometry.name;
    const bool block_first = std::count(GetParam().rank_arguments.begin(),
                                        GetParam().rank_arguments.end(), "--arena=block-first") > 0;
    options.identity.fingerprint = geometry.fingerprint(block_first ? ipc::ArenaOrder::kBlockFirst
                                                                    : ipc::ArenaOrder::kLayerFirst);
    options.identity.weights = ipc::Digest::random();
    ASSERT_TRUE(run_until([&] {
      auto client = worker::Client::connect(options, ipc::Deadline::after(200ms));
      if (!client) return false;
      client_ = std::move(*client);
      return true;
    }));
    loop_.watch(client_->fd(), [] {});
    const auto ready = client_->wait_ready(true, test::soon());
    ASSERT_TRUE(ready.has_value()) << ready.error().to_string();
    channel_.emplace(loop_, ipc::RuntimeDir::open(temp_.path().string(), "default").value(),
                     "default", ipc::Rank{0}, "test", worker::StepChannel::Hooks{[] {}, [] {}});
    ASSERT_TRUE(run_until([&] { return channel_->is_up(); }));
  }

  /// Blocks [first, first + count) of each group, with contents of their own for each index.
  ipc::Step step() const {
    ipc::Step step;
    step.session = client_->state().ranks.at(0).session;
    step.epoch = client_->state().ranks.at(0).epoch;
    return step;
  }
  std::vector<ipc::SeededItem> seeded(std::uint32_t first,
                                      std::uint32_t count,
                                      std::uint64_t seed = kSeed) const {
    std::vector<ipc::SeededItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < count; ++i) {
        items.push_back({GroupId{group}, BlockId{first + i}, seed + group * 1000 + i});
      }
    }
    return items;
  }
  struct Answer {
    std::optional<ipc::Result<ipc::StepReply>> reply;
    [[nodiscard]] bool is_clean() const {
      return reply && reply->has_value() &&
             std::all_of((*reply)->mismatches.begin(), (*reply)->mismatches.end(),
                         [](std::uint64_t words) { return words == 0; });
    }
    [[nodiscard]] ErrorCode code() const { return reply->error().code; }
  };
  std::shared_ptr<Answer> send(const ipc::Step& step) {
    auto answer = std::make_shared<Answer>();
    const auto sent = channel_->send(
        step, [answer](ipc::Result<ipc::StepReply> reply) { answer->reply = std::move(reply); });
    EXPECT_TRUE(sent.has_value());
    return answer;
  }
  void expect_clean(const std::shared_ptr<Answer>& answer) {
    ASSERT_TRUE(run_until([&] { return answer->reply.has_value(); }));
    ASSERT_TRUE(answer->reply->has_value()) << answer->reply->error().to_string();
    EXPECT_TRUE(answer->is_clean());
  }
  void expect_failed(const std::shared_ptr<Answer>& answer, ErrorCode code) {
    ASSERT_TRUE(run_until([&] { return answer->reply.has_value(); }));
    ASSERT_FALSE(answer->reply->has_value());
    EXPECT_EQ(answer->code(), code) << answer->reply->error().to_string();
  }

  static ipc::Digest hash(std::uint32_t i, std::uint8_t prompt) {
    ipc::Digest digest;
    digest.bytes.at(0) = static_cast<std::uint8_t>(i);
    digest.bytes.at(1) = prompt;
    return digest;
  }
  ipc::JobId submit_store(std::uint32_t first,
                          std::uint32_t count,
                          std::optional<LayerTicket> layers,
                          std::uint8_t prompt = 1) {
    std::vector<worker::StoreTarget> targets;
    std::vector<worker::StoreItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < count; ++i)
        targets.push_back({GroupId{group}, hash(i, prompt)});
    }
    const auto slots = client_->reserve_store(targets, test::soon()).value();
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < count; ++i) {
        const auto& slot = slots.at(items.size());
        EXPECT_EQ(slot.outcome, worker::Reservation::kReserved);
        items.push_back({GroupId{group}, BlockId{first + i}, slot.slot});
      }
    }
    return client_->submit_store(items, layers).value();
  }
  ipc::JobId submit_load(std::uint32_t first,
                         std::uint32_t count,
                         std::optional<LayerTicket> layers,
                         std::uint8_t prompt = 1) {
    std::vector<worker::LoadItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < count; ++i) {
        items.push_back({GroupId{group}, BlockId{first + i}, hash(i, prompt)});
      }
    }
    return client_->submit_load(items, 1, layers).value();
  }
  std::optional<Completion> completion(ipc::JobId job) {
    for (Completion& done : client_->poll(64)) completions_.push_back(std::move(done));
    for (const Completion& done : completions_) {
      if (done.job == job) return done;
    }
    return std::nullopt;
  }
  void expect_done(ipc::JobId job) {
    ASSERT_TRUE(run_until([&] { return completion(job).has_value(); }));
    EXPECT_TRUE(completion(job)->all_ok()) << completion(job)->message;
  }
  void expect_job_failed(ipc::JobId job, ErrorCode code) {
    ASSERT_TRUE(run_until([&] { return completion(job).has_value(); }));
    const Completion done = *completion(job);
    for (const std::uint8_t result : done.results) {
      EXPECT_EQ(result, static_cast<std::uint8_t>(code)) << done.message;
    }
  }
  /// The host tier has blocks [0, count), from the device blocks that begin at 0.
  void fill_host(std::uint32_t count) {
    ipc::Step fill = step();
    fill.fills = seeded(0, count);
    expect_clean(send(fill));
    expect_done(submit_store(0, count, std::nullopt));
  }
  ipc::Step awaiting(const LayerTicket& ticket, std::uint32_t first, std::uint32_t count) const {
    ipc::Step verify = step();
    verify.awaits = ticket;
    verify.verifies = seeded(first, count);
    return verify;
  }

  const test::ShortTempDir temp_;
  ipc::EventLoop loop_;
  std::optional<test::ChildProcess> manager_;
  std::optional<test::ChildProcess> worker_;
  std::optional<test::ChildProcess> mover_;
  std::unique_ptr<worker::Client> client_;
  std::optional<worker::StepChannel> channel_;
  std::uint32_t groups_ = 1;
  std::vector<Completion> completions_;
};

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
  const auto sees_offload = [&](bool ready) {
    return run_until([&] {
      (void)client_->poll(0);
      return client_->state().offload_ready == ready;
    });
  };
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

INSTANTIATE_TEST_SUITE_P(
    Ways,
    LayersTest,
    testing::Values(
        Case{"Staged", "tiny", {}, {}},
        Case{"StagedInSmallSlots", "tiny", {"--staging-slot-bytes=64KiB", "--staging-slots=8"}, {}},
        Case{"StagedWithScales", "tiny-fp8", {}, {}},
        Case{"StagedInTwoGroups", "tiny-draft", {}, {}},
        Case{"Batch", "tiny", {}, {"--copy-strategy=batch"}},
        Case{"StridedInTwoGroups", "tiny-state", {}, {"--copy-strategy=strided"}},
        Case{"BlockFirst", "tiny", {"--arena=block-first"}, {}}),
    [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace kvferry
