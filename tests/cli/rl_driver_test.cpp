// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/rl_fake_instance.hpp"
#include "ipc/os/temp_dir.hpp"
#include "rl/loop_driver.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::FakeFaults;
using test::FakeInstance;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr std::uint32_t kIterations = 8;

class LoopDriverTest : public testing::Test {
 protected:
  LoopDriverTest() : weights_(write_weights_versions(temp_ / "weights", 1 << 16, 2, 0).value()) {
    options_.runtime_dir = temp_.path().string();
    options_.instance = "rl";
    options_.ranks = FakeInstance::kRanks;
    options_.iterations = kIterations;
    options_.cycle.engine = "rl";
    options_.start_limit = 20s;
    options_.patience = 20s;
  }

  /// Drives the loop to its end.
  RlReport run(const FakeFaults& faults = {}) {
    auto dir = ipc::RuntimeDir::open(options_.runtime_dir, options_.instance);
    EXPECT_TRUE(dir) << dir.error().to_string();
    FakeInstance instance(std::move(*dir), "rl", weights_[0].id, faults);
    ipc::EventLoop loop;
    std::optional<ipc::Status> ended;
    LoopDriver::Hooks hooks;
    hooks.say = [this](const std::string& line) { said_.push_back(line); };
    hooks.on_started = [this] { started_ = true; };
    hooks.on_iteration = [this](const IterationRecord& record) {
      EXPECT_TRUE(record.finished);
      shown_.push_back(record.number);
    };
    hooks.on_end = [&](const ipc::Status& status) { ended = status; };
    RlReport report;
    {
      LoopDriver driver(loop, options_, prompts_, weights_, std::move(hooks));
      driver.start();
      const ipc::Deadline deadline = ipc::Deadline::after(40s);
      while (!ended && !deadline.expired()) loop.run_once(deadline);
      report.settings.iterations = options_.iterations;
      report.settings.update = options_.cycle.update;
      report.settings.empty_cache = options_.cycle.empty_cache;
      driver.fill(report);
    }
    EXPECT_TRUE(ended) << "still running";
    if (ended && !*ended) report.errors.push_back(ended->error().to_string());
    return report;
  }

  const test::ShortTempDir temp_;
  const PromptSet prompts_{0, 8, 16};
  const std::vector<WeightsVersion> weights_;
  LoopDriver::Options options_;
  std::vector<std::string> said_;
  std::vector<std::uint32_t> shown_;
  bool started_ = false;
};

class LoopDriverModeTest : public LoopDriverTest,
                           public testing::WithParamInterface<ipc::PauseMode> {};

TEST_P(LoopDriverModeTest, DoesAllIterationsAndVerifiesTheirAnswers) {
  options_.cycle.mode = GetParam();
  const RlReport report = run();
  EXPECT_THAT(failures_of(report), IsEmpty());
  EXPECT_TRUE(started_);
  ASSERT_THAT(report.iterations, SizeIs(kIterations));
  EXPECT_THAT(shown_, ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_EQ(report.submitted, 8 * kIterations);
  EXPECT_EQ(report.unanswered, 0U);
  EXPECT_EQ(report.answers.finished + report.answers.aborted, report.submitted);
  EXPECT_GT(report.answers.verified, 0U);
  EXPECT_GT(report.compared_prompts, 0U);
  EXPECT_EQ(report.emptied_continues, kIterations);
  std::uint64_t finished = 0;
  for (const IterationRecord& record : report.iterations) {
    EXPECT_EQ(record.version, record.number % kWeightsVersions);
    EXPECT_EQ(record.weights, weights_[record.version].id);
    ASSERT_THAT(record.ranks, SizeIs(2));
    EXPECT_EQ(record.ranks[1].reserved_before, 60U << 20);
    EXPECT_EQ(record.ranks[1].reserved_after, 40U << 20) << "of the continue's answer";
    EXPECT_TRUE(record.update_ms);
    EXPECT_FALSE(record.clear_ms);
    finished += record.answers.finished;
  }
  EXPECT_EQ(finished, report.answers.finished);
  if (GetParam() == ipc::PauseMode::kAbort) {
    EXPECT_GT(report.answers.aborted, 0U);
  } else {
    EXPECT_GT(report.answers.mixed, 0U);
  }
  if (GetParam() == ipc::PauseMode::kRetract) {
    EXPECT_GT(report.answers.retracted, 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes,
                         LoopDriverModeTest,
                         testing::Values(ipc::PauseMode::kAbort,
                                         ipc::PauseMode::kRetract,
                                         ipc::PauseMode::kInPlace),
                         [](const auto& mode) { return std::string(to_string(mode.param)); });

TEST_F(LoopDriverTest, WithoutEmptyingItTakesWhatTheWorkersSay) {
  options_.cycle.empty_cache = false;
  const RlReport report = run();
  EXPECT_THAT(failures_of(report), IsEmpty());
  EXPECT_EQ(report.emptied_continues, 0U);
  EXPECT_EQ(report.iterations.back().ranks[0].reserved_after, 50U << 20);
}

TEST_F(LoopDriverTest, ClearsAndReinitsWhenAskedToAndCountsQuarantines) {
  options_.cycle.clear = true;
  const RlReport report = run({.quarantines = true});
  EXPECT_THAT(failures_of(report), IsEmpty());
  EXPECT_EQ(report.quarantined, kIterations);
  for (const IterationRecord& record : report.iterations) {
    EXPECT_TRUE(record.clear_ms);
    EXPECT_TRUE(record.reinit_ms);
  }
}

TEST_F(LoopDriverTest, WithoutUpdatesTheWeightsStay) {
  options_.cycle.update = UpdateKind::kNone;
  const RlReport report = run();
  EXPECT_THAT(failures_of(report), IsEmpty());
  EXPECT_EQ(report.iterations.back().version, 0U);
  EXPECT_EQ(report.compared_prompts, 0U);
  EXPECT_GT(report.answers.verified, 0U);
}

TEST_F(LoopDriverTest, ABusySchedulerIsAskedAgain) {
  EXPECT_THAT(failures_of(run({.busy_answers = 20})), IsEmpty());
}

TEST_F(LoopDriverTest, TransfersThatStillEndDelayAnUpdate) {
  EXPECT_THAT(failures_of(run({.not_idle_updates = 3})), IsEmpty());
}

TEST_F(LoopDriverTest, AWrongAnswerIsCorruptAndNamed) {
  const RlReport report = run({.wrong_answers_after = 40});
  ASSERT_THAT(said_, SizeIs(testing::Ge(1U)));
  EXPECT_THAT(said_[0], HasSubstr("corrupt answer to prompt"));
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("answers were corrupt")));
}

TEST_F(LoopDriverTest, ACommandThatFailsEndsTheRunAndIsNamed) {
  const auto error_of = [this](ipc::MessageKind kind) {
    const RlReport report = run({.fails = kind});
    EXPECT_THAT(report.errors, SizeIs(1));
    return report.errors.empty() ? "" : report.errors[0];
  };
  EXPECT_THAT(error_of(ipc::MessageKind::kPause),
              AllOf(HasSubstr("iteration 1: pause"), HasSubstr("planted")));
  EXPECT_THAT(error_of(ipc::MessageKind::kUpdateWeights), HasSubstr("update of the weights"));
  EXPECT_THAT(error_of(ipc::MessageKind::kContinue), HasSubstr("continue: planted"));
  EXPECT_THAT(error_of(ipc::MessageKind::kWorkerMemory), HasSubstr("memory while paused: planted"));
}

TEST_F(LoopDriverTest, OtherWeightsThanAskedForEndTheRun) {
  const RlReport report = run({.other_weights = true});
  ASSERT_THAT(report.errors, SizeIs(1));
  EXPECT_THAT(report.errors[0], HasSubstr(weights_[1].id.hex()));
}

TEST_F(LoopDriverTest, RequestsThatAreNeverAnsweredEndTheRunWithTheirNumber) {
  options_.patience = 300ms;
  const RlReport report = run({.forgets_long_requests = true});
  ASSERT_THAT(report.errors, SizeIs(1));
  EXPECT_THAT(report.errors[0], HasSubstr("nothing went on"));
  EXPECT_THAT(report.errors[0], testing::ContainsRegex("requests answered|go on"));
  EXPECT_GT(report.unanswered, 0U);
}

TEST_F(LoopDriverTest, WhatIsMissingAtTheStartIsNamed) {
  // Long enough to have seen, on a machine that is busy, all that is there.
  options_.start_limit = 5s;
  const RlReport report = run({.lacks_a_mover = true});
  EXPECT_FALSE(started_);
  ASSERT_THAT(report.errors, SizeIs(1));
  EXPECT_THAT(report.errors[0], HasSubstr("waiting for the mover of rank 1"));
  EXPECT_THAT(report.iterations, IsEmpty());
}

TEST_F(LoopDriverTest, WhatIsMissingIsNamedWhileTheManagerIsAskedAnew) {
  options_.start_limit = 4s;  // Less than a status may take: it ends while one is due.
  const RlReport report = run({.statuses = 1, .lacks_a_mover = true});
  ASSERT_THAT(report.errors, SizeIs(1));
  EXPECT_THAT(report.errors[0], HasSubstr("waiting for the mover of rank 1"));
}

TEST_F(LoopDriverTest, AManagerThatDoesNotAnswerAtTheStartIsNamed) {
  options_.start_limit = 4s;
  const RlReport report = run({.statuses = 0});
  ASSERT_THAT(report.errors, SizeIs(1));
  EXPECT_THAT(report.errors[0], HasSubstr("waiting for an answer of the manager"));
}

TEST_F(LoopDriverTest, ALenderThatIsMissingAtTheStartIsNamed) {
  options_.start_limit = 5s;
  options_.lenders = {"v0-r0"};
  const RlReport report = run();
  EXPECT_FALSE(started_);
  ASSERT_THAT(report.errors, SizeIs(1));
  EXPECT_THAT(report.errors[0], HasSubstr("waiting for the lender v0-r0"));
}

}  // namespace
}  // namespace kvferry::cli
