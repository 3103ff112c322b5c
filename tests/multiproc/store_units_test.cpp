// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Prefixes in store units of several device blocks, the last one partial: what is stored comes back
// word for word, to other blocks, after the manager was killed, and to the engine that continues
// the prefix. All processes are real; this one is the engine. On a GPU, too.
#include "kvferry/worker/store_units.hpp"

#include "ipc/os/temp_dir.hpp"
#include "multiproc/real_engine.hpp"
#include "support/manager_status.hpp"
#include "support/prefix_hashes.hpp"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <map>
#include <optional>
#include <utility>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::Digest;
using ipc::ErrorCode;
using ipc::GroupId;

constexpr std::uint32_t kUnit = 4;
constexpr std::uint64_t kSeed = 500;
constexpr std::uint32_t kElsewhere = 64;  ///< Device blocks where it is loaded.

bool is_on_gpu() { return std::string(KVFERRY_TEST_DEVICE) != "host"; }

class StoreUnitsTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (is_on_gpu() && ipc::cuda_device_count() == 0) {
      if (ipc::environment("KVFERRY_REQUIRE_GPU") == "1") {
        FAIL() << "KVFERRY_REQUIRE_GPU=1, but no CUDA device is usable here";
      }
      GTEST_SKIP() << "no CUDA device";
    }
    start_manager();
    const std::string device =
        is_on_gpu() ? std::string(KVFERRY_TEST_DEVICE)
                    : fmt::format("host:{}:256MiB", temp_.path().filename().string());
    engine_.start([this](std::vector<std::string> arguments) { return run(arguments); }, device);
    ASSERT_NO_FATAL_FAILURE(engine_.connect());
  }
  void TearDown() override {
    if (HasFailure() && manager_) std::fputs(manager_->stderr_text().c_str(), stderr);
    engine_.close();
  }
  void start_manager() {
    manager_.emplace(run({"manager", "--host-memory=64MiB", "--verify-loads=always"}));
  }
  test::ChildProcess run(std::vector<std::string> arguments) {
    // On another machine than that of the build it lies elsewhere.
    const std::string program = ipc::environment("KVFERRY_PROGRAM");
    return test::ChildProcess({.program = program.empty() ? KVFERRY_PROGRAM : program,
                               .arguments = std::move(arguments),
                               .environment = {"KVFERRY_RUNTIME_DIR=" + temp_.path().string()}});
  }
  /// Blocks [from, hashes.size()) of the prefix, which device blocks of those numbers hold.
  void store(const std::vector<Digest>& hashes, std::size_t from = 0) {
    const auto job = begin_store(hashes, from);
    ASSERT_TRUE(job.has_value());
    const auto done = engine_.await(*job);
    EXPECT_TRUE(done.all_ok()) << done.message;
  }
  /// The same of the units that are not there yet; nothing: all are.
  std::optional<ipc::JobId> begin_store(const std::vector<Digest>& hashes, std::size_t from = 0) {
    const std::vector<Digest> keys = units_.keys(hashes);
    std::vector<worker::StoreTarget> targets;
    std::map<std::pair<std::uint32_t, std::size_t>, std::size_t> places;  // by group and unit
    for (std::uint32_t group = 0; group < engine_.groups(); ++group) {
      for (std::size_t i = from / kUnit * kUnit; i < hashes.size(); ++i) {
        if (!is_needed(group, i, hashes.size())) continue;
        const std::size_t unit = i / kUnit;
        if (places.emplace(std::pair{group, unit}, targets.size()).second) {
          targets.push_back({GroupId{group}, keys[unit], unit == 0 ? Digest{} : keys[unit - 1]});
        }
        targets.back().parts |= std::uint64_t{1} << units_.part_of(hashes, i).part;
      }
    }
    const auto slots = engine_.client().reserve_store(targets, test::soon());
    EXPECT_TRUE(slots.has_value()) << slots.error().to_string();
    if (!slots) return std::nullopt;
    std::vector<worker::StoreItem> items;
    for (std::uint32_t group = 0; group < engine_.groups(); ++group) {
      for (std::size_t i = from / kUnit * kUnit; i < hashes.size(); ++i) {
        if (!is_needed(group, i, hashes.size())) continue;
        const std::size_t target = places.at({group, i / kUnit});
        EXPECT_NE(slots->at(target).outcome, worker::Reservation::kFull);
        if (slots->at(target).outcome != worker::Reservation::kReserved) continue;
        items.push_back({GroupId{group}, BlockId{static_cast<std::uint32_t>(i)},
                         slots->at(target).slot, units_.part_of(hashes, i).part});
      }
    }
    if (items.empty()) return std::nullopt;
    return engine_.client().submit_store(items).value();
  }
  worker::Completion load(std::span<const Digest> hashes) {
    std::vector<worker::LoadItem> items;
    for (std::uint32_t group = 0; group < engine_.groups(); ++group) {
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        if (!is_needed(group, i, hashes.size())) continue;
        const worker::UnitPart part = units_.part_of(hashes, i);
        items.push_back({GroupId{group}, BlockId{kElsewhere + static_cast<std::uint32_t>(i)},
                         part.key, part.part});
      }
    }
    return engine_.await(engine_.client().submit_load(items, 1).value());
  }
  [[nodiscard]] std::uint32_t usable(std::span<const Digest> hashes) {
    const auto found = engine_.client().match_in_units(hashes);
    EXPECT_TRUE(found.has_value()) << found.error().to_string();
    return found.value_or(0);
  }
  /// The first blocks of the prefix are in host memory as they were written.
  void expect_back(const std::vector<Digest>& hashes, std::uint32_t blocks) {
    ASSERT_EQ(usable(hashes), blocks);
    const worker::Completion done = load(std::span(hashes).first(blocks));
    EXPECT_TRUE(done.all_ok()) << done.message;
    const auto wanted = [&](std::uint32_t group, std::uint32_t block) {
      return is_needed(group, block, blocks);
    };
    EXPECT_EQ(engine_.step(false, kSeed, blocks, kElsewhere, wanted), 0U);
  }
  /// By a prefix that ends there: of a recurrent group the last state alone.
  [[nodiscard]] bool is_needed(std::uint32_t group, std::size_t block, std::size_t end) const {
    return geometry_.groups.at(group).rule != ipc::HitRule::kLastState || block + 1 == end;
  }
  [[nodiscard]] bool has_states() const {
    return std::any_of(
        geometry_.groups.begin(), geometry_.groups.end(),
        [](const ipc::GroupSpec& group) { return group.rule == ipc::HitRule::kLastState; });
  }
  /// Entries of the index that a prefix has which was stored alone.
  [[nodiscard]] std::size_t units_of(std::size_t blocks) const {
    std::size_t units = 0;
    for (const ipc::GroupSpec& group : geometry_.groups) {
      units += group.rule == ipc::HitRule::kLastState ? 1 : (blocks + kUnit - 1) / kUnit;
    }
    return units;
  }
  [[nodiscard]] nlohmann::json status() {
    const auto json = engine_.client().status(test::soon());
    EXPECT_TRUE(json.has_value());
    return json ? nlohmann::json::parse(*json) : nlohmann::json();
  }

  const test::ShortTempDir temp_;
  ipc::EventLoop loop_;
  const ipc::Geometry geometry_ = ipc::load_geometry(GetParam(), 1).value();
  std::optional<test::ChildProcess> manager_;
  const worker::StoreUnits units_{kUnit};
  test::RealEngine engine_{
      loop_, {.geometry = GetParam(), .unit_blocks = kUnit}, temp_.path().string()};
};

TEST_P(StoreUnitsTest, WhatWasStoredInUnitsComesBackAndIsOneEntryOfTheIndexForEach) {
  const std::vector<Digest> hashes = test::prefix_hashes(0, 10);
  EXPECT_EQ(engine_.step(true, kSeed, 10, 0), 0U);
  ASSERT_NO_FATAL_FAILURE(store(hashes));
  expect_back(hashes, 10);
  EXPECT_EQ(status()["index"]["blocks"], units_of(10));
}

TEST_P(StoreUnitsTest, APrefixThatGoesOnFindsThePartialUnitAndThenStoresTheWholeOne) {
  const std::vector<Digest> first = test::prefix_hashes(0, 10);
  const std::vector<Digest> second = test::prefix_hashes(0, 15);  // the first one, continued
  EXPECT_EQ(engine_.step(true, kSeed, 15, 0), 0U);
  ASSERT_NO_FATAL_FAILURE(store(first));
  expect_back(second, 10);
  // What ends before has its whole units; and no state, where groups have some.
  EXPECT_EQ(usable(std::span(second).first(9)), has_states() ? 0U : 8U);
  ASSERT_NO_FATAL_FAILURE(store(second, 8));
  expect_back(second, 15);
  expect_back(first, 10);
  EXPECT_EQ(usable(std::span(second).first(12)), has_states() ? 10U : 12U);
  EXPECT_EQ(usable(test::prefix_hashes(1, 15)), 0U);
}

TEST_P(StoreUnitsTest, AKilledManagersUnitsAreServedByTheNextAndCheckedPartByPart) {
  const std::vector<Digest> hashes = test::prefix_hashes(0, 10);
  EXPECT_EQ(engine_.step(true, kSeed, 10, 0), 0U);
  ASSERT_NO_FATAL_FAILURE(store(hashes));
  const auto summed = [&] { return status()["pool"]["integrity"]["summed"]; };
  ASSERT_TRUE(test::run_until(loop_, [&] { return summed() == units_of(10); }));
  manager_->signal(SIGKILL);
  ASSERT_TRUE(manager_->wait(test::soon()).has_value());
  start_manager();
  ASSERT_TRUE(test::run_until(loop_, [&] {
    (void)engine_.client().poll(0);
    return engine_.client().state().offload_ready && engine_.client().state().manager_connected &&
           engine_.client().match_in_units(hashes).value_or(0) == 10;
  }));
  expect_back(hashes, 10);
  const nlohmann::json pool = status()["pool"];
  EXPECT_EQ(pool["kept"]["adopted"], units_of(10));
  EXPECT_GE(pool["integrity"]["checked"], 10);
  EXPECT_EQ(pool["integrity"]["corrupt"], 0);
}

// How much of the store had come when the clear began is open; what is found is there as a whole.
TEST_P(StoreUnitsTest, AClearUnderAStoreLeavesWholeUnitsOrNoneAndTheRestCanBeStored) {
  constexpr std::uint32_t kBlocks = 15;
  const std::vector<Digest> hashes = test::prefix_hashes(0, kBlocks);
  for (const bool waits : {true, false}) {
    EXPECT_EQ(engine_.step(true, kSeed, kBlocks, 0), 0U);
    ASSERT_NO_FATAL_FAILURE(store(std::vector(hashes.begin(), hashes.begin() + 6)));
    const auto job = begin_store(hashes);
    ASSERT_TRUE(job.has_value());
    if (waits) (void)engine_.await(*job);
    const auto cleared = engine_.client().clear(worker::HostPolicy::kKeep, test::soon());
    ASSERT_TRUE(cleared.has_value()) << cleared.error().to_string();
    (void)engine_.await(*job);
    const auto back = engine_.client().reinit(0, test::soon());
    ASSERT_TRUE(back.has_value()) << back.error().to_string();
    ASSERT_TRUE(engine_.client().wait_ready(true, test::soon()));
    const std::uint32_t found = usable(hashes);
    EXPECT_GE(found, 6U) << "what was stored before the clear";
    if (waits) {
      EXPECT_EQ(found, kBlocks);
    }
    expect_back(hashes, found);
    EXPECT_EQ(engine_.step(true, kSeed, kBlocks, 0), 0U);
    if (const auto rest = begin_store(hashes)) {
      const auto done = engine_.await(*rest);
      EXPECT_TRUE(done.all_ok()) << done.message;
    }
    expect_back(hashes, kBlocks);
    ASSERT_TRUE(engine_.client().clear(worker::HostPolicy::kDrop, test::soon()));
    ASSERT_TRUE(engine_.client().reinit(0, test::soon()));
    ASSERT_TRUE(engine_.client().wait_ready(true, test::soon()));
    EXPECT_EQ(usable(hashes), 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Geometries,
    StoreUnitsTest,
    testing::Values("tiny", "tiny-fp8", "tiny-draft", "tiny-window", "tiny-state"),
    [](const auto& instance) {
      std::string name = instance.param;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

}  // namespace
}  // namespace kvferry
