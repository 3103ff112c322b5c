// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// docs/lifecycle.md, row 14: components of workers, and what their releases empty, on a serving
// engine of two ranks.
#include "cli/lifecycle_fixture.hpp"
#include "support/safetensors_writer.hpp"

#include <algorithm>

namespace kvferry::test {
namespace {

using ipc::EmptyReason;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class LifecycleComponentsTest : public LifecycleRowsTest {
 protected:
  void SetUp() override {
    write(first_, 1);
    write(second_, 2);
  }
  static void write(const std::string& file, std::uint64_t seed) {
    write_safetensors(file, {{"w", "BF16", {4096, 1024}}, {"v", "BF16", {2048, 1024}}}, seed);
  }
  void start_with(const std::string& strategy) {
    start_rows({"--weights=" + first_, "--weights-strategy=" + strategy});
  }
  /// What the command prints of this component on rank 1, cell by cell.
  [[nodiscard]] std::string line_of(const std::string& output, const std::string& component) const {
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);) {
      if (line.find("   1  ") == 0 && line.find(component) != std::string::npos) return line;
    }
    return "no line of " + component + " in " + output;
  }
  [[nodiscard]] Finished components(const std::vector<std::string>& options = {}) const {
    Finished finished = ask("components", options);
    EXPECT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
    return finished;
  }

  const std::string first_ = (temp_ / "first").string();
  const std::string second_ = (temp_ / "second").string();
};

TEST_F(LifecycleComponentsTest, Row14ASmallOneIsReleasedWhileRequestsRunAndEmptiesNothing) {
  ASSERT_NO_FATAL_FAILURE(start_with("resident"));
  const GenerateReply first = generate(prompt_, 64);
  Answer answer;
  ask_for(answer, prompt_, kLong);
  const std::string seen = components().output;
  EXPECT_THAT(line_of(seen, "decode_graph"), HasSubstr("offloaded  no"));
  EXPECT_THAT(line_of(seen, "weights"), ContainsRegex("resident +yes +6\\.00 MiB"));
  int found = 0;
  for (int i = 0; i < 3 || (found == 0 && !answer); ++i) {
    const std::string released = components({"--release=decode_graph"}).output;
    EXPECT_THAT(line_of(released, "decode_graph"), ContainsRegex("no +0 B .*not emptied"));
    if (line_of(released, "decode_graph").find("KiB") != std::string::npos) ++found;
    EXPECT_THAT(line_of(released, "weights"), AllOf(HasSubstr("6.00 MiB"), Not(HasSubstr("empt"))));
  }
  EXPECT_GT(found, 0) << "it never had anything to give up";
  const GenerateReply served = wait_for(answer);
  EXPECT_EQ(served.admissions, 1U) << "nothing held it";
  EXPECT_TRUE(std::equal(first.tokens.begin(), first.tokens.end(), served.tokens.begin()));
  expect_emptied({});
  // The next pass has taken its memory again.
  (void)generate(prompt_, 16);
  EXPECT_THAT(line_of(components().output, "decode_graph"), Not(HasSubstr("0 B")));
}

TEST_F(LifecycleComponentsTest, Row14ALargeOneEmptiesWhenItsStorageIsGone) {
  ASSERT_NO_FATAL_FAILURE(start_with("offloaded"));
  const GenerateReply first = generate(prompt_, 16);
  // Its use ended with the load at the start.
  EXPECT_THAT(line_of(components().output, "weights"), ContainsRegex("offloaded +yes +0 B"));
  expect_emptied({});
  // An update uses it again, and ends that use: the allocator gives all back that it took.
  done("update-weights", {kSettles, "--file=" + second_});
  expect_emptied({{EmptyReason::kComponent, 1}});
  EXPECT_THAT(
      running_.back()->stderr_text(),
      HasSubstr("component weights (offloaded): 6.00 MiB -> 0 B on the device; large release "
                "(its storage is gone): allocator emptied, reserved "));
  const GenerateReply second = generate(prompt_, 16);
  EXPECT_NE(second.tokens, first.tokens);
  // Once more there is nothing to give up, and so nothing to empty.
  EXPECT_THAT(line_of(components({"--release=weights"}).output, "weights"),
              HasSubstr("not emptied"));
  expect_emptied({});
  done("update-weights", {kSettles, "--file=" + first_});
  EXPECT_EQ(generate(prompt_, 16).tokens, first.tokens);
  expect_emptied({{EmptyReason::kComponent, 1}});
}

TEST_F(LifecycleComponentsTest, Row14LayerByLayerEmptiesWheneverItsUseEnds) {
  ASSERT_NO_FATAL_FAILURE(start_with("layerwise"));
  const GenerateReply first = generate(prompt_, 16);
  EXPECT_THAT(line_of(components().output, "weights"), ContainsRegex("layerwise +yes +0 B"));
  for (const char* source : {"--from=disk", "--from=tensor"}) {
    done("update-weights", {kSettles, source, "--file=" + second_});
    done("update-weights", {kSettles, source, "--file=" + first_});
    expect_emptied({{EmptyReason::kComponent, 2}});
    EXPECT_EQ(generate(prompt_, 16).tokens, first.tokens);
  }
  EXPECT_THAT(line_of(components({"--release=all"}).output, "weights"), HasSubstr("emptied: "));
  expect_emptied({{EmptyReason::kComponent, 1}});
  // Released and resumed as a tag, they stay in host memory.
  done("release", {kSettles, "--tags=weights"});
  expect_emptied({{EmptyReason::kRelease, 1}});
  done("resume");
  EXPECT_EQ(generate(prompt_, 16).tokens, first.tokens);
  EXPECT_THAT(line_of(components().output, "weights"), ContainsRegex("layerwise +yes +0 B"));
}

TEST_F(LifecycleComponentsTest, Row14LookingEmptiesNothingAndAnUnknownOneReleasesNothing) {
  ASSERT_NO_FATAL_FAILURE(start_with("resident"));
  (void)generate(prompt_, 16);
  const std::string before = components().output;
  refused("components", {"--release=decode_graph,draft"},
          "no component 'draft': it has weights, decode_graph");
  EXPECT_EQ(components().output, before) << "the known one was released";
  for (int i = 0; i < 20; ++i) EXPECT_EQ(components().output, before);
  // A resident one keeps what it has.
  EXPECT_THAT(line_of(components({"--release=weights"}).output, "weights"),
              ContainsRegex("resident +yes +6\\.00 MiB +6\\.00 MiB +not emptied"));
  expect_emptied({});
}

}  // namespace
}  // namespace kvferry::test
