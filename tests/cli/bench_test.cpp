// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Whole benchmarks, small: every process is real. What they measure is not looked at, but that they
// measured it.
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>

#include <csignal>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace kvferry::test {
namespace {

using nlohmann::json;
using std::chrono_literals::operator""s;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::UnorderedElementsAre;

class BenchTest : public ReplayTest {
 protected:
  [[nodiscard]] std::vector<std::string> bench_arguments(std::vector<std::string> more) const {
    std::vector<std::string> arguments = {
        "bench",        "--device=host", "--runtime-dir=" + path("run"),
        "--blocks=1,4", "--repeats=2",   "--samples=3",
        "--bytes=1MiB"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  /// Runs to a good end and returns what it tells.
  json bench(std::vector<std::string> more) {
    more.emplace_back("--json");
    const Finished finished = run_kvferry(bench_arguments(std::move(more)));
    EXPECT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
    json report = json::parse(finished.output, nullptr, false);
    EXPECT_TRUE(report.is_object()) << finished.output;
    EXPECT_THAT(report["errors"], IsEmpty());
    EXPECT_EQ(report["leaked_device_bytes"], 0);
    EXPECT_EQ(report["leaked_host_bytes"], 0);
    EXPECT_THAT(report["leftover_names"], IsEmpty());
    return report;
  }
  /// One that a test ends.
  void start_long(std::vector<std::string> more,
                  const char* kind = "transfer",
                  const char* bytes = "--bytes=16TiB") {
    for (const char* argument : {kind, bytes, "--chunk-size=4KiB", "--no-bare", "--json"}) {
      more.emplace_back(argument);
    }
    running_.emplace(
        ChildOptions{.program = KVFERRY_PROGRAM, .arguments = bench_arguments(std::move(more))});
  }
  /// The mover comes first, and quickly; then there is enough to do for a while.
  void start_ablation() {
    start_long({"--strategy=batch", "--direction=d2h", "--repeats=20"}, "ablation",
               "--bytes=16MiB");
  }
  json end_of_long() {
    std::string output;
    while (auto line = running_->read_line(soon())) output += *line + "\n";
    EXPECT_EQ(finish_replay(), ChildExit::exited(1));
    json report = json::parse(output, nullptr, false);
    EXPECT_TRUE(report.is_object()) << output << running_->stderr_text();
    EXPECT_EQ(report["leaked_device_bytes"], 0);
    EXPECT_EQ(report["leaked_host_bytes"], 0);
    EXPECT_THAT(report["leftover_names"], IsEmpty());
    return report;
  }
};

TEST_F(BenchTest, MeasuresEveryStrategyAndWayBesideTheLink) {
  const std::string plot = path("bench.svg");
  const json report = bench({"--chunk-size=6KiB", "--regions=4", "--plot=" + plot});
  for (const char* way : {"d2h", "h2d", "both"}) EXPECT_GT(report["limit"][way], 0.0) << way;
  std::set<std::tuple<std::string, std::string, std::string, int, int>> seen;
  for (const json& result : report["results"]) {
    const bool transfer = result["bench"] == "transfer";
    EXPECT_EQ(result["gbps"].is_number(), transfer) << result;
    EXPECT_EQ(result["share"].is_number(), transfer) << result;
    EXPECT_EQ(result["us"].is_number(), !transfer) << result;
    EXPECT_GT(transfer ? result["gbps"] : result["us"], 0.0) << result;
    EXPECT_EQ(result["cpu_ms_per_gib"].is_number(), transfer && result["path"] == "engine");
    EXPECT_EQ(result["regions"], 4);
    EXPECT_EQ(result["block_bytes"], 4 * result["chunk_bytes"].get<int>());
    EXPECT_TRUE(result["geometry"].is_null());
    if (transfer) {
      EXPECT_LE(result["gbps_least"], result["gbps_most"]);
    }
    if (transfer && result["path"] == "engine") {
      seen.emplace(result["strategy"], result["direction"], result["locality"],
                   result["chunk_bytes"].get<int>(), result["blocks"].get<int>());
    }
  }
  // auto, staged, strided, batch, memcpy, kernel, agent; three ways, two jobs.
  EXPECT_EQ(seen.size(), 7U * 3U * 2U);
  std::stringstream drawn;
  drawn << std::ifstream(plot).rdbuf();
  for (const char* curve : {"line limit", "line staged", "line memcpy bare", ">6.00 KiB x 4<"}) {
    EXPECT_THAT(drawn.str(), HasSubstr(curve));
  }
}

TEST_F(BenchTest, BlockFirstArenasOfModelsAreCopiedDirectly) {
  const json report = bench({"transfer", "--geometry=tiny", "--arena=block-first", "--ranks=2",
                             "--direction=d2h", "--locality=sequential,random", "--no-bare"});
  std::set<std::string> strategies;
  for (const json& result : report["results"]) {
    EXPECT_EQ(result["geometry"], "tiny");
    EXPECT_EQ(result["path"], "engine");
    strategies.insert(result["strategy"]);
  }
  EXPECT_THAT(strategies,
              UnorderedElementsAre("auto", "direct", "batch", "memcpy", "kernel", "agent"));
  EXPECT_EQ(report["results"].size(), 6U * 2U * 2U);
}

TEST_F(BenchTest, JobsOfManySizesHaveRoomOneAfterTheOther) {
  const json report = bench({"transfer", "--chunk-size=16KiB", "--blocks=2,8,16,32,64",
                             "--direction=d2h,both", "--strategy=batch", "--no-bare"});
  EXPECT_EQ(report["results"].size(), (2U + 5U) * 2U) << "those of all tests, too";
}

TEST_F(BenchTest, MeasuresWhatAnEngineWaitsFor) {
  const json report = bench({"submit", "lookup", "clear", "pool", "--chunk-size=4KiB",
                             "--regions=2", "--entries=2000", "--pool-size=4MiB"});
  std::set<std::pair<std::string, std::string>> seen;
  for (const json& result : report["results"]) {
    seen.emplace(result["bench"], result["strategy"]);
    if (result["strategy"] != "room awaited") {
      EXPECT_GT(result["us"], 0.0) << result;
    }
    EXPECT_GE(result["us_p99"], result["us"]) << result;
    const bool counts = result["bench"] == "submit" && result["strategy"] == "auto";
    EXPECT_EQ(result["per_second"].is_number(), counts) << result;
    EXPECT_EQ(result["pool_bytes"].is_number(), result["bench"] == "pool") << result;
  }
  using Line = std::pair<std::string, std::string>;
  const auto lookup = [](const std::string& how) { return Line("lookup", how + ", 2000 entries"); };
  EXPECT_THAT(seen,
              UnorderedElementsAre(
                  Line("submit", "auto"), Line("submit", "store, offered"),
                  Line("submit", "store, reserved first"), lookup("prefix, in the table"),
                  lookup("half a prefix, in the table"), lookup("each block, in the table"),
                  lookup("by a message"), Line("clear", "free"), Line("clear", "allocate"),
                  Line("clear", "clear"), Line("clear", "reinit"), Line("pool", "first GiB filled"),
                  Line("pool", "all filled"), Line("pool", "register"), Line("pool", "unregister"),
                  Line("pool", "give back"), Line("pool", "jobs accepted"),
                  Line("pool", "first GiB swapped out"), Line("pool", "swap, first GiB"),
                  Line("pool", "longest swap, first GiB"), Line("pool", "swap, all there"),
                  Line("pool", "longest swap, all there"), Line("pool", "room awaited")));
}

TEST_F(BenchTest, APromptIsHandedOverByPiecesAndAsAWhole) {
  const json report = bench({"handover", "--chunk-size=4KiB", "--regions=2", "--blocks=12",
                             "--ranks=2", "--strategy=batch,staged"});
  std::set<std::tuple<std::string, int>> seen;
  for (const json& result : report["results"]) {
    EXPECT_EQ(result["bench"], "handover");
    EXPECT_EQ(result["direction"], "both");
    EXPECT_EQ(result["path"], "engine");
    EXPECT_GT(result["us"], 0.0) << result;
    EXPECT_GE(result["us_p99"], result["us"]) << result;
    seen.emplace(result["strategy"], result["blocks"].get<int>());
  }
  using Row = std::tuple<std::string, int>;
  std::vector<Row> rows;
  for (const std::string strategy : {"batch", "staged"}) {
    for (const int blocks : {1, 4, 12}) {
      rows.emplace_back(strategy + ": stored, then loaded", blocks);
      rows.emplace_back(strategy + ": handed over, 1 block a store", blocks);
    }
    rows.emplace_back(strategy + ": handed over, 8 blocks a store", 12);
  }
  EXPECT_THAT(seen, testing::UnorderedElementsAreArray(rows));
}

TEST_F(BenchTest, AHandOverWhosePrefillLosesItsMoverFailsAndLeavesNothing) {
  start_long({"--samples=10000"}, "handover");
  ASSERT_TRUE(wait_until(
      [this] { return running_->stderr_text().find("handover, ") != std::string::npos; }));
  ASSERT_TRUE(children().at("mover/0").signal(SIGKILL));
  const json report = end_of_long();
  EXPECT_THAT(report["errors"].dump(), HasSubstr("a job failed"));
}

TEST_F(BenchTest, TheNextManagerFindsWhatAKilledOneHadStored) {
  const json report = bench({"restart", "--entries=2000", "--repeats=1"});
  std::map<std::string, double> us;
  for (const json& result : report["results"]) us[result["strategy"]] = result["us"];
  EXPECT_EQ(us.size(), 5U);
  EXPECT_GT(us["answers, 2000 entries"], 0.0);
  EXPECT_GE(us["all blocks found, 2000 entries"], us["answers, 2000 entries"]);
}

TEST_F(BenchTest, AYoungPoolIsUsedFromItsManagersStartOnUntilItIsFull) {
  const json report =
      bench({"pool", "--chunk-size=4KiB", "--regions=2", "--ranks=2", "--pool-size=8MiB"});
  std::map<std::string, json> rows;
  for (const json& result : report["results"]) {
    if (result["path"] == "engine") rows[result["strategy"]] = result;
    EXPECT_EQ(result["pool_bytes"], 8 << 20) << result;
  }
  ASSERT_TRUE(rows.contains("first GiB swapped out"));
  const json& first = rows["first GiB swapped out"];
  EXPECT_EQ(first["block_bytes"], 2 * 2 * 4096) << "of both ranks";
  EXPECT_EQ(first["blocks"], 16) << "256 KiB a swap";
  EXPECT_GT(first["us"], rows["jobs accepted"]["us"]);
  EXPECT_GE(first["us"].get<double>() - rows["jobs accepted"]["us"].get<double>(),
            rows["longest swap, first GiB"]["us"]);
  EXPECT_GE(rows["longest swap, first GiB"]["us"], rows["swap, first GiB"]["us"]);
  EXPECT_FALSE(rows.contains("longest swap, the rest")) << "there is none";
}

TEST_F(BenchTest, APoolWithoutRoomForOneSwapIsAnError) {
  const Finished finished = run_kvferry(
      bench_arguments({"pool", "--chunk-size=1MiB", "--regions=8", "--pool-size=4MiB", "--json"}));
  EXPECT_EQ(finished.exit, ChildExit::exited(1));
  EXPECT_THAT(finished.complaints, HasSubstr("give more --pool-size"));
}

TEST_F(BenchTest, MeasuresAnUrgentLoadAloneAndBehindOthers) {
  const json report =
      bench({"urgent", "--chunk-size=4KiB", "--regions=2", "--strategy=batch,staged"});
  std::set<std::pair<std::string, int>> seen;
  for (const json& result : report["results"]) {
    seen.emplace(result["strategy"], result["blocks"]);
    EXPECT_GT(result["us"], 0.0) << result;
    EXPECT_EQ(result["direction"], "h2d");
  }
  EXPECT_THAT(
      seen,
      UnorderedElementsAre(
          std::pair("batch: alone", 1), std::pair("batch: behind loads", 1),
          std::pair("batch: behind loads", 4), std::pair("batch: behind loads ahead", 1),
          std::pair("batch: behind loads ahead", 4), std::pair("staged: alone", 1),
          std::pair("staged: behind loads", 1), std::pair("staged: behind loads", 4),
          std::pair("staged: behind loads ahead", 1), std::pair("staged: behind loads ahead", 4)));
}

TEST_F(BenchTest, MeasuresWhatCopiesCostTheComputeBesideThem) {
  const json report = bench({"interference", "--chunk-size=8KiB", "--regions=4", "--pairs=2",
                             "--load=decode,hbm", "--direction=d2h"});
  using Line = std::tuple<std::string, std::string, std::string, int>;
  std::set<Line> seen;
  for (const json& result : report["results"]) {
    EXPECT_EQ(result["bench"], "interference");
    seen.emplace(result["load"], result["path"], result["strategy"], result["blocks"].get<int>());
    for (const char* name :
         {"gbps", "share", "slowdown", "itl_p50_us", "itl_p99_us", "itl_p50_us_beside",
          "itl_p99_us_beside", "itl_p50_ratio", "itl_p99_ratio"}) {
      EXPECT_GT(result[name], 0.0) << name << " of " << result;
    }
    EXPECT_LE(result["itl_p50_us"], result["itl_p99_us"]) << result;
    EXPECT_LE(result["slowdown_least"], result["slowdown"]) << result;
    EXPECT_LE(result["slowdown"], result["slowdown_most"]) << result;
    const bool engine = result["path"] == "engine";
    EXPECT_EQ(result["itl_p99_beyond_copy_low"].is_number(), engine) << result;
    for (const char* name : {"itl_p99_ratio", "itl_p99_beyond_copy"}) {
      const std::string spread = name;
      if (!result[spread + "_low"].is_number() && !engine) continue;
      EXPECT_GT(result[spread + "_low"], 0.0) << result;
      EXPECT_LE(result[spread + "_low"], result[spread + "_high"]) << result;
    }
  }
  EXPECT_THAT(seen, UnorderedElementsAre(
                        Line("decode", "bare", "one copy", 1), Line("decode", "engine", "auto", 1),
                        Line("decode", "engine", "auto", 4), Line("hbm", "bare", "one copy", 1),
                        Line("hbm", "engine", "auto", 1), Line("hbm", "engine", "auto", 4)));
}

TEST_F(BenchTest, MeasuresInterferenceOfEveryLocality) {
  const std::string plot = path("beside.svg");
  const std::vector<std::string> arguments = {
      "interference",    "--plot=" + plot,  "--chunk-size=8KiB",
      "--regions=4",     "--pairs=2",       "--load=hbm",
      "--direction=h2d", "--strategy=auto", "--locality=sequential,random"};
  const json report = bench(arguments);
  std::set<std::tuple<std::string, std::string, int>> seen;
  for (const json& result : report["results"]) {
    seen.emplace(result["path"], result["locality"], result["blocks"].get<int>());
  }
  EXPECT_THAT(seen, UnorderedElementsAre(
                        std::tuple("bare", "sequential", 1), std::tuple("engine", "sequential", 1),
                        std::tuple("engine", "sequential", 4), std::tuple("engine", "random", 1),
                        std::tuple("engine", "random", 4)));
  std::stringstream drawn;
  drawn << std::ifstream(plot).rdbuf();
  for (const char* part : {"copies h2d beside hbm", "circle class=\"one-copy\"",
                           ">auto, 8.00 KiB, 4 blocks, random<", "share of the idle link"}) {
    EXPECT_THAT(drawn.str(), HasSubstr(part));
  }
}

TEST_F(BenchTest, MeasuresEveryChunkSizeThatIsNamed) {
  const json report = bench({"submit", "clear", "--chunk-size=4KiB,8KiB", "--regions=2",
                             "--pool-size=4MiB", "--samples=1"});
  std::set<std::tuple<std::string, std::string, int>> seen;
  for (const json& result : report["results"]) {
    if (result["path"] == "bare") continue;
    if (result["bench"] == "submit" && result["strategy"] != "auto") continue;
    seen.emplace(result["bench"], result["strategy"], result["chunk_bytes"].get<int>());
  }
  EXPECT_THAT(seen, UnorderedElementsAre(
                        std::tuple("submit", "auto", 4096), std::tuple("submit", "auto", 8192),
                        std::tuple("clear", "clear", 4096), std::tuple("clear", "clear", 8192),
                        std::tuple("clear", "reinit", 4096), std::tuple("clear", "reinit", 8192)));
}

TEST_F(BenchTest, MeasuresTheSlowestOfTwoRanksThatCompute) {
  const json report = bench({"interference", "--chunk-size=8KiB", "--regions=4", "--pairs=2",
                             "--load=decode", "--direction=d2h", "--ranks=2"});
  ASSERT_EQ(report["results"].size(), 3U) << "one large copy, and two kinds of jobs";
  for (const json& result : report["results"]) {
    const bool bare = result["path"] == "bare";
    EXPECT_GT(result["gbps"], 0.0) << result;
    EXPECT_GT(result["slowdown"], 0.0) << result;
    EXPECT_GT(result["itl_p99_us"], 0.0) << result;
    EXPECT_EQ(result["share"].is_number(), bare) << "the link is one device's: " << result;
    EXPECT_EQ(result["block_bytes"], (bare ? 1 : 2) * 4 * (8 << 10)) << result;
    EXPECT_TRUE(result["copy_gbps"].is_null()) << result;
  }
}

TEST_F(BenchTest, ComparesAMoverWithAWorkerThatCopiesByItselfAndKillsBoth) {
  const json report = bench({"ablation", "--chunk-size=6KiB", "--regions=4"});
  using Line = std::tuple<std::string, std::string, std::string, int>;
  std::set<Line> seen;
  std::set<std::tuple<std::string, std::string, bool>> killed;
  for (const json& result : report["results"]) {
    EXPECT_EQ(result["bench"], "ablation");
    seen.emplace(result["path"], result["strategy"], result["direction"],
                 result["blocks"].get<int>());
    for (const char* name : {"gbps", "share", "cpu_ms_per_gib"}) {
      EXPECT_GT(result[name], 0.0) << name << " of " << result;
    }
    EXPECT_EQ(result["us"].is_number(), result["blocks"] == 1) << result;
    EXPECT_EQ(result["recovery_us"].is_number(), result["arena_kept"].is_boolean()) << result;
    if (!result["recovery_us"].is_number()) continue;
    EXPECT_GT(result["recovery_us"], 0.0) << result;
    killed.emplace(result["path"], result["strategy"], result["arena_kept"].get<bool>());
  }
  EXPECT_EQ(seen.size(), 2U * 4U * 3U * 2U);
  EXPECT_THAT(killed, UnorderedElementsAre(
                          std::tuple("mover", "staged", true), std::tuple("mover", "strided", true),
                          std::tuple("mover", "batch", true), std::tuple("mover", "memcpy", true),
                          std::tuple("own", "staged", false), std::tuple("own", "strided", false),
                          std::tuple("own", "batch", false), std::tuple("own", "memcpy", false)));
}

TEST_F(BenchTest, AnAblationOfABlockFirstArenaComparesDirectCopies) {
  const json report =
      bench({"ablation", "--geometry=tiny", "--arena=block-first", "--direction=d2h"});
  using Line = std::tuple<std::string, std::string, int>;
  std::set<Line> seen;
  for (const json& result : report["results"]) {
    seen.emplace(result["path"], result["strategy"], result["blocks"].get<int>());
    EXPECT_GT(result["gbps"], 0.0) << result;
  }
  std::set<Line> expected;
  for (const char* path : {"mover", "own"}) {
    for (const char* strategy : {"direct", "strided", "batch", "memcpy"}) {
      for (const int blocks : {1, 4}) expected.emplace(path, strategy, blocks);
    }
  }
  EXPECT_EQ(seen, expected);
}

// The benchmark itself fails when a block that was written does not come back as it went.
TEST_F(BenchTest, AnAblationHasBlocksThatFitNoPieceOfThePool) {
  const Finished finished = run_kvferry(
      {"bench", "ablation", "--device=host", "--runtime-dir=" + path("run"), "--chunk-size=33MiB",
       "--regions=2", "--blocks=1", "--direction=d2h", "--strategy=staged,strided", "--repeats=1",
       "--samples=1", "--bytes=1MiB", "--json"});
  ASSERT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
  const json report = json::parse(finished.output, nullptr, false);
  EXPECT_THAT(report["errors"], IsEmpty());
  std::set<std::pair<std::string, std::string>> seen;
  for (const json& result : report["results"]) seen.emplace(result["path"], result["strategy"]);
  EXPECT_EQ(seen.size(), 2U * 2U) << report["results"];
}

TEST_F(BenchTest, AnAblationOfOneStrategyOfAModelIsATableForAWay) {
  const Finished finished = run_kvferry(bench_arguments(
      {"ablation", "--geometry=tiny", "--strategy=auto,strided", "--direction=h2d"}));
  EXPECT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
  EXPECT_THAT(finished.output,
              AllOf(HasSubstr("ablation h2d, with a mover and without: tiny"),
                    HasSubstr("mover strided"), HasSubstr("own strided"), HasSubstr("  kept"),
                    HasSubstr("  lost"), Not(HasSubstr("staged"))));
  EXPECT_THAT(finished.complaints, Not(HasSubstr("died"))) << "it was killed on purpose";
}

TEST_F(BenchTest, ASignalWhileAWorkerCopiesByItselfEndsItInAnOrderlyWay) {
  start_ablation();
  ASSERT_TRUE(wait_until([this] { return children().contains("bench-copier/0"); }))
      << running_->stderr_text();
  running_->signal(SIGINT);
  const json report = end_of_long();
  EXPECT_THAT(report["errors"][0].get<std::string>(), HasSubstr("interrupted by signal 2"));
}

TEST_F(BenchTest, AWorkerThatCopiesByItselfEndsWithAKilledBenchmark) {
  start_ablation();
  ASSERT_TRUE(wait_until([this] { return children().contains("bench-copier/0"); }))
      << running_->stderr_text();
  const auto all = children();
  running_->signal(SIGKILL);
  EXPECT_TRUE(all.at("bench-copier/0").wait_death(ipc::Deadline::after(10s)));
}

TEST_F(BenchTest, MeasuresWhatAWorkersOwnCopiesCostItsComputeBesideThoseOfAMover) {
  const json report =
      bench({"interference", "ablation", "--chunk-size=8KiB", "--regions=4", "--pairs=2",
             "--load=decode", "--direction=d2h", "--strategy=staged", "--no-bare"});
  std::set<std::tuple<std::string, std::string, std::string>> seen;
  for (const json& result : report["results"]) {
    seen.emplace(result["bench"], result["path"], result["strategy"]);
    EXPECT_EQ(result["slowdown"].is_number(), result["bench"] == "interference") << result;
  }
  EXPECT_THAT(seen, UnorderedElementsAre(std::tuple("interference", "bare", "one copy"),
                                         std::tuple("interference", "engine", "staged"),
                                         std::tuple("interference", "own", "staged"),
                                         std::tuple("ablation", "mover", "staged"),
                                         std::tuple("ablation", "own", "staged")));
}

TEST_F(BenchTest, TellsWhatEachProcessTakesThatHasNothingToDo) {
  const json report = bench({"idle", "--chunk-size=8KiB", "--regions=4", "--repeats=1"});
  std::set<std::string> processes;
  for (const json& result : report["results"]) {
    EXPECT_EQ(result["bench"], "idle");
    processes.insert(result["strategy"]);
    EXPECT_GE(result["core_share"], 0.0) << result;
    // The bar is a thousandth; a machine that is shared adds its own to what it counts.
    EXPECT_LT(result["core_share"], 0.05) << "it polls: " << result;
  }
  EXPECT_THAT(processes, UnorderedElementsAre("manager", "worker/0", "mover/0"));
}

TEST_F(BenchTest, ALoadThatTheDeviceHasNotIsToldOnceItsWorkerHasSaidSo) {
  const Finished finished = run_kvferry(bench_arguments(
      {"interference", "--chunk-size=8KiB", "--regions=4", "--pairs=1", "--load=gemm"}));
  EXPECT_EQ(finished.exit, ChildExit::exited(1));
  EXPECT_THAT(finished.complaints, HasSubstr("that takes a CUDA device"));
}

TEST_F(BenchTest, ShowsATableForEachWayWithAllStrategies) {
  const Finished finished =
      run_kvferry(bench_arguments({"--chunk-size=4KiB", "--regions=4", "--direction=h2d"}));
  EXPECT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
  EXPECT_THAT(finished.output, AllOf(HasSubstr("the link: d2h"), HasSubstr("transfer h2d, GB/s"),
                                     HasSubstr("latency h2d, us"), HasSubstr("4 blocks"),
                                     HasSubstr("bare one copy"), HasSubstr("engine staged")));
}

TEST_F(BenchTest, ASignalEndsItInAnOrderlyWayWithWhatWasMeasured) {
  start_long({});
  ASSERT_TRUE(wait_until([this] { return children().size() == 3; })) << running_->stderr_text();
  running_->signal(SIGINT);
  const json report = end_of_long();
  EXPECT_THAT(report["errors"][0].get<std::string>(), HasSubstr("interrupted by signal 2"));
  EXPECT_GT(report["limit"]["d2h"], 0.0);
}

TEST_F(BenchTest, AKilledMoverEndsItWithAnError) {
  start_long({"--strategy=batch"});
  ASSERT_TRUE(wait_until([this] {
    const json now = status("bench");
    return now.is_object() && now["engines"].size() == 1 &&
           now["engines"][0]["jobs"]["done"].get<int>() >= 100;
  })) << running_->stderr_text();
  const auto before = children();
  ASSERT_TRUE(before.at("mover/0").signal(SIGKILL));
  const json report = end_of_long();
  EXPECT_THAT(report["errors"][0].get<std::string>(), HasSubstr("peer_died"));
  EXPECT_THAT(running_->stderr_text(), HasSubstr("mover/0"));
}

TEST_F(BenchTest, AWrongUseIsToldBeforeAnythingStarts) {
  const auto complaint = [this](std::vector<std::string> more) {
    const Finished finished = run_kvferry(bench_arguments(std::move(more)));
    EXPECT_EQ(finished.exit, ChildExit::exited(2));
    EXPECT_THAT(finished.output, IsEmpty());
    return finished.complaints;
  };
  EXPECT_THAT(complaint({"speed"}), HasSubstr("none of transfer, latency, interference, layers"));
  EXPECT_THAT(complaint({"interference", "--load=rest"}), HasSubstr("decode, gemm, skinny or hbm"));
  EXPECT_THAT(complaint({"--direction=up"}), HasSubstr("none of d2h, h2d, both"));
  EXPECT_THAT(complaint({"--chunk-size=0"}), HasSubstr("--chunk-size"));
  EXPECT_THAT(complaint({"--chunk-size=16KiB,16384"}),
              HasSubstr("'16384' is the same as '16KiB' before it"));
  EXPECT_THAT(complaint({"transfer", "transfer"}), HasSubstr("'transfer' is in the list twice"));
  EXPECT_THAT(complaint({"--blocks=1,16,1"}), HasSubstr("--blocks: '1' is in the list twice"));
  EXPECT_THAT(complaint({"--blocks=0"}), HasSubstr("'0' is no count between 1 and 65536"));
  EXPECT_THAT(complaint({"--regions=4,4"}), HasSubstr("--regions: '4' is in the list twice"));
  EXPECT_THAT(complaint({"--geometry=tiny,tiny"}), HasSubstr("'tiny' is in the list twice"));
  EXPECT_THAT(complaint({"--geometry=unheard-of"}), HasSubstr("unheard-of"));
  EXPECT_THAT(complaint({"--geometry=tiny", "--regions=4"}), HasSubstr("--regions"));
  EXPECT_THAT(complaint({"--strategy=direct"}), HasSubstr("block-first"));
  EXPECT_THAT(complaint({"ablation", "--ranks=2"}), HasSubstr("--ranks"));
  EXPECT_THAT(complaint({"ablation", "--strategy=auto"}), HasSubstr("direct, staged, strided"));
  EXPECT_THAT(complaint({"ablation", "--strategy=kernel"}), HasSubstr("names none of them"));
  EXPECT_THAT(complaint({"latency", "submit", "--plot=" + path("none.svg")}),
              HasSubstr("--plot draws transfers and interference"));
  EXPECT_THAT(complaint({"ablation", "--locality=sequential,random"}),
              AllOf(HasSubstr("--locality is sequential,random"), HasSubstr("name one")));
}

}  // namespace
}  // namespace kvferry::test
