// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A planner that has planned a job takes no memory for the next one of that size, however it cuts
// it.
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "mover/copy_plan.hpp"
#include "mover/running_job.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

std::atomic<std::uint64_t> allocations{0};

}  // namespace

// All of this program's memory comes through here.
void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }

namespace kvferry::cache_manager {
namespace {

struct Case {
  const char* name;
  const char* geometry;
  PlanLimits limits;
};

PlanLimits staged() {
  PlanLimits limits;
  limits.slot_bytes = 8ULL << 20;
  return limits;
}
PlanLimits strided() {
  PlanLimits limits;
  limits.strided = true;
  return limits;
}
PlanLimits kernel() {
  PlanLimits limits;
  limits.kernel = true;
  return limits;
}
PlanLimits layered() {
  PlanLimits limits = staged();
  limits.layered = true;
  return limits;
}

class PlanAllocationsTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr std::uint32_t kBlocks = 512;

  void SetUp() override {
    const auto geometry = ipc::load_geometry(GetParam().geometry, 1);
    ASSERT_TRUE(geometry.has_value()) << geometry.error().to_string();
    ipc::ArenaOptions options;
    options.gpu_blocks = kBlocks;
    const auto layout = ipc::plan_arena(*geometry, options);
    ASSERT_TRUE(layout.has_value()) << layout.error().to_string();
    layout_ = *layout;
  }
  /// Random blocks at random places of the pool.
  std::vector<ipc::MoverItem> job(const BlockParts& parts) {
    std::vector<std::uint32_t> blocks(kBlocks);
    std::vector<std::uint32_t> places(kBlocks);
    for (std::uint32_t i = 0; i < kBlocks; ++i) blocks[i] = places[i] = i;
    std::shuffle(blocks.begin(), blocks.end(), random_);
    std::shuffle(places.begin(), places.end(), random_);
    const ipc::GroupId group{0};
    const std::uint64_t bytes = parts.replicated_bytes(group) + parts.sharded_bytes(group);
    std::vector<ipc::MoverItem> items;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      const std::uint64_t place = places[i] * bytes;
      items.push_back(
          {group, ipc::BlockId{blocks[i]}, place, place + parts.replicated_bytes(group), true});
    }
    return items;
  }

  std::mt19937_64 random_{9};
  ipc::ArenaLayout layout_;
};

TEST_P(PlanAllocationsTest, WarmPlannersTakeNoMemory) {
  const BlockParts parts(layout_);
  const std::vector<ipc::MoverItem> items = job(parts);
  const std::vector<std::uint8_t> results(items.size(), 0);
  CopyPlanner planner;
  PlannedChunk chunk;
  std::uint64_t bytes = 0;
  const auto plan = [&] {
    planner.start(parts, items, results, GetParam().limits);
    bytes = 0;
    while (planner.has_next()) {
      planner.plan_next(chunk);
      bytes += chunk.size_bytes;
    }
  };
  plan();
  ASSERT_EQ(bytes, kBlocks * (parts.replicated_bytes(ipc::GroupId{0}) +
                              parts.sharded_bytes(ipc::GroupId{0})));
  const std::uint64_t before = allocations.load();
  plan();
  EXPECT_EQ(allocations.load() - before, 0U);
  // For the table in docs/performance.md: a time is no test.
  std::vector<double> ns_of_a_block(101);
  for (double& ns : ns_of_a_block) {
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    plan();
    ns = std::chrono::duration<double, std::nano>(ipc::MonotonicClock::now() - start).count() /
         kBlocks;
  }
  std::nth_element(ns_of_a_block.begin(), ns_of_a_block.begin() + 50, ns_of_a_block.end());
  std::printf("%s: %.0f ns a block\n", GetParam().name, ns_of_a_block[50]);
  // It counts: this test can fail.
  const std::uint64_t then = allocations.load();
  const std::vector<int> counted(100);
  EXPECT_EQ(allocations.load() - then, 1U) << counted.size();
}

// As a lane runs them, one after another.
TEST_P(PlanAllocationsTest, AJobInTheMemoryOfAnotherTakesNoneToBePlanned) {
  const BlockParts parts(layout_);
  const std::vector<ipc::MoverItem> items = job(parts);
  const ipc::GroupId group{0};
  const std::uint64_t bytes =
      kBlocks * (parts.replicated_bytes(group) + parts.sharded_bytes(group));
  const auto device = ipc::open_device(
      *ipc::DeviceSpec::parse(fmt::format("host:plan-allocations-{}:1GiB", ::getpid())));
  auto arena =
      ipc::Arena::allocate(*device, ipc::Epoch{3}, layout_, ipc::HandleKind::kVmm, nullptr);
  ASSERT_TRUE(arena.has_value()) << arena.error().to_string();
  const auto mapped = std::make_shared<MappedArena>(*arena);
  auto fd = ipc::SharedMemory::create_pool("plan-allocations", bytes, false);
  ASSERT_TRUE(fd.has_value());
  const auto pool = ipc::PoolMapping::map(*device, std::move(fd).value(), bytes).value();
  const PlanLimits& limits = GetParam().limits;
  PlanMemory memory;
  for (std::uint64_t round = 0; round < 3; ++round) {
    LaneJob next{{}, mapped, pool, ipc::MonotonicClock::now()};
    next.job.job = ipc::JobId{round};
    next.job.items = items;
    next.strategy = limits.slot_bytes > 0 ? CopyStrategy::kStaged
                    : limits.kernel       ? CopyStrategy::kKernel
                    : limits.strided      ? CopyStrategy::kStrided
                                          : CopyStrategy::kBatch;
    if (limits.layered) next.job.layers.emplace();
    const std::uint64_t before = allocations.load();
    RunningJob running(std::move(next), std::move(memory));
    while (running.has_next()) running.end(running.start_next(8ULL << 20));
    const std::uint64_t taken = allocations.load() - before;
    if (round == 0) {
      EXPECT_GT(taken, 1U) << "it counts";
    } else {
      EXPECT_EQ(taken, 1U) << "what is answered of each block";
    }
    memory = running.take_memory();
    EXPECT_EQ(running.take_result().bytes, bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Ways,
                         PlanAllocationsTest,
                         testing::Values(Case{"Staged", "tiny", staged()},
                                         Case{"StagedWithReplicated", "tiny-mla", staged()},
                                         Case{"Strided", "tiny", strided()},
                                         Case{"Batch", "tiny-fp8", PlanLimits{}},
                                         Case{"Kernel", "tiny-mla", kernel()},
                                         Case{"Layered", "tiny", layered()}),
                         [](const auto& instance) { return std::string(instance.param.name); });

}  // namespace
}  // namespace kvferry::cache_manager
