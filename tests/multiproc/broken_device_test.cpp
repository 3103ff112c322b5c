// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A mover whose device breaks for good, as after an uncorrectable error, among jobs: all of them
// are answered, it says why and ends by itself, nothing that was stored is lost, and the next mover
// serves. All processes are real; this one is the engine.
#include "ipc/os/temp_dir.hpp"
#include "multiproc/real_engine.hpp"

#include <gmock/gmock.h>

#include <map>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::Digest;
using ipc::ErrorCode;
using ipc::GroupId;
using testing::HasSubstr;

constexpr std::uint64_t kSeed = 900;
constexpr std::uint32_t kBatch = 8;
constexpr std::uint32_t kElsewhere = 96;  ///< Device blocks where it is loaded.

struct Break {
  const char* name;
  const char* strategy;
  const char* arena;
  const char* at;  ///< KVFERRY_TEST_BREAKS: behind the first store and the first load.
};

class BrokenMoverTest : public testing::TestWithParam<Break> {
 protected:
  void SetUp() override {
    manager_.emplace(run(KVFERRY_PROGRAM, {"manager", "--host-memory=64MiB"}, {}));
    const auto start = [this](std::vector<std::string> arguments) {
      if (arguments.front() == "worker") return run(KVFERRY_PROGRAM, std::move(arguments), {});
      // It ends without taking anything down, which the sanitizers are to take for no leak.
      return run(KVFERRY_FAULTY_PROGRAM, std::move(arguments),
                 {std::string("KVFERRY_TEST_BREAKS=") + GetParam().at,
                  "TSAN_OPTIONS=" + ipc::environment("TSAN_OPTIONS") + ":report_thread_leaks=0",
                  "ASAN_OPTIONS=" + ipc::environment("ASAN_OPTIONS") + ":detect_leaks=0"});
    };
    engine_.start(start, device());
    ASSERT_NO_FATAL_FAILURE(engine_.connect());
  }
  void TearDown() override {
    if (HasFailure()) {
      std::fputs(manager_->stderr_text().c_str(), stderr);
      std::fputs(engine_.mover().stderr_text().c_str(), stderr);
    }
    engine_.close();
  }
  [[nodiscard]] std::string device() const {
    return fmt::format("host:{}:256MiB", temp_.path().filename().string());
  }
  test::ChildProcess run(const std::string& program,
                         std::vector<std::string> arguments,
                         std::vector<std::string> environment) {
    if (arguments.front() != "manager") {
      arguments.push_back(std::string("--arena=") + GetParam().arena);
      if (arguments.front() == "mover") {
        arguments.push_back(std::string("--copy-strategy=") + GetParam().strategy);
      }
    }
    environment.push_back("KVFERRY_RUNTIME_DIR=" + temp_.path().string());
    return test::ChildProcess({.program = program,
                               .arguments = std::move(arguments),
                               .environment = std::move(environment)});
  }
  static Digest key(std::uint32_t i) { return Digest::from_words(5, i + 1); }
  /// Of a batch, from the device blocks that hold it.
  ipc::JobId store(std::uint32_t batch) {
    std::vector<worker::StoreTarget> targets;
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      targets.push_back({GroupId{0}, key(batch * kBatch + i)});
    }
    const auto slots = engine_.client().reserve_store(targets, test::soon()).value();
    std::vector<worker::StoreItem> items;
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      items.push_back({GroupId{0}, BlockId{batch * kBatch + i}, slots.at(i).slot});
    }
    return engine_.client().submit_store(items).value();
  }
  ipc::JobId load(std::uint32_t batch, std::uint32_t to) {
    std::vector<worker::LoadItem> items;
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      items.push_back({GroupId{0}, BlockId{to + i}, key(batch * kBatch + i)});
    }
    return engine_.client().submit_load(items, 1).value();
  }
  [[nodiscard]] bool sees_offload(bool ready) {
    return test::run_until(loop_, [&] {
      (void)engine_.client().poll(0);
      return engine_.client().state().offload_ready == ready;
    });
  }

  const test::ShortTempDir temp_;
  ipc::EventLoop loop_;
  std::optional<test::ChildProcess> manager_;
  test::RealEngine engine_{loop_,
                           {.is_block_first = std::string_view(GetParam().arena) == "block-first"},
                           temp_.path().string()};
};

TEST_P(BrokenMoverTest, AnswersAllJobsEndsByItselfAndTheNextOneServes) {
  EXPECT_EQ(engine_.step(true, kSeed, 8 * kBatch, 0), 0U);
  EXPECT_TRUE(engine_.await(store(0)).all_ok());
  EXPECT_TRUE(engine_.await(load(0, kElsewhere)).all_ok());
  std::map<ipc::JobId, std::uint32_t> stores;
  std::vector<ipc::JobId> loads;
  for (std::uint32_t batch = 1; batch < 8; ++batch) {
    stores.emplace(store(batch), batch);
    loads.push_back(load(0, kElsewhere + batch * kBatch));
  }
  std::vector<std::uint32_t> stored{0};
  std::size_t failed = 0;
  const auto expect_answer = [&](ipc::JobId job) {
    const worker::Completion done = engine_.await(job);
    ASSERT_EQ(done.job, job) << "never answered";
    for (const std::uint8_t result : done.results) {
      EXPECT_THAT(static_cast<ErrorCode>(result),
                  testing::AnyOf(ErrorCode{}, ErrorCode::kCuda, ErrorCode::kRevoked,
                                 ErrorCode::kCancelled, ErrorCode::kPeerDied, ErrorCode::kNotReady))
          << done.message;
    }
    if (!done.all_ok()) {
      ++failed;
    } else if (const auto at = stores.find(job); at != stores.end()) {
      stored.push_back(at->second);
    }
  };
  for (const auto& [job, batch] : stores) ASSERT_NO_FATAL_FAILURE(expect_answer(job));
  for (const ipc::JobId job : loads) ASSERT_NO_FATAL_FAILURE(expect_answer(job));
  EXPECT_GE(failed, 1U);

  const auto ended = engine_.mover().wait(test::soon());
  ASSERT_TRUE(ended.has_value()) << "it goes on with a device that is lost";
  EXPECT_FALSE(ended->by_signal);
  EXPECT_NE(ended->code, 0);
  EXPECT_THAT(engine_.mover().stderr_text(), HasSubstr("uncorrectable memory error"));
  ASSERT_TRUE(sees_offload(false));

  engine_.start_mover(
      [this](std::vector<std::string> arguments) {
        return run(KVFERRY_PROGRAM, std::move(arguments), {});
      },
      device());
  ASSERT_TRUE(sees_offload(true));
  for (const std::uint32_t batch : stored) {
    const worker::Completion done = engine_.await(load(batch, kElsewhere));
    EXPECT_TRUE(done.all_ok()) << done.message;
    EXPECT_EQ(engine_.step(false, kSeed + batch * kBatch, kBatch, kElsewhere), 0U)
        << "batch " << batch;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways,
                         BrokenMoverTest,
                         testing::Values(Break{"Staged", "staged", "layer-first", "copy:4"},
                                         Break{"Rows", "strided", "layer-first", "rows:4"},
                                         Break{"Batch", "batch", "layer-first", "copy:5"},
                                         Break{"BlockFirst", "direct", "block-first", "copy:4"}),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace kvferry
