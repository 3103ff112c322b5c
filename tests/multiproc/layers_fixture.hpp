// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/step_channel.hpp"
#include "support/child_process.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry {

inline constexpr std::uint32_t kGpuBlocks = 160;
inline constexpr std::uint64_t kSeed = 7000;

/// Longer than any test waits.
inline constexpr std::chrono::minutes kForEver{5};

/// A way of layer-wise transfers.
struct LayersCase {
  std::string name;
  std::string geometry;
  std::vector<std::string> rank_arguments;  ///< Of worker and mover.
  std::vector<std::string> mover_arguments;
};

/// All ways by which layers go.
inline std::vector<LayersCase> layers_ways() {
  return {
      LayersCase{"Staged", "tiny", {}, {}},
      LayersCase{
          "StagedInSmallSlots", "tiny", {"--staging-slot-bytes=64KiB", "--staging-slots=8"}, {}},
      LayersCase{"StagedWithScales", "tiny-fp8", {}, {}},
      LayersCase{"StagedInTwoGroups", "tiny-draft", {}, {}},
      LayersCase{"Batch", "tiny", {}, {"--copy-strategy=batch"}},
      LayersCase{"StridedInTwoGroups", "tiny-state", {}, {"--copy-strategy=strided"}},
      LayersCase{"BlockFirst", "tiny", {"--arena=block-first"}, {}}};
}

/// Manager, worker and mover are real processes, this one is the engine.
class LayersTest : public testing::TestWithParam<LayersCase> {
 protected:
  using BlockId = ipc::BlockId;
  using ErrorCode = ipc::ErrorCode;
  using GroupId = ipc::GroupId;
  using LayerTicket = ipc::LayerTicket;
  using Completion = worker::Completion;

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
  test::ChildProcess start(std::vector<std::string> arguments, const std::string& faults = {}) {
    // On another machine than that of the build it lies elsewhere.
    const std::string program = ipc::environment("KVFERRY_PROGRAM");
    return test::ChildProcess({.program = program.empty() ? KVFERRY_PROGRAM : program,
                               .arguments = std::move(arguments),
                               .environment = {"KVFERRY_RUNTIME_DIR=" + temp_.path().string(),
                                               "KVFERRY_FAULTS=" + faults}});
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
  void start_mover(const std::string& faults = {}) {
    auto arguments = rank("mover");
    const auto& more = GetParam().mover_arguments;
    arguments.insert(arguments.end(), more.begin(), more.end());
    mover_.emplace(start(arguments, faults));
  }
  /// The engine has seen a mover come, or go.
  bool sees_offload(bool ready) {
    return run_until([&] {
      (void)client_->poll(0);
      return client_->state().offload_ready == ready;
    });
  }

  bool run_until(const std::function<bool()>& done) {
    const ipc::Deadline deadline = test::soon();
    while (!done() && !deadline.expired()) {
      loop_.run_once(deadline.earlier(ipc::Deadline::after(std::chrono::milliseconds(20))));
    }
    return done();
  }

  worker::ClientOptions client_options() const {
    const ipc::Geometry geometry = ipc::load_geometry(GetParam().geometry, 1).value();
    worker::ClientOptions options;
    options.runtime_dir = temp_.path().string();
    options.identity.model = geometry.name;
    const bool block_first = std::count(GetParam().rank_arguments.begin(),
                                        GetParam().rank_arguments.end(), "--arena=block-first") > 0;
    options.identity.fingerprint = geometry.fingerprint(block_first ? ipc::ArenaOrder::kBlockFirst
                                                                    : ipc::ArenaOrder::kLayerFirst);
    options.identity.weights = weights_;
    return options;
  }
  void connect() {
    groups_ = static_cast<std::uint32_t>(
        ipc::load_geometry(GetParam().geometry, 1).value().groups.size());
    ASSERT_TRUE(run_until([&] {
      auto client = worker::Client::connect(client_options(),
                                            ipc::Deadline::after(std::chrono::milliseconds(200)));
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
  /// Whole, though its parts may tell different codes: those behind the first one are cancelled.
  void expect_job_refused(ipc::JobId job, const std::string& text) {
    ASSERT_TRUE(run_until([&] { return completion(job).has_value(); }));
    const Completion done = *completion(job);
    EXPECT_THAT(done.results, testing::Each(testing::Ne(0)));
    EXPECT_THAT(done.message, testing::HasSubstr(text));
  }
  /// Of a load of a use after that of a step that was sent: it goes another way, and comes before
  /// the step has begun once in a while. Then it is served (false), and the step's use is over.
  bool is_refused(ipc::JobId load, const std::string& text) {
    EXPECT_TRUE(run_until([&] { return completion(load).has_value(); }));
    if (completion(load)->all_ok()) return false;
    expect_job_refused(load, text);
    return true;
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
  const ipc::Digest weights_ = ipc::Digest::random();
  ipc::EventLoop loop_;
  std::optional<test::ChildProcess> manager_;
  std::optional<test::ChildProcess> worker_;
  std::optional<test::ChildProcess> mover_;
  std::unique_ptr<worker::Client> client_;
  std::optional<worker::StepChannel> channel_;
  std::uint32_t groups_ = 1;
  std::vector<Completion> completions_;
};

}  // namespace kvferry
