// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A prefill and a decode on one host: two engines with workers and movers of their own, one
// manager. What the one computes and stores, block by block, the other one loads meanwhile, and its
// worker compares every word. All processes are real; this one is both engines. On a GPU, too.
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
#include <csignal>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::ErrorCode;
using ipc::GroupId;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::Each;
using worker::Completion;

constexpr std::uint32_t kArenaBlocks = 160;
constexpr std::uint64_t kContents = 9000;
/// Where the decode has its blocks: not where the prefill had them.
constexpr std::uint32_t kDecodes = 64;

bool is_on_gpu() { return std::string(KVFERRY_TEST_DEVICE) != "host"; }

bool run_until(ipc::EventLoop& loop, const std::function<bool()>& done) {
  const ipc::Deadline deadline = test::soon();
  while (!done() && !deadline.expired()) {
    loop.run_once(deadline.earlier(ipc::Deadline::after(20ms)));
  }
  return done();
}

ipc::Digest key(std::uint32_t block) {
  ipc::Digest digest;
  digest.bytes.at(0) = static_cast<std::uint8_t>(block);
  digest.bytes.at(1) = 1;
  return digest;
}

/// One engine of the model, with the worker and the mover of its only rank.
class TestEngine {
 public:
  using Start = std::function<test::ChildProcess(std::vector<std::string>)>;

  TestEngine(ipc::EventLoop& loop, std::string name, std::string runtime_dir)
      : loop_(loop), name_(std::move(name)), runtime_dir_(std::move(runtime_dir)) {}

  void start(const Start& start, const std::string& device) {
    for (auto* const child : {&worker_, &mover_}) {
      child->emplace(
          start({child == &worker_ ? "worker" : "mover", "--engine=" + name_, "--geometry=tiny",
                 fmt::format("--gpu-blocks={}", kArenaBlocks), "--device=" + device}));
    }
  }
  void connect(const ipc::Digest& weights) {
    const ipc::Geometry geometry = ipc::load_geometry("tiny", 1).value();
    groups_ = static_cast<std::uint32_t>(geometry.groups.size());
    worker::ClientOptions options;
    options.runtime_dir = runtime_dir_;
    options.engine = name_;
    options.identity.model = geometry.name;
    options.identity.fingerprint = geometry.fingerprint(ipc::ArenaOrder::kLayerFirst);
    options.identity.weights = weights;
    ASSERT_TRUE(run_until(loop_, [&] {
      auto client = worker::Client::connect(options, ipc::Deadline::after(200ms));
      if (!client) return false;
      client_ = std::move(*client);
      return true;
    }));
    loop_.watch(client_->fd(), [] {});
    const auto ready = client_->wait_ready(true, test::soon());
    ASSERT_TRUE(ready.has_value()) << ready.error().to_string();
    channel_.emplace(loop_, ipc::RuntimeDir::open(runtime_dir_, "default").value(), name_,
                     ipc::Rank{0}, "test", worker::StepChannel::Hooks{[] {}, [] {}});
    ASSERT_TRUE(run_until(loop_, [&] { return channel_->is_up(); }));
  }
  void close() {
    if (client_ != nullptr) loop_.unwatch(client_->fd());
    channel_.reset();
    client_.reset();
  }
  [[nodiscard]] worker::Client& client() { return *client_; }
  [[nodiscard]] test::ChildProcess& worker() { return *worker_; }
  [[nodiscard]] test::ChildProcess& mover() { return *mover_; }

  /// Writes the contents of blocks [first, first + count) of the prompt to device blocks from at
  /// on, or compares them; returns how many words were others.
  std::uint64_t step(bool fills, std::uint32_t first, std::uint32_t count, std::uint32_t at) {
    ipc::Step step;
    step.session = client_->state().ranks.at(0).session;
    step.epoch = client_->state().ranks.at(0).epoch;
    auto& items = fills ? step.fills : step.verifies;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = first; i < first + count; ++i) {
        items.push_back({GroupId{group}, BlockId{at + i}, kContents + group * 1000 + i});
      }
    }
    std::optional<ipc::Result<ipc::StepReply>> reply;
    const auto sent = channel_->send(
        step, [&reply](ipc::Result<ipc::StepReply> answer) { reply = std::move(answer); });
    EXPECT_TRUE(sent.has_value());
    EXPECT_TRUE(run_until(loop_, [&] { return reply.has_value(); }));
    EXPECT_TRUE(reply && reply->has_value());
    std::uint64_t wrong = 0;
    for (const std::uint64_t words : (*reply)->mismatches) wrong += words;
    return wrong;
  }
  /// Of blocks that a step has written.
  ipc::JobId store(std::uint32_t first, std::uint32_t count) {
    std::vector<worker::StoreTarget> targets;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = first; i < first + count; ++i) {
        targets.push_back({GroupId{group}, key(i)});
      }
    }
    const auto slots = client_->reserve_store(targets, test::soon()).value();
    std::vector<worker::StoreItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = first; i < first + count; ++i) {
        items.push_back({GroupId{group}, BlockId{i}, slots.at(items.size()).slot});
      }
    }
    return client_->submit_store(items).value();
  }
  ipc::JobId load_when_stored(std::uint32_t first, std::uint32_t count, ipc::Duration within) {
    std::vector<worker::LoadItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = first; i < first + count; ++i) {
        items.push_back({GroupId{group}, BlockId{kDecodes + i}, key(i)});
      }
    }
    return client_->submit_load_when_stored(items, 1, ipc::MonotonicClock::now() + within).value();
  }
  [[nodiscard]] std::optional<Completion> completion(ipc::JobId job) {
    for (Completion& done : client_->poll(64)) completions_.push_back(std::move(done));
    const auto found = std::find_if(completions_.begin(), completions_.end(),
                                    [job](const Completion& done) { return done.job == job; });
    return found == completions_.end() ? std::nullopt : std::optional(*found);
  }
  [[nodiscard]] Completion await(ipc::JobId job) {
    EXPECT_TRUE(run_until(loop_, [&] { return completion(job).has_value(); }));
    return completion(job).value_or(Completion{});
  }
  /// Until so many blocks can be found, of each group.
  [[nodiscard]] bool sees(std::uint32_t count) {
    std::vector<ipc::Digest> keys;
    for (std::uint32_t i = 0; i < count; ++i) keys.push_back(key(i));
    return run_until(loop_, [&] {
      const auto found = client_->lookup(keys, test::soon());
      return found && found->usable_prefix == count;
    });
  }

 private:
  ipc::EventLoop& loop_;
  const std::string name_;
  const std::string runtime_dir_;
  std::uint32_t groups_ = 0;
  std::optional<test::ChildProcess> worker_;
  std::optional<test::ChildProcess> mover_;
  std::unique_ptr<worker::Client> client_;
  std::optional<worker::StepChannel> channel_;
  std::vector<Completion> completions_;
};

class HandOverTest : public testing::Test {
 protected:
  void SetUp() override {
    if (is_on_gpu() && ipc::cuda_device_count() == 0) {
      if (ipc::environment("KVFERRY_REQUIRE_GPU") == "1") {
        FAIL() << "KVFERRY_REQUIRE_GPU=1, but no CUDA device is usable here";
      }
      GTEST_SKIP() << "no CUDA device";
    }
    manager_.emplace(start({"manager", "--host-memory=64MiB"}));
    const ipc::Digest weights = ipc::Digest::random();
    for (TestEngine* engine : {&prefill_, &decode_}) {
      const std::string device =
          is_on_gpu() ? std::string(KVFERRY_TEST_DEVICE)
                      : fmt::format("host:{}:256MiB", temp_.path().filename().string());
      engine->start([this](std::vector<std::string> arguments) { return start(arguments); },
                    device);
      ASSERT_NO_FATAL_FAILURE(engine->connect(weights));
    }
  }
  void TearDown() override {
    if (HasFailure() && manager_) std::fputs(manager_->stderr_text().c_str(), stderr);
    prefill_.close();
    decode_.close();
  }
  test::ChildProcess start(std::vector<std::string> arguments) {
    // On another machine than that of the build it lies elsewhere.
    const std::string program = ipc::environment("KVFERRY_PROGRAM");
    return test::ChildProcess({.program = program.empty() ? KVFERRY_PROGRAM : program,
                               .arguments = std::move(arguments),
                               .environment = {"KVFERRY_RUNTIME_DIR=" + temp_.path().string()}});
  }

  const test::ShortTempDir temp_;
  ipc::EventLoop loop_;
  std::optional<test::ChildProcess> manager_;
  TestEngine prefill_{loop_, "prefill", temp_.path().string()};
  TestEngine decode_{loop_, "decode", temp_.path().string()};
};

// A decode that wants to know of each piece asks for it by a job of its own.
TEST_F(HandOverTest, ADecodeGetsEachPieceWhileThePrefillGoesOn) {
  constexpr std::uint32_t kPrompt = 48;
  constexpr std::uint32_t kPiece = 8;
  std::vector<ipc::JobId> loads;
  for (std::uint32_t first = 0; first < kPrompt; first += kPiece) {
    loads.push_back(decode_.load_when_stored(first, kPiece, 60s));
  }
  for (std::uint32_t first = 0; first < kPrompt; first += kPiece) {
    const ipc::JobId load = loads.at(first / kPiece);
    EXPECT_FALSE(decode_.completion(load).has_value()) << "after " << first << " blocks";
    EXPECT_EQ(prefill_.step(true, first, kPiece, 0), 0U);
    EXPECT_TRUE(prefill_.await(prefill_.store(first, kPiece)).all_ok());
    const Completion done = decode_.await(load);
    EXPECT_TRUE(done.all_ok()) << done.message;
    EXPECT_EQ(decode_.step(false, first, kPiece, kDecodes), 0U);
  }
}

TEST_F(HandOverTest, OneLoadTakesWhatManyStoresBring) {
  constexpr std::uint32_t kPrompt = 48;
  constexpr std::uint32_t kPiece = 8;
  const ipc::JobId load = decode_.load_when_stored(0, kPrompt, 60s);
  for (std::uint32_t first = 0; first < kPrompt; first += kPiece) {
    EXPECT_FALSE(decode_.completion(load).has_value()) << "after " << first << " blocks";
    EXPECT_EQ(prefill_.step(true, first, kPiece, 0), 0U);
    EXPECT_TRUE(prefill_.await(prefill_.store(first, kPiece)).all_ok());
  }
  const Completion done = decode_.await(load);
  EXPECT_TRUE(done.all_ok()) << done.message;
  EXPECT_EQ(decode_.step(false, 0, kPrompt, kDecodes), 0U);
}

TEST_F(HandOverTest, WhatWasThereBeforeGoesWithTheRest) {
  EXPECT_EQ(prefill_.step(true, 0, 16, 0), 0U);
  EXPECT_TRUE(prefill_.await(prefill_.store(0, 8)).all_ok());
  ASSERT_TRUE(decode_.sees(8));
  const ipc::JobId load = decode_.load_when_stored(0, 16, 60s);
  EXPECT_TRUE(prefill_.await(prefill_.store(8, 8)).all_ok());
  EXPECT_TRUE(decode_.await(load).all_ok());
  EXPECT_EQ(decode_.step(false, 0, 16, kDecodes), 0U);
}

TEST_F(HandOverTest, TheDecodeGetsWhatWasStoredWhenThePrefillIsKilled) {
  EXPECT_EQ(prefill_.step(true, 0, 8, 0), 0U);
  const ipc::JobId load = decode_.load_when_stored(0, 16, 5s);
  EXPECT_TRUE(prefill_.await(prefill_.store(0, 8)).all_ok());
  prefill_.worker().signal(SIGKILL);
  prefill_.mover().signal(SIGKILL);
  const Completion done = decode_.await(load);
  std::uint32_t loaded = 0;
  for (const std::uint8_t result : done.results) {
    EXPECT_THAT(result, testing::AnyOf(0, static_cast<std::uint8_t>(ErrorCode::kTimeout)));
    loaded += result == 0 ? 1 : 0;
  }
  EXPECT_EQ(2 * loaded, done.results.size()) << "the half that was stored";
  EXPECT_EQ(decode_.step(false, 0, 8, kDecodes), 0U);
}

TEST_F(HandOverTest, TheDeathOfTheDecodesMoverEndsItsWaitAndLeavesThePrefillAlone) {
  const ipc::JobId load = decode_.load_when_stored(0, 8, 60s);
  decode_.mover().signal(SIGKILL);
  const Completion done = decode_.await(load);
  EXPECT_THAT(done.results, Each(testing::Ne(0)));
  EXPECT_EQ(prefill_.step(true, 0, 8, 0), 0U);
  EXPECT_TRUE(prefill_.await(prefill_.store(0, 8)).all_ok());
}

}  // namespace
}  // namespace kvferry
