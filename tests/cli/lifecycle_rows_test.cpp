// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// docs/lifecycle.md, row by row, on a serving engine of two ranks: what a command leaves of
// requests, cache and memory, and that every rank's allocator is emptied for the row's reason and
// for no other.
#include "cli/lifecycle_fixture.hpp"

#include <algorithm>
#include <array>
#include <csignal>

namespace kvferry::test {
namespace {

using ipc::EmptyReason;
using testing::HasSubstr;

TEST_F(LifecycleRowsTest, Row1FlushForgetsAndEmptiesOnce) {
  ASSERT_NO_FATAL_FAILURE(start_rows());
  const GenerateReply first = generate(prompt_, 16);
  const std::uint64_t epoch = epoch_of(0);
  done("flush", {kSettles, "--host=keep"});
  expect_emptied({{EmptyReason::kFlush, 1}});
  GenerateReply again = generate(prompt_, 16);
  EXPECT_EQ(again.tokens, first.tokens);
  EXPECT_GT(again.cached_tokens, 0U) << "from host memory";
  done("flush", {kSettles, "--no-empty-cache"});
  expect_emptied({});
  again = generate(prompt_, 16);
  EXPECT_EQ(again.tokens, first.tokens);
  EXPECT_EQ(again.cached_tokens, 0U);
  EXPECT_EQ(epoch_of(0), epoch) << "the regions stay";
  // Refused: every term is named, and nothing has changed.
  Answer answer;
  ask_for(answer, prompt_, kLong);
  done("pause", {"--mode=in_place"});
  refused("flush", {}, "1 are frozen in place");
  expect_emptied({});
  done("continue", {"--no-empty-cache"});
  const GenerateReply whole = wait_for(answer);
  EXPECT_EQ(whole.admissions, 1U);
  EXPECT_GT(whole.cached_tokens, 0U) << "the refused flush had forgotten it";
  done("flush", {kSettles});
  expect_emptied({{EmptyReason::kFlush, 1}});
}

class LifecycleRolesTest : public LifecycleRowsTest,
                           public testing::WithParamInterface<const char*> {};

TEST_P(LifecycleRolesTest, Row2ClearFreesTheRegionsAndEmptiesOnce) {
  ASSERT_NO_FATAL_FAILURE(start_rows({}, {std::string("--cache-owner=") + GetParam()}));
  const GenerateReply first = generate(prompt_, 16);
  const std::uint64_t before = device_bytes();
  const Finished cleared = ask("clear");
  ASSERT_EQ(cleared.exit, ChildExit::exited(0)) << cleared.complaints;
  EXPECT_THAT(cleared.output, HasSubstr("device free before"));
  EXPECT_LT(device_bytes(), before);
  expect_emptied({{EmptyReason::kClear, 1}});
  // Requests wait. A second one finds nothing to free, but empties: on every path.
  Answer answer;
  ask_for(answer, prompt_, 16);
  const Finished again = ask("clear");
  EXPECT_EQ(again.exit, ChildExit::exited(0)) << again.complaints;
  EXPECT_THAT(again.output, HasSubstr("already cleared"));
  expect_emptied({{EmptyReason::kClear, 1}});
  EXPECT_FALSE(answer.has_value());
  done("reinit");
  const GenerateReply served = wait_for(answer);
  EXPECT_EQ(served.tokens, first.tokens);
  EXPECT_EQ(served.cached_tokens, 0U);
}

TEST_P(LifecycleRolesTest, Row3ReinitGivesFreshRegionsAndEmptiesNothing) {
  ASSERT_NO_FATAL_FAILURE(start_rows({}, {std::string("--cache-owner=") + GetParam()}));
  const GenerateReply first = generate(prompt_, 16);
  const std::array<std::uint64_t, kRanks> epochs{epoch_of(0), epoch_of(1)};
  const std::uint64_t held = device_bytes();
  done("clear", {"--host=keep"});
  expect_emptied({{EmptyReason::kClear, 1}});
  done("reinit");
  expect_emptied({});
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(epoch_of(rank), epochs[rank] + 1);
  const GenerateReply kept = generate(prompt_, 16);
  EXPECT_EQ(kept.tokens, first.tokens);
  EXPECT_GT(kept.cached_tokens, 0U) << "host memory was kept";
  // Asked again: never a second allocation.
  (void)ask("reinit");
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(epoch_of(rank), epochs[rank] + 1);
  EXPECT_LE(device_bytes(), held + memory_of(0).peak_reserved + memory_of(1).peak_reserved);
  EXPECT_EQ(generate(prompt_, 16).tokens, first.tokens);
  expect_emptied({});
}

INSTANTIATE_TEST_SUITE_P(OwnedByThe, LifecycleRolesTest, testing::Values("worker", "mover"));

TEST_F(LifecycleRowsTest, Row4PauseAbortEndsRequestsAndKeepsTheCache) {
  ASSERT_NO_FATAL_FAILURE(start_rows());
  const GenerateReply first = generate(prompt_, 16);
  Answer answer;
  ask_for(answer, prompt_, kLong);
  done("pause", {"--mode=abort"});
  EXPECT_EQ(wait_for(answer).end, GenerateEnd::kAborted);
  done("pause", {"--mode=abort"});  // Again: the same.
  Answer later;
  ask_for(later, prompt_, 16);
  expect_emptied({});
  EXPECT_FALSE(later.has_value()) << "nothing runs while it is paused";
  done("continue", {"--no-empty-cache"});
  const GenerateReply warm = wait_for(later);
  EXPECT_EQ(warm.tokens, first.tokens);
  EXPECT_GT(warm.cached_tokens, 0U);
  expect_emptied({});
}

TEST_F(LifecycleRowsTest, Row5PauseRetractLetsAFlushWork) {
  ASSERT_NO_FATAL_FAILURE(start_rows());
  const GenerateReply expected = generate(prompt_, kLong);
  Answer answer;
  ask_for(answer, prompt_, kLong);
  const Finished paused = ask("pause", {"--mode=retract"});
  ASSERT_EQ(paused.exit, ChildExit::exited(0)) << paused.complaints;
  EXPECT_THAT(paused.output, HasSubstr("0 running, 0 frozen, 1 waiting, 0 transfers"));
  expect_emptied({});
  done("flush");
  expect_emptied({{EmptyReason::kFlush, 1}});
  done("continue", {"--no-empty-cache"});
  const GenerateReply whole = wait_for(answer);
  EXPECT_EQ(whole.tokens, expected.tokens);
  EXPECT_EQ(whole.admissions, 2U);
}

TEST_F(LifecycleRowsTest, Row6PauseInPlaceKeepsBlocksAndDrainsTransfers) {
  ASSERT_NO_FATAL_FAILURE(start_rows());
  const GenerateReply expected = generate(prompt_, kLong);
  done("flush", {kSettles});
  expect_emptied({{EmptyReason::kFlush, 1}});
  Answer answer;
  ask_for(answer, prompt_, kLong);
  const Finished paused = ask("pause", {"--mode=in_place"});
  ASSERT_EQ(paused.exit, ChildExit::exited(0)) << paused.complaints;
  EXPECT_THAT(paused.output, HasSubstr("0 running, 1 frozen, 0 waiting"));
  // What was being stored is stored: nobody has to continue for that.
  EXPECT_TRUE(wait_status([](const nlohmann::json& status) {
    const auto& jobs = status["engines"][0]["jobs"];
    return jobs["queued"] == 0 && jobs["running"] == 0;
  })) << engine()["jobs"].dump();
  expect_emptied({});
  done("continue", {"--no-empty-cache"});
  const GenerateReply whole = wait_for(answer);
  EXPECT_EQ(whole.tokens, expected.tokens);
  EXPECT_EQ(whole.admissions, 1U);
}

TEST_F(LifecycleRowsTest, Row7ContinueEmptiesBeforeAnythingRuns) {
  ASSERT_NO_FATAL_FAILURE(start_rows());
  refused("continue", {}, "not_paused");
  expect_emptied({});
  for (const char* mode : {"--mode=abort", "--mode=retract", "--mode=in_place"}) {
    generate(prompt_, 16);
    done("pause", {mode});
    const Finished resumed = ask("continue");
    ASSERT_EQ(resumed.exit, ChildExit::exited(0)) << resumed.complaints;
    EXPECT_THAT(resumed.output, HasSubstr("reserved before"));
    expect_emptied({{EmptyReason::kContinue, 1}});
    refused("continue", {}, "not_paused");
    done("pause", {mode});
    done("continue", {"--no-empty-cache"});
    expect_emptied({});
  }
  EXPECT_THAT(running_.back()->stderr_text(),
              testing::ContainsRegex(" I worker/1 continue: reserved .* -> .* .freed .*"));
}

TEST_F(LifecycleRowsTest, Row16LookingChangesNothing) {
  ASSERT_NO_FATAL_FAILURE(start_rows({"--log-level=debug"}, {}));
  generate(prompt_, 16);
  const ipc::WorkerMemory before = memory_of(1);
  worker::StepChannel steps(loop_, *dir_, "default", ipc::Rank{1}, "scraper", {[] {}, [] {}});
  ASSERT_TRUE(run_until([&] { return steps.is_up(); }));
  constexpr int kLooks = 10000;
  constexpr int kAtOnce = 20;  // A busy machine takes its time for each way there and back.
  int seen = 0;
  std::uint64_t reserved = 0;
  for (int look = 0; look < kLooks; look += kAtOnce) {
    for (int i = 0; i < kAtOnce; ++i) {
      ASSERT_TRUE(steps.ask_memory([&](const ipc::Result<ipc::WorkerMemory>& memory) {
        ++seen;
        reserved = std::max(reserved, memory ? memory->reserved : ~std::uint64_t{0});
      }));
    }
    ASSERT_TRUE(run_until([&] { return seen == look + kAtOnce; }));
    if (look % 1000 == 0) done("status");
  }
  EXPECT_EQ(reserved, before.reserved);
  expect_emptied({});
  EXPECT_EQ(memory_of(1).reserved, before.reserved);
}

class LifecycleEndsTest : public LifecycleRowsTest, public testing::WithParamInterface<int> {};

TEST_P(LifecycleEndsTest, Row18AllDeviceMemoryGoesBackWhateverEnds) {
  ASSERT_NO_FATAL_FAILURE(start_rows());
  generate(prompt_, 16);
  Answer answer;
  ask_for(answer, prompt_, kLong);
  EXPECT_GT(device_bytes(), 0U);
  for (const auto& process : running_) process->signal(GetParam());
  for (const auto& process : running_) {
    const auto end = process->wait(soon());
    ASSERT_TRUE(end.has_value()) << process->stderr_text();
    if (GetParam() == SIGKILL) {
      EXPECT_EQ(end, ChildExit::killed_by(SIGKILL));
    } else {
      EXPECT_EQ(end, ChildExit::exited(0)) << process->stderr_text();
    }
  }
  EXPECT_EQ(device_bytes(), 0U);
}

INSTANTIATE_TEST_SUITE_P(By,
                         LifecycleEndsTest,
                         testing::Values(SIGTERM, SIGKILL),
                         [](const auto& signal) {
                           return std::string(signal.param == SIGTERM ? "Term" : "Kill");
                         });

}  // namespace
}  // namespace kvferry::test
