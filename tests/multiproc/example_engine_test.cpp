// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "ipc/os/temp_dir.hpp"
#include "support/child_process.hpp"
#include "support/manager_status.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace kvferry {
namespace {

using std::chrono_literals::operator""s;
using testing::HasSubstr;
using testing::StartsWith;

/// The example beside the processes that its first comment names, all real.
class ExampleEngineTest : public testing::Test {
 protected:
  test::ChildProcess start(std::vector<std::string> arguments) {
    return test::ChildProcess({.program = KVFERRY_PROGRAM,
                               .arguments = std::move(arguments),
                               .environment = environment()});
  }
  void start_manager() { manager_.emplace(start({"manager", "--host-memory=16MiB"})); }
  /// Worker and mover of every rank.
  void start_ranks(std::uint32_t ranks, const std::string& geometry) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      for (const char* command : {"worker", "mover"}) {
        // Named after our directory, so that no other test shares the simulated device.
        const std::string device =
            fmt::format("host:{}-{}:64MiB", temp_.path().filename().string(), rank);
        ranks_.push_back(
            start({command, "--geometry=" + geometry, "--gpu-blocks=64", "--device=" + device,
                   fmt::format("--rank={}", rank), fmt::format("--ranks={}", ranks)}));
      }
    }
  }
  void start_engine(std::vector<std::string> arguments = {}) {
    engine_.emplace(test::ChildOptions{.program = test::sibling_program("example_engine"),
                                       .arguments = std::move(arguments),
                                       .environment = environment()});
  }
  bool wait_status(const std::function<bool(const nlohmann::json&)>& condition) {
    return test::wait_status(temp_.path().string(), *manager_, condition);
  }
  bool wait_connected_engine() {
    return wait_status([](const nlohmann::json& status) {
      for (const auto& peer : status["peers"]) {
        if (peer["kind"] == "engine") return true;
      }
      return false;
    });
  }
  void expect_served() {
    EXPECT_THAT(engine_->read_line(test::soon()).value_or(""), StartsWith("ready: generation "))
        << engine_->stderr_text();
    for (const char* line : {"loaded 0 of 4 blocks", "stored 4 blocks", "loaded 4 of 4 blocks"}) {
      EXPECT_EQ(engine_->read_line(test::soon()), line) << engine_->stderr_text();
    }
    EXPECT_EQ(engine_->wait(test::soon()), test::ChildExit::exited(0)) << engine_->stderr_text();
  }

  std::optional<test::ChildProcess> manager_;
  std::vector<test::ChildProcess> ranks_;
  std::optional<test::ChildProcess> engine_;

 private:
  [[nodiscard]] std::vector<std::string> environment() const {
    return {"KVFERRY_RUNTIME_DIR=" + temp_.path().string()};
  }
  const test::ShortTempDir temp_;
};

TEST_F(ExampleEngineTest, StoresTheFirstTimeAndLoadsTheSecond) {
  start_manager();
  start_ranks(1, "tiny");
  ASSERT_TRUE(wait_status([](const nlohmann::json& status) {
    return status["engines"].size() == 1 && status["engines"][0]["offload_ready"] == true;
  }));
  start_engine();
  expect_served();
}

TEST_F(ExampleEngineTest, ConnectedBeforeTheWorkersItWaitsAndServesOnTwoRanks) {
  start_manager();
  ASSERT_TRUE(wait_status([](const nlohmann::json&) { return true; }));
  start_engine({"default", "2", "tiny-fp8"});
  ASSERT_TRUE(wait_connected_engine()) << engine_->stderr_text();
  start_ranks(2, "tiny-fp8");
  expect_served();
}

TEST_F(ExampleEngineTest, ConnectedBeforeWorkersOfAnotherGeometryItEndsAtOnceAndSaysSo) {
  start_manager();
  ASSERT_TRUE(wait_status([](const nlohmann::json&) { return true; }));
  start_engine({"default", "1", "tiny-mla"});
  ASSERT_TRUE(wait_connected_engine()) << engine_->stderr_text();
  start_ranks(1, "tiny");
  // The example itself would wait for 30 s for workers that fit.
  EXPECT_EQ(engine_->wait(test::soon()), test::ChildExit::exited(1)) << engine_->stderr_text();
  EXPECT_THAT(engine_->stderr_text(), HasSubstr("example_engine: geometry_mismatch: "));
}

TEST_F(ExampleEngineTest, SaysWhatIsMissingWithoutAManager) {
  start_engine();
  EXPECT_EQ(engine_->wait(test::soon()), test::ChildExit::exited(1));
  EXPECT_THAT(engine_->stderr_text(), HasSubstr("no_manager"));
}

}  // namespace
}  // namespace kvferry
