// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// When the scheduler of reference workers stores blocks in host memory, and when it computes them
// although they are there: its answers are the same in any case.
#include "cli/serve_fixture.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

class ServeTierTest : public ServeTest {
 protected:
  /// Blocks that lookups find in host memory, once no job is left that would change that.
  int stored_blocks() {
    int blocks = -1;
    const bool settled = wait_status([&blocks](const nlohmann::json& status) {
      blocks = status["index"]["blocks"].get<int>();
      const auto& jobs = status["engines"][0]["jobs"];
      return jobs["queued"] == 0 && jobs["running"] == 0;
    });
    EXPECT_TRUE(settled);
    return blocks;
  }
};

TEST_F(ServeTierTest, SelectiveStoresAPrefixWhenItIsUsedAgain) {
  ASSERT_NO_FATAL_FAILURE(start_engine(1, {"--write-policy=selective"}));
  const auto prompt = prompt_of(100, 80);
  const GenerateReply cold = generate(prompt, 8);
  EXPECT_EQ(stored_blocks(), 0);
  EXPECT_EQ(generate(prompt, 8).tokens, cold.tokens);
  EXPECT_TRUE(wait_status(
      [](const nlohmann::json& status) { return status["index"]["blocks"].get<int>() > 0; }));
}

TEST_F(ServeTierTest, WriteBackStoresWhatIsEvictedAndFindsItAgain) {
  gpu_blocks_ = 24;
  ASSERT_NO_FATAL_FAILURE(start_engine(2, {"--write-policy=write-back", "--write-back-wait=60s"}));
  const auto prompt = prompt_of(100, 80);
  const GenerateReply cold = generate(prompt, 8);
  EXPECT_EQ(cold.cached_tokens, 0U);
  EXPECT_EQ(stored_blocks(), 0);
  for (std::uint32_t i = 1; i <= 8; ++i) generate(prompt_of(1000 * i, 80), 8);
  EXPECT_GT(stored_blocks(), 0);
  const GenerateReply warm = generate(prompt, 8);
  EXPECT_EQ(warm.tokens, cold.tokens);
  EXPECT_EQ(warm.cached_tokens, 80U) << "of what the device had evicted something was lost";
}

TEST_F(ServeTierTest, ANamespaceHasItsBlocksUnderItsName) {
  const std::filesystem::path key = temp_ / "key";
  std::ofstream(key) << "0123456789abcdef0123456789abcdef\n";
  std::filesystem::permissions(key, std::filesystem::perms::owner_read);
  ASSERT_NO_FATAL_FAILURE(
      start_engine(1, {"--namespace=tenant", "--namespace-key-file=" + key.string()}));
  generate(prompt_of(100, 80), 8);
  EXPECT_TRUE(wait_status([](const nlohmann::json& status) {
    const auto& all = status["namespaces"];
    return std::any_of(all.begin(), all.end(), [](const nlohmann::json& one) {
      return one["name"] == "tenant" && one["has_key"] == true && one["blocks"] > 0;
    });
  }));
}

class ServePolicyTest : public ServeTierTest, public testing::WithParamInterface<const char*> {};

TEST_P(ServePolicyTest, ManyRequestsOnASmallDeviceHaveTheAnswersOfEachAlone) {
  gpu_blocks_ = 10;
  ASSERT_NO_FATAL_FAILURE(start_engine(1, {GetParam(), "--recompute=auto"}));
  std::vector<GenerateReply> alone;
  for (std::uint32_t i = 0; i < 8; ++i) alone.push_back(generate(prompt_of(i * 50, 33), 60));
  ASSERT_EQ(ask("flush", {kSettles}).exit, ChildExit::exited(0));
  for (int round = 0; round < 2; ++round) {
    std::vector<Answer> answers(alone.size());
    for (std::uint32_t i = 0; i < answers.size(); ++i) {
      ask_for(answers[i], prompt_of(i * 50, 33), 60);
    }
    for (std::uint32_t i = 0; i < answers.size(); ++i) {
      ASSERT_TRUE(run_until([&] { return answers[i].has_value(); })) << i;
      ASSERT_TRUE(answers[i]->has_value()) << answers[i]->error().to_string();
      EXPECT_EQ((*answers[i])->tokens, alone[i].tokens) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of,
                         ServePolicyTest,
                         testing::Values("--write-policy=write-through",
                                         "--write-policy=selective",
                                         "--write-policy=write-back",
                                         "--store-queue=1",
                                         "--prefetch=best-effort",
                                         "--prefetch=timeout",
                                         "--unit-blocks=3"),
                         [](const auto& option) {
                           std::string name(option.param);
                           name.erase(0, name.find('=') == std::string::npos ? 0 : 2);
                           std::replace_if(
                               name.begin(), name.end(),
                               [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

TEST_F(ServeTierTest, RequestsThatWaitHaveTheirPrefixesLoadedAndTheSameAnswers) {
  gpu_blocks_ = 1200;
  ASSERT_NO_FATAL_FAILURE(
      start_engine(1, {"--prefetch=wait", "--prefetch-requests=16", "--log-level=debug"}));
  constexpr std::uint32_t kPrompts = 24;
  std::vector<GenerateReply> alone;
  for (std::uint32_t i = 0; i < kPrompts; ++i) alone.push_back(generate(prompt_of(i * 90, 66), 8));
  EXPECT_GT(stored_blocks(), 0);
  // Behind a full batch of others they wait, unless those have ended before they come.
  constexpr std::uint32_t kBatch = 64;
  const auto prefetched = [this] {
    return running_.back()->stderr_text().find("scheduler: prefetches ") != std::string::npos;
  };
  for (int round = 0; round < 10 && !prefetched(); ++round) {
    ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
    std::vector<Answer> batch(kBatch);
    std::vector<Answer> answers(kPrompts);
    for (std::uint32_t i = 0; i < kBatch; ++i) ask_for(batch[i], prompt_of(10'000 + i, 5), 120);
    for (std::uint32_t i = 0; i < kPrompts; ++i) ask_for(answers[i], prompt_of(i * 90, 66), 8);
    for (std::uint32_t i = 0; i < kPrompts; ++i) {
      ASSERT_TRUE(run_until([&] { return answers[i].has_value(); })) << i;
      ASSERT_TRUE(answers[i]->has_value()) << answers[i]->error().to_string();
      EXPECT_EQ((*answers[i])->tokens, alone[i].tokens) << i;
      EXPECT_EQ((*answers[i])->cached_tokens, 64U) << i;
    }
    for (const Answer& answer : batch) {
      ASSERT_TRUE(run_until([&answer] { return answer.has_value(); }));
      ASSERT_TRUE(answer->has_value()) << answer->error().to_string();
    }
  }
  EXPECT_TRUE(prefetched()) << running_.back()->stderr_text();
}

class ServeUnitsTest : public ServeTierTest, public testing::WithParamInterface<const char*> {
 protected:
  void start_in_units(std::vector<std::string> more = {}) {
    geometry_ = GetParam();
    more.emplace_back("--unit-blocks=4");
    ASSERT_NO_FATAL_FAILURE(start_engine(1, more));
  }
  void forget_device() {
    ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
  }
};

TEST_P(ServeUnitsTest, APrefixComesBackInWholeUnitsAndWhereItEnded) {
  ASSERT_NO_FATAL_FAILURE(start_in_units());
  const auto prompt = prompt_of(100, 80);
  const GenerateReply cold = generate(prompt, 8);
  EXPECT_EQ(cold.cached_tokens, 0U);
  forget_device();
  const GenerateReply warm = generate(prompt, 8);
  EXPECT_EQ(warm.tokens, cold.tokens);
  EXPECT_EQ(warm.cached_tokens, 80U);
  // The next turn goes on where that one ended, and completes its unit.
  auto longer = prompt_of(100, 140);
  forget_device();
  const GenerateReply turn = generate(longer, 8);
  EXPECT_EQ(turn.cached_tokens, 80U);
  forget_device();
  const GenerateReply again = generate(longer, 8);
  EXPECT_EQ(again.tokens, turn.tokens);
  EXPECT_EQ(again.cached_tokens, 128U);
}

TEST_P(ServeUnitsTest, ManyRequestsOnASmallDeviceHaveTheAnswersOfEachAlone) {
  gpu_blocks_ = 24;
  ASSERT_NO_FATAL_FAILURE(start_in_units({"--prefetch=best-effort", "--prefetch-requests=16"}));
  std::vector<GenerateReply> alone;
  for (std::uint32_t i = 0; i < 12; ++i) alone.push_back(generate(prompt_of(i * 300, 100), 30));
  for (int round = 0; round < 3; ++round) {
    forget_device();
    std::vector<Answer> answers(alone.size());
    for (std::uint32_t i = 0; i < answers.size(); ++i) {
      ask_for(answers[i], prompt_of(i * 300, 100), 30);
    }
    std::uint32_t cached = 0;
    for (std::uint32_t i = 0; i < answers.size(); ++i) {
      ASSERT_TRUE(run_until([&] { return answers[i].has_value(); })) << i;
      ASSERT_TRUE(answers[i]->has_value()) << answers[i]->error().to_string();
      EXPECT_EQ((*answers[i])->tokens, alone[i].tokens) << i;
      cached += (*answers[i])->cached_tokens;
    }
    EXPECT_GT(cached, 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Geometries,
                         ServeUnitsTest,
                         testing::Values("tiny", "tiny-window", "tiny-state"),
                         [](const auto& geometry) {
                           std::string name = geometry.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_F(ServeTierTest, InUnitsThePrefixThatIsSharedInPartIsFoundAsFarAsWholeOnes) {
  ASSERT_NO_FATAL_FAILURE(start_engine(1, {"--unit-blocks=4"}));
  generate(prompt_of(100, 200), 8);  // 12 full blocks
  EXPECT_EQ(stored_blocks(), 3) << "keys of units";
  ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
  const auto shares = [](std::uint32_t tokens) {
    auto prompt = prompt_of(100, tokens);
    const auto own = prompt_of(50'000, 200 - tokens);
    prompt.insert(prompt.end(), own.begin(), own.end());
    return prompt;
  };
  EXPECT_EQ(generate(shares(6 * 16), 8).cached_tokens, 64U);
  ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
  EXPECT_EQ(generate(shares(3 * 16), 8).cached_tokens, 0U);
}

// Of the second unit the first request leaves a window's last three blocks, where all four are
// wanted: that is a miss that no load comes upon, and the unit gives way to one that has them.
TEST_F(ServeTierTest, AWindowsUnitThatLacksABlockIsNotLoadedAndGivesWay) {
  geometry_ = "tiny-window";
  ASSERT_NO_FATAL_FAILURE(start_engine(1, {"--unit-blocks=4"}));
  generate(prompt_of(100, 150), 2);  // 9 full blocks
  const auto shares_eight = [](std::uint32_t own) {
    auto prompt = prompt_of(100, 8 * 16);
    prompt.insert(prompt.end(), {own, own + 1, own + 2});
    return prompt;
  };
  for (const std::uint32_t found : {0U, 128U}) {
    ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
    EXPECT_EQ(generate(shares_eight(found + 1), 2).cached_tokens, found);
  }
  int misses = -1;
  EXPECT_TRUE(wait_status([&misses](const nlohmann::json& status) {
    misses = status["namespaces"].at(0)["misses"].get<int>();
    return true;
  }));
  EXPECT_EQ(misses, 0) << "blocks that a load asked for";
}

// Flips a bit of what a manager's pool has, so far (of 1) into it.
void damage(const ChildProcess& manager, double from, double to) {
  for (const auto& entry :
       std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", manager.pid()))) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (gone || target.find("memfd:kvferry-pool-") == std::string::npos) continue;
    std::fstream pool(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(pool), {}};
    const std::size_t first = bytes.find_first_not_of('\0');
    ASSERT_NE(first, std::string::npos) << "nothing is stored";
    const auto used = static_cast<double>(bytes.find_last_not_of('\0') + 1 - first);
    const std::size_t at =
        bytes.find_first_not_of('\0', first + static_cast<std::size_t>(used * from));
    ASSERT_LT(at, first + static_cast<std::size_t>(used * to));
    pool.clear();
    pool.seekp(static_cast<std::streamoff>(at));
    pool.put(static_cast<char>(bytes[at] ^ 1));
    ASSERT_TRUE(pool.good());
    return;
  }
  FAIL() << "the manager has no pool";
}

TEST_F(ServeTierTest, OfALoadThatDoesNotComeWholeWhatCameIsFound) {
  ChildProcess& manager = start("manager", {"--verify-loads=always"});
  start("mover");
  start("worker", {"--serve"});
  ASSERT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
  connect();
  const auto prompt = prompt_of(100, 83);
  const GenerateReply cold = generate(prompt, 2);
  ASSERT_EQ(stored_blocks(), 5);
  ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
  ASSERT_NO_FATAL_FAILURE(damage(manager, 0.65, 0.75));  // the fourth of the five
  const GenerateReply damaged = generate(prompt, 2);
  EXPECT_EQ(damaged.tokens, cold.tokens);
  EXPECT_EQ(damaged.cached_tokens, 48U);
  EXPECT_EQ(damaged.admissions, 2U);
  EXPECT_EQ(generate(prompt, 2).cached_tokens, 80U);
}

TEST_F(ServeTierTest, AKilledManagersUnitsAreFoundAgain) {
  ASSERT_NO_FATAL_FAILURE(start_engine(1, {"--unit-blocks=4"}));
  const auto prompt = prompt_of(100, 80);
  const GenerateReply cold = generate(prompt, 8);
  ASSERT_TRUE(wait_status(
      [](const nlohmann::json& status) { return status["pool"]["integrity"]["summed"] == 2; }));
  running_.front()->signal(SIGKILL);
  ASSERT_TRUE(running_.front()->wait(soon()).has_value());
  start("manager");
  std::swap(running_.front(), running_.back());  // where wait_status() looks for it
  ASSERT_TRUE(wait_status([this](const nlohmann::json& status) {
    const bool scheduler_is_back =
        running_.front()->stderr_text().find(" joined engine ") != std::string::npos;
    return offload_ready(status) && scheduler_is_back && status["pool"]["kept"]["adopted"] == 2;
  }));
  ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
  const GenerateReply warm = generate(prompt, 8);
  EXPECT_EQ(warm.tokens, cold.tokens);
  EXPECT_EQ(warm.cached_tokens, 80U);
}

class ServeStoppedTest : public ServeTierTest, public testing::WithParamInterface<const char*> {};

// Blocks of what it was offered are nobody's until it answers: requests fit beside them.
TEST_P(ServeStoppedTest, AStoppedManagerKeepsNobodyWaiting) {
  gpu_blocks_ = 40;
  ASSERT_NO_FATAL_FAILURE(
      start_engine(1, {fmt::format("--write-policy={}", GetParam()), "--write-back-wait=60s"}));
  const auto prompt = prompt_of(100, 80);
  const GenerateReply cold = generate(prompt, 8);
  for (std::uint32_t i = 0; i < 8; ++i) generate(prompt_of(5000 + 100 * i, 80), 8);
  stored_blocks();
  ASSERT_TRUE(running_.front()->stop());
  const auto is_noticed = [this] {
    return running_.back()->stderr_text().find("goes on without host memory") != std::string::npos;
  };
  // What is full of these is offered to it, and looked for there. Together they need more blocks
  // than there are, so that some grow at the cost of others.
  const ipc::Deadline deadline = soon();
  for (std::uint32_t i = 1; !is_noticed() && !deadline.expired(); ++i) {
    std::array<Answer, 4> answers;
    for (std::uint32_t k = 0; k < answers.size(); ++k) {
      ask_for(answers.at(k), prompt_of(1000 + 4 * i + k, 80), 160);
    }
    ASSERT_TRUE(run_until([&answers] {
      return std::all_of(answers.begin(), answers.end(),
                         [](const Answer& answer) { return answer.has_value(); });
    })) << running_.back()->stderr_text();
    for (const Answer& answer : answers) EXPECT_TRUE(answer->has_value());
  }
  EXPECT_TRUE(is_noticed()) << running_.back()->stderr_text();
  running_.front()->signal(SIGCONT);
  EXPECT_EQ(generate(prompt, 8).tokens, cold.tokens);
  stored_blocks();  // Nothing of what it was offered is under way for ever.
  EXPECT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
}
INSTANTIATE_TEST_SUITE_P(Policies,
                         ServeStoppedTest,
                         testing::Values("write-through", "write-back"),
                         [](const auto& policy) {
                           return std::string(policy.param) == "write-back" ? "WriteBack"
                                                                            : "WriteThrough";
                         });

TEST_F(ServeTierTest, WhatDoesNotGoWithUnitsIsRefused) {
  const Finished run =
      run_kvferry({"worker", "--serve", "--unit-blocks=4", "--write-policy=write-back"});
  EXPECT_EQ(run.exit, ChildExit::exited(2));
  EXPECT_THAT(run.complaints, testing::HasSubstr("choose write-through or selective"));
}

class ServeWindowTest : public ServeTierTest, public testing::WithParamInterface<const char*> {};

// What a request loads with a window behind it can take more room than computing it: prefetches for
// others may hold just that. Nobody waits for ever.
TEST_P(ServeWindowTest, RequestsForAllOfASmallDeviceAreServedBesidePrefetches) {
  geometry_ = "tiny-window";
  gpu_blocks_ = 16;
  ASSERT_NO_FATAL_FAILURE(
      start_engine(1, {GetParam(), "--write-policy=write-back", "--prefetch-requests=16"}));
  std::vector<std::vector<std::uint32_t>> prompts;
  for (std::uint32_t i = 0; i < 12; ++i)
    prompts.push_back(prompt_of(i * 300, i % 3 == 0 ? 180 : 33));
  std::vector<GenerateReply> alone;
  alone.reserve(prompts.size());
  for (const auto& prompt : prompts) alone.push_back(generate(prompt, 8));
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
    std::vector<Answer> answers(prompts.size());
    for (std::size_t i = 0; i < prompts.size(); ++i) ask_for(answers[i], prompts[i], 8);
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      ASSERT_TRUE(run_until([&] { return answers[i].has_value(); })) << round << ": " << i;
      ASSERT_TRUE(answers[i]->has_value()) << answers[i]->error().to_string();
      EXPECT_EQ((*answers[i])->tokens, alone[i].tokens) << round << ": " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Stops,
                         ServeWindowTest,
                         testing::Values("--prefetch=best-effort", "--prefetch=wait"),
                         [](const auto& option) {
                           return std::string(option.param) == "--prefetch=wait" ? "wait"
                                                                                 : "best_effort";
                         });

// Loads and prefetches that were planned for memory that is cleared meanwhile bring nobody else's
// contents.
TEST_F(ServeTierTest, ClearsUnderLoadsAndPrefetchesChangeNoAnswer) {
  gpu_blocks_ = 40;
  ASSERT_NO_FATAL_FAILURE(start_engine(
      1, {"--prefetch=best-effort", "--prefetch-requests=16", "--write-policy=write-back"}));
  constexpr std::uint32_t kPrompts = 12;
  std::vector<GenerateReply> alone;
  for (std::uint32_t i = 0; i < kPrompts; ++i) alone.push_back(generate(prompt_of(i * 90, 66), 30));
  for (int round = 0; round < 4; ++round) {
    std::vector<Answer> answers(kPrompts);
    for (std::uint32_t i = 0; i < kPrompts; ++i) ask_for(answers[i], prompt_of(i * 90, 66), 30);
    // When some of them have been served the others are on their way.
    ASSERT_TRUE(run_until([&answers] { return answers[1].has_value(); }));
    ASSERT_EQ(ask("clear").exit, ChildExit::exited(0));
    ASSERT_EQ(ask("reinit").exit, ChildExit::exited(0));
    for (std::uint32_t i = 0; i < kPrompts; ++i) {
      ASSERT_TRUE(run_until([&] { return answers[i].has_value(); })) << round << ": " << i;
      ASSERT_TRUE(answers[i]->has_value()) << answers[i]->error().to_string();
      EXPECT_EQ((*answers[i])->tokens, alone[i].tokens) << round << ": " << i;
    }
  }
}

TEST_F(ServeTierTest, OptionsOfASchedulerThatDoesNotRunAreRefused) {
  for (const char* option : {"--write-policy=selective", "--prefetch=wait", "--store-queue=4"}) {
    const Finished run = run_kvferry({"worker", "--runtime-dir=" + (temp_ / "run").string(),
                                      "--geometry=tiny", "--gpu-blocks=8", option});
    EXPECT_EQ(run.exit, ChildExit::exited(2)) << option;
    EXPECT_THAT(run.complaints, testing::HasSubstr("with --serve: choose that, or leave"))
        << option;
  }
}

TEST_F(ServeTierTest, RecomputeAlwaysComputesWhatHostMemoryHas) {
  ASSERT_NO_FATAL_FAILURE(start_engine(1, {"--recompute=always"}));
  const auto prompt = prompt_of(100, 80);
  const GenerateReply cold = generate(prompt, 8);
  EXPECT_GT(stored_blocks(), 0);
  ASSERT_EQ(ask("flush", {kSettles, "--host=keep"}).exit, ChildExit::exited(0));
  const GenerateReply again = generate(prompt, 8);
  EXPECT_EQ(again.cached_tokens, 0U);
  EXPECT_EQ(again.tokens, cold.tokens);
}

}  // namespace
}  // namespace kvferry::test
