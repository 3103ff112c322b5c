// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A mover that is stopped (SIGSTOP) while checksums of what it has stored are awaited of it: nobody
// waits for it for ever, nothing is found without checksums where all loads are checked, and all
// goes on once it does, or once another one has its place. All processes are real; this one is two
// engines of a model, one whose mover is stopped and one that shares what it has stored.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/transitions/fault_plan.hpp"
#include "multiproc/real_engine.hpp"
#include "support/prefix_hashes.hpp"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <cstdio>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::Digest;
using ipc::ErrorCode;
using ipc::GroupId;
using testing::Each;
using worker::Completion;

constexpr std::uint32_t kBlocks = 8;
/// So many that their checksums take a while.
constexpr std::uint32_t kMany = 512;
/// Device blocks where they are loaded.
constexpr std::uint32_t kElsewhere = kMany;
constexpr std::chrono::milliseconds kForEver = std::chrono::hours(1);

class SharingEngine : public test::RealEngine {
 public:
  SharingEngine(ipc::EventLoop& loop, std::string name, std::string runtime_dir)
      : RealEngine(loop,
                   {.name = std::move(name), .arena_blocks = kMany + kBlocks},
                   std::move(runtime_dir)),
        loop_(loop) {}

  /// Computes the prefix's blocks, and begins to store them.
  ipc::JobId store(std::uint64_t seed, std::uint32_t count) {
    EXPECT_EQ(step(true, seed, count, 0), 0U);
    const std::vector<Digest> hashes = test::prefix_hashes(seed, count);
    std::vector<worker::StoreTarget> targets;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      targets.push_back({GroupId{0}, hashes[i], i == 0 ? Digest{} : hashes[i - 1]});
    }
    const auto slots = client().reserve_store(targets, test::soon()).value();
    std::vector<worker::StoreItem> items;
    for (std::uint32_t i = 0; i < count; ++i) {
      EXPECT_EQ(slots.at(i).outcome, worker::Reservation::kReserved);
      items.push_back({GroupId{0}, BlockId{i}, slots.at(i).slot});
    }
    return client().submit_store(items).value();
  }
  Completion load(std::uint64_t seed) {
    std::vector<worker::LoadItem> items;
    for (const Digest& hash : test::prefix_hashes(seed, kBlocks)) {
      const auto block = kElsewhere + static_cast<std::uint32_t>(items.size());
      items.push_back({GroupId{0}, BlockId{block}, hash});
    }
    return await(client().submit_load(items, 1).value());
  }
  /// How many blocks of the prefix are found.
  std::uint32_t found(std::uint64_t seed, std::uint32_t count) {
    const auto match = client().match_prefix(test::prefix_hashes(seed, count));
    EXPECT_TRUE(match.has_value()) << match.error().to_string();
    return match ? match->usable : 0;
  }
  /// The prefix's first blocks come from host memory as they were computed.
  void expect_back(std::uint64_t seed) {
    ASSERT_TRUE(test::run_until(loop_, [&] { return found(seed, kBlocks) == kBlocks; }));
    const Completion done = load(seed);
    EXPECT_TRUE(done.all_ok()) << done.message;
    EXPECT_EQ(step(false, seed, kBlocks, kElsewhere), 0U);
  }
  void expect_nothing(std::uint64_t seed) {
    EXPECT_EQ(found(seed, kBlocks), 0U);
    EXPECT_THAT(load(seed).results, Each(static_cast<std::uint8_t>(ErrorCode::kNotFound)));
  }
  void expect_stored_and_back(std::uint64_t seed, std::uint32_t count) {
    const Completion done = await(store(seed, count));
    EXPECT_TRUE(done.all_ok()) << done.message;
    expect_back(seed);
  }
  [[nodiscard]] bool can_offload() {
    (void)client().poll(0);
    return client().state().manager_connected && client().state().offload_ready;
  }

 private:
  ipc::EventLoop& loop_;
};

class StoppedMoverTest : public testing::Test {
 protected:
  struct Limits {
    bool checks_all_loads = true;
    std::chrono::milliseconds jobs = kForEver;
    std::chrono::milliseconds late_sums = kForEver;
  };

  void start(const Limits& limits, std::string faults = {}) {
    start_manager(limits);
    faults_ = std::move(faults);
    for (SharingEngine* engine : {&stores_, &shares_}) {
      engine->start_worker(ranks(), device());
      engine->start_mover(ranks(), device());
      faults_.clear();
      ASSERT_NO_FATAL_FAILURE(engine->connect());
    }
  }
  void TearDown() override {
    if (HasFailure() && manager_) (void)std::fputs(manager_->stderr_text().c_str(), stderr);
    stores_.close();
    shares_.close();
  }
  void start_manager(const Limits& limits) {
    manager_.emplace(test::ChildOptions{
        .program = KVFERRY_MANAGER_CHILD,
        .arguments = {temp_.path().string(), std::to_string(limits.jobs.count()), "1024",
                      std::to_string(128ULL << 20U), limits.checks_all_loads ? "always" : "sampled",
                      std::to_string(limits.late_sums.count())}});
  }
  void kill_manager() {
    manager_->kill();
    ASSERT_TRUE(manager_->wait(test::soon()).has_value());
  }
  [[nodiscard]] std::string device() const {
    return fmt::format("host:{}:256MiB", temp_.path().filename().string());
  }
  test::RealEngine::Start ranks() {
    return [this](std::vector<std::string> arguments) {
      std::vector<std::string> environment = {"KVFERRY_RUNTIME_DIR=" + temp_.path().string()};
      if (arguments.front() == "mover") environment.push_back("KVFERRY_FAULTS=" + faults_);
      return test::ChildProcess({.program = KVFERRY_PROGRAM,
                                 .arguments = std::move(arguments),
                                 .environment = std::move(environment)});
    };
  }
  [[nodiscard]] nlohmann::json pool() {
    const auto json = shares_.client().status(test::soon());
    EXPECT_TRUE(json.has_value());
    return json ? nlohmann::json::parse(*json)["pool"] : nlohmann::json();
  }
  [[nodiscard]] bool run_until(const std::function<bool()>& done) {
    return test::run_until(loop_, done);
  }
  /// A store that has been answered, of whose checksums the mover had told none when it was
  /// stopped. @return its seed
  [[nodiscard]] std::uint64_t store_and_stop_before_sums() {
    for (std::uint64_t seed = 1; seed < 50; ++seed) {
      EXPECT_TRUE(stores_.await(stores_.store(seed, kMany)).all_ok());
      EXPECT_TRUE(stores_.mover().stop());
      (void)pool();  // what the mover sent has come before the next answer
      if (pool()["integrity"]["unsummed"] == kMany) return seed;
      stores_.mover().signal(SIGCONT);
      EXPECT_TRUE(run_until([this] { return pool()["integrity"]["unsummed"] == 0; }));
    }
    ADD_FAILURE() << "the mover was always faster";
    return 0;
  }
  /// The next manager, which checks all loads, has the pool, and the other engine.
  void replace_manager(std::chrono::milliseconds late_sums) {
    ASSERT_NO_FATAL_FAILURE(kill_manager());
    start_manager({.late_sums = late_sums});
    ASSERT_TRUE(run_until([this] { return shares_.can_offload(); }));
  }

  const test::ShortTempDir temp_;
  ipc::EventLoop loop_;
  std::string faults_;  ///< Of the next mover.
  std::optional<test::ChildProcess> manager_;
  SharingEngine stores_{loop_, "stores", temp_.path().string()};
  SharingEngine shares_{loop_, "shares", temp_.path().string()};
};

/// Stopped by itself, when the copies of its first store have ended and before their checksums are
/// computed, which the answer has to bring.
class StoppedBeforeSumsTest : public StoppedMoverTest {
 protected:
  void SetUp() override {
    if (!ipc::FaultPlan::is_supported()) GTEST_SKIP() << "this build has no fault points";
  }
  [[nodiscard]] ipc::JobId store_and_stop() {
    const ipc::JobId job = stores_.store(1, kBlocks);
    EXPECT_TRUE(run_until([this] { return stores_.mover().has_stopped(); }));
    return job;
  }
};

TEST_F(StoppedBeforeSumsTest, ItsStoreIsFoundOnceItGoesOnAndOthersGoOnMeanwhile) {
  ASSERT_NO_FATAL_FAILURE(start({}, "mover.answer=stop"));
  const ipc::JobId job = store_and_stop();
  for (SharingEngine* engine : {&stores_, &shares_}) engine->expect_nothing(1);
  shares_.expect_stored_and_back(2, kBlocks);
  EXPECT_FALSE(stores_.completion(job).has_value());
  stores_.mover().signal(SIGCONT);
  EXPECT_TRUE(stores_.await(job).all_ok());
  for (SharingEngine* engine : {&stores_, &shares_}) engine->expect_back(1);
  const nlohmann::json integrity = pool()["integrity"];
  EXPECT_EQ(integrity["checked"], 3 * kBlocks);
  EXPECT_EQ(integrity["unsummed"], 0);
  EXPECT_EQ(integrity["unchecked"], 0);
}

TEST_F(StoppedBeforeSumsTest, ItIsKilledWhenItsTimeIsOverAndTheNextOneStoresAnew) {
  ASSERT_NO_FATAL_FAILURE(start({.jobs = std::chrono::seconds(2)}, "mover.answer=stop"));
  const ipc::JobId job = store_and_stop();
  const Completion done = stores_.await(job);
  EXPECT_EQ(done.results.size(), kBlocks);
  EXPECT_THAT(done.results, Each(testing::Ne(0)));
  EXPECT_EQ(stores_.mover().wait(test::soon()), test::ChildExit::killed_by(SIGKILL));
  for (SharingEngine* engine : {&stores_, &shares_}) EXPECT_EQ(engine->found(1, kBlocks), 0U);
  stores_.start_mover(ranks(), device());
  ASSERT_TRUE(run_until([this] { return stores_.can_offload(); }));
  stores_.expect_stored_and_back(1, kBlocks);
  shares_.expect_back(1);
}

// Blocks are found at once where not all loads are checked; the next manager finds none that has no
// checksums, of which the mover has some to tell.
TEST_F(StoppedMoverTest, TheNextManagerFindsItsBlocksOnceItGoesOn) {
  ASSERT_NO_FATAL_FAILURE(start({.checks_all_loads = false}));
  const std::uint64_t seed = store_and_stop_before_sums();
  ASSERT_NO_FATAL_FAILURE(replace_manager(kForEver));
  ASSERT_TRUE(run_until([this] { return pool()["kept"]["awaited"] == kMany; }));
  shares_.expect_nothing(seed);
  shares_.expect_stored_and_back(seed + 1000, kBlocks);
  stores_.mover().signal(SIGCONT);
  shares_.expect_back(seed);
  EXPECT_EQ(shares_.found(seed, kMany), kMany);
  const nlohmann::json now = pool();
  EXPECT_EQ(now["kept"]["awaited"], 0);
  EXPECT_EQ(now["kept"]["unsummed"], 0);
  EXPECT_EQ(now["integrity"]["unchecked"], 0);
  EXPECT_EQ(now["integrity"]["corrupt"], 0);
  ASSERT_TRUE(run_until([this] { return stores_.can_offload(); }));
  stores_.expect_back(seed);
}

TEST_F(StoppedMoverTest, TheNextManagerDropsItsBlocksOnceItIsDead) {
  ASSERT_NO_FATAL_FAILURE(start({.checks_all_loads = false}));
  const std::uint64_t seed = store_and_stop_before_sums();
  ASSERT_NO_FATAL_FAILURE(replace_manager(kForEver));
  ASSERT_TRUE(run_until([this] { return pool()["kept"]["awaited"] == kMany; }));
  stores_.mover().kill();
  ASSERT_TRUE(run_until([this] { return pool()["kept"]["unsummed"] == kMany; }));
  EXPECT_EQ(pool()["kept"]["awaited"], 0);
  shares_.expect_nothing(seed);
  stores_.start_mover(ranks(), device());
  ASSERT_TRUE(run_until([this] { return stores_.can_offload(); }));
  stores_.expect_stored_and_back(seed, kMany);
  shares_.expect_back(seed);
}

TEST_F(StoppedMoverTest, TheNextManagerDropsItsBlocksAfterItsPatienceAndWhatItTellsThenIsNothing) {
  ASSERT_NO_FATAL_FAILURE(start({.checks_all_loads = false}));
  const std::uint64_t seed = store_and_stop_before_sums();
  ASSERT_NO_FATAL_FAILURE(replace_manager(std::chrono::milliseconds(1)));
  ASSERT_TRUE(run_until([this] { return pool()["kept"]["unsummed"] == kMany; }));
  shares_.expect_nothing(seed);
  stores_.mover().signal(SIGCONT);
  ASSERT_TRUE(run_until([this] { return stores_.can_offload(); }));
  for (SharingEngine* engine : {&stores_, &shares_}) engine->expect_nothing(seed);
  stores_.expect_stored_and_back(seed, kMany);
  shares_.expect_back(seed);
}

}  // namespace
}  // namespace kvferry
