// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include "command.hpp"
#include "rank_options.hpp"
#include "toml_config.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace kvferry::cli {
namespace {

using testing::HasSubstr;

/// Sets an environment variable for as long as it lives.
class Variable {
 public:
  Variable(std::string name, const std::string& value) : name_(std::move(name)) {
    setenv(name_.c_str(), value.c_str(), 1);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { unsetenv(name_.c_str()); }

 private:
  std::string name_;
};

/// A file in the test's own temporary folder.
class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) {
    std::string name = testing::TempDir() + "kvferry-options-XXXXXX";
    const int fd = mkstemp(name.data());
    EXPECT_GE(fd, 0);
    path_ = name;
    std::ofstream(path_) << text;
    close(fd);
  }
  ConfigFile(const ConfigFile&) = delete;
  ConfigFile& operator=(const ConfigFile&) = delete;
  ~ConfigFile() { std::filesystem::remove(path_); }
  [[nodiscard]] std::string option() const { return "--config=" + path_.string(); }
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

/// A worker's options, parsed.
struct Parsed {
  std::optional<int> code;
  RankOptions options;
  std::string complaint;
};

Parsed parse(Arguments arguments) {
  Parsed parsed;
  auto app = make_app("worker", "", "", parsed.options.common);
  add_rank_options(*app, parsed.options);
  testing::internal::CaptureStderr();
  parsed.code = parse_arguments(*app, arguments);
  parsed.complaint = testing::internal::GetCapturedStderr();
  return parsed;
}

TEST(OptionsTest, CommandLineWinsOverEnvironmentOverFile) {
  const ConfigFile file("geometry = 'tiny'\ngpu-blocks = 1\nranks = 2\nengine = 'from-file'\n");
  const Variable blocks("KVFERRY_GPU_BLOCKS", "20");
  const Variable engine("KVFERRY_ENGINE", "from-environment");
  const Parsed parsed = parse({file.option(), "--gpu-blocks", "300"});
  ASSERT_FALSE(parsed.code) << parsed.complaint;
  EXPECT_EQ(parsed.options.gpu_blocks, 300U);
  EXPECT_EQ(parsed.options.engine, "from-environment");
  EXPECT_EQ(parsed.options.ranks, 2U);
  EXPECT_EQ(parsed.options.geometry, "tiny");
}

TEST(OptionsTest, WhatTheEnvironmentSaysWronglyIsToldByItsName) {
  const Variable blocks("KVFERRY_GPU_BLOCKS", "many");
  const Parsed parsed = parse({"--geometry=tiny"});
  EXPECT_EQ(parsed.code, kExitUsage);
  EXPECT_THAT(parsed.complaint,
              HasSubstr("--gpu-blocks from the environment's KVFERRY_GPU_BLOCKS: 'many' is no"));
  const Parsed given = parse({"--geometry=tiny", "--gpu-blocks=few"});
  EXPECT_EQ(given.code, kExitUsage);
  EXPECT_THAT(given.complaint, HasSubstr("--gpu-blocks: 'few' is no count"));
  EXPECT_FALSE(parse({"--geometry=tiny", "--gpu-blocks", "4"}).code) << "that counts";
}

TEST(OptionsTest, AWrongNumberOfTheEnvironmentIsToldByItsNameInEveryCommand) {
  const Variable queue("KVFERRY_STORE_QUEUE", "abc");
  testing::internal::CaptureStderr();
  EXPECT_EQ(replay_command({"--device=host"}), kExitUsage);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("KVFERRY_STORE_QUEUE: "));
}

TEST(OptionsTest, TheFileMayComeFromTheEnvironment) {
  const ConfigFile file("[worker]\ngeometry = 'tiny'\ncache_owner = 'mover'\n");
  const Variable config("KVFERRY_CONFIG", file.path());
  const Parsed parsed = parse({});
  ASSERT_FALSE(parsed.code) << parsed.complaint;
  EXPECT_EQ(parsed.options.geometry, "tiny");
  EXPECT_EQ(parsed.options.arena.cache_owner, ipc::CacheOwner::kMover);
}

TEST(OptionsTest, ACommandsOwnTableWinsAndOtherTablesAreNotForIt) {
  const ConfigFile file(
      "geometry = 'tiny'\ngpu-blocks = 5\n[worker]\ngpu-blocks = 6\n[mover]\ngpu-blocks = 7\n");
  const Parsed parsed = parse({file.option()});
  ASSERT_FALSE(parsed.code) << parsed.complaint;
  EXPECT_EQ(parsed.options.gpu_blocks, 6U);
}

TEST(OptionsTest, OptionsOfOtherCommandsMayStandInASharedFile) {
  const ConfigFile file("geometry = 'tiny'\nhost-memory = '1GiB'\n");
  const Parsed parsed = parse({file.option()});
  EXPECT_FALSE(parsed.code) << parsed.complaint;
}

TEST(OptionsTest, WhatMayBeGivenForSeveralMayBeAListInTheFile) {
  const ConfigFile file("share = ['left=3', 'right=2']\n");
  for (const bool is_one_of_ours : {false, true}) {
    CommonOptions common;
    std::vector<std::string> shares;
    auto app = make_app("manager", "", "", common);
    if (is_one_of_ours) app->add_option("--share", shares);
    EXPECT_FALSE(parse_arguments(*app, {file.option()}));
    EXPECT_EQ(shares.size(), is_one_of_ours ? 2U : 0U);
  }
  const ConfigFile nested("share = ['left=3', ['right=2']]\n");
  const Parsed parsed = parse({nested.option()});
  EXPECT_EQ(parsed.code, kExitUsage);
  EXPECT_THAT(parsed.complaint, HasSubstr("number nor true/false, nor a list of them"));
}

struct BadFile {
  const char* name;
  const char* text;
  const char* complaint;
};

class BadFileTest : public testing::TestWithParam<BadFile> {};

TEST_P(BadFileTest, IsAUsageErrorThatNamesLineAndKey) {
  const ConfigFile file(GetParam().text);
  const Parsed parsed = parse({file.option()});
  EXPECT_EQ(parsed.code, kExitUsage);
  EXPECT_THAT(parsed.complaint, HasSubstr(GetParam().complaint));
}

INSTANTIATE_TEST_SUITE_P(
    Files,
    BadFileTest,
    testing::Values(
        BadFile{"Syntax", "geometry = 'tiny'\nranks = = 2\n", "line 2"},
        BadFile{"UnknownKey", "geometry = 'tiny'\ngpu-block = 2\n",
                "line 2: there is no option 'gpu-block'"},
        BadFile{"UnknownKeyInTable", "[worker]\nhost-memory = '1GiB'\n",
                "there is no option 'host-memory' of kvferry worker"},
        BadFile{"UnknownTable", "[wroker]\nranks = 2\n", "there is no command [wroker]"},
        BadFile{"List", "ranks = [1, 2]\n", "'ranks' is neither text, number nor true/false"},
        BadFile{"BadValue", "geometry = 'tiny'\ncache-owner = 'me'\n",
                "'me' is none of worker|mover"}),
    [](const auto& file) { return std::string(file.param.name); });

TEST(OptionsTest, AMissingFileIsAUsageError) {
  const Parsed parsed = parse({"--geometry=tiny", "--config=/nonexistent/kvferry.toml"});
  EXPECT_EQ(parsed.code, kExitUsage);
  EXPECT_THAT(parsed.complaint, HasSubstr("/nonexistent/kvferry.toml"));
}

TEST(OptionsTest, EveryOptionOfEveryCommandMayStandInAFile) {
  // Each is parsed from a file of its own: a name that the file reader does not know is refused
  // with another message than a value that the option does not take.
  for (const Command& command : commands()) {
    testing::internal::CaptureStdout();
    EXPECT_EQ(command.run({"--help"}), kExitDone);
    const std::string help = testing::internal::GetCapturedStdout();
    std::size_t at = 0;
    while ((at = help.find("\n  --", at)) != std::string::npos) {
      at += 5;
      const std::string name = help.substr(at, help.find_first_of(" ,\n", at) - at);
      if (name == "help" || name == "config") continue;
      const auto known = configurable_options();
      EXPECT_NE(std::find(known.begin(), known.end(), name), known.end())
          << "'" << name << "' of " << command.name;
    }
  }
}

TEST(OptionsTest, WhatDoesNotCountIsRefusedOnTheCommandLineAlone) {
  const ConfigFile file("share = 3\n");
  const auto check = [](const Arguments& arguments, bool counts) {
    CommonOptions common;
    int share = 0;
    auto app = make_app("manager", "", "", common);
    app->add_option("--share", share);
    EXPECT_FALSE(parse_arguments(*app, arguments));
    return check_uses(*app, arguments, {{"--share", counts, "--this, not --that"}});
  };
  EXPECT_TRUE(check({}, false));
  EXPECT_TRUE(check({"--share=1"}, true));
  EXPECT_TRUE(check({file.option()}, false));
  {
    const Variable variable("KVFERRY_SHARE", "1");
    EXPECT_TRUE(check({}, false));
  }
  for (const Arguments& arguments : {Arguments{"--share=1"}, Arguments{"--share", "1"}}) {
    const ipc::Status refused = check(arguments, false);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().message,
              "--share is for --this, not --that: choose that, or leave --share out");
  }
}

struct BadUse {
  const char* name;
  int (*run)(const Arguments&);
  Arguments arguments;
  const char* complaint;
};

class BadUseTest : public testing::TestWithParam<BadUse> {};

TEST_P(BadUseTest, ExitsWithUsageAndSaysWhatIsWrong) {
  testing::internal::CaptureStderr();
  const int code = GetParam().run(GetParam().arguments);
  const std::string complaint = testing::internal::GetCapturedStderr();
  EXPECT_EQ(code, kExitUsage) << complaint;
  EXPECT_THAT(complaint, HasSubstr(GetParam().complaint));
}

INSTANTIATE_TEST_SUITE_P(
    Commands,
    BadUseTest,
    testing::Values(
        BadUse{"UnknownOption", worker_command, {"--geometri=tiny"}, "--geometri"},
        BadUse{"NoGeometry", worker_command, {}, "--geometry is required"},
        BadUse{"UnknownGeometry", worker_command, {"--geometry=huge"}, "tiny"},
        BadUse{"UnknownGeometryInReplay",
               replay_command,
               {"--device=host", "--geometry=huge"},
               "huge"},
        BadUse{"MissingGeometryFile",
               worker_command,
               {"--geometry=/nonexistent/g.toml"},
               "/nonexistent/g.toml"},
        BadUse{"RankBeyondRanks",
               worker_command,
               {"--geometry=tiny", "--rank=2", "--ranks=2"},
               "--rank 2 is not below --ranks 2"},
        BadUse{"NoRanks", replay_command, {"--device=host", "--ranks=0"}, "--ranks"},
        BadUse{"NoGpuBlocks",
               worker_command,
               {"--geometry=tiny", "--gpu-blocks=0"},
               "'0' is no count between 1 and"},
        BadUse{"NegativeGpuBlocks",
               replay_command,
               {"--device=host", "--gpu-blocks=-5"},
               "'-5' is no count between 1 and"},
        BadUse{"HugeGpuBlocks",
               worker_command,
               {"--geometry=tiny", "--gpu-blocks=99999999999999999999"},
               "is no count between"},
        BadUse{"NoHostMemory", manager_command, {"--host-memory=0"}, "'0'"},
        BadUse{"NegativeHostMemory", manager_command, {"--host-memory=-1GiB"}, "-1GiB"},
        BadUse{"NodeOfNoMachine", manager_command, {"--numa-nodes=999"}, "'999' is none of this"},
        BadUse{"HugeHostMemory", manager_command, {"--host-memory=99999999TiB"}, "99999999TiB"},
        BadUse{"HostMemoryWithoutNumber",
               replay_command,
               {"--device=host", "--host-memory=lots"},
               "lots"},
        BadUse{"BadOwner",
               worker_command,
               {"--geometry=tiny", "--cache-owner=both"},
               "'both' is none of worker|mover"},
        BadUse{"BadHandles", replay_command, {"--handles=ipc"}, "'ipc' is none of vmm|legacy"},
        BadUse{"BadArena", worker_command, {"--geometry=tiny", "--arena=diagonal"}, "diagonal"},
        BadUse{"BadDevice", worker_command, {"--geometry=tiny", "--device=tpu:0"}, "tpu:0"},
        BadUse{"BadReplayDevice", replay_command, {"--device=tpu"}, "'tpu' is none of"},
        BadUse{"BadDeviceList", replay_command, {"--device=cuda:x"}, "cuda:x"},
        BadUse{"BadStrategy",
               mover_command,
               {"--geometry=tiny", "--copy-strategy=teleport"},
               "teleport"},
        BadUse{"AgentSwapsAndAStrategy",
               mover_command,
               {"--geometry=tiny", "--copy-strategy=batch", "--agent-swaps=1MiB"},
               "--agent-swaps is for --copy-strategy auto, not batch"},
        BadUse{"QuotaOfNobody",
               manager_command,
               {"--namespace-quota=10%:20%"},
               "--namespace-quota: '10%:20%' is no NAME=SOFT:HARD"},
        BadUse{"QuotaOfNobodyInReplay",
               replay_command,
               {"--device=host", "--namespace-quota=10%:20%"},
               "--namespace-quota: '10%:20%' is no NAME=SOFT:HARD"},
        BadUse{"NamespaceOfControlCharacters",
               replay_command,
               {"--device=host", "--namespace=\x01"},
               "namespace of 1 bytes"},
        BadUse{"KeyOfNoNamespace",
               replay_command,
               {"--device=host", "--namespace-key-file=/nonexistent/key"},
               "--namespace"},
        BadUse{"KeyThatIsNotThere",
               replay_command,
               {"--namespace=a", "--namespace-key-file=/nonexistent/key"},
               "/nonexistent/key"},
        BadUse{"NamespaceOfNoScheduler",
               worker_command,
               {"--geometry=tiny", "--namespace=a"},
               "--namespace is for the scheduler of reference workers"},
        BadUse{"QuotaAboveThePool",
               manager_command,
               {"--namespace-quota=a=0:2GiB"},
               "the quota of namespace a is 0%:2.00 GiB, the host pool has 1.00 GiB"},
        BadUse{"QuotasThatDoNotFit",
               manager_command,
               {"--namespace-quota=a=60%:", "--namespace-quota=b=60%:"},
               "the soft shares of 2 namespaces are 1.20 GiB together"},
        BadUse{"TwoQuotas",
               manager_command,
               {"--namespace-quota=a=10%:,a=20%:"},
               "namespace a has one of 10%:100% already"},
        BadUse{"DefaultQuotaOfText",
               manager_command,
               {"--default-namespace-quota=much"},
               "--default-namespace-quota: 'much' is no SOFT:HARD"},
        BadUse{"WatermarksTheWrongWayRound",
               manager_command,
               {"--evict-ahead=2:1"},
               "watermarks of 2 % and 1 %"},
        BadUse{"ShareOfNobody", manager_command, {"--share=3"}, "--share 3: give the name"},
        BadUse{"NoShare", manager_command, {"--share=chat=0"}, "its share, 1 to 1000"},
        BadUse{"HugeShare", manager_command, {"--share=chat=1001"}, "its share, 1 to 1000"},
        BadUse{"ShareOfText", manager_command, {"--share=chat=3x"}, "chat=3x"},
        BadUse{"TwoShares",
               manager_command,
               {"--share=chat=3", "--share=chat=4"},
               "engine chat has a share of 3 already"},
        BadUse{"EventsNowhere", manager_command, {"--kv-events=events"}, "'events' is no endpoint"},
        BadUse{"EventsOfAName",
               manager_command,
               {"--kv-events=tcp://router:5557"},
               "an address of this machine in numbers"},
        BadUse{"SnapshotsAlone",
               manager_command,
               {"--kv-events-snapshot=ipc:///tmp/a"},
               "--kv-events"},
        BadUse{"EventsAndSnapshotsInOnePlace",
               manager_command,
               {"--kv-events=ipc:///tmp/a", "--kv-events-snapshot=ipc:///tmp/a"},
               "each an endpoint of its own"},
        BadUse{"EventsFromNowhere", events_command, {}, "--endpoint is required"},
        BadUse{"EventsOfANegativeCount",
               events_command,
               {"--endpoint=ipc:///tmp/a", "--count=-1"},
               "--count"},
        BadUse{"ReplayOfANegativeQueue", replay_command, {"--store-queue=-1"}, "--store-queue"},
        BadUse{"EventsFromABadPlace", events_command, {"--endpoint=/tmp/a"}, "is no endpoint"},
        BadUse{"TraceOfNothing", trace_command, {"--last=0"}, "--last"},
        BadUse{"TraceOfLessThanNothing", trace_command, {"--last=-1"}, "--last"},
        BadUse{
            "TraceOfMoreThanThereCanBe", trace_command, {"--last=99999999999999999999"}, "--last"},
        BadUse{"TraceOfText", trace_command, {"--last=many"}, "--last"},
        BadUse{"BadLevel", manager_command, {"--log-level=loud"}, "loud"},
        BadUse{"BadTime", manager_command, {"--job-deadline=soon"}, "'soon' is no time"},
        BadUse{"NoTime", manager_command, {"--job-deadline=0s"}, "'0s' is no time"},
        BadUse{"BadSpeed", replay_command, {"--speed=-1"}, "'-1' is neither max nor"},
        BadUse{"SpeedThatIsNoNumber", replay_command, {"--speed=nan"}, "'nan' is neither max nor"},
        BadUse{"RateThatIsNoNumber",
               replay_command,
               {"--recompute=auto", "--prefill-rate=nan"},
               "'nan' is no number between 1 and"},
        BadUse{"EndlessRate",
               replay_command,
               {"--recompute=auto", "--prefill-rate=inf"},
               "'inf' is no number between 1 and"},
        BadUse{"ShareThatIsNoNumber",
               longctx_command,
               {"--active=nan"},
               "'nan' is no number between 0.01 and 1"},
        BadUse{"BadVerify", replay_command, {"--verify=some"}, "'some' is none of off|sample|full"},
        BadUse{"NegativeSeed", replay_command, {"--seed=-1"}, "'-1' is no whole number"},
        BadUse{"UnknownWorkload", replay_command, {"--workload=foo"}, "foo"},
        BadUse{"MissingTrace", replay_command, {"--trace=/nonexistent/t"}, "/nonexistent/t"},
        BadUse{"TraceIsADirectory", replay_command, {"--trace=/"}, "is a directory"},
        BadUse{"UnwritableReport", replay_command, {"--report=/dev/null/r.json"}, "/dev/null/r"},
        BadUse{"UnwritableLogs", replay_command, {"--keep-logs=/dev/null/logs"}, "/dev/null/logs"},
        BadUse{"StagedWithoutAStagingRing",
               replay_command,
               {"--device=host", "--arena=block-first", "--copy-strategy=staged"},
               "staged needs at least 2 staging slots"},
        BadUse{"DirectInLayerFirst",
               mover_command,
               {"--geometry=tiny", "--copy-strategy=direct"},
               "direct needs a block-first arena"},
        BadUse{"NoRequests", replay_command, {"--requests=0"}, "--requests"},
        BadUse{"TraceAndWorkload",
               replay_command,
               {"--trace=/dev/null", "--workload=conversation"},
               "excludes"},
        BadUse{"TraceAndSeed",
               simulate_command,
               {"--trace=/dev/null", "--seed=3"},
               "--seed is for requests that are made up, not --trace /dev/null: choose that, or"},
        BadUse{"ReplayOfATraceAndSeed",
               replay_command,
               {"--device=host", "--trace=/dev/null", "--seed", "3"},
               "--seed is for requests that are made up"},
        BadUse{"UsesWithoutSelective",
               replay_command,
               {"--device=host", "--write-uses=3"},
               "--write-uses is for --write-policy selective, not write-through: choose that, or "
               "leave --write-uses out"},
        BadUse{"RequestsWithoutPrefetch",
               replay_command,
               {"--device=host", "--prefetch-requests", "3"},
               "--prefetch-requests is for --prefetch best-effort, wait or timeout, not off"},
        BadUse{"TimeoutWithoutPrefetch",
               replay_command,
               {"--device=host", "--prefetch-timeout=1s"},
               "--prefetch-timeout is for --prefetch wait or timeout, not off"},
        BadUse{"TimeoutOfBestEffort",
               replay_command,
               {"--device=host", "--prefetch=best-effort", "--prefetch-timeout=1s"},
               "--prefetch-timeout is for --prefetch wait or timeout, not best-effort"},
        BadUse{"RateWithoutAuto",
               replay_command,
               {"--device=host", "--prefill-rate=100", "--recompute=always"},
               "--prefill-rate is for --recompute auto, not always"},
        BadUse{"UsesOfAWorkerWithoutSelective",
               worker_command,
               {"--geometry=tiny", "--serve", "--write-policy=write-back", "--write-uses=3"},
               "--write-uses is for --write-policy selective, not write-back"},
        BadUse{"BadInstance", status_command, {"--instance=../up"}, "../up"},
        BadUse{"BadPolicy", clear_command, {"--host=maybe"}, "'maybe' is none of drop|keep"}),
    [](const auto& use) { return std::string(use.param.name); });

TEST(ProgramTest, PicksTheCommandByItsNameOrItsFirstArgument) {
  testing::internal::CaptureStdout();
  EXPECT_EQ(run_program("/usr/bin/kvferry-manager", {"--help"}), kExitDone);
  EXPECT_THAT(testing::internal::GetCapturedStdout(), HasSubstr("--host-memory"));
  testing::internal::CaptureStdout();
  EXPECT_EQ(run_program("kvferry", {"help", "mover"}), kExitDone);
  EXPECT_THAT(testing::internal::GetCapturedStdout(), HasSubstr("--copy-strategy"));
  testing::internal::CaptureStderr();
  EXPECT_EQ(run_program("kvferry", {"mvoer"}), kExitUsage);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("there is no command 'mvoer'"));
}

TEST(ProgramTest, EveryHelpExplainsAndShowsAnExample) {
  for (const Command& command : commands()) {
    testing::internal::CaptureStdout();
    EXPECT_EQ(command.run({"--help"}), kExitDone);
    const std::string help = testing::internal::GetCapturedStdout();
    EXPECT_THAT(help, HasSubstr("example")) << command.name;
    EXPECT_THAT(help, HasSubstr("kvferry " + std::string(command.name))) << command.name;
    EXPECT_THAT(help, HasSubstr("--instance")) << command.name;
  }
}

TEST(RankOptionsTest, AStagingSlotOfAGpuHoldsWholeBlocks) {
  for (const auto& [name, blocks] : std::map<std::string, std::uint64_t>{
           {"tiny", 0}, {"llama-3-8b", 4}, {"deepseek-v3", 2}, {"llama-3-70b", 2}}) {
    const auto geometry = find_geometry(name, 1);
    ASSERT_TRUE(geometry) << name;
    const auto ring = make_arena_options({}, *geometry, 16, ipc::DeviceKind::kCuda);
    const std::uint64_t block =
        geometry->replicated_bytes(ipc::GroupId{0}) + geometry->sharded_bytes(ipc::GroupId{0});
    EXPECT_GE(ring.staging_slot_bytes, 8U << 20) << name;
    if (blocks > 0) {
      EXPECT_EQ(ring.staging_slot_bytes / block, blocks) << name;
    }
    EXPECT_GE(ring.staging_slots, 4U) << name;
    EXPECT_LE(ring.staging_slots * ring.staging_slot_bytes, 128U << 20) << name;
  }
}

TEST(RankOptionsTest, AGpusStagingRingStaysSmallWhenItsSlotsAreLarge) {
  const auto geometry = find_geometry("llama-3-8b", 1);
  ASSERT_TRUE(geometry);
  ArenaChoice choice;
  for (const auto& [mib, slots] :
       std::map<std::uint64_t, std::uint32_t>{{1, 16}, {8, 16}, {16, 8}, {32, 4}, {256, 4}}) {
    choice.staging_slot_bytes = mib << 20U;
    const auto ring = make_arena_options(choice, *geometry, 16, ipc::DeviceKind::kCuda);
    EXPECT_EQ(ring.staging_slot_bytes, mib << 20U);
    EXPECT_EQ(ring.staging_slots, slots) << mib;
  }
}

TEST(RankOptionsTest, StagingSuitsArenaAndDevice) {
  const auto geometry = find_geometry("tiny", 1);
  ASSERT_TRUE(geometry);
  ArenaChoice choice;
  const auto staged = make_arena_options(choice, *geometry, 16, ipc::DeviceKind::kCuda);
  EXPECT_GT(staged.staging_slots, 0U);
  EXPECT_GE(staged.staging_slot_bytes, geometry->sharded_bytes(ipc::GroupId{0}));
  choice.order = ipc::ArenaOrder::kBlockFirst;
  EXPECT_EQ(make_arena_options(choice, *geometry, 16, ipc::DeviceKind::kHost).staging_slots, 0U);
  choice.staging_slots = 3;
  choice.staging_slot_bytes = 1U << 20;
  const auto forced = make_arena_options(choice, *geometry, 16, ipc::DeviceKind::kHost);
  EXPECT_EQ(forced.staging_slots, 3U);
  EXPECT_EQ(forced.staging_slot_bytes, 1U << 20);
}

}  // namespace
}  // namespace kvferry::cli
