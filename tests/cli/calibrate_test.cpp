// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// kvferry calibrate, and movers that calibrate themselves: real processes on simulated devices.
#include "cli/daemons_fixture.hpp"
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>
#include <poll.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

class CalibrateTest : public ReplayTest {
 protected:
  Finished calibrate(std::vector<std::string> more) {
    std::vector<std::string> arguments = {"calibrate", "--device=host",
                                          "--runtime-dir=" + path("run"),
                                          "--cache-dir=" + path("cache")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_kvferry(arguments);
  }
  json calibrations(std::vector<std::string> more, std::string* complaints = nullptr) {
    more.emplace_back("--json");
    const Finished finished = calibrate(std::move(more));
    EXPECT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
    if (complaints != nullptr) *complaints = finished.complaints;
    const json told = json::parse(finished.output, nullptr, false);
    EXPECT_TRUE(told.is_object()) << finished.output;
    return told["calibrations"];
  }
  [[nodiscard]] std::vector<fs::path> kept() const {
    std::vector<fs::path> files;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(path("cache"), none)) {
      if (entry.path().extension() == ".json") files.push_back(entry.path());
    }
    return files;
  }
  static std::string read(const fs::path& file) {
    std::stringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }
};

TEST_F(CalibrateTest, TellsEveryCandidateForEveryJobSizeAndWay) {
  const json all = calibrations({"--chunk-size=4KiB,8KiB", "--regions=8"});
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(kept().size(), 2U);
  for (const json& one : all) {
    EXPECT_GT(one["measured_seconds"], 0.0);
    EXPECT_LT(one["measured_seconds"], 10.0);
    EXPECT_TRUE(fs::exists(one["file"].get<std::string>()));
    EXPECT_THAT(one["device"]["name"].get<std::string>(), HasSubstr("simulated"));
    std::set<std::pair<std::string, int>> seen;
    std::set<std::string> possible(one["possible"].begin(), one["possible"].end());
    EXPECT_EQ(possible, (std::set<std::string>{"staged", "strided", "batch", "memcpy"}));
    for (const json& result : one["results"]) {
      seen.emplace(result["direction"], result["blocks"].get<int>());
      EXPECT_EQ(result["regions"], 8);
      EXPECT_EQ(result["block_bytes"], 8 * result["chunk_bytes"].get<int>());
      for (const std::string& strategy : possible) {
        EXPECT_GT(result["strategies"][strategy]["us"], 0.0);
        EXPECT_GT(result["strategies"][strategy]["gbps"], 0.0);
        EXPECT_GT(result["strategies"][strategy]["share"], 0.0);
      }
      for (const char* when : {"alone", "among"}) {
        EXPECT_TRUE(possible.contains(result["choice"][when].get<std::string>())) << result;
      }
    }
    for (const char* way : {"d2h", "h2d"}) {
      for (const int blocks : {1, 4, 16, 64}) EXPECT_TRUE(seen.contains({way, blocks}));
    }
  }
}

TEST_F(CalibrateTest, ShowsWhatIsKeptUntilItIsToBeFreshOrCannotBeUsed) {
  ASSERT_EQ(calibrations({"--geometry=tiny"}).size(), 1U);
  ASSERT_EQ(kept().size(), 1U);
  const fs::path file = kept().front();
  const std::string first = read(file);
  std::string complaints;
  json again = calibrations({"--geometry=tiny"}, &complaints);
  EXPECT_TRUE(again[0]["measured_seconds"].is_null());
  EXPECT_EQ(complaints, "");
  EXPECT_EQ(read(file), first);
  again = calibrations({"--geometry=tiny", "--fresh"});
  EXPECT_TRUE(again[0]["measured_seconds"].is_number());
  EXPECT_NE(read(file), first);
  // Another driver.
  std::string other = read(file);
  const std::string field = "\"driver\": \"";
  ASSERT_NE(other.find(field), std::string::npos);
  other.insert(other.find(field) + field.size(), "older ");
  std::ofstream(file, std::ios::trunc) << other;
  again = calibrations({"--geometry=tiny"}, &complaints);
  EXPECT_TRUE(again[0]["measured_seconds"].is_number());
  EXPECT_THAT(complaints, AllOf(HasSubstr("measuring anew"), HasSubstr("was 'older ")));
  // Nothing of the kind.
  std::ofstream(file, std::ios::trunc) << "\x7f"
                                       << "ELF";
  again = calibrations({"--geometry=tiny"}, &complaints);
  EXPECT_TRUE(again[0]["measured_seconds"].is_number());
  EXPECT_THAT(complaints, AllOf(HasSubstr("protocol"), HasSubstr("no JSON")));
  EXPECT_TRUE(calibrations({"--geometry=tiny"})[0]["measured_seconds"].is_null());
}

TEST_F(CalibrateTest, PrintsATableAndWhereItIsKept) {
  const Finished told = calibrate({"--geometry=tiny-mla", "--ranks=2"});
  EXPECT_EQ(told.exit, ChildExit::exited(0)) << told.complaints;
  EXPECT_THAT(told.output, AllOf(HasSubstr("tiny-mla on simulated device"), HasSubstr("d2h"),
                                 HasSubstr("h2d"), HasSubstr("strided"), HasSubstr("staged*"),
                                 HasSubstr("kept in " + path("cache"))));
}

TEST_F(CalibrateTest, WithoutAPlaceItSaysThatNothingIsKept) {
  std::ofstream(path("cache")) << "a file";
  const Finished told = calibrate({"--geometry=tiny"});
  EXPECT_EQ(told.exit, ChildExit::exited(0));
  EXPECT_THAT(told.output, HasSubstr("not kept"));
  EXPECT_THAT(told.complaints, HasSubstr("not kept"));
}

TEST_F(CalibrateTest, SlipsAreWrongUsage) {
  for (const char* slip : {"--geometry=nothing", "--device=tpu", "--arena=block-first",
                           "--chunk-size=much", "--regions=0"}) {
    EXPECT_EQ(calibrate({slip}).exit, ChildExit::exited(2)) << slip;
  }
}

// Jobs come all the time, and clears stop what is being measured: nothing is lost, and nothing of
// the measurement is left.
TEST_F(CalibrateTest, MoversThatCalibrateThemselvesServeAllTheSame) {
  const std::vector<std::string> arguments =
      replay_arguments(write_trace(150), {"--keep-logs=" + path("logs"), "--clear-every=40"});
  // From nothing, and then with what 'kvferry calibrate' kept for the same geometry.
  for (const bool kept_before : {false, true}) {
    if (kept_before) (void)calibrations({"--geometry=tiny", "--ranks=2"});
    ChildProcess child(
        {.program = KVFERRY_PROGRAM,
         .arguments = arguments,
         .environment = {"KVFERRY_CALIBRATION=on", "KVFERRY_CACHE_DIR=" + path("cache")}});
    ASSERT_EQ(child.wait(ipc::Deadline::after(std::chrono::seconds(90))), ChildExit::exited(0))
        << child.stderr_text();
    const json told = report();
    EXPECT_EQ(told["blocks_corrupt"], 0);
    EXPECT_GT(told["blocks_verified"], 0);
    EXPECT_EQ(told["leaked_device_bytes"], 0);
    EXPECT_EQ(told["leaked_host_bytes"], 0);
    if (!kept_before) continue;
    std::string logs;
    for (const auto& entry : fs::recursive_directory_iterator(path("logs"))) {
      if (entry.path().native().find("mover") != std::string::npos) logs += read(entry.path());
    }
    EXPECT_THAT(logs, AllOf(HasSubstr("were calibrated before: " + path("cache")),
                            HasSubstr("copy strategy to host: ")));
  }
}

class CalibratingMoverTest : public DaemonsTest {};

TEST_F(CalibratingMoverTest, AnIdleMoverCalibratesAndKeepsItForTheCommand) {
  const std::string cache = "--cache-dir=" + (temp_ / "cache").string();
  start("manager");
  start("worker");
  start("mover", {"--calibration=on", cache});
  const ipc::Deadline deadline = soon();
  const auto is_kept = [this] {
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(temp_ / "cache", none)) {
      if (entry.path().extension() == ".json") return true;  // and not one that is being written
    }
    return false;
  };
  while (!is_kept()) {
    ASSERT_FALSE(deadline.expired()) << running_.back()->stderr_text();
    pollfd end{running_.back()->pidfd(), POLLIN, 0};
    ASSERT_EQ(::poll(&end, 1, 10), 0) << running_.back()->stderr_text();
  }
  const Finished told =
      ask("calibrate", {"--device=host", "--geometry=" + geometry_, cache, "--json"});
  EXPECT_EQ(told.exit, ChildExit::exited(0)) << told.complaints;
  const json all = json::parse(told.output, nullptr, false);
  ASSERT_TRUE(all.is_object()) << told.output;
  EXPECT_TRUE(all["calibrations"][0]["measured_seconds"].is_null()) << "kept by the mover";
}

}  // namespace
}  // namespace kvferry::test
