// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/report.hpp"

#include "replay/sizing.hpp"
#include "run/anonymous_memory.hpp"
#include "status_text.hpp"
#include "table.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// A run with nothing to complain about.
ReplayReport good() {
  ReplayReport report;
  report.counters.requests = 100;
  report.counters.block_references = 1'000;
  report.counters.hits_device = 50;
  report.counters.hits_host = 150;
  report.counters.loads = 150;
  report.counters.bytes_to_device = 2'000'000'000;
  report.counters.blocks_verified = 40;
  report.duration_s = 4;
  report.device = "host";
  report.geometry = "tiny";
  return report;
}

TEST(ReportTest, HasTheFieldsThatScriptsRelyOn) {
  ReplayReport report = good();
  report.counters.clear_ms = {3, 1, 2};
  const nlohmann::json json = to_json(report);
  for (const char* name : {"requests",
                           "block_references",
                           "hits_device",
                           "hits_host",
                           "hit_rate",
                           "bytes_to_host",
                           "bytes_to_device",
                           "blocks_verified",
                           "blocks_corrupt",
                           "clears",
                           "reinits",
                           "clear_ms",
                           "reinit_ms",
                           "leaked_device_bytes",
                           "leaked_host_bytes",
                           "leftover_names",
                           "restarts",
                           "duration_s",
                           "device",
                           "geometry",
                           "loads",
                           "stores",
                           "failed_jobs",
                           "evicted_before_load",
                           "skipped_lines",
                           "blocks_survived",
                           "retracted"}) {
    EXPECT_TRUE(json.contains(name)) << name;
  }
  EXPECT_DOUBLE_EQ(json["hit_rate"].get<double>(), 0.2);
  EXPECT_DOUBLE_EQ(json["gb_per_s_to_device"].get<double>(), 0.5);
  EXPECT_DOUBLE_EQ(json["clear_ms"]["p50"].get<double>(), 2);
  EXPECT_DOUBLE_EQ(json["clear_ms"]["max"].get<double>(), 3);
  EXPECT_DOUBLE_EQ(json["reinit_ms"]["p99"].get<double>(), 0);
  EXPECT_TRUE(json["leftover_names"].is_number_unsigned());
  EXPECT_TRUE(json["leftover_paths"].is_array());
  EXPECT_TRUE(json["error"].is_null());
}

TEST(ReportTest, PercentilesAreValuesThatWereSeen) {
  EXPECT_DOUBLE_EQ(percentile({}, 0.5), 0);
  EXPECT_DOUBLE_EQ(percentile({7}, 0.99), 7);
  std::vector<double> values;
  for (int i = 100; i > 0; --i) values.push_back(i);
  EXPECT_DOUBLE_EQ(percentile(values, 0.50), 50);
  EXPECT_DOUBLE_EQ(percentile(values, 0.99), 99);
  EXPECT_DOUBLE_EQ(percentile(values, 1.0), 100);
}

TEST(ReportTest, AGoodRunHasNoFailure) { EXPECT_THAT(failures_of(good()), IsEmpty()); }

TEST(ReportTest, EveryKindOfFailureIsNamed) {
  ReplayReport report = good();
  report.counters.blocks_corrupt = 2;
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("2 of 40 verified blocks were corrupt")));
  report = good();
  report.leaked_device_bytes = 1U << 20;
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("1.00 MiB of device memory")));
  report = good();
  report.leaked_host_bytes = 1U << 20;
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("1.00 MiB of host memory")));
  report = good();
  report.leftover_names = {"/dev/shm/a"};
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("/dev/shm/a")));
  report = good();
  report.counters.loads = 0;
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("nothing was ever loaded back")));
  report.error = "interrupted";
  EXPECT_THAT(failures_of(report), ElementsAre("interrupted"));
}

TEST(ReportTest, AClearThatGaveBackLessThanTheArenaIsAFailureUnlessItSaidSo) {
  constexpr std::uint64_t kArena = 64ULL << 20;
  ReplayReport report = good();
  report.counters.clears = 3;
  const DeviceClear whole{"host:d", 100, 100 + kArena, 100, 100 + kArena, kArena};
  const DeviceClear part{"host:d", 100, 100 + kArena / 2, 100, 100 + kArena, kArena};
  report.clear_memory.push_back({{whole}, false, false});
  EXPECT_THAT(failures_of(report), IsEmpty());
  EXPECT_EQ(summarize_clears(report.clear_memory).given_back, kArena);
  EXPECT_EQ(summarize_clears(report.clear_memory).largest_difference, 0U);
  report.clear_memory.push_back({{part}, true, false});
  EXPECT_THAT(failures_of(report), IsEmpty()) << "a quarantine was reported";
  EXPECT_EQ(summarize_clears(report.clear_memory).largest_difference, kArena / 2);
  report.clear_memory.push_back({{part}, false, true});
  EXPECT_THAT(failures_of(report), IsEmpty()) << "another process took memory meanwhile";
  report.clear_memory.push_back({{whole, part}, false, false});
  EXPECT_THAT(failures_of(report), ElementsAre(HasSubstr("1 of 3 clears gave back less")));
  EXPECT_THAT(summarize(report), HasSubstr("device memory given back"));
  EXPECT_EQ(
      to_json(report)["clear_memory"][3]["devices"][1]["seen_free_after"].get<std::uint64_t>(),
      100 + kArena / 2);
}

TEST(ReportTest, TheSummaryIsAligned) {
  const std::string text = summarize(good());
  EXPECT_THAT(text, HasSubstr("hit rate"));
  EXPECT_THAT(text, HasSubstr("20.0 %"));
  EXPECT_THAT(text, HasSubstr("1,000"));
  EXPECT_EQ(text.find('\t'), std::string::npos);
}

/// One mover and one worker, 100 KiB more for each request; a pool with runs of ten.
RunSample sample_at(std::uint64_t requests) {
  RunSample sample;
  sample.requests = requests;
  sample.seconds = static_cast<double>(requests) / 10;
  for (const char* name : {"manager", "mover/0", "mover/1", "replay", "worker/0", "worker/1"}) {
    sample.anonymous_kib[name] = 1024 + requests * 100;
  }
  sample.pool = PoolSample{requests * 100, requests * 10, 1U << 20, 3, 4096};
  return sample;
}

TEST(ReportTest, SamplesTellOfAQuarterOfTheRunAndOfItsEnd) {
  ReplayReport report = good();
  report.samples = {sample_at(0), sample_at(24), sample_at(60), sample_at(100)};
  report.samples.back().pool->placed_extents = 2'500;
  const std::string text = summarize(report);
  EXPECT_THAT(text, HasSubstr("manager 3.34 MiB to 10.8 MiB, movers 6.69 MiB to 21.5 MiB"));
  EXPECT_THAT(text, ContainsRegex("blocks per extent +4.00 .*10.00 at a quarter"));
  const nlohmann::json last = to_json(report)["samples"][3];
  EXPECT_EQ(last["requests"], 100);
  EXPECT_EQ(last["anonymous_kib"]["worker/1"], 1024 + 100 * 100);
  EXPECT_EQ(last["pool"]["placed_extents"], 2'500);
  EXPECT_EQ(last["pool"]["free"], 1U << 20);
}

TEST(ReportTest, ARunTooShortForTwoSamplesHasNoLinesOfThem) {
  ReplayReport report = good();
  EXPECT_EQ(summarize(report).find("anonymous memory"), std::string::npos);
  report.samples = {sample_at(0), sample_at(100)};
  EXPECT_EQ(summarize(report).find("anonymous memory"), std::string::npos);
  EXPECT_EQ(summarize(report).find("per extent"), std::string::npos);
}

TEST(ReportTest, SamplesThatLackAProcessOrThePoolAreNotCompared) {
  std::vector<RunSample> samples = {sample_at(25), sample_at(30), sample_at(99), sample_at(100)};
  samples[0].anonymous_kib.erase("mover/0");
  samples[3].pool.reset();
  const auto memory = quarter_and_end(samples, /*with_pool=*/false);
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory->quarter->requests, 30U);
  EXPECT_EQ(memory->end->requests, 100U);
  const auto pool = quarter_and_end(samples, /*with_pool=*/true);
  ASSERT_TRUE(pool);
  EXPECT_EQ(pool->end->requests, 99U);
  EXPECT_TRUE(to_json(samples)[3]["pool"].is_null());
}

TEST(SampleListTest, StaysBoundedAndEvenAndKeepsTheFirstAndTheLast) {
  SampleList list;
  for (std::uint64_t requests = 0; requests <= 100'000; ++requests) {
    if (list.is_due(requests) || requests == 100'000) list.add(sample_at(requests));
    ASSERT_LE(list.samples().size(), kMostSamples);
  }
  const auto& samples = list.samples();
  EXPECT_GT(samples.size(), kMostSamples / 2);
  EXPECT_EQ(samples.front().requests, 0U);
  EXPECT_EQ(samples.back().requests, 100'000U);
  const std::uint64_t step = samples[1].requests;
  for (std::size_t i = 1; i + 1 < samples.size(); ++i) EXPECT_EQ(samples[i].requests, i * step);
  for (const RunSample& sample : samples) EXPECT_EQ(sample.anonymous_kib.size(), 6U);
  list.add(sample_at(100'000));
  EXPECT_LT(samples[samples.size() - 2].requests, 100'000U) << "two after as many requests";
}

TEST(SampleListTest, ReadsWhatStatusAndProcSay) {
  const auto pool = pool_of_status(
      R"({"pool": {"placed_blocks": 30, "placed_extents": 4, "free": 5000, "slabs": 2,
          "free_pages": 1, "page_bytes": 4096}})");
  ASSERT_TRUE(pool);
  EXPECT_DOUBLE_EQ(pool->blocks_per_extent(), 7.5);
  EXPECT_EQ(pool->free_in_slabs, 5000U - 4096U);
  for (const char* text : {"", "[]", R"({"pool": 1})", R"({"pool": {"free": 1}})"}) {
    EXPECT_FALSE(pool_of_status(text)) << text;
  }
  EXPECT_EQ(parse_anonymous_kib("Name:\tkvferry\nVmRSS:\t  99 kB\nRssAnon:\t    1234 kB\nX:\n"),
            1234U);
  EXPECT_FALSE(parse_anonymous_kib("Name:\tkvferry\nState:\tZ (zombie)\n"));
  EXPECT_FALSE(parse_anonymous_kib("Name:\tkvferry\nRssAnon:"));
  EXPECT_GT(anonymous_kib(::getpid()).value_or(0), 0U);
}

TEST(ReportTest, AReportThatCannotBeWrittenSaysWhere) {
  const auto written = write_report(good(), "/nonexistent/folder/report.json");
  ASSERT_FALSE(written);
  EXPECT_THAT(written.error().message, HasSubstr("/nonexistent/folder/report.json"));
}

TEST(SizingTest, TheDeviceHoldsAboutOnePercentAndTheHostAFifth) {
  const auto geometry = ipc::load_geometry("tiny", 1);
  ASSERT_TRUE(geometry);
  const TraceFacts facts{288'500, 182'790, 250};
  const auto sizing = choose_sizes(*geometry, facts, {}, {}, {});
  ASSERT_TRUE(sizing) << sizing.error().message;
  EXPECT_NEAR(sizing->gpu_blocks, 2'000, 100);
  EXPECT_NEAR(static_cast<double>(sizing->host_bytes) /
                  static_cast<double>(host_bytes_per_block(*geometry)),
              40'500, 1'000);
}

TEST(SizingTest, AShortRunStillHasRoomForItsLongestRequest) {
  const auto geometry = ipc::load_geometry("tiny-state", 1);
  ASSERT_TRUE(geometry);
  const TraceFacts facts{400, 300, 100};
  const auto sizing = choose_sizes(*geometry, facts, {}, {}, {});
  ASSERT_TRUE(sizing) << sizing.error().message;
  EXPECT_GE(sizing->gpu_blocks, 100U);
  EXPECT_LT(sizing->gpu_blocks, 300U);
}

TEST(SizingTest, RefusesADeviceThatIsSmallerThanTheLongestRequest) {
  const auto geometry = ipc::load_geometry("tiny", 1);
  ASSERT_TRUE(geometry);
  const TraceFacts facts{400, 300, 100};
  const auto sizing = choose_sizes(*geometry, facts, 99U, {}, {});
  ASSERT_FALSE(sizing);
  EXPECT_THAT(sizing.error().message, HasSubstr("needs 100 device blocks"));
  EXPECT_FALSE(choose_sizes(*geometry, facts, {}, 1U, {})) << "one byte of host memory";
}

TEST(SizingTest, RefusesWhatTheHostDoesNotHaveBeforeAnythingStarts) {
  const auto geometry = ipc::load_geometry("tiny", 2);
  ASSERT_TRUE(geometry);
  const TraceFacts facts{400, 300, 100};
  SizingLimits limits;
  limits.host_available = 1ULL << 30;
  EXPECT_TRUE(choose_sizes(*geometry, facts, {}, 1ULL << 29, limits));
  const auto host = choose_sizes(*geometry, facts, {}, 1ULL << 31, limits);
  ASSERT_FALSE(host);
  EXPECT_THAT(host.error().message, HasSubstr("2.00 GiB of host memory for blocks"));
  EXPECT_TRUE(choose_sizes(*geometry, facts, 1U << 20, 1ULL << 29, limits)) << "real devices";
  limits.devices_in_host_memory = true;
  const auto devices = choose_sizes(*geometry, facts, 1U << 20, 1ULL << 29, limits);
  ASSERT_FALSE(devices);
  EXPECT_THAT(devices.error().message, HasSubstr("for the simulated devices"));
}

TEST(TableTest, AlignsColumnsAndDropsTrailingBlanks) {
  Table table({{"name"}, {"n", Align::kRight}, {"note"}});
  table.add({"a", "1", "x"});
  table.add({"longer", "1,000"});
  EXPECT_EQ(table.render("> "), "> name        n  note\n> a           1  x\n> longer  1,000\n");
}

TEST(TableTest, SeparatesThousands) {
  EXPECT_EQ(with_separators(0), "0");
  EXPECT_EQ(with_separators(999), "999");
  EXPECT_EQ(with_separators(1'000), "1,000");
  EXPECT_EQ(with_separators(12'345'678), "12,345,678");
}

TEST(StatusTextTest, ShowsHostEnginesAndProcesses) {
  const auto text = describe_status(R"({
    "instance": "chat", "pid": 42, "uptime": 3725.5,
    "pool": {"bytes": 1073741824, "used": 1048576, "blocks": 32},
    "index": {"blocks": 32, "pinned": 1, "reserved": 0, "evicted": 7},
    "namespaces": [{"name": "chat", "soft_bytes": 0, "hard_bytes": null, "bytes": 65536,
      "blocks": 2, "hits": 1234, "misses": 5, "stored": 9, "evicted": 7, "evicted_for_others": 3,
      "refused_quota": 1}],
    "engines": [{"name": "e", "phase": "ready", "generation": 3, "offload_ready": true,
      "geometry": "tiny", "group_blocks": [64], "cache_owner": "worker",
      "jobs": {"queued": 0, "running": 1, "done": 5, "failed": 0, "cancelled": 0, "stale": 0},
      "bytes_to_host": 2048, "bytes_to_device": 0, "clears": 1, "reinits": 1, "note": "",
      "ranks": [{"rank": 0, "worker": {"pid": 43, "phase": "ready", "mapped": true, "epoch": 2,
        "device_free": 1024, "device_total": 4096, "quarantined_bytes": 0, "note": ""},
        "mover": null}]}]})");
  ASSERT_TRUE(text) << text.error().message;
  EXPECT_THAT(*text, HasSubstr("instance chat: pid 42, up 1 h 2 min"));
  EXPECT_THAT(*text, ContainsRegex("chat +2 +64.0 KiB +0 B +- +1,234 +5 +9 +7 +3 +1"));
  EXPECT_THAT(*text, HasSubstr("1.00 MiB of 1.00 GiB used, 32 blocks"));
  EXPECT_THAT(*text, HasSubstr("engine e: ready, generation 3, offload ready"));
  EXPECT_THAT(*text, HasSubstr("1.00 KiB of 4.00 KiB"));
  EXPECT_THAT(*text, HasSubstr("absent"));
  EXPECT_EQ(text->find("{}"), std::string::npos);
}

TEST(StatusTextTest, NamesWhatOffloadLacks) {
  const std::string reasons = describe_missing(R"({"engines": [
    {"name": "other", "ranks": [{"rank": 0, "worker": null, "mover": null}]},
    {"name": "e", "note": "", "ranks": [{"rank": 1,
      "worker": {"pid": 7, "mapped": true, "connected": true, "living_leases": 2, "note": ""},
      "mover": {"pid": 8, "mapped": false, "connected": true, "note": "no strategy"}},
      {"rank": 2, "worker": {"mapped": true, "connected": true, "note": ""}, "mover": null}]}]})",
                                               "e");
  EXPECT_EQ(reasons,
            "worker/1 (pid 7) sees its arena held by 2 processes; mover/1 (pid 8) has no arena "
            "mapped: no strategy; mover/2 has not registered");
  EXPECT_THAT(describe_missing("[]", "e"), HasSubstr("cannot be read"));
}

TEST(StatusTextTest, TakesWhatIsMissingAndRefusesWhatIsNoObject) {
  const auto sparse = describe_status(R"({"engines": [{"ranks": [{}, 3]}, 7], "pool": []})");
  ASSERT_TRUE(sparse) << sparse.error().message;
  EXPECT_FALSE(describe_status("[1]"));
  EXPECT_FALSE(describe_status("not json"));
}

TEST(StatusTextTest, ShowsNothingForValuesThatNoManagerWrites) {
  constexpr std::size_t kDeep = 1'000'000;
  const std::string deep = std::string(kDeep, '[') + std::string(kDeep, ']');
  const auto text = describe_status(R"({"pid": )" + deep + R"(, "uptime": -1e300})");
  ASSERT_TRUE(text) << text.error().message;
  EXPECT_THAT(*text, HasSubstr("pid -, up -"));
}

ReplayCounters counters_after(std::uint64_t requests, std::uint64_t device, std::uint64_t host) {
  ReplayCounters counters;
  counters.requests = requests;
  counters.block_references = 10 * requests;
  counters.hits_device = device;
  counters.hits_host = host;
  return counters;
}

TEST(DeathLogTest, TellsOfEachPartOfTheRunWhatWasFoundInIt) {
  DeathLog log;
  EXPECT_TRUE(log.ended(counters_after(5, 1, 1)).empty());
  log.add("manager", 1.5, counters_after(100, 200, 300));
  log.add("mover/0", 2.5, counters_after(150, 250, 400));
  const auto deaths = log.ended(counters_after(250, 550, 400));
  ASSERT_EQ(deaths.size(), 2U);
  EXPECT_EQ(deaths[0].process, "manager");
  EXPECT_EQ(deaths[0].requests, 100U);
  EXPECT_EQ(deaths[0].seconds, 1.5);
  EXPECT_DOUBLE_EQ(deaths[0].before.hit_rate(), 0.5);
  EXPECT_DOUBLE_EQ(deaths[0].before.host_hit_rate(), 0.3);
  EXPECT_EQ(deaths[0].after.requests, 50U);
  EXPECT_DOUBLE_EQ(deaths[0].after.hit_rate(), 0.3);
  EXPECT_DOUBLE_EQ(deaths[1].before.host_hit_rate(), 0.2);
  EXPECT_EQ(deaths[1].after.requests, 100U);
  EXPECT_EQ(deaths[1].after.hits_device, 300U);
  EXPECT_EQ(deaths[1].after.hits_host, 0U);
}

TEST(DeathLogTest, TheReportAndItsTableTellBeforeAndAfter) {
  DeathLog log;
  log.add("manager", 1.5, counters_after(100, 200, 300));
  ReplayReport report = good();
  report.deaths = log.ended(counters_after(200, 400, 500));
  const auto json = to_json(report)["deaths"];
  ASSERT_EQ(json.size(), 1U);
  EXPECT_EQ(json[0]["process"], "manager");
  EXPECT_EQ(json[0]["before"]["hit_rate"], 0.5);
  EXPECT_EQ(json[0]["after"]["hit_rate"], 0.4);
  EXPECT_EQ(json[0]["after"]["block_references"], 1000);
  EXPECT_THAT(summarize(report), HasSubstr("50.0 % of blocks found before, 40.0 % after; in host "
                                           "memory 30.0 and 20.0 %"));
  EXPECT_TRUE(to_json(good())["deaths"].empty());
}

}  // namespace
}  // namespace kvferry::cli
