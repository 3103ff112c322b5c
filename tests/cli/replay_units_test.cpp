// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A replay whose host memory holds several device blocks as one: what is found, that it is right,
// with every other option for the host tier, and when processes die.
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

namespace kvferry::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr int kRequests = 240;
constexpr int kLong = 1500;

class ReplayUnitsTest : public ReplayTest {
 protected:
  /// Plays to the end, and nothing is wrong with it.
  json play(const std::string& trace, const std::vector<std::string>& more) {
    const Finished run = replay(trace, more);
    output_ = run.output;
    EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
    return checked();
  }
  json checked() {
    json report = this->report();
    EXPECT_EQ(report["requests"], report["requests_given"]);
    EXPECT_GT(report["blocks_verified"], 0);
    EXPECT_EQ(report["blocks_corrupt"], 0);
    EXPECT_EQ(report["leaked_device_bytes"], 0);
    EXPECT_EQ(report["leaked_host_bytes"], 0);
    EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
    return report;
  }
  static int hits(const json& report) {
    return report["hits_device"].get<int>() + report["hits_host"].get<int>();
  }
  /// Prefixes of this many blocks of one text, each followed by others of its own up to ten, and
  /// then by a request that takes all twelve blocks of the device.
  std::string forked_trace(const std::vector<int>& shared) {
    int next = 1000;
    std::vector<std::vector<int>> requests;
    for (const int blocks : shared) {
      requests.push_back(ids(0, 10));
      for (int i = blocks; i < 10; ++i) requests.back()[static_cast<std::size_t>(i)] = next++;
      requests.push_back(ids(next, 12));
      next += 12;
    }
    return trace_of(requests);
  }
  static std::vector<int> ids(int first, std::size_t count) {
    std::vector<int> made(count);
    std::iota(made.begin(), made.end(), first);
    return made;
  }
  /// Of these hash ids, a request for each line.
  std::string trace_of(const std::vector<std::vector<int>>& requests) {
    const std::string file = path("made.jsonl");
    std::ofstream out(file);
    for (const std::vector<int>& made : requests) {
      out << json{{"timestamp", 0},
                  {"input_length", made.size() * 512},
                  {"output_length", 0},
                  {"hash_ids", made}}
                 .dump()
          << '\n';
    }
    return file;
  }
  std::string output_;
};

TEST_F(ReplayUnitsTest, WhatIsSharedIsFoundInWholeUnitsAndWhereAPrefixEnded) {
  // The first one is the text itself, and ends within its third unit.
  const std::string trace = forked_trace({10, 6, 9, 10, 3, 4});
  const std::vector<std::string> options = {"--gpu-blocks=12", "--in-flight=1"};
  const auto in_units = [&](const std::string& blocks) {
    auto more = options;
    more.push_back("--unit-blocks=" + blocks);
    const json report = play(trace, more);
    EXPECT_EQ(std::to_string(report["unit_blocks"].get<int>()), blocks);
    EXPECT_EQ(report["hits_device"], 0);
    EXPECT_EQ(report["loads"], report["hits_host"]);
    EXPECT_EQ(report["failed_jobs"], 0);
    return report["hits_host"].get<int>();
  };
  EXPECT_EQ(in_units("1"), 6 + 9 + 10 + 3 + 4);
  EXPECT_THAT(output_, testing::Not(HasSubstr("store unit")));
  EXPECT_EQ(in_units("4"), 4 + 8 + 10 + 0 + 4);
  EXPECT_THAT(output_, HasSubstr("blocks of a store unit"));
  EXPECT_EQ(in_units("64"), 0 + 0 + 10 + 0 + 0);
  EXPECT_EQ(play(trace, options)["hits_host"], 6 + 9 + 10 + 3 + 4);
}

TEST_F(ReplayUnitsTest, AUnitThatLacksPartsGetsThemFromThePrefixThatHasThem) {
  // A window of four blocks, behind nine and then behind eight: of the second unit the first
  // request holds three blocks, the second one all. Between them others take all blocks of the
  // device: they begin when the stores of those before have ended.
  std::vector<std::vector<int>> requests = {ids(0, 9), ids(1000, 12), ids(0, 8), ids(2000, 12)};
  requests.push_back(ids(0, 8));
  requests.back().push_back(1);
  const json report = play(trace_of(requests), {"--geometry=tiny-window", "--unit-blocks=4",
                                                "--gpu-blocks=12", "--in-flight=1"});
  EXPECT_EQ(report["failed_jobs"], 0);
  EXPECT_EQ(report["evicted_before_load"], 1) << "what the second one looked for";
  EXPECT_EQ(report["hits_host"], 8) << "of the last one: without its window's row the second one "
                                       "has nothing to go on from";
}

TEST_F(ReplayUnitsTest, PartsThatAUnitLacksAreNotPrefetched) {
  // Of the second unit the first request stores a window's last three blocks; the last two need all
  // four, and wait while others run that have nothing to load or store. What takes the whole device
  // begins when the stores of those before have ended.
  const std::vector<int> whole = ids(1000, 60);
  std::vector<std::vector<int>> requests = {ids(0, 9), whole, ids(2000, 60), whole};
  requests.insert(requests.end(), 20, ids(1000, 12));
  for (const int own : {100, 200}) {
    requests.push_back(ids(0, 8));
    requests.back().insert(requests.back().end(), {own, own + 1});
  }
  const json report =
      play(trace_of(requests), {"--geometry=tiny-window", "--unit-blocks=4", "--gpu-blocks=60",
                                "--in-flight=1", "--prefetch=wait", "--prefetch-timeout=60s"});
  EXPECT_EQ(report["prefetch"]["failed"], 0);
  EXPECT_EQ(report["failed_jobs"], 0) << "asked for again";
  EXPECT_EQ(report["evicted_before_load"], 1) << "what its unit does not have is asked for once";
}

/// Geometry, blocks of a unit, options for the host tier.
using Use = std::tuple<std::string, int, std::vector<std::string>>;

class ReplayUnitUseTest : public ReplayUnitsTest, public testing::WithParamInterface<Use> {
 protected:
  [[nodiscard]] std::vector<std::string> options(int unit_blocks) const {
    std::vector<std::string> all = {"--geometry=" + std::get<0>(GetParam()),
                                    "--unit-blocks=" + std::to_string(unit_blocks),
                                    "--gpu-blocks=150", "--host-memory=256MiB"};
    const auto& more = std::get<2>(GetParam());
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

TEST_P(ReplayUnitUseTest, ComesBackAsItWasStored) {
  const std::string trace = write_trace(kRequests);
  const json report = play(trace, options(std::get<1>(GetParam())));
  EXPECT_EQ(report["unit_blocks"], std::get<1>(GetParam()));
  EXPECT_GT(report["loads"], 0);
  EXPECT_GT(report["hits_host"], 0);
}

INSTANTIATE_TEST_SUITE_P(
    Uses,
    ReplayUnitUseTest,
    testing::Values(
        Use{"tiny", 2, {}},
        Use{"tiny-mla", 16, {"--in-flight=8"}},
        Use{"tiny-draft", 4, {"--prefetch=wait", "--prefetch-timeout=60s", "--in-flight=2"}},
        Use{"tiny-window", 4, {"--prefetch=best-effort", "--in-flight=2"}},
        Use{"tiny-window", 3, {"--clear-every=60"}},
        Use{"tiny-state", 4, {"--prefetch=timeout", "--in-flight=2", "--clear-every=60"}},
        Use{"tiny", 4, {"--recompute=auto", "--prefill-rate=1"}},
        Use{"tiny", 8, {"--store-queue=8"}},
        Use{"tiny", 3, {"--write-policy=selective"}}),
    [](const auto& use) {
      std::string name = std::get<0>(use.param) + "_" + std::to_string(std::get<1>(use.param));
      for (const std::string& option : std::get<2>(use.param)) {
        name += "_" + option.substr(2, option.find('=') - 2);
      }
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

class ReplayUnitGroupsTest : public ReplayUnitsTest,
                             public testing::WithParamInterface<const char*> {};

TEST_P(ReplayUnitGroupsTest, TurnsThatGoOnWhereTheLastOneEndedFindAsMuchAsInSingleBlocks) {
  const std::string trace = write_trace(kRequests);
  const auto hits_in = [&](const std::string& blocks) {
    return hits(play(trace, {std::string("--geometry=") + GetParam(), "--unit-blocks=" + blocks,
                             "--gpu-blocks=150", "--host-memory=256MiB", "--in-flight=1"}));
  };
  const int single = hits_in("1");
  EXPECT_EQ(hits_in("3"), single);
  EXPECT_EQ(hits_in("4"), single);
}

INSTANTIATE_TEST_SUITE_P(Geometries,
                         ReplayUnitGroupsTest,
                         testing::Values("tiny", "tiny-draft", "tiny-window", "tiny-state"),
                         [](const auto& geometry) {
                           std::string name = geometry.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

class ReplayUnitDeathTest : public ReplayUnitsTest,
                            public testing::WithParamInterface<std::string> {};

TEST_P(ReplayUnitDeathTest, IsSurvivedAndNoUnitIsWrong) {
  start_replay(write_trace(kLong, 30), {"--unit-blocks=4"});
  auto before = children();
  ASSERT_TRUE(before.contains(GetParam()));
  ASSERT_TRUE(before.at(GetParam()).signal(SIGKILL));
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  const json report = checked();
  EXPECT_EQ(report["restarts"], 1);
  EXPECT_GT(report["hits_host"], 0);
}

INSTANTIATE_TEST_SUITE_P(Victims,
                         ReplayUnitDeathTest,
                         testing::Values("manager", "mover/0", "worker/1"),
                         [](const auto& victim) {
                           return victim.param.substr(0, victim.param.find('/'));
                         });

TEST_F(ReplayUnitsTest, TheUnitsOfAKilledManagerAreFoundAgain) {
  start_replay(write_trace(kLong, 30), {"--unit-blocks=4"});
  ASSERT_TRUE(wait_until([&] {
    const json now = status();
    return now.is_object() && now["pool"]["integrity"]["summed"] > 50;
  })) << running_->stderr_text();
  ASSERT_TRUE(children().at("manager").signal(SIGKILL));
  json kept;
  EXPECT_TRUE(wait_until([&] {
    const json now = status();
    if (now.is_object() && now["pool"]["kept"].is_object()) kept = now["pool"]["kept"];
    return kept.is_object();
  })) << running_->stderr_text();
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  ASSERT_TRUE(kept.is_object());
  EXPECT_GT(kept["adopted"], 0);
  const json report = checked();
  EXPECT_EQ(report["restarts"], 1);
  EXPECT_GT(report["hits_host"], 0);
}

TEST_F(ReplayUnitsTest, WhatDoesNotGoWithUnitsIsRefusedWithTheRemedy) {
  const auto refused = [this](const std::vector<std::string>& options) {
    const Finished run = replay(write_trace(10), options);
    EXPECT_EQ(run.exit, ChildExit::exited(2)) << run.output;
    return run.complaints;
  };
  EXPECT_THAT(refused({"--unit-blocks=4", "--write-policy=write-back"}),
              testing::AllOf(HasSubstr("--unit-blocks 4 with --write-policy write-back"),
                             HasSubstr("choose write-through or selective")));
  EXPECT_THAT(refused({"--unit-blocks=16", "--store-queue=15"}),
              HasSubstr("give a queue of at least 16, or 0"));
  EXPECT_THAT(refused({"--unit-blocks=65"}), HasSubstr("64"));
  EXPECT_THAT(refused({"--unit-blocks=0"}), HasSubstr("64"));
}

TEST_F(ReplayUnitsTest, AConfigFileSaysHowLargeUnitsAre) {
  std::ofstream(path("kvferry.toml")) << "[replay]\nunit-blocks = 4\n";
  const json report = play(write_trace(kRequests), {"--config=" + path("kvferry.toml")});
  EXPECT_EQ(report["unit_blocks"], 4);
}

}  // namespace
}  // namespace kvferry::test
