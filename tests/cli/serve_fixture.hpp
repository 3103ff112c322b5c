// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cli/daemons_fixture.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/generation_channel.hpp"
#include "kvferry/worker/step_channel.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {

using ipc::Generate;
using ipc::GenerateEnd;
using ipc::GenerateReply;

inline std::vector<std::uint32_t> prompt_of(std::uint32_t first, std::uint32_t length) {
  std::vector<std::uint32_t> prompt(length);
  std::iota(prompt.begin(), prompt.end(), first);
  return prompt;
}

/// An engine of reference workers with a scheduler of its own, as users start it.
class ServeTest : public DaemonsTest {
 protected:
  using Answer = std::optional<ipc::Result<GenerateReply>>;
  /// For a flush behind a request: that is answered before its blocks have been stored, and an
  /// engine is idle only when its copies have ended, too.
  static constexpr const char* kSettles = "--timeout=10";

  void start_engine(std::uint32_t ranks,
                    const std::vector<std::string>& workers = {},
                    const std::vector<std::string>& both = {}) {
    start("manager");
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      std::vector<std::string> options{fmt::format("--rank={}", rank),
                                       fmt::format("--ranks={}", ranks)};
      options.insert(options.end(), both.begin(), both.end());
      start("mover", options);
      options.insert(options.end(), workers.begin(), workers.end());
      options.emplace_back("--serve");
      start("worker", options);
    }
    ASSERT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
    connect();
  }
  void connect() {
    auto dir = ipc::RuntimeDir::open((temp_ / "run").string(), "chat");
    ASSERT_TRUE(dir.has_value());
    dir_.emplace(std::move(*dir));
    channel_.emplace(loop_, *dir_, "default", "test", [] {});
    ASSERT_TRUE(run_until([this] { return channel_->is_up(); }));
  }
  template <typename Condition> bool run_until(Condition condition) {
    const ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(60));
    while (!condition()) {
      if (deadline.expired()) return false;
      loop_.run_once(deadline);
    }
    return true;
  }
  /// The answer comes with a later run_until().
  void ask_for(Answer& answer, const std::vector<std::uint32_t>& prompt, std::uint32_t tokens) {
    const auto sent = channel_->submit(
        Generate{prompt, tokens},
        [&answer](ipc::Result<GenerateReply> reply) { answer.emplace(std::move(reply)); });
    ASSERT_TRUE(sent.has_value()) << sent.error().to_string();
  }
  GenerateReply generate(const std::vector<std::uint32_t>& prompt, std::uint32_t tokens) {
    Answer answer;
    ask_for(answer, prompt, tokens);
    if (!run_until([&answer] { return answer.has_value(); })) {
      ADD_FAILURE() << "no answer; the worker says: " << running_.back()->stderr_text();
      return {};
    }
    if (!*answer) {
      ADD_FAILURE() << answer->error().to_string();
      return {};
    }
    EXPECT_EQ((*answer)->end, GenerateEnd::kLength);
    EXPECT_THAT((*answer)->tokens, testing::SizeIs(tokens));
    return **answer;
  }

  ipc::EventLoop loop_;
  ipc::WorkerMemory memory_of(std::uint32_t rank) {
    worker::StepChannel steps(loop_, *dir_, "default", ipc::Rank{rank}, "test", {[] {}, [] {}});
    EXPECT_TRUE(run_until([&] { return steps.is_up(); }));
    std::optional<ipc::Result<ipc::WorkerMemory>> memory;
    EXPECT_TRUE(steps.ask_memory([&](ipc::Result<ipc::WorkerMemory> seen) { memory = seen; }));
    EXPECT_TRUE(run_until([&] { return memory.has_value(); }));
    return memory && *memory ? **memory : ipc::WorkerMemory{};
  }

  std::optional<ipc::RuntimeDir> dir_;
  std::optional<worker::GenerationChannel> channel_;
};

}  // namespace kvferry::test
