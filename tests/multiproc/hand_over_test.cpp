// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A prefill and a decode on one host: two engines with workers and movers of their own, one
// manager. What the one computes and stores, block by block, the other one loads meanwhile, and its
// worker compares every word. All processes are real; this one is both engines. On a GPU, too.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "multiproc/real_engine.hpp"
#include "support/child_process.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <optional>
#include <string>
#include <vector>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::ErrorCode;
using ipc::GroupId;
using std::chrono_literals::operator""s;
using testing::Each;
using worker::Completion;

constexpr std::uint64_t kContents = 9000;
/// Where the decode has its blocks: not where the prefill had them.
constexpr std::uint32_t kDecodes = 64;

bool is_on_gpu() { return std::string(KVFERRY_TEST_DEVICE) != "host"; }

ipc::Digest key(std::uint32_t block) {
  ipc::Digest digest;
  digest.bytes.at(0) = static_cast<std::uint8_t>(block);
  digest.bytes.at(1) = 1;
  return digest;
}

/// One engine of the model: its blocks of the prompt are in the order of their keys.
class PromptEngine : public test::RealEngine {
 public:
  using RealEngine::RealEngine;

  /// Of blocks that a step has written.
  ipc::JobId store(std::uint32_t first, std::uint32_t count) {
    std::vector<worker::StoreTarget> targets;
    for (std::uint32_t group = 0; group < groups(); ++group) {
      for (std::uint32_t i = first; i < first + count; ++i) {
        targets.push_back({GroupId{group}, key(i)});
      }
    }
    const auto slots = client().reserve_store(targets, test::soon()).value();
    std::vector<worker::StoreItem> items;
    for (std::uint32_t group = 0; group < groups(); ++group) {
      for (std::uint32_t i = first; i < first + count; ++i) {
        items.push_back({GroupId{group}, BlockId{i}, slots.at(items.size()).slot});
      }
    }
    return client().submit_store(items).value();
  }
  ipc::JobId load_when_stored(std::uint32_t first, std::uint32_t count, ipc::Duration within) {
    std::vector<worker::LoadItem> items;
    for (std::uint32_t group = 0; group < groups(); ++group) {
      for (std::uint32_t i = first; i < first + count; ++i) {
        items.push_back({GroupId{group}, BlockId{kDecodes + i}, key(i)});
      }
    }
    return client().submit_load_when_stored(items, 1, ipc::MonotonicClock::now() + within).value();
  }
  /// The blocks [first, first + count) of the prompt, at device blocks from at on.
  std::uint64_t prompt(bool fills, std::uint32_t first, std::uint32_t count, std::uint32_t at) {
    return step(fills, kContents + first, count, at + first);
  }
  /// Until so many blocks can be found, of each group.
  [[nodiscard]] bool sees(ipc::EventLoop& loop, std::uint32_t count) {
    std::vector<ipc::Digest> keys;
    for (std::uint32_t i = 0; i < count; ++i) keys.push_back(key(i));
    return test::run_until(loop, [&] {
      const auto found = client().lookup(keys, test::soon());
      return found && found->usable_prefix == count;
    });
  }
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
    for (PromptEngine* engine : {&prefill_, &decode_}) {
      const std::string device =
          is_on_gpu() ? std::string(KVFERRY_TEST_DEVICE)
                      : fmt::format("host:{}:256MiB", temp_.path().filename().string());
      engine->start([this](std::vector<std::string> arguments) { return start(arguments); },
                    device);
      ASSERT_NO_FATAL_FAILURE(engine->connect());
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
  PromptEngine prefill_{loop_, {.name = "prefill"}, temp_.path().string()};
  PromptEngine decode_{loop_, {.name = "decode"}, temp_.path().string()};
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
    EXPECT_EQ(prefill_.prompt(true, first, kPiece, 0), 0U);
    EXPECT_TRUE(prefill_.await(prefill_.store(first, kPiece)).all_ok());
    const Completion done = decode_.await(load);
    EXPECT_TRUE(done.all_ok()) << done.message;
    EXPECT_EQ(decode_.prompt(false, first, kPiece, kDecodes), 0U);
  }
}

TEST_F(HandOverTest, OneLoadTakesWhatManyStoresBring) {
  constexpr std::uint32_t kPrompt = 48;
  constexpr std::uint32_t kPiece = 8;
  const ipc::JobId load = decode_.load_when_stored(0, kPrompt, 60s);
  for (std::uint32_t first = 0; first < kPrompt; first += kPiece) {
    EXPECT_FALSE(decode_.completion(load).has_value()) << "after " << first << " blocks";
    EXPECT_EQ(prefill_.prompt(true, first, kPiece, 0), 0U);
    EXPECT_TRUE(prefill_.await(prefill_.store(first, kPiece)).all_ok());
  }
  const Completion done = decode_.await(load);
  EXPECT_TRUE(done.all_ok()) << done.message;
  EXPECT_EQ(decode_.prompt(false, 0, kPrompt, kDecodes), 0U);
}

TEST_F(HandOverTest, WhatWasThereBeforeGoesWithTheRest) {
  EXPECT_EQ(prefill_.prompt(true, 0, 16, 0), 0U);
  EXPECT_TRUE(prefill_.await(prefill_.store(0, 8)).all_ok());
  ASSERT_TRUE(decode_.sees(loop_, 8));
  const ipc::JobId load = decode_.load_when_stored(0, 16, 60s);
  EXPECT_TRUE(prefill_.await(prefill_.store(8, 8)).all_ok());
  EXPECT_TRUE(decode_.await(load).all_ok());
  EXPECT_EQ(decode_.prompt(false, 0, 16, kDecodes), 0U);
}

TEST_F(HandOverTest, TheDecodeGetsWhatWasStoredWhenThePrefillIsKilled) {
  EXPECT_EQ(prefill_.prompt(true, 0, 8, 0), 0U);
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
  EXPECT_EQ(decode_.prompt(false, 0, 8, kDecodes), 0U);
}

TEST_F(HandOverTest, TheDeathOfTheDecodesMoverEndsItsWaitAndLeavesThePrefillAlone) {
  const ipc::JobId load = decode_.load_when_stored(0, 8, 60s);
  decode_.mover().signal(SIGKILL);
  const Completion done = decode_.await(load);
  EXPECT_THAT(done.results, Each(testing::Ne(0)));
  EXPECT_EQ(prefill_.prompt(true, 0, 8, 0), 0U);
  EXPECT_TRUE(prefill_.await(prefill_.store(0, 8)).all_ok());
}

}  // namespace
}  // namespace kvferry
