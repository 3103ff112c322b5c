// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Updates of weights from every source, with real processes: what is generated afterwards is what a
// fresh engine generates with those weights.
#include "cli/update_sources_fixture.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <csignal>

namespace kvferry::test {
namespace {

using testing::HasSubstr;

class LifecycleUpdateTest : public UpdateSourcesTest,
                            public testing::WithParamInterface<const char*> {};

TEST_P(LifecycleUpdateTest, GivesTheTokensOfAFreshEngineAndEmptiesOnlyWhenAsked) {
  const std::string from = GetParam();
  const auto prompt = prompt_of(5, 40);
  prepare_for(from);
  geometry_ = "tiny-mla";  // Its ranks share regions, and so a table of all of the weights.
  ASSERT_NO_FATAL_FAILURE(start_engine(2, {"--weights=" + second_}));
  const GenerateReply fresh = generate(prompt, 20);
  channel_.reset();
  running_.clear();
  ASSERT_NO_FATAL_FAILURE(
      start_engine(2, {"--weights=" + first_, std::string("--weights-id=") + kFirstId}));
  const GenerateReply before = generate(prompt, 20);
  EXPECT_NE(before.tokens, fresh.tokens);
  if (from == "ipc") lend(second_, "trainer");

  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  std::vector<std::uint64_t> empties{empties_of(memory_of(0)), empties_of(memory_of(1))};
  const Finished updated = update(from);
  ASSERT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
  EXPECT_THAT(updated.output, HasSubstr("on 2 ranks, 4.04 KiB"));
  const bool broadcast = from == "broadcast";
  EXPECT_EQ(updated.output.find(broadcast ? "handed on by host" : "handed on by messages") !=
                std::string::npos,
            broadcast || from == "distributed")
      << updated.output;
  EXPECT_NE(identity(), kFirstId);
  for (std::uint32_t rank : {0U, 1U}) EXPECT_EQ(empties_of(memory_of(rank)), empties[rank]);
  const Finished emptied = update(from, {"--empty-cache"});
  ASSERT_EQ(emptied.exit, ChildExit::exited(0)) << emptied.complaints;
  for (std::uint32_t rank : {0U, 1U}) EXPECT_EQ(empties_of(memory_of(rank)), empties[rank] + 1);
  ASSERT_EQ(ask("continue", {"--no-empty-cache"}).exit, ChildExit::exited(0));
  const GenerateReply after = generate(prompt, 20);
  EXPECT_EQ(after.tokens, fresh.tokens);
  EXPECT_EQ(after.cached_tokens, 0U) << "a prefix of other weights was served";
}

TEST_P(LifecycleUpdateTest, WhatFailsKeepsIdentityAndTokensAndFrozenRequestsAreInTheWayOfAFlush) {
  const std::string from = GetParam();
  prepare_for(from);
  gpu_blocks_ = 160;
  ASSERT_NO_FATAL_FAILURE(
      start_engine(2, {"--weights=" + first_, std::string("--weights-id=") + kFirstId}));
  const auto prompt = prompt_of(1000, 30);
  const GenerateReply before = generate(prompt, 20);
  // Another model's.
  write_safetensors(second_, {{"w", "BF16", {64, 33}}}, 3);
  if (from == "ipc") lend(second_, "trainer");
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  const Finished other = update(from);
  EXPECT_EQ(other.exit, ChildExit::exited(1));
  EXPECT_THAT(other.complaints,
              HasSubstr("'w' BF16 [64, 33], the model in use has 'w' BF16 [64, 32]"));
  EXPECT_EQ(identity(), kFirstId);
  ASSERT_EQ(ask("continue").exit, ChildExit::exited(0));
  EXPECT_EQ(generate(prompt, 20).tokens, before.tokens);
  if (from == "ipc") {  // Nobody has its memory any more.
    lenders_.back()->signal(SIGTERM);
    EXPECT_EQ(lenders_.back()->wait(soon()), ChildExit::exited(0));
  }

  lenders_.clear();
  write(second_, 2);
  if (from == "ipc") lend(second_, "trainer");
  Answer answer;
  ask_for(answer, prompt, 1500);
  const Finished paused = ask("pause", {"--mode=in_place"});
  ASSERT_THAT(paused.output, HasSubstr("1 frozen"));
  const Finished refused = update(from);
  EXPECT_EQ(refused.exit, ChildExit::exited(1));
  EXPECT_THAT(refused.complaints, HasSubstr("not_idle"));
  EXPECT_EQ(identity(), kFirstId);
  const Finished updated = update(from, {"--no-flush-cache"});
  EXPECT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
  ASSERT_EQ(ask("continue").exit, ChildExit::exited(0));
  ASSERT_TRUE(run_until([&answer] { return answer.has_value(); }));
  ASSERT_TRUE(answer->has_value()) << answer->error().to_string();
  EXPECT_NE((*answer)->weights_first, (*answer)->weights_last);
}

INSTANTIATE_TEST_SUITE_P(Row,
                         LifecycleUpdateTest,
                         testing::Values("disk", "distributed", "broadcast", "tensor", "ipc"),
                         [](const auto& from) {
                           const std::string name = from.param;
                           return (name == "disk"          ? "8FromDisk"
                                   : name == "distributed" ? "9FromDistributed"
                                   : name == "broadcast"   ? "9FromBroadcast"
                                   : name == "tensor"      ? "10FromTensor"
                                                           : "11FromIpc");
                         });

class LentWeightsTest : public UpdateSourcesTest,
                        public testing::WithParamInterface<const char*> {};

TEST_P(LentWeightsTest, MemoryIsFreeAfterTheLendersEnd) {
  ASSERT_NO_FATAL_FAILURE(start_engine(2, {"--weights=" + first_}));
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  const std::uint64_t before = device_bytes();
  ChildProcess& lender = lend(second_, "trainer", {std::string("--handles=") + GetParam()});
  EXPECT_GT(device_bytes(), before);
  const Finished updated = update("ipc", {"--empty-cache"});
  ASSERT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
  lender.signal(SIGTERM);
  EXPECT_EQ(lender.wait(soon()), ChildExit::exited(0)) << lender.stderr_text();
  EXPECT_LE(device_bytes(), before);
}

INSTANTIATE_TEST_SUITE_P(By, LentWeightsTest, testing::Values("vmm", "legacy"));

TEST_F(UpdateSourcesTest, AnUnknownOrDeadLenderIsNamedAndChangesNothing) {
  ASSERT_NO_FATAL_FAILURE(
      start_engine(2, {"--weights=" + first_, std::string("--weights-id=") + kFirstId}));
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  const Finished nobody = update("ipc");
  EXPECT_EQ(nobody.exit, ChildExit::exited(1));
  EXPECT_THAT(nobody.complaints, HasSubstr("nobody lends weights as 'trainer'"));
  // Stopped before it has described anything, then killed under the workers that wait for it.
  ChildProcess& lender = lend(second_, "trainer");
  ASSERT_TRUE(lender.stop());
  ChildProcess asks(ChildOptions{.program = KVFERRY_PROGRAM, .arguments = [this] {
                                   auto arguments = common("update-weights");
                                   arguments.emplace_back("--from=ipc");
                                   arguments.emplace_back("--source=trainer");
                                   return arguments;
                                 }()});
  const std::string name = fmt::format("exporter 'trainer' (pid {})", lender.pid());
  ASSERT_TRUE(wait_status([this, &name](const nlohmann::json& /*status*/) {
    return std::count_if(running_.begin(), running_.end(), [&name](const auto& process) {
             return process->stderr_text().find(name + " is asked") != std::string::npos;
           }) == 2;
  }));
  const std::string died = name + " died";
  lender.kill();
  EXPECT_EQ(asks.wait(soon()), ChildExit::exited(1));
  EXPECT_THAT(asks.stderr_text(), HasSubstr(died));
  EXPECT_EQ(identity(), kFirstId);
  // Its name is free for the next one.
  lend(second_, "trainer");
  const Finished updated = update("ipc");
  EXPECT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
}

TEST_F(UpdateSourcesTest, ARankThatTakesNoPartInADistributionIsNamed) {
  ASSERT_NO_FATAL_FAILURE(
      start_engine(2, {"--weights=" + first_, std::string("--weights-id=") + kFirstId}));
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  const Finished missing = ask("update-weights", {"--from=distributed", "--file=/nowhere"});
  EXPECT_EQ(missing.exit, ChildExit::exited(1));
  EXPECT_THAT(missing.complaints, HasSubstr("rank 0: weights file /nowhere"));
  ChildProcess& last = *running_.back();
  last.kill();
  EXPECT_EQ(last.wait(soon()), ChildExit::killed_by(SIGKILL));
  const Finished dead = update("distributed");
  EXPECT_EQ(dead.exit, ChildExit::exited(1));
  EXPECT_THAT(dead.complaints, HasSubstr("rank 1"));
}

/// Ranks of which one is in the middle of a broadcast, or has not come to it, and does not go on.
class BrokenBroadcastTest : public UpdateSourcesTest {
 protected:
  void start_large() {
    own_devices_ = true;
    device_size_ = "256MiB";
    write_safetensors(first_, model_, 1);
    write_safetensors(second_, model_, 2);
    ASSERT_NO_FATAL_FAILURE(
        start_engine(2, {"--weights=" + first_, std::string("--weights-id=") + kFirstId}));
    ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  }
  /// Stops rank 1 between the order to prepare and its answer. An update that was faster is made
  /// again.
  ChildProcess begin_and_stop(const std::vector<std::string>& options = {}) {
    for (int attempt = 0;; ++attempt) {
      ChildProcess asks = begin(options);
      EXPECT_TRUE(says(*running_.back(), "which rank 0 broadcasts", attempt + 1));
      EXPECT_TRUE(running_.back()->stop());
      if (times(*running_.back(), "that rank 0 broadcast\n") <= attempt) return asks;
      running_.back()->signal(SIGCONT);
      EXPECT_TRUE(asks.wait(soon()).has_value());
    }
  }
  ChildProcess begin(const std::vector<std::string>& options) {
    auto arguments = common("update-weights");
    for (const auto& option : {std::string("--from=distributed"), "--file=" + second_}) {
      arguments.push_back(option);
    }
    arguments.insert(arguments.end(), options.begin(), options.end());
    return ChildProcess(ChildOptions{.program = KVFERRY_PROGRAM, .arguments = arguments});
  }
  static int times(const ChildProcess& process, const std::string& text) {
    const std::string all = process.stderr_text();
    int count = 0;
    for (auto at = all.find(text); at != std::string::npos; at = all.find(text, at + 1)) ++count;
    return count;
  }
  bool says(const ChildProcess& process, const std::string& text, int often = 1) {
    return wait_status(
        [&](const nlohmann::json& /*status*/) { return times(process, text) >= often; });
  }
  ChildProcess& worker_zero() { return *running_.at(2); }

  const std::vector<WrittenTensor> model_{{"w", "U8", {2, 24 << 20}}, {"n", "F32", {5}}};
};

TEST_F(BrokenBroadcastTest, ADeathEndsItAndLeavesAllAsTheyWere) {
  ASSERT_NO_FATAL_FAILURE(start_large());
  ChildProcess asks = begin_and_stop();
  running_.back()->kill();
  EXPECT_EQ(asks.wait(soon()), ChildExit::exited(1));
  EXPECT_THAT(asks.stderr_text(), HasSubstr("peer_died: engine default rank 1"));
  EXPECT_TRUE(says(worker_zero(), "weights: cancelled") ||
              says(worker_zero(), "weights: peer_died"))
      << worker_zero().stderr_text();
  EXPECT_EQ(update("disk").exit, ChildExit::exited(1)) << "rank 1 has no worker";
  start("worker", {"--rank=1", "--ranks=2", "--weights=" + first_,
                   std::string("--weights-id=") + kFirstId, "--serve"});
  ASSERT_TRUE(wait_status(offload_ready));
  EXPECT_EQ(identity(), kFirstId);
  const Finished updated = update("broadcast");
  EXPECT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
  EXPECT_THAT(updated.output, HasSubstr("handed on by host"));
}

TEST_F(BrokenBroadcastTest, ARankThatHangsEndsItAtTheDeadlineAndGoesOnLater) {
  ASSERT_NO_FATAL_FAILURE(start_large());
  ChildProcess asks = begin_and_stop({"--deadline=6s"});
  EXPECT_TRUE(says(worker_zero(), "weights: timeout")) << worker_zero().stderr_text();
  running_.back()->signal(SIGCONT);
  EXPECT_EQ(asks.wait(soon()), ChildExit::exited(1));
  EXPECT_THAT(asks.stderr_text(), HasSubstr("timeout: engine default rank"));
  EXPECT_EQ(identity(), kFirstId);
  const Finished updated = update("broadcast");
  EXPECT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
}

TEST_F(BrokenBroadcastTest, OneRankThatTakesMessagesAloneIsServedWithThem) {
  own_devices_ = true;
  DaemonsTest::start("manager");
  for (const std::string rank : {"0", "1"}) {
    const std::vector<std::string> shared{"--rank=" + rank, "--ranks=2"};
    DaemonsTest::start("mover", shared);
    std::vector<std::string> worker = shared;
    worker.insert(worker.end(), {"--weights=" + first_, "--serve"});
    if (rank == "1") worker.emplace_back("--weights-broadcast=messages");
    DaemonsTest::start("worker", worker);
  }
  ASSERT_TRUE(wait_status(offload_ready));
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  const Finished updated = update("broadcast");
  EXPECT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
  EXPECT_THAT(updated.output, HasSubstr("handed on by messages"));
}

TEST_F(UpdateSourcesTest, AWrongUseIsToldAtOnce) {
  const auto refused = [this](const std::vector<std::string>& options, const char* why) {
    const Finished done = ask("update-weights", options);
    EXPECT_EQ(done.exit, ChildExit::exited(2));
    EXPECT_THAT(done.complaints, HasSubstr(why));
  };
  refused({"--from=ipc"}, "--from ipc needs --source, and no --file");
  refused({"--from=ipc", "--source=a", "--file=b"}, "needs --source, and no --file");
  refused({"--from=disk", "--source=a"}, "--from disk needs --file, and no --source");
  refused({"--from=nowhere"}, "'nowhere' is none of disk|tensor|distributed|ipc");
}

}  // namespace
}  // namespace kvferry::test
