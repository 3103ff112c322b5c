// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Engines of reference workers with their own scheduler: what they generate depends on weights and
// on every byte of the KV cache, and on nothing else.
#include "cli/serve_fixture.hpp"
#include "kvferry/ipc/rank/emptied_cache.hpp"
#include "support/safetensors_writer.hpp"

#include <gmock/gmock.h>

#include <csignal>
#include <numeric>
#include <optional>
#include <vector>

namespace kvferry::test {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::SizeIs;

class ServeGeometryTest : public ServeTest, public testing::WithParamInterface<const char*> {};

TEST_P(ServeGeometryTest, APrefixThatIsReusedGivesTheSameTokens) {
  geometry_ = GetParam();
  gpu_blocks_ = 64;
  ASSERT_NO_FATAL_FAILURE(start_engine(2));
  const auto prompt = prompt_of(100, 40);
  const GenerateReply cold = generate(prompt, 24);
  EXPECT_EQ(cold.cached_tokens, 0U);
  const GenerateReply warm = generate(prompt, 24);
  EXPECT_GT(warm.cached_tokens, 0U);
  EXPECT_EQ(warm.tokens, cold.tokens);
  // A longer one that goes on where the first ended.
  std::vector<std::uint32_t> longer = prompt;
  longer.insert(longer.end(), cold.tokens.begin(), cold.tokens.begin() + 12);
  const GenerateReply rest = generate(longer, 12);
  EXPECT_GT(rest.cached_tokens, 32U);
  EXPECT_EQ(rest.tokens, std::vector(cold.tokens.begin() + 12, cold.tokens.end()));
  EXPECT_NE(generate(prompt_of(101, 40), 24).tokens, cold.tokens);
}

INSTANTIATE_TEST_SUITE_P(
    Of,
    ServeGeometryTest,
    testing::Values("tiny", "tiny-mla", "tiny-draft", "tiny-window", "tiny-state"));

TEST_F(ServeTest, NothingButOutputsTellsOfAClearAFlushAndAPause) {
  ASSERT_NO_FATAL_FAILURE(start_engine(2));
  const auto prompt = prompt_of(7, 50);
  const GenerateReply first = generate(prompt, 16);
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"flush", kSettles},
                                             {"flush", kSettles, "--host=keep"},
                                             {"clear"},
                                             {"reinit"},
                                             {"pause", "--mode=retract"},
                                             {"continue"},
                                             {"pause", "--mode=in_place"},
                                             {"continue", "--no-empty-cache"}}) {
    const Finished done = ask(command[0], {command.begin() + 1, command.end()});
    ASSERT_EQ(done.exit, ChildExit::exited(0)) << command[0] << ": " << done.complaints;
    if (command[0] == "clear" || command[0] == "pause") continue;
    EXPECT_EQ(generate(prompt, 16).tokens, first.tokens) << "after " << command[0];
  }
}

TEST_F(ServeTest, RequestsThatAPauseStoppedGoOnWithTheSameTokens) {
  gpu_blocks_ = 160;
  ASSERT_NO_FATAL_FAILURE(start_engine(1));
  const auto prompt = prompt_of(1000, 30);
  constexpr std::uint32_t kTokens = 1500;  // Long enough to be stopped in the middle.
  const GenerateReply expected = generate(prompt, kTokens);
  ASSERT_EQ(ask("flush", {kSettles}).exit, ChildExit::exited(0));
  for (const auto& [mode, left] : {std::pair{"--mode=retract", "0 frozen, 1 waiting"},
                                   std::pair{"--mode=in_place", "1 frozen, 0 waiting"}}) {
    Answer answer;
    ask_for(answer, prompt, kTokens);
    const Finished paused = ask("pause", {mode});
    ASSERT_EQ(paused.exit, ChildExit::exited(0)) << paused.complaints;
    EXPECT_THAT(paused.output, HasSubstr(left));
    const Finished resumed = ask("continue");
    ASSERT_EQ(resumed.exit, ChildExit::exited(0)) << resumed.complaints;
    ASSERT_TRUE(run_until([&answer] { return answer.has_value(); }));
    ASSERT_TRUE(answer->has_value()) << answer->error().to_string();
    EXPECT_EQ((*answer)->tokens, expected.tokens) << mode;
  }
  Answer aborted;
  ask_for(aborted, prompt, kTokens);
  ASSERT_EQ(ask("pause", {"--mode=abort"}).exit, ChildExit::exited(0));
  ASSERT_TRUE(run_until([&aborted] { return aborted.has_value(); }));
  ASSERT_TRUE(aborted->has_value());
  EXPECT_EQ((*aborted)->end, GenerateEnd::kAborted);
}

TEST_F(ServeTest, WhatAPauseFrozeIsNotInTheWayOfAClearedEngine) {
  gpu_blocks_ = 160;
  ASSERT_NO_FATAL_FAILURE(start_engine(1));
  const auto prompt = prompt_of(1000, 30);
  constexpr std::uint32_t kTokens = 1500;
  const GenerateReply expected = generate(prompt, kTokens);
  ASSERT_EQ(ask("flush", {kSettles}).exit, ChildExit::exited(0));
  Answer answer;
  ask_for(answer, prompt, kTokens);
  const Finished paused = ask("pause", {"--mode=in_place"});
  EXPECT_THAT(paused.output, HasSubstr("1 frozen"));
  ASSERT_EQ(ask("flush").exit, ChildExit::exited(1)) << "frozen requests hold blocks";
  ASSERT_EQ(ask("clear").exit, ChildExit::exited(0));
  const Finished flushed = ask("flush", {kSettles});
  EXPECT_EQ(flushed.exit, ChildExit::exited(0)) << flushed.complaints;
  ASSERT_EQ(ask("reinit").exit, ChildExit::exited(0));
  ASSERT_EQ(ask("continue").exit, ChildExit::exited(0));
  ASSERT_TRUE(run_until([&answer] { return answer.has_value(); }));
  ASSERT_TRUE(answer->has_value()) << answer->error().to_string();
  EXPECT_EQ((*answer)->tokens, expected.tokens);
  EXPECT_EQ((*answer)->admissions, 2U);
}

// What a request found of its prompt and has not computed anything from is of the weights that were
// in use when it was let in: its answer is of both.
TEST_F(ServeTest, APrefixThatWasLoadedBeforeAnUpdateIsOfTheEarlierWeights) {
  const std::string first = (temp_ / "first").string();
  const std::string second = (temp_ / "second").string();
  write_safetensors(first, {{"w", "BF16", {64, 32}}}, 1);
  write_safetensors(second, {{"w", "BF16", {64, 32}}}, 2);
  ASSERT_NO_FATAL_FAILURE(start_engine(1, {"--weights=" + first}));
  const auto prompt = prompt_of(1000, 100);
  const GenerateReply before = generate(prompt, 4);
  ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
  // The load of its prefix is on its way for as long as the mover is stopped.
  ChildProcess& mover = *running_[1];
  ASSERT_TRUE(mover.stop());
  Answer answer;
  ask_for(answer, prompt, 4);
  ASSERT_TRUE(wait_status([](const nlohmann::json& status) {
    const auto& jobs = status["engines"][0]["jobs"];
    return jobs["queued"].get<int>() + jobs["running"].get<int>() > 0;
  }));
  std::vector<std::string> pause = common("pause");
  pause.emplace_back("--mode=in_place");
  ChildProcess pauses(ChildOptions{.program = KVFERRY_PROGRAM, .arguments = pause});
  ASSERT_TRUE(wait_status(
      [](const nlohmann::json& status) { return status["engines"][0]["paused"] == "in_place"; }));
  mover.signal(SIGCONT);
  EXPECT_THAT(pauses.read_line(soon()).value_or(""), HasSubstr("1 frozen"));
  ASSERT_EQ(pauses.wait(soon()), ChildExit::exited(0));
  const Finished updated = ask("update-weights", {"--file=" + second, "--no-flush-cache"});
  ASSERT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
  ASSERT_EQ(ask("continue").exit, ChildExit::exited(0));
  ASSERT_TRUE(run_until([&answer] { return answer.has_value(); }));
  ASSERT_TRUE(answer->has_value()) << answer->error().to_string();
  EXPECT_GT((*answer)->cached_tokens, 0U);
  EXPECT_EQ((*answer)->weights_first, before.weights_last);
  EXPECT_NE((*answer)->weights_last, before.weights_last);
}

TEST_F(ServeTest, AWorkerThatIsReplacedWhileTheManagerIsAwayWaitsForIt) {
  ASSERT_NO_FATAL_FAILURE(start_engine(2));
  const auto prompt = prompt_of(60, 40);
  const GenerateReply expected = generate(prompt, 300);
  for (ChildProcess* gone : {running_.front().get(), running_.back().get()}) {
    gone->kill();
    EXPECT_EQ(gone->wait(soon()), ChildExit::killed_by(SIGKILL));
  }
  start("worker", {"--rank=1", "--ranks=2", "--serve"});
  Answer answer;
  ask_for(answer, prompt, 300);
  start("manager");
  ASSERT_TRUE(run_until([&] { return answer.has_value(); })) << running_.back()->stderr_text();
  ASSERT_TRUE(answer->has_value()) << answer->error().to_string();
  EXPECT_EQ((*answer)->tokens, expected.tokens);
}

TEST_F(ServeTest, TokensDependOnTheWeightsAndComeBackWithThem) {
  const std::string first = (temp_ / "first").string();
  const std::string second = (temp_ / "second").string();
  write_safetensors(first, {{"w", "BF16", {64, 32}}, {"n", "F32", {5}}}, 1);
  write_safetensors(second, {{"w", "BF16", {64, 32}}, {"n", "F32", {5}}}, 2);
  const std::string id = "0123456789abcdef0123456789abcdef";
  ASSERT_NO_FATAL_FAILURE(start_engine(2, {"--weights=" + first, "--weights-id=" + id}));
  const auto prompt = prompt_of(5, 40);
  const GenerateReply before = generate(prompt, 20);
  const auto update = [this](const std::string& file, const std::vector<std::string>& more) {
    ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
    std::vector<std::string> options{"--file=" + file};
    options.insert(options.end(), more.begin(), more.end());
    const Finished updated = ask("update-weights", options);
    ASSERT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
    ASSERT_EQ(ask("continue").exit, ChildExit::exited(0));
  };
  ASSERT_NO_FATAL_FAILURE(update(second, {"--no-flush-cache"}));
  const GenerateReply other = generate(prompt, 20);
  EXPECT_NE(other.tokens, before.tokens);
  EXPECT_EQ(other.cached_tokens, 0U) << "a prefix of other weights was served";
  EXPECT_NE(other.weights_first, before.weights_first);
  ASSERT_NO_FATAL_FAILURE(update(first, {"--weights-id=" + id}));
  const GenerateReply back = generate(prompt, 20);
  EXPECT_EQ(back.tokens, before.tokens);
  EXPECT_EQ(back.weights_last, before.weights_last);
  EXPECT_GT(back.cached_tokens, 0U) << "host memory kept what these weights had computed";
}

TEST_F(ServeTest, ManyRequestsShareADeviceThatHoldsAFewOfThem) {
  gpu_blocks_ = 10;
  ASSERT_NO_FATAL_FAILURE(start_engine(1));
  std::vector<GenerateReply> alone;
  for (std::uint32_t i = 0; i < 12; ++i) alone.push_back(generate(prompt_of(i * 50, 33), 60));
  ASSERT_EQ(ask("flush", {kSettles}).exit, ChildExit::exited(0));
  std::vector<Answer> answers(alone.size());
  for (std::uint32_t i = 0; i < answers.size(); ++i) {
    ask_for(answers[i], prompt_of(i * 50, 33), 60);
  }
  std::uint32_t put_back = 0;
  for (std::uint32_t i = 0; i < answers.size(); ++i) {
    ASSERT_TRUE(run_until([&] { return answers[i].has_value(); })) << i;
    ASSERT_TRUE(answers[i]->has_value()) << answers[i]->error().to_string();
    EXPECT_EQ((*answers[i])->tokens, alone[i].tokens) << i;
    put_back += (*answers[i])->admissions - 1;
  }
  EXPECT_GT(put_back, 0U) << "they never were in each other's way";
}

class ServeHandlesTest : public ServeTest, public testing::WithParamInterface<const char*> {};

TEST_P(ServeHandlesTest, AReinitReplaysTheFirstGraphWhereTheArenaComesBackAtItsAddresses) {
  const std::string handles = GetParam();
  ASSERT_NO_FATAL_FAILURE(start_engine(1, {}, {"--handles=" + handles}));
  const auto prompt = prompt_of(11, 20);
  const GenerateReply first = generate(prompt, 10);
  for (int cycle = 0; cycle < 3; ++cycle) {
    ASSERT_EQ(ask("clear").exit, ChildExit::exited(0));
    ASSERT_EQ(ask("reinit").exit, ChildExit::exited(0));
    EXPECT_EQ(generate(prompt, 10).tokens, first.tokens);
  }
  const ipc::WorkerMemory memory = memory_of(0);
  EXPECT_GE(memory.graph_launches, 40U);
  // Legacy memory may come back anywhere.
  if (handles == "vmm") {
    EXPECT_EQ(memory.graph_recordings, 1U);
  }
  EXPECT_LE(memory.graph_recordings, 4U);
}

INSTANTIATE_TEST_SUITE_P(With, ServeHandlesTest, testing::Values("vmm", "legacy"));

TEST_F(ServeTest, WrongBytesInABlockChangeWhatIsGenerated) {
  ASSERT_NO_FATAL_FAILURE(start_engine(1));
  const auto prompt = prompt_of(3, 48);
  const GenerateReply right = generate(prompt, 8);
  // Somebody writes over every block that the prefix may lie in.
  worker::StepChannel steps(loop_, *dir_, "default", ipc::Rank{0}, "vandal", {[] {}, [] {}});
  ASSERT_TRUE(run_until([&] { return steps.is_up(); }));
  const auto status = nlohmann::json::parse(ask("status", {"--json"}).output);
  ipc::Step step;
  const auto& rank = status["engines"][0]["ranks"][0]["worker"];
  step.session = ipc::SessionId::from_hex(rank["session"].get<std::string>()).value();
  step.epoch = ipc::Epoch{rank["epoch"].get<std::uint64_t>()};
  for (std::uint32_t block = 0; block < 32; ++block) {
    step.fills.push_back({ipc::GroupId{0}, ipc::BlockId{block}, 99});
  }
  std::optional<ipc::Result<ipc::StepReply>> filled;
  ASSERT_TRUE(steps.send(step, [&](ipc::Result<ipc::StepReply> reply) { filled = reply; }));
  ASSERT_TRUE(run_until([&] { return filled.has_value(); }));
  ASSERT_TRUE(filled->has_value()) << filled->error().to_string();
  const GenerateReply wrong = generate(prompt, 8);
  EXPECT_GT(wrong.cached_tokens, 0U);
  EXPECT_NE(wrong.tokens, right.tokens);
}

TEST_F(ServeTest, RequestsThatCannotBeServedAreToldWhy) {
  ASSERT_NO_FATAL_FAILURE(start_engine(1));
  const auto refusal = [this](const std::vector<std::uint32_t>& prompt, std::uint32_t tokens) {
    Answer answer;
    ask_for(answer, prompt, tokens);
    EXPECT_TRUE(run_until([&] { return answer.has_value(); }));
    return answer && !*answer ? answer->error().to_string() : std::string("no refusal");
  };
  EXPECT_THAT(refusal({}, 1), HasSubstr("give at least one of each"));
  EXPECT_THAT(refusal({1}, 0), HasSubstr("give at least one of each"));
  EXPECT_THAT(refusal({1}, 2'000'000), HasSubstr("at most"));
  EXPECT_THAT(refusal(prompt_of(0, 100), 10'000), HasSubstr("--gpu-blocks"));
  EXPECT_THAT(generate(prompt_of(0, 3), 2).tokens, SizeIs(2));
}

TEST_F(ServeTest, AKilledWorkerOfAnotherRankCostsTime) {
  ASSERT_NO_FATAL_FAILURE(start_engine(2));
  const auto prompt = prompt_of(60, 40);
  const GenerateReply expected = generate(prompt, 300);
  Answer answer;
  ask_for(answer, prompt, 300);
  ChildProcess& killed = *running_.back();
  killed.kill();
  EXPECT_EQ(killed.wait(soon()), ChildExit::killed_by(SIGKILL));
  start("worker", {"--rank=1", "--ranks=2", "--serve"});
  ASSERT_TRUE(run_until([&] { return answer.has_value(); })) << running_.back()->stderr_text();
  ASSERT_TRUE(answer->has_value()) << answer->error().to_string();
  EXPECT_EQ((*answer)->tokens, expected.tokens);
}

TEST_F(ServeTest, Row17AnIdleWorkerIsTrimmedOnceUntilItHasWorkedAgain) {
  ASSERT_NO_FATAL_FAILURE(start_engine(2, {"--idle-trim=0.1"}));
  constexpr auto kIdle = static_cast<std::size_t>(ipc::EmptyReason::kIdle) - 1;
  const auto all_trimmed = [this](const std::vector<std::uint64_t>& times) {
    for (std::uint32_t rank = 0; rank < times.size(); ++rank) {
      if (memory_of(rank).empties.at(kIdle) < times[rank]) return false;
    }
    return true;
  };
  // Nothing tells of a trim: it is looked for.
  const auto wait_trimmed = [&](const std::vector<std::uint64_t>& times) {
    const ipc::Deadline deadline = soon();
    while (!deadline.expired()) {
      if (all_trimmed(times)) return true;
    }
    return false;
  };
  ASSERT_TRUE(wait_trimmed({1, 1}));
  generate(prompt_of(30, 40), 8);
  const std::vector<std::uint64_t> before{memory_of(0).empties.at(kIdle),
                                          memory_of(1).empties.at(kIdle)};
  // A rank may have been trimmed after the last step by now, or between two of them.
  generate(prompt_of(900, 40), 8);
  ASSERT_TRUE(wait_trimmed({before[0] + 1, before[1] + 1}));
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const ipc::WorkerMemory memory = memory_of(rank);
    EXPECT_EQ(std::accumulate(memory.empties.begin(), memory.empties.end(), std::uint64_t{0}),
              memory.empties[kIdle])
        << "rank " << rank << ": emptied for no other reason";
  }
}

}  // namespace
}  // namespace kvferry::test
