// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/judge.hpp"

#include "soak/observer.hpp"
#include "soak/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace kvferry::soak {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// Memory of `cycles` cycles, looked at every tenth: `per_cycle` bytes more each, in whole pages,
/// and a random walk of a few pages around it, as heaps do.
std::vector<Point> memory_of(double cycles, double per_cycle, int noise_pages) {
  constexpr double kPage = 4096;
  std::mt19937 random(7);
  std::vector<Point> points;
  int walk = 0;
  for (double cycle = 0; cycle < cycles; cycle += 10) {
    walk = std::clamp(walk + static_cast<int>(random() % 3) - 1, -noise_pages, noise_pages);
    const double exact = 20e6 + per_cycle * cycle;
    points.push_back({cycle, std::floor(exact / kPage) * kPage + walk * kPage});
  }
  return points;
}

TEST(JudgeTest, FindsTheSlopeOfALine) {
  const std::vector<Point> points = {{0, 5}, {1, 7}, {2, 9}, {3, 11}};
  const Fit fit = fit_slope(points);
  EXPECT_DOUBLE_EQ(fit.slope, 2);
  EXPECT_NEAR(fit.low, 2, 1e-9);
  EXPECT_NEAR(fit.high, 2, 1e-9);
  EXPECT_DOUBLE_EQ(fit.span, 3);
}

TEST(JudgeTest, MemoryThatWandersIsNoLeak) {
  const SlopeVerdict verdict = judge_slope(memory_of(10'000, 0, 8), SlopeLimit{});
  EXPECT_TRUE(verdict.good) << verdict.fit.low << " to " << verdict.fit.high;
  EXPECT_LT(verdict.fit.low, 0);
  EXPECT_GT(verdict.fit.high, 0);
}

TEST(JudgeTest, OneSmallObjectPerCycleIsALeak) {
  const SlopeVerdict verdict = judge_slope(memory_of(10'000, 48, 8), SlopeLimit{});
  EXPECT_FALSE(verdict.good) << verdict.fit.low << " to " << verdict.fit.high;
  EXPECT_LT(verdict.fit.low, 48);
  EXPECT_GT(verdict.fit.high, 48);
}

TEST(JudgeTest, TheFirstTenthMayWarmUp) {
  std::vector<Point> points = memory_of(10'000, 0, 2);
  for (Point& point : points) point.y -= std::max(0.0, 900 - point.x) * 10'000;
  EXPECT_TRUE(judge_slope(points, SlopeLimit{}).good);
}

TEST(JudgeTest, TooFewPointsProveNothing) {
  EXPECT_FALSE(judge_slope({}, SlopeLimit{}).good);
  EXPECT_FALSE(judge_slope(memory_of(20, 0, 0), SlopeLimit{}).good);
  // Nor does noise that would hide a leak.
  EXPECT_FALSE(judge_slope(memory_of(300, 0, 60), SlopeLimit{}).good);
}

TEST(JudgeTest, TakesQuantilesFromWhatWasSeen) {
  const Quantiles none = quantiles_of({});
  EXPECT_EQ(none.count, 0U);
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const Quantiles found = quantiles_of(values);
  EXPECT_DOUBLE_EQ(found.p50, 50);
  EXPECT_DOUBLE_EQ(found.p99, 99);
  EXPECT_DOUBLE_EQ(found.max, 100);
}

Look usual_look() {
  Look look;
  ProcessLook worker;
  worker.name = "worker/0";
  worker.kinds = {{"socket", 5}, {"memfd", 2}};
  worker.descriptors = 7;
  look.processes = {worker};
  look.names = {"registry", "registry.lock"};
  look.memfds = 9;
  look.device_used = 1 << 20;
  return look;
}

TEST(JudgeTest, NoDifferenceIsTooSmall) {
  const Look before = usual_look();
  EXPECT_THAT(differences(before, usual_look()), IsEmpty());
  Look now = usual_look();
  ++now.processes[0].kinds["socket"];
  EXPECT_THAT(differences(before, now), ElementsAre(HasSubstr("worker/0")));
  // One more of one kind for one less of another is a change, too.
  --now.processes[0].kinds["memfd"];
  EXPECT_THAT(differences(before, now), ElementsAre(HasSubstr("worker/0")));
  now = usual_look();
  now.names.insert("x");
  EXPECT_THAT(differences(before, now), ElementsAre(HasSubstr("'x' is new")));
  now = usual_look();
  now.device_used += 1;
  EXPECT_THAT(differences(before, now), ElementsAre(HasSubstr("bytes of the devices")));
  now = usual_look();
  now.memfds += 1;
  EXPECT_THAT(differences(before, now), ElementsAre(HasSubstr("memory objects")));
  now = usual_look();
  now.abstract.insert("@x");
  EXPECT_THAT(differences(before, now), ElementsAre(HasSubstr("abstract socket")));
}

/// A run in which all went well.
Seen good_run() {
  Seen seen;
  for (int i = 0; i < 100; ++i)
    seen.cycles.push_back({.clear_ms = 12, .reinit_ms = 8, .whole_ms = 30});
  seen.cycles.push_back({.clear_ms = 900, .reinit_ms = 8, .whole_ms = 950, .struck = true});
  seen.first = usual_look();
  seen.names = {"worker/0"};
  for (std::uint64_t i = 0; i < 101; i += 10) {
    Sample sample;
    sample.cycle = i;
    sample.processes[0] = {.life = 1, .private_bytes = 20U << 20U, .heap_bytes = 1U << 20U};
    seen.samples.push_back(sample);
  }
  seen.back_ms = {300};
  seen.traffic.blocks_out = 5;
  seen.traffic.blocks_verified = 5;
  seen.traffic.over_clears = 2;
  seen.trace.checks = 5;
  seen.trace.transitions = 100;
  return seen;
}

std::vector<std::string> failed(const Seen& seen, std::uint64_t cycles = 101) {
  SoakOptions options;
  options.cycles = cycles;
  options.fleet.devices = {"host:x:1MiB"};
  options.around.heap_library = "x.so";
  std::vector<std::string> names;
  for (const Figure& figure : judge(options, seen)) {
    if (!figure.good) names.push_back(figure.name);
  }
  return names;
}

TEST(JudgeTest, FailsForEachThingThatMayNotBe) {
  EXPECT_THAT(failed(good_run()), IsEmpty());
  const auto failed_with = [](auto change) {
    Seen seen = good_run();
    change(seen);
    return failed(seen);
  };
  EXPECT_THAT(failed_with([](Seen& s) { s.cycles.pop_back(); }), ElementsAre(HasSubstr("cycles")));
  EXPECT_THAT(failed_with([](Seen& s) { s.cycles[3].clear_ms = 9100; }),
              ElementsAre("clear, p50 / p99 / max"));
  EXPECT_THAT(failed_with([](Seen& s) { s.cycles.back().clear_ms = 12'100; }),
              ElementsAre("clear, with a kill or stop"));
  EXPECT_THAT(failed_with([](Seen& s) {
                s.cycles.back().clear_ms = 12'100;
                s.cycles.back().stopped_ms = 6000;
              }),
              IsEmpty());
  EXPECT_THAT(failed_with([](Seen& s) { s.back_ms = {5500}; }),
              ElementsAre(HasSubstr("memory back")));
  EXPECT_THAT(failed_with([](Seen& s) { s.traffic.blocks_corrupt = 1; }),
              ElementsAre("blocks corrupt"));
  EXPECT_THAT(failed_with([](Seen& s) { s.traffic.blocks_lost = 1; }),
              ElementsAre(HasSubstr("lost")));
  EXPECT_THAT(failed_with([](Seen& s) { s.traffic.over_clears = 0; }),
              ElementsAre(HasSubstr("verified")));
  EXPECT_THAT(failed_with([](Seen& s) { s.changes = {"x"}; }),
              ElementsAre(HasSubstr("descriptors")));
  EXPECT_THAT(failed_with([](Seen& s) { s.samples.back().rings = 50; }),
              ElementsAre(HasSubstr("files of transitions")));
  EXPECT_THAT(failed_with([](Seen& s) { s.trace.breaches = {"x"}; }),
              ElementsAre("transitions checked"));
  EXPECT_THAT(failed_with([](Seen& s) {
                s.deaths = {{"x", ""}};
              }),
              ElementsAre(HasSubstr("died by themselves")));
  EXPECT_THAT(failed_with([](Seen& s) { s.used_in_the_end = 1; }),
              ElementsAre(HasSubstr("in the end")));
  EXPECT_THAT(failed_with([](Seen& s) { s.left_names = {"x"}; }), ElementsAre("names in the end"));
  EXPECT_THAT(failed_with([](Seen& s) { s.wrong = {"x"}; }), ElementsAre("other failures"));
  EXPECT_THAT(failed_with([](Seen& s) {
                for (std::size_t i = 0; i < s.samples.size(); ++i) {
                  s.samples[i].processes[0].private_bytes += i << 18U;
                }
              }),
              ElementsAre("private memory, worker/0"));
  EXPECT_THAT(failed_with([](Seen& s) { s.samples.back().processes[0].heap_bytes = 0; }),
              ElementsAre("live heap, worker/0"));
  EXPECT_THAT(failed_with([](Seen& s) {
                for (std::size_t i = 0; i < s.samples.size(); ++i) {
                  s.samples[i].processes[0].heap_bytes = (1U << 20U) + (i << 18U);
                }
              }),
              ElementsAre("live heap, worker/0"));
}

TEST(JudgeTest, OnlyAShortRunsTimesAreThoseOfASharedMachine) {
  const auto late = [](std::uint64_t cycles) {
    Seen seen = good_run();
    seen.cycles.resize(cycles, {.clear_ms = 12, .reinit_ms = 8, .whole_ms = 30});
    seen.cycles[3].clear_ms = 5100;
    seen.cycles[100].clear_ms = 8100;
    seen.back_ms = {1500};
    return failed(seen, cycles);
  };
  EXPECT_THAT(late(101), IsEmpty());
  EXPECT_THAT(late(2000), ElementsAre("clear, p50 / p99 / max", "clear, with a kill or stop",
                                      HasSubstr("memory back")));
}

TEST(JudgeTest, ALongLifesHeapMayNotGrowByABlockInEachCycle) {
  const auto failed_with = [](std::uint64_t per_cycle, std::uint64_t cycles) {
    Seen seen = good_run();
    seen.samples.clear();
    for (std::uint64_t at = 0; at <= cycles; at += 20) {
      Sample sample;
      sample.cycle = at;
      sample.processes[0] = {
          .life = 1, .private_bytes = 20U << 20U, .heap_bytes = (1U << 20U) + at * per_cycle};
      seen.samples.push_back(sample);
    }
    return failed(seen, 10'000);
  };
  const auto heap = testing::Contains("live heap, worker/0");
  EXPECT_THAT(failed_with(24, 2000), heap) << "the smallest block";
  EXPECT_THAT(failed_with(6, 2000), testing::Not(heap));
  EXPECT_THAT(failed_with(9, 9000), heap);
  EXPECT_THAT(failed_with(7, 9000), testing::Not(heap));
  // A life between two kills sees queues and caches fill.
  EXPECT_THAT(failed_with(60, 1500), testing::Not(heap));
  EXPECT_THAT(failed_with(120, 1500), heap);
}

}  // namespace
}  // namespace kvferry::soak
