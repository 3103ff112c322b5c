// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/rl_samples.hpp"
#include "rl/live_table.hpp"
#include "rl/readiness.hpp"
#include "rl/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>

namespace kvferry::cli {
namespace {

using test::kMiB;
using test::sample_report;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

TEST(RlReportTest, HasTheFieldsThatScriptsRelyOn) {
  RlReport report = sample_report(6);
  report.iterations[1].clear_ms = 2.5;
  report.iterations[1].answers.retracted = 3;
  const nlohmann::json json = to_json(report);
  for (const char* name :
       {"iterations", "settings", "requests", "verified", "corrupt", "leaked_device_bytes",
        "leaked_host_bytes", "leftover_names", "empties", "graphs", "errors", "failures",
        "high_water_bytes", "restarts", "quarantined", "duration_s"}) {
    EXPECT_TRUE(json.contains(name)) << name;
  }
  ASSERT_EQ(json["iterations"].size(), 6U);
  const nlohmann::json& second = json["iterations"][1];
  for (const char* name :
       {"iteration", "mode", "weights_id", "reserved_before", "reserved_after", "used_after",
        "free_on_device", "seconds", "pause_ms", "update_ms", "continue_ms", "clear_ms",
        "reinit_ms", "finished", "aborted", "retracted", "ranks"}) {
    EXPECT_TRUE(second.contains(name)) << name;
  }
  EXPECT_EQ(second["iteration"], 2);
  EXPECT_EQ(second["mode"], "retract");
  EXPECT_EQ(second["reserved_before"], 2 * 60 * kMiB) << "summed over ranks";
  EXPECT_EQ(second["reserved_after"], 2 * 40 * kMiB);
  EXPECT_EQ(second["used_after"], 2 * 30 * kMiB);
  EXPECT_EQ(second["free_on_device"], (100 + 101) * kMiB);
  EXPECT_EQ(second["free_on_device_least"], 100 * kMiB);
  EXPECT_EQ(second["ranks"][1]["reserved_after"], 40 * kMiB);
  EXPECT_EQ(second["clear_ms"], 2.5);
  EXPECT_TRUE(second["reinit_ms"].is_null());
  EXPECT_EQ(second["retracted"], 3);
  EXPECT_EQ(json["empties"][1]["rank"], 1);
  EXPECT_EQ(json["empties"][1]["continue"], 6);
  EXPECT_EQ(json["empties"][1]["clear"], 0);
  EXPECT_EQ(json["high_water_bytes"], 2 * 60 * kMiB);
  EXPECT_EQ(json["settings"]["mode"], "retract");
  EXPECT_THAT(json["errors"], IsEmpty());
  EXPECT_THAT(json["failures"], IsEmpty());
}

TEST(RlReportTest, MemoryThatGrowsAtContinuesIsAFailure) {
  RlReport report = sample_report(10);
  EXPECT_THAT(failures_of(report), IsEmpty());
  report.iterations[0].ranks[1].reserved_after += 8 * kMiB;
  report.iterations[2].ranks[1].reserved_after += 8 * kMiB;
  EXPECT_THAT(failures_of(report), IsEmpty()) << "the first three warm up";
  report.iterations[7].ranks[1].reserved_after += 2 * kMiB;
  EXPECT_THAT(failures_of(report),
              ElementsAre(AllOf(HasSubstr("rank 1 kept 40.0 MiB"), HasSubstr("of iteration 4"),
                                HasSubstr("42.0 MiB"), HasSubstr("of iteration 8"))));
  report.settings.empty_cache = false;
  EXPECT_THAT(failures_of(report), IsEmpty()) << "nobody asked for it";
  EXPECT_EQ(high_water_bytes(report), 2 * 60 * kMiB);
}

TEST(RlReportTest, AllocatorsThatAreEmptiedMoreOrLessOftenThanAskedAreAFailure) {
  RlReport report = sample_report(4);
  report.workers[0].empties[2] = 5;
  EXPECT_THAT(failures_of(report),
              ElementsAre(AllOf(HasSubstr("rank 0 was emptied 5 times"), HasSubstr("4 times"))));
  report.restarts = 1;
  EXPECT_THAT(failures_of(report), IsEmpty()) << "who was replaced counts anew";
}

TEST(RlReportTest, EachFailureIsNamed) {
  RlReport report = sample_report(4);
  report.answers.corrupt = 2;
  report.answers.finished = 50;
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("2 of 50 answers were corrupt")));
  report = sample_report(4);
  report.errors = {"iteration 5: pause: busy"};
  EXPECT_THAT(failures_of(report), ElementsAre("iteration 5: pause: busy"));
  report = sample_report(4);
  report.leaked_device_bytes = kMiB;
  report.leaked_host_bytes = 2 * kMiB;
  report.leftover_names = {"/dev/shm/a"};
  EXPECT_THAT(failures_of(report),
              ElementsAre(HasSubstr("1.00 MiB of device"), HasSubstr("2.00 MiB of host"),
                          HasSubstr("/dev/shm/a")));
  report = sample_report(7);
  report.answers.verified = 0;
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("the run shows nothing")));
  report = sample_report(7);
  report.compared_prompts = 9;
  report.equal_prompts = 8;
  EXPECT_THAT(failures_of(report), IsEmpty());
  report.equal_prompts = 9;
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("the updates changed nothing")));
}

TEST(RlReportTest, AnIterationThatTheRunEndedInHasNoMemoryToJudge) {
  RlReport report = sample_report(6);
  report.iterations.back().finished = false;
  report.iterations.back().ranks.clear();
  report.errors = {"interrupted"};
  EXPECT_THAT(failures_of(report), ElementsAre("interrupted"));
  EXPECT_EQ(to_json(report)["iterations"][5]["done"], false);
  EXPECT_THAT(summarize(report), HasSubstr("answers verified"));
}

TEST(RlReportTest, TheSummaryNamesSettingsAndMemory) {
  const std::string text = summarize(sample_report(6));
  EXPECT_THAT(text, HasSubstr("retract, update from disk, emptied at every continue, 2 ranks of "
                              "tiny on host"));
  EXPECT_THAT(text, HasSubstr("80.0 MiB"));
  EXPECT_THAT(text, HasSubstr("120.0 MiB"));
}

TEST(LiveTableTest, RowsStandUnderTheirHeading) {
  const RlReport report = sample_report(2);
  const std::string heading = live_heading(0);
  const std::string row = live_row(report.iterations[1], 0);
  EXPECT_EQ(heading.size(), row.size());
  EXPECT_EQ(heading.find("used") + 4, row.find("60.0 MiB") + 8) << "aligned to the right";
  EXPECT_THAT(heading, HasSubstr("least free"));
  EXPECT_THAT(row, AllOf(HasSubstr("120.0 MiB"), HasSubstr("100.0 MiB"), HasSubstr("v2")));
}

TEST(LiveTableTest, NeverWrapsHoweverNarrowTheTerminal) {
  const RlReport report = sample_report(1);
  for (std::size_t columns = 1; columns < 140; ++columns) {
    EXPECT_LT(live_heading(columns).size(), columns);
    EXPECT_EQ(live_row(report.iterations[0], columns).size(), live_heading(columns).size());
  }
}

TEST(LiveTableTest, ASentenceHasAllOfIt) {
  const RlReport report = sample_report(3);
  EXPECT_THAT(live_sentence(report.iterations[2], 200),
              AllOf(HasSubstr("3 of 200 iterations"), HasSubstr("120.0 MiB -> 80.0 MiB"),
                    HasSubstr("100.0 MiB free on the fullest device"), HasSubstr("update 20.0 ms"),
                    Not(HasSubstr("\n"))));
}

TEST(ReadinessTest, NamesWhatIsMissing) {
  const ipc::Digest weights = ipc::Digest::from_words(1, 2);
  const auto missing = [&](const nlohmann::json& status) {
    return missing_from(status.dump(), "rl", 2, weights);
  };
  EXPECT_THAT(missing_from("nonsense", "rl", 1, weights), ElementsAre(HasSubstr("engine rl")));
  EXPECT_THAT(missing({{"engines", nlohmann::json::array()}}), ElementsAre(HasSubstr("engine rl")));
  const nlohmann::json process = {{"mapped", true}};
  nlohmann::json engine = {
      {"name", "rl"},
      {"offload_ready", false},
      {"weights", nullptr},
      {"ranks", {{{"worker", process}, {"mover", process}}, {{"worker", process}}}}};
  EXPECT_THAT(missing({{"engines", {engine}}}), ElementsAre("the mover of rank 1"));
  engine["ranks"][1]["mover"] = {{"mapped", false}};
  EXPECT_THAT(missing({{"engines", {engine}}}), ElementsAre("the cache at the mover of rank 1"));
  engine["ranks"][1]["mover"] = process;
  EXPECT_THAT(missing({{"engines", {engine}}}),
              ElementsAre(HasSubstr("offload"), HasSubstr(weights.hex())));
  engine["offload_ready"] = true;
  engine["weights"] = weights.hex();
  EXPECT_THAT(missing({{"engines", {engine}}}), IsEmpty());
  engine["name"] = "other";
  EXPECT_THAT(missing({{"engines", {engine}}}), ElementsAre(HasSubstr("engine rl")));
}

}  // namespace
}  // namespace kvferry::cli
