// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// docs/lifecycle.md, rows 12 and 13: device memory that is released and resumed, by tag, on a
// serving engine of two ranks.
#include "cli/lifecycle_fixture.hpp"
#include "support/safetensors_writer.hpp"

#include <csignal>

namespace kvferry::test {
namespace {

using ipc::EmptyReason;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kFirstId = "0123456789abcdef0123456789abcdef";

class LifecycleMemoryTest : public LifecycleRowsTest {
 protected:
  void SetUp() override {
    write(first_, 1);
    write(second_, 2);
  }
  static void write(const std::string& file, std::uint64_t seed) {
    write_safetensors(file, {{"w", "BF16", {4096, 1024}}, {"n", "F32", {5}}, {"none", "U8", {0}}},
                      seed);
  }
  void start_with_weights(const std::vector<std::string>& both = {}) {
    start_rows({"--weights=" + first_, std::string("--weights-id=") + kFirstId}, both);
  }
  [[nodiscard]] std::vector<std::string> released() const {
    return engine()["released"].get<std::vector<std::string>>();
  }
  /// Kills it while everything is released, and waits until the next one knows all of it.
  void replace_manager() {
    running_.front()->kill();
    ASSERT_EQ(running_.front()->wait(soon()), ChildExit::killed_by(SIGKILL));
    running_.erase(running_.begin());
    start("manager");
    std::swap(running_.front(), running_.back());
    ASSERT_TRUE(wait_status([](const nlohmann::json& status) {
      return status["engines"].size() == 1 && status["engines"][0]["released"].size() == 3 &&
             status["engines"][0]["paused"] == "retract" &&
             !status["engines"][0]["ranks"][1]["mover"].is_null();
    }));
  }
  /// All of what is left of the device, until this ends.
  [[nodiscard]] std::vector<std::unique_ptr<ipc::DeviceMemory>> take_all() {
    auto spec = ipc::DeviceSpec::parse(device());
    if (other_ == nullptr) other_ = ipc::open_device(*spec);
    std::vector<std::unique_ptr<ipc::DeviceMemory>> taken;
    for (std::uint64_t size = 32 << 20; size >= 64 << 10; size /= 2) {
      for (;;) {
        auto piece = other_->allocate(size, ipc::HandleKind::kLegacy, nullptr);
        if (!piece) break;
        taken.push_back(std::move(*piece));
      }
    }
    return taken;
  }

  const std::string first_ = (temp_ / "first").string();
  const std::string second_ = (temp_ / "second").string();
  std::unique_ptr<ipc::Device> other_;
};

class LifecycleMemoryRolesTest : public LifecycleMemoryTest,
                                 public testing::WithParamInterface<const char*> {};

TEST_P(LifecycleMemoryRolesTest, Row12ReleaseGivesEverythingBackAndRow13BringsItBackBitForBit) {
  ASSERT_NO_FATAL_FAILURE(start_with_weights({std::string("--cache-owner=") + GetParam()}));
  const GenerateReply first = generate(prompt_, 16);
  const std::array<std::uint64_t, kRanks> epochs{epoch_of(0), epoch_of(1)};
  const std::uint64_t held = device_bytes();
  const Finished given = ask("release", {kSettles});
  ASSERT_EQ(given.exit, ChildExit::exited(0)) << given.complaints;
  EXPECT_THAT(given.output, HasSubstr("released in"));
  EXPECT_THAT(given.output, HasSubstr("kv_cache, weights, scratch"));
  EXPECT_EQ(device_bytes(), 0U) << "of " << held;
  expect_emptied({{EmptyReason::kClear, 1}});
  EXPECT_THAT(released(), ElementsAre("kv_cache", "weights", "scratch"));
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(memory_of(rank).reserved, 0U);
  // Requests wait, and nothing lets them run without what they need.
  Answer answer;
  ask_for(answer, prompt_, 16);
  refused("continue", {}, "its kv_cache, weights, scratch is released: resume it first");
  refused("update-weights", {"--file=" + second_}, "its weights are released");
  done("release");  // Again: nothing is left to give.
  EXPECT_EQ(device_bytes(), 0U);
  expect_emptied({{EmptyReason::kClear, 1}});
  EXPECT_FALSE(answer.has_value());

  const Finished back = ask("resume");
  ASSERT_EQ(back.exit, ChildExit::exited(0)) << back.complaints;
  EXPECT_THAT(back.output, HasSubstr("requests run again"));
  const GenerateReply served = wait_for(answer);
  EXPECT_EQ(served.tokens, first.tokens) << "other weights than before";
  EXPECT_EQ(served.cached_tokens, 0U) << "the cache was not empty";
  EXPECT_EQ(generate(prompt_, 16).tokens, first.tokens);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(epoch_of(rank), epochs[rank] + 1);
  EXPECT_THAT(released(), ElementsAre());
  EXPECT_EQ(engine()["weights"], kFirstId);
  expect_emptied({});
  refused("resume", {}, "not_released");
  refused("resume", {"--tags=weights"}, "weights is not released (nothing is)");
}

INSTANTIATE_TEST_SUITE_P(OwnedByThe, LifecycleMemoryRolesTest, testing::Values("worker", "mover"));

TEST_F(LifecycleMemoryTest, Row12EachTagAloneEmptiesOnceAndAPauseOfBeforeStays) {
  geometry_ = "tiny-mla";  // Its ranks share a table of all of the weights, which none has whole.
  ASSERT_NO_FATAL_FAILURE(start_with_weights());
  const GenerateReply first = generate(prompt_, 16);
  done("pause", {"--mode=retract"});
  for (const char* tag : {"weights", "scratch"}) {
    const std::uint64_t before = device_bytes();
    done("release", {std::string("--tags=") + tag});
    EXPECT_LT(device_bytes(), before) << tag;
    expect_emptied({{EmptyReason::kRelease, 1}});
  }
  EXPECT_THAT(released(), ElementsAre("weights", "scratch"));
  refused("resume", {"--tags=kv_cache"}, "kv_cache is not released (weights, scratch is)");
  const std::uint64_t arena = device_bytes();
  done("release", {"--tags=kv_cache", "--host=keep"});
  EXPECT_LT(device_bytes(), arena);
  expect_emptied({{EmptyReason::kClear, 1}});
  for (const char* tag : {"weights", "kv_cache"}) {
    const Finished back = ask("resume", {std::string("--tags=") + tag});
    ASSERT_EQ(back.exit, ChildExit::exited(0)) << back.complaints;
    EXPECT_THAT(back.output, HasSubstr("requests are held"));
    refused("continue", {}, "is released: resume it first");
  }
  const Finished last = ask("resume", {"--tags=scratch"});
  EXPECT_THAT(last.output, HasSubstr("paused (retract) as before"));
  done("continue", {"--no-empty-cache"});
  const GenerateReply served = generate(prompt_, 16);
  EXPECT_EQ(served.tokens, first.tokens);
  EXPECT_GT(served.cached_tokens, 0U) << "host memory was kept";
  expect_emptied({});
}

TEST_F(LifecycleMemoryTest, Row12IsRefusedWhileRequestsHoldBlocks) {
  ASSERT_NO_FATAL_FAILURE(start_with_weights());
  Answer answer;
  ask_for(answer, prompt_, kLong);
  done("pause", {"--mode=in_place"});
  const std::uint64_t before = device_bytes();
  refused("release", {}, "1 are frozen in place");
  EXPECT_EQ(device_bytes(), before);
  EXPECT_THAT(released(), ElementsAre());
  expect_emptied({});
  done("continue", {"--no-empty-cache"});
  EXPECT_EQ(wait_for(answer).admissions, 1U);
}

TEST_F(LifecycleMemoryTest, Row13WithoutMemoryStaysReleasedAndCanBeRetried) {
  ASSERT_NO_FATAL_FAILURE(start_with_weights());
  const GenerateReply first = generate(prompt_, 16);
  done("release", {kSettles});
  // The smallest first: what is left of its segment is too small for the next.
  for (const char* tag : {"scratch", "weights", "kv_cache"}) {
    auto taken = take_all();
    refused("resume", {std::string("--tags=") + tag}, "no_device_memory");
    EXPECT_THAT(released(), testing::Contains(tag));
    refused("continue", {}, "is released");
    taken.clear();
    done("resume", {std::string("--tags=") + tag});
    EXPECT_THAT(released(), testing::Not(testing::Contains(tag)));
  }
  EXPECT_EQ(generate(prompt_, 16).tokens, first.tokens);
}

TEST_F(LifecycleMemoryTest, Row13WithoutABackupNothingComputesBeforeAnUpdate) {
  ASSERT_NO_FATAL_FAILURE(start_rows({"--weights=" + second_}));
  const GenerateReply expected = generate(prompt_, 16);
  channel_.reset();
  running_.clear();
  ASSERT_NO_FATAL_FAILURE(start_with_weights());
  EXPECT_NE(generate(prompt_, 16).tokens, expected.tokens);
  done("release", {kSettles, "--weights-backup=none"});
  const Finished back = ask("resume");
  ASSERT_EQ(back.exit, ChildExit::exited(0)) << back.complaints;
  EXPECT_THAT(back.output, HasSubstr("the weights were released without a backup"));
  EXPECT_EQ(engine()["weights_lost"], true);
  Answer answer;
  ask_for(answer, prompt_, 16);
  refused("continue", {}, "released without a backup: update them");
  EXPECT_FALSE(answer.has_value());
  // There is nothing to back up, and the memory is given up all the same.
  done("release", {"--tags=weights"});
  EXPECT_THAT(running_.back()->stderr_text(), HasSubstr("no backup of weights that were lost"));
  done("resume");
  EXPECT_EQ(engine()["weights_lost"], true);
  // Of the same model they have to be all the same.
  write_safetensors(first_, {{"w", "BF16", {64, 33}}}, 3);
  refused("update-weights", {"--file=" + first_}, "the model in use has 'w' BF16 [4096, 1024]");
  done("update-weights", {"--file=" + second_});
  EXPECT_EQ(engine()["weights_lost"], false);
  done("continue");
  EXPECT_EQ(wait_for(answer).tokens, expected.tokens);
}

TEST_F(LifecycleMemoryTest, AReleaseOutlivesItsManager) {
  ASSERT_NO_FATAL_FAILURE(start_with_weights());
  const GenerateReply first = generate(prompt_, 16);
  done("release", {kSettles});
  ASSERT_NO_FATAL_FAILURE(replace_manager());
  EXPECT_EQ(device_bytes(), 0U);
  refused("continue", {}, "is released");
  const Finished part = ask("resume", {"--tags=weights,scratch"});
  EXPECT_THAT(part.output, HasSubstr("kv_cache is still released")) << part.complaints;
  refused("continue", {}, "is released");
  const Finished back = ask("resume");
  EXPECT_THAT(back.output, HasSubstr("requests run again")) << back.complaints;
  EXPECT_EQ(generate(prompt_, 16).tokens, first.tokens);
}

TEST_F(LifecycleMemoryTest, SoDoesThePauseOfBefore) {
  ASSERT_NO_FATAL_FAILURE(start_with_weights());
  const GenerateReply first = generate(prompt_, 16);
  done("pause");
  done("release");
  ASSERT_NO_FATAL_FAILURE(replace_manager());
  const Finished back = ask("resume");
  EXPECT_THAT(back.output, HasSubstr("paused (retract) as before")) << back.complaints;
  done("continue");
  EXPECT_EQ(generate(prompt_, 16).tokens, first.tokens);
}

}  // namespace
}  // namespace kvferry::test
