// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What an engine is told of its device blocks when processes die, by CacheState::contents: whether
// they hold what they held. All processes are real; this one is the engine.
#include "ipc/os/temp_dir.hpp"
#include "multiproc/real_engine.hpp"

#include <gmock/gmock.h>

#include <csignal>
#include <optional>
#include <vector>

namespace kvferry {
namespace {

using ipc::ErrorCode;
using testing::Each;

constexpr std::uint32_t kBlocks = 8;
constexpr std::uint64_t kSeed = 700;

class ContentsTest : public testing::Test {
 protected:
  void SetUp() override {
    start_manager();
    engine_.start(starter(), device());
    ASSERT_NO_FATAL_FAILURE(engine_.connect());
    EXPECT_EQ(engine_.step(true, kSeed, kBlocks, 0), 0U);
    before_ = state();
    EXPECT_GT(before_.contents, 0U);
  }
  void TearDown() override {
    if (HasFailure() && manager_) std::fputs(manager_->stderr_text().c_str(), stderr);
    engine_.close();
  }
  void start_manager() { manager_.emplace(run({"manager", "--host-memory=64MiB"})); }
  void kill_manager() {
    manager_->signal(SIGKILL);
    ASSERT_TRUE(manager_->wait(test::soon()).has_value());
  }
  void replace_worker() {
    engine_.worker().signal(SIGKILL);
    ASSERT_TRUE(engine_.worker().wait(test::soon()).has_value());
    engine_.start_worker(starter(), device());
  }
  [[nodiscard]] std::string device() const {
    return fmt::format("host:{}:256MiB", temp_.path().filename().string());
  }
  [[nodiscard]] test::RealEngine::Start starter() {
    return [this](std::vector<std::string> arguments) { return run(std::move(arguments)); };
  }
  test::ChildProcess run(std::vector<std::string> arguments) {
    return test::ChildProcess({.program = KVFERRY_PROGRAM,
                               .arguments = std::move(arguments),
                               .environment = {"KVFERRY_RUNTIME_DIR=" + temp_.path().string()}});
  }
  [[nodiscard]] worker::CacheState state() {
    (void)engine_.client().poll(0);
    return engine_.client().state();
  }
  /// Under which generation the cache can be used again, on movers, too.
  void wait_usable_after(std::uint64_t generation) {
    ASSERT_TRUE(test::run_until(loop_, [&] {
      const worker::CacheState now = state();
      return now.manager_connected && now.offload_ready && now.generation != generation;
    }));
  }
  [[nodiscard]] worker::Completion swap_out() {
    const std::vector<worker::SequenceItem> items = {{ipc::GroupId{0}, ipc::BlockId{0}, 0}};
    const auto job = engine_.client().swap_out(1, items);
    EXPECT_TRUE(job.has_value());
    return job ? engine_.await(*job) : worker::Completion{};
  }

  const test::ShortTempDir temp_;
  ipc::EventLoop loop_;
  std::optional<test::ChildProcess> manager_;
  test::RealEngine engine_{loop_, {}, temp_.path().string()};
  worker::CacheState before_;
};

TEST_F(ContentsTest, AnotherManagerCountsGenerationsAnewAndTheContentsAreTheSame) {
  for (int i = 0; i < 2; ++i) {
    const worker::CacheState earlier = state();
    ASSERT_NO_FATAL_FAILURE(kill_manager());
    ASSERT_TRUE(test::run_until(loop_, [&] { return !state().manager_connected; }));
    EXPECT_EQ(state().contents, before_.contents) << "while no manager is there";
    start_manager();
    ASSERT_NO_FATAL_FAILURE(wait_usable_after(earlier.generation));
    EXPECT_EQ(state().contents, before_.contents);
    EXPECT_GT(state().generation, earlier.generation);
    EXPECT_EQ(engine_.step(false, kSeed, kBlocks, 0), 0U) << "the blocks hold what they held";
  }
}

TEST_F(ContentsTest, AJobOfTheGenerationOfAKilledManagerIsStaleAndItsBlocksAreGoodForAnother) {
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  start_manager();
  // Without a look at the state, which would acknowledge the next one's generation.
  ASSERT_TRUE(test::run_until(loop_, [&] {
    (void)engine_.client().poll(0);
    return engine_.client().stats().reconnects == 1;
  }));
  EXPECT_THAT(swap_out().results, Each(static_cast<std::uint8_t>(ErrorCode::kStaleEpoch)));
  ASSERT_NO_FATAL_FAILURE(wait_usable_after(before_.generation));
  EXPECT_EQ(state().contents, before_.contents);
  const worker::Completion again = swap_out();
  EXPECT_TRUE(again.all_ok()) << again.message;
}

TEST_F(ContentsTest, AClearIsTheEndOfTheContentsAndAReinitMakesOthers) {
  ASSERT_TRUE(engine_.client().clear(worker::HostPolicy::kKeep, test::soon()).has_value());
  ASSERT_TRUE(
      test::run_until(loop_, [&] { return state().phase == worker::CachePhase::kCleared; }));
  const std::uint64_t cleared = state().contents;
  EXPECT_GT(cleared, before_.contents);
  ASSERT_TRUE(engine_.client().reinit(0, test::soon()).has_value());
  ASSERT_NO_FATAL_FAILURE(wait_usable_after(before_.generation));
  EXPECT_GT(state().contents, cleared);
}

TEST_F(ContentsTest, AClearBeforeTheDeathOfTheManagerIsNotForgottenOverIt) {
  ASSERT_TRUE(engine_.client().clear(worker::HostPolicy::kKeep, test::soon()).has_value());
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  start_manager();
  // The next manager does not know the ranks at first.
  ASSERT_TRUE(test::run_until(loop_, [&] {
    const auto made = engine_.client().reinit(0, test::soon());
    return made.has_value() || state().phase == worker::CachePhase::kReady;
  }));
  ASSERT_NO_FATAL_FAILURE(wait_usable_after(before_.generation));
  EXPECT_GT(state().contents, before_.contents);
}

TEST_F(ContentsTest, TheDeathOfTheWorkerThatOwnsTheMemoryIsTheEndOfTheContents) {
  ASSERT_NO_FATAL_FAILURE(replace_worker());
  ASSERT_NO_FATAL_FAILURE(wait_usable_after(before_.generation));
  EXPECT_GT(state().contents, before_.contents);
}

TEST_F(ContentsTest, TheDeathOfTheWorkerIsToldByAManagerThatDidNotSeeIt) {
  ASSERT_NO_FATAL_FAILURE(kill_manager());
  ASSERT_NO_FATAL_FAILURE(replace_worker());
  start_manager();
  ASSERT_NO_FATAL_FAILURE(wait_usable_after(before_.generation));
  EXPECT_GT(state().contents, before_.contents);
}

TEST_F(ContentsTest, TheDeathOfTheMoverChangesNothing) {
  engine_.mover().signal(SIGKILL);
  ASSERT_TRUE(engine_.mover().wait(test::soon()).has_value());
  ASSERT_TRUE(test::run_until(loop_, [&] { return !state().offload_ready; }));
  engine_.start_mover(starter(), device());
  ASSERT_TRUE(test::run_until(loop_, [&] { return state().offload_ready; }));
  EXPECT_EQ(state().contents, before_.contents);
}

}  // namespace
}  // namespace kvferry
