// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// kvferry simulate, as it is run.
#include "cli/replay_fixture.hpp"
#include "cli/svg_checks.hpp"

#include <gmock/gmock.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class SimulateTest : public ReplayTest {
 protected:
  Finished simulate(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "simulate");
    return run_kvferry(arguments);
  }
  std::string trace(const std::string& text) {
    std::ofstream(path("trace.jsonl")) << text;
    return "--trace=" + path("trace.jsonl");
  }
};

std::string request(const std::string& ids) {
  return R"({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [)" + ids + "]}\n";
}

TEST_F(SimulateTest, TellsHitRatesOfATraceAsJson) {
  const Finished finished = simulate({trace(request("1, 2") + request("3") + request("1, 2")),
                                      "--capacity=2,3", "--policy=lru,optimal,reuse", "--json"});
  ASSERT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
  const json told = json::parse(finished.output);
  EXPECT_EQ(told["requests"], 3);
  EXPECT_DOUBLE_EQ(told["unlimited_hit_rate"], 0.4);
  ASSERT_EQ(told["results"].size(), 6U);
  EXPECT_EQ(told["results"][0]["policy"], "lru");
  EXPECT_EQ(told["results"][0]["capacity"], 2);
  EXPECT_DOUBLE_EQ(told["results"][0]["hit_rate"], 0.2) << "the deeper block went";
  EXPECT_DOUBLE_EQ(told["results"][1]["hit_rate"], 0.4);
  EXPECT_EQ(told["results"][2]["policy"], "optimal");
  EXPECT_DOUBLE_EQ(told["results"][2]["hit_rate"], 0.4);
}

TEST_F(SimulateTest, ShowsAllPoliciesAndDrawsThem) {
  const Finished finished = simulate({"--requests=300", "--plot=" + path("hits.svg")});
  ASSERT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
  for (const char* name : {"reuse", "lru", "arc", "s3fifo", "sieve", "lfu", "optimal", "gain"}) {
    EXPECT_THAT(finished.output, HasSubstr(name));
  }
  std::stringstream drawn;
  drawn << std::ifstream(path("hits.svg")).rdbuf();
  EXPECT_THAT(drawn.str(), HasSubstr("<svg"));
  EXPECT_EQ(flaw_of(drawn.str()), "");
}

TEST_F(SimulateTest, RefusesWhatItCannotPlay) {
  const Finished broken = simulate({trace(request("1") + "{}\n")});
  EXPECT_EQ(broken.exit, ChildExit::exited(1));
  EXPECT_THAT(broken.complaints, HasSubstr("trace.jsonl:2"));
  const Finished skipped = simulate({trace(request("1") + "{}\n"), "--skip-bad", "--json"});
  EXPECT_EQ(skipped.exit, ChildExit::exited(0));
  EXPECT_EQ(json::parse(skipped.output)["skipped_lines"], 1);
  EXPECT_THAT(simulate({trace(request("1") + "{}\n"), "--skip-bad"}).output,
              HasSubstr("trace.jsonl: 1 requests (1 malformed lines skipped), 1 blocks"));
  EXPECT_THAT(simulate({trace(request("1"))}).output, HasSubstr("trace.jsonl: 1 requests, 1 b"));
  EXPECT_EQ(simulate({"--policy=best"}).exit, ChildExit::exited(2));
  EXPECT_EQ(simulate({"--capacity=0"}).exit, ChildExit::exited(2));
  EXPECT_EQ(simulate({"--capacity=1e3"}).exit, ChildExit::exited(2));
}

TEST_F(SimulateTest, NeedsNothingOfATraceButIds) {
  const Finished finished = simulate({trace("{\"hash_ids\": [1, 2], \"turn\": 1}\n"
                                            "{\"timestamp\": 0.5, \"hash_ids\": [1, 2]}\n"),
                                      "--capacity=2", "--policy=lru", "--json"});
  ASSERT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
  EXPECT_EQ(json::parse(finished.output)["results"][0]["hits"], 2);
  const Finished wrong = simulate({trace("{\"timestamp\": \"now\", \"hash_ids\": [1, 2]}\n")});
  EXPECT_EQ(wrong.exit, ChildExit::exited(1));
  EXPECT_THAT(wrong.complaints, HasSubstr("\"timestamp\" is \"now\", not a number"));
}

TEST_F(SimulateTest, ListsMayHaveBlanksAndNoEmptyElements) {
  const std::string file = trace(request("1, 2") + request("1, 2"));
  const Finished finished =
      simulate({file, "--capacity", "1, 2 ", "--policy= lru ,\tarc", "--json"});
  ASSERT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
  const json told = json::parse(finished.output);
  ASSERT_EQ(told["results"].size(), 4U);
  EXPECT_EQ(told["results"][1]["capacity"], 2);
  EXPECT_EQ(told["results"][3]["policy"], "arc");
  for (const std::string list : {"--capacity=100,,200", "--capacity=100,", "--capacity=,100",
                                 "--capacity= , 100", "--policy=lru,,arc"}) {
    const Finished refused = simulate({file, list});
    EXPECT_EQ(refused.exit, ChildExit::exited(2)) << list;
    EXPECT_THAT(refused.complaints, HasSubstr("'" + list.substr(list.find('=') + 1) +
                                              "' has nothing where an element should be"));
  }
}

TEST_F(SimulateTest, RefusesAListThatHasAnElementTwice) {
  const std::string file = trace(request("1, 2") + request("1, 2"));
  for (const auto& [list, twice] : {std::pair{"--capacity=1000,20, 1000", "'1000' is in the list"},
                                    std::pair{"--capacity=10,010", "'010' is the same as '10'"},
                                    std::pair{"--policy=lru,arc,lru", "'lru' is in the list"}}) {
    const Finished refused = simulate({file, list});
    EXPECT_EQ(refused.exit, ChildExit::exited(2)) << list;
    EXPECT_THAT(refused.complaints,
                testing::AllOf(HasSubstr(std::string(list).substr(0, 8)), HasSubstr(twice)));
  }
  const Finished apart = simulate({file, "--capacity=10", "--capacity=10"});
  EXPECT_EQ(apart.exit, ChildExit::exited(2)) << "two lists are one";
  EXPECT_THAT(simulate({"--help"}).output, HasSubstr("each number once"));
}

TEST_F(SimulateTest, RefusesATraceOfNothing) {
  const Finished finished = simulate({trace("")});
  EXPECT_EQ(finished.exit, ChildExit::exited(1));
  EXPECT_THAT(finished.complaints, HasSubstr("trace.jsonl"));
}

}  // namespace
}  // namespace kvferry::test
