// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Random jobs by every strategy, and a device that fails somewhere in them: who is told what, which
// bytes are right, and what the engine can do afterwards.
#include "cache_manager/faulty_engine_fixture.hpp"
#include "cache_manager/serving_agent.hpp"
#include "mover/copy_depth.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using ipc::ErrorCode;
using test::DeviceCall;
using test::DeviceFault;
using test::FaultKind;
using testing::Each;
using testing::HasSubstr;

constexpr std::uint32_t kBlocksEachWay = 80;

struct Way {
  const char* name;
  CopyStrategy strategy;
  ipc::ArenaOrder order;
};

class CopyFaultsTest : public FaultyEngineFixture, public testing::WithParamInterface<Way> {
 protected:
  static constexpr std::uint32_t kBlocksOfSlot = 4;

  struct RandomJob {
    CopyDirection direction = CopyDirection::kDeviceToHost;
    std::vector<Move> moves;
    ipc::MoverJob job;
  };

  void adjust(TransferEngine::Options& options) override { options.strategy = GetParam().strategy; }
  void adjust_arena(ipc::ArenaOptions& options) override {
    options.order = GetParam().order;
    options.gpu_blocks = 2 * kBlocksEachWay;
    options.staging_slot_bytes = kBlocksOfSlot * kBlockBytes;
  }
  void SetUp() override {
    FaultyEngineFixture::SetUp();
    agent_device_.emplace(ipc::open_device(spec_), agent_plan_);
    agent_.emplace(*listener_, *arena_, *agent_device_);
  }
  void TearDown() override {
    FaultyEngineFixture::TearDown();
    agent_.reset();
  }
  void device_failed(const ipc::Error& error) override {
    const std::lock_guard lock(mutex_);
    device_failures_.push_back(error);
    answered_.notify_all();
  }

  static bool is_staged() { return GetParam().strategy == CopyStrategy::kStaged; }
  static bool is_agent() { return GetParam().strategy == CopyStrategy::kAgent; }
  static bool is_kernel() { return GetParam().strategy == CopyStrategy::kKernel; }
  static DeviceCall copy_call(CopyDirection direction) {
    if (is_kernel() || is_agent()) {
      return direction == CopyDirection::kDeviceToHost ? DeviceCall::kGather : DeviceCall::kScatter;
    }
    return GetParam().strategy == CopyStrategy::kStrided ? DeviceCall::kCopyRows
                                                         : DeviceCall::kCopy;
  }

  std::uint64_t pick(std::uint64_t from, std::uint64_t to) {
    return std::uniform_int_distribution<std::uint64_t>(from, to)(random_);
  }
  std::vector<std::uint32_t> shuffled(std::uint32_t from, std::uint32_t count) {
    std::vector<std::uint32_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), from);
    std::shuffle(numbers.begin(), numbers.end(), random_);
    return numbers;
  }
  /// Jobs that have nothing in common, of all blocks of that way, and what they are to move.
  std::vector<RandomJob> make_jobs(CopyDirection direction) {
    const bool stores = direction == CopyDirection::kDeviceToHost;
    const auto blocks = shuffled(stores ? 0 : kBlocksEachWay, kBlocksEachWay);
    const auto places = shuffled(stores ? 0 : kPlaces / 2, kPlaces / 2);
    std::vector<RandomJob> jobs;
    for (std::size_t next = 0; next < blocks.size();) {
      const std::size_t end = std::min<std::size_t>(blocks.size(), next + pick(1, kBlocksEachWay));
      RandomJob& made = jobs.emplace_back();
      made.direction = direction;
      for (; next < end; ++next) {
        made.moves.push_back({blocks[next], places[next]});
        put_source(direction, made.moves.back(), contents(seed(made.moves.back())));
      }
      // Of what is fetched ahead every eighth turn would be of another size.
      made.job = job(++last_id_, direction, made.moves);
      made.job.urgency.priority = ipc::Urgency::kOrdinary;
    }
    return jobs;
  }
  [[nodiscard]] std::uint64_t seed(const Move& move) const { return round_ * 1000 + move.block; }

  /// As the engine cuts it.
  std::vector<std::vector<std::size_t>> chunks_of(const ipc::MoverJob& job) const {
    const BlockParts parts(arena_->layout());
    PlanLimits limits;
    limits.pool_piece_bytes = ipc::PoolMapping::kPieceBytes;
    limits.slot_bytes = is_staged() ? arena_->layout().staging.slot_bytes : 0;
    limits.strided = GetParam().strategy == CopyStrategy::kStrided;
    limits.kernel = is_kernel() || is_agent();
    const std::vector<std::uint8_t> results(job.items.size(), 0);
    CopyPlanner planner;
    planner.start(parts, job.items, results, limits);
    const CopyDepth depth(job.direction, {});  // all are of one urgency
    planner.set_chunk_bytes(depth.call_bytes({GetParam().strategy}, ipc::MonotonicClock::now()));
    std::vector<std::vector<std::size_t>> chunks;
    PlannedChunk chunk;
    while (planner.has_next()) {
      planner.plan_next(chunk);
      chunks.push_back(chunk.items);
    }
    return chunks;
  }

  /// What is marked as moved was moved.
  void check_bytes(const RandomJob& job, const ipc::MoverJobDone& done) {
    ASSERT_EQ(done.results.size(), job.moves.size());
    for (std::size_t i = 0; i < job.moves.size(); ++i) {
      if (done.results[i] != 0) continue;
      ASSERT_TRUE(target(job.direction, job.moves[i]) == contents(seed(job.moves[i])))
          << "item " << i << " of job " << job.job.job.value;
    }
  }
  /// Each chunk has failed as a whole, or not at all; gives those that have.
  std::vector<std::vector<std::size_t>> failed_chunks(const RandomJob& job,
                                                      const ipc::MoverJobDone& done,
                                                      const std::string& text) {
    std::vector<std::vector<std::size_t>> failed;
    for (const std::vector<std::size_t>& chunk : chunks_of(job.job)) {
      const std::uint8_t result = done.results[chunk.front()];
      for (const std::size_t item : chunk) EXPECT_EQ(done.results[item], result);
      if (result == 0) continue;
      EXPECT_EQ(result, static_cast<std::uint8_t>(ErrorCode::kCuda));
      failed.push_back(chunk);
    }
    if (failed.empty()) {
      EXPECT_EQ(done.message, "");
    } else {
      EXPECT_THAT(done.message, HasSubstr(text));
    }
    return failed;
  }
  /// Whether the failed call was about a block of the chunk.
  bool was_about(const RandomJob& job, const std::vector<std::size_t>& chunk) {
    const auto* base = static_cast<const std::byte*>(pool_->pinned(0, 1).value());
    const auto offset =
        static_cast<std::uint64_t>(static_cast<const std::byte*>(plan_.where()) - base);
    return std::any_of(chunk.begin(), chunk.end(), [&](std::size_t item) {
      return job.moves[item].place == offset / kBlockBytes;
    });
  }

  /// Jobs go on only when every slot of their lane is in use, again and again, whatever failed
  /// before: an idle lane begins with a whole ring, so that it would not miss a slot.
  void use_all_slots(const std::vector<RandomJob>& jobs) {
    if (!is_staged()) return;
    std::array<std::size_t, 2> chunks{};
    for (const RandomJob& job : jobs) {
      chunks.at(job.direction == CopyDirection::kHostToDevice ? 1 : 0) += chunks_of(job.job).size();
    }
    for (std::uint32_t lane = 0; lane < chunks.size(); ++lane) {
      // All but the one that fails are asked for.
      agent_->want_batches(lane, kSlotsOfLane, (chunks.at(lane) - 1) / kSlotsOfLane);
    }
  }
  /// A job of as many chunks as there are slots, all of them with the worker at once.
  void check_that_all_serves(CopyDirection direction) {
    ++round_;
    const bool stores = direction == CopyDirection::kDeviceToHost;
    RandomJob all;
    all.direction = direction;
    for (std::uint32_t i = 0; i < kSlotsOfLane * kBlocksOfSlot; ++i) {
      all.moves.push_back({i + (stores ? 0 : kBlocksEachWay), i + (stores ? 0 : kPlaces / 2)});
      put_source(direction, all.moves.back(), contents(seed(all.moves.back())));
    }
    if (is_staged()) agent_->want_batches(stores ? 0 : 1, kSlotsOfLane, 1);
    const std::uint64_t id = ++last_id_;
    engine_->submit(job(id, direction, all.moves));
    const ipc::MoverJobDone done = wait_answer(id);
    ASSERT_THAT(done.results, Each(0)) << done.message;
    check_bytes(all, done);
  }

  std::mt19937_64 random_{20'260'101};
  std::uint64_t round_ = 0;
  std::uint64_t last_id_ = 0;
  std::vector<ipc::Error> device_failures_;  ///< Guarded by mutex_.
  test::FaultPlan agent_plan_;               ///< Of the worker, whose device is the same.
  std::optional<test::FaultyDevice> agent_device_;
  std::optional<ServingAgent> agent_;
};

TEST_P(CopyFaultsTest, OneFailedCallFailsOneChunkAndNothingElse) {
  constexpr std::uint64_t kRounds = 6;
  std::vector<DeviceCall> calls{copy_call(CopyDirection::kDeviceToHost),
                                copy_call(CopyDirection::kHostToDevice), DeviceCall::kRegisterHost};
  if (is_staged()) calls.insert(calls.end(), {DeviceCall::kGather, DeviceCall::kScatter});
  // A straight copy of which no notice comes is waited for by itself.
  if (!is_staged() && !is_agent()) calls.push_back(DeviceCall::kNotify);
  for (std::uint64_t round = 0; round < kRounds && !HasFailure(); ++round) {
    ++round_;
    std::vector<RandomJob> jobs = make_jobs(CopyDirection::kDeviceToHost);
    for (RandomJob& job : make_jobs(CopyDirection::kHostToDevice)) jobs.push_back(std::move(job));
    renew_pool();
    DeviceFault fault;
    fault.call = calls[round % calls.size()];
    fault.number = fault.call == DeviceCall::kRegisterHost ? 1 : pick(1, 4);
    fault.kind = pick(0, 1) == 0 ? FaultKind::kOnce : FaultKind::kHalfDone;
    fault.text = fmt::format("fault of round {}", round);
    const bool is_pack = fault.call == DeviceCall::kGather || fault.call == DeviceCall::kScatter;
    const bool is_workers = is_agent() || (is_staged() && is_pack);
    test::FaultPlan& plan = is_workers ? agent_plan_ : plan_;
    plan.fail(fault);
    use_all_slots(jobs);
    for (const RandomJob& job : jobs) engine_->submit(job.job);
    std::size_t failed = 0;
    for (const RandomJob& job : jobs) {
      const ipc::MoverJobDone done = wait_answer(job.job.job.value);
      ASSERT_NO_FATAL_FAILURE(check_bytes(job, done));
      const auto chunks = failed_chunks(job, done, fault.text);
      failed += chunks.size();
      std::size_t failed_items = 0;
      for (const auto& chunk : chunks) {
        failed_items += chunk.size();
        if (fault.call == DeviceCall::kCopy || fault.call == DeviceCall::kCopyRows ||
            (is_kernel() && is_pack)) {
          EXPECT_TRUE(was_about(job, chunk)) << "another chunk failed";
        }
      }
      EXPECT_EQ(done.bytes, (job.moves.size() - failed_items) * kBlockBytes);
    }
    EXPECT_EQ(failed, plan.fired() ? 1U : 0U) << "call " << static_cast<int>(fault.call);
    EXPECT_TRUE(plan.fired() || fault.call == DeviceCall::kNotify);
    for (const auto way : {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
      ASSERT_NO_FATAL_FAILURE(check_that_all_serves(way));
    }
  }
}

// The end of what went out cannot be seen from then on but by asking: the lane gives up what the
// worker was asked for. The other lane does not notice.
TEST_P(CopyFaultsTest, NoticeThatFailsEndsTheJobsOfOneLaneAndTheEngineServesOn) {
  constexpr std::uint64_t kRounds = 6;
  for (std::uint64_t round = 0; round < kRounds && !HasFailure(); ++round) {
    ++round_;
    std::vector<RandomJob> jobs = make_jobs(CopyDirection::kDeviceToHost);
    for (RandomJob& job : make_jobs(CopyDirection::kHostToDevice)) jobs.push_back(std::move(job));
    DeviceFault fault;
    fault.call = DeviceCall::kNotify;
    fault.number = pick(1, 3);
    fault.text = fmt::format("fault of round {}", round);
    plan_.fail(fault);
    for (const RandomJob& job : jobs) engine_->submit(job.job);
    bool stores_failed = false;
    bool loads_failed = false;
    for (const RandomJob& job : jobs) {
      const ipc::MoverJobDone done = wait_answer(job.job.job.value);
      ASSERT_NO_FATAL_FAILURE(check_bytes(job, done));
      if (failed_chunks(job, done, fault.text).empty()) continue;
      (job.direction == CopyDirection::kDeviceToHost ? stores_failed : loads_failed) = true;
    }
    EXPECT_FALSE(stores_failed && loads_failed);
    EXPECT_EQ(stores_failed || loads_failed, plan_.fired());
    for (const auto way : {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
      ASSERT_NO_FATAL_FAILURE(check_that_all_serves(way));
    }
  }
}

/// Of chunks whose ends are marked: of loads that go through the ring alone.
class MarkFaultsTest : public CopyFaultsTest {};

// As a notice that fails, but for one chunk's end: what was enqueued with it must be awaited.
TEST_P(MarkFaultsTest, MarkThatFailsFailsItsJobAndTheEngineServesOn) {
  constexpr std::uint64_t kRounds = 4;
  for (std::uint64_t round = 0; round < kRounds && !HasFailure(); ++round) {
    ++round_;
    std::vector<RandomJob> jobs = make_jobs(CopyDirection::kHostToDevice);
    DeviceFault fault;
    fault.call = DeviceCall::kWriteWord;
    fault.number = 1 + round;
    fault.text = fmt::format("fault of round {}", round);
    plan_.fail(fault);
    std::size_t failed = 0;
    for (const RandomJob& job : jobs) {
      // Alone, so that its chunks are marked.
      engine_->submit(job.job);
      const ipc::MoverJobDone done = wait_answer(job.job.job.value);
      ASSERT_NO_FATAL_FAILURE(check_bytes(job, done));
      failed += failed_chunks(job, done, fault.text).empty() ? 0U : 1U;
    }
    EXPECT_TRUE(plan_.fired());
    EXPECT_EQ(failed, 1U);
    for (const auto way : {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
      ASSERT_NO_FATAL_FAILURE(check_that_all_serves(way));
    }
  }
}

class BrokenDeviceTest : public CopyFaultsTest {
 protected:
  void break_in(CopyDirection direction, DeviceCall call, std::uint64_t number) {
    SCOPED_TRACE(fmt::format("call {} number {}", static_cast<int>(call), number));
    ++round_;
    const std::vector<RandomJob> jobs = make_jobs(direction);
    DeviceFault fault;
    fault.call = call;
    fault.number = number;
    fault.kind = FaultKind::kBreaks;
    fault.text = "uncorrectable memory error";
    plan_.fail(fault);
    for (const RandomJob& job : jobs) engine_->submit(job.job);
    ASSERT_TRUE(wait_device_failed());
    EXPECT_FALSE(engine_->idle());
    // At once, however long it might: nothing will show any more that the copies have ended.
    const ipc::Status drained = engine_->quiesce(ipc::Epoch{1}, test::soon());
    ASSERT_FALSE(drained.has_value());
    EXPECT_EQ(drained.error().code, ErrorCode::kCuda);
    EXPECT_THAT(drained.error().message, HasSubstr(fault.text));
    engine_.reset();
    std::size_t unanswered = 0;
    for (const RandomJob& job : jobs) {
      const std::uint64_t id = job.job.job.value;
      if (!is_answered(id)) {
        ++unanswered;
        continue;
      }
      const ipc::MoverJobDone done = wait_answer(id);
      ASSERT_NO_FATAL_FAILURE(check_bytes(job, done));
      // It was over before, or never began; or what was left of it never will.
      for (const std::uint8_t result : done.results) {
        EXPECT_TRUE(result == 0 || result == static_cast<std::uint8_t>(ErrorCode::kRevoked) ||
                    result == static_cast<std::uint8_t>(ErrorCode::kCuda));
      }
    }
    EXPECT_GE(unanswered, 1U) << "its blocks would be given on under the copy";
    const std::lock_guard lock(mutex_);
    ASSERT_EQ(device_failures_.size(), 1U);
    EXPECT_EQ(device_failures_[0].code, ErrorCode::kCuda);
    EXPECT_EQ(device_failures_[0].message, fault.text);
  }
  bool wait_device_failed() {
    std::unique_lock lock(mutex_);
    return answered_.wait_until(lock, test::soon().when(),
                                [this] { return !device_failures_.empty(); });
  }
};

TEST_P(BrokenDeviceTest, StoresUnderWayStayUnansweredWhenACopyBreaksIt) {
  break_in(CopyDirection::kDeviceToHost, copy_call(CopyDirection::kDeviceToHost), pick(1, 2));
}
TEST_P(BrokenDeviceTest, LoadsUnderWayStayUnansweredWhenACopyBreaksIt) {
  break_in(CopyDirection::kHostToDevice, copy_call(CopyDirection::kHostToDevice), pick(1, 2));
}
TEST_P(BrokenDeviceTest, StoresUnderWayStayUnansweredWhenALookFindsItBroken) {
  break_in(CopyDirection::kDeviceToHost, DeviceCall::kQuery, 1);
}
TEST_P(BrokenDeviceTest, LoadsUnderWayStayUnansweredWhenALookFindsItBroken) {
  break_in(CopyDirection::kHostToDevice, DeviceCall::kQuery, 1);
}
TEST_P(BrokenDeviceTest, StoresUnderWayStayUnansweredWhenANoticeFindsItBroken) {
  break_in(CopyDirection::kDeviceToHost, DeviceCall::kNotify, 1);
}
TEST_P(BrokenDeviceTest, LoadsUnderWayStayUnansweredWhenANoticeFindsItBroken) {
  break_in(CopyDirection::kHostToDevice, DeviceCall::kNotify, 1);
}
TEST_P(BrokenDeviceTest, LoadsUnderWayStayUnansweredWhenThePoolCannotBeRegisteredAnyMore) {
  break_in(CopyDirection::kHostToDevice, DeviceCall::kRegisterHost, 1);
}

const auto kWays =
    testing::Values(Way{"Staged", CopyStrategy::kStaged, ipc::ArenaOrder::kLayerFirst},
                    Way{"Strided", CopyStrategy::kStrided, ipc::ArenaOrder::kLayerFirst},
                    Way{"Batch", CopyStrategy::kBatch, ipc::ArenaOrder::kLayerFirst},
                    Way{"Memcpy", CopyStrategy::kMemcpy, ipc::ArenaOrder::kLayerFirstMany},
                    Way{"Kernel", CopyStrategy::kKernel, ipc::ArenaOrder::kLayerFirst},
                    Way{"Direct", CopyStrategy::kDirect, ipc::ArenaOrder::kBlockFirst});
std::string name_of(const testing::TestParamInfo<Way>& instance) { return instance.param.name; }

INSTANTIATE_TEST_SUITE_P(Ways, CopyFaultsTest, kWays, name_of);
INSTANTIATE_TEST_SUITE_P(Ways,
                         MarkFaultsTest,
                         testing::Values(Way{"Staged", CopyStrategy::kStaged,
                                             ipc::ArenaOrder::kLayerFirst}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(OfTheWorker,
                         CopyFaultsTest,
                         testing::Values(Way{"Agent", CopyStrategy::kAgent,
                                             ipc::ArenaOrder::kLayerFirst}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Ways, BrokenDeviceTest, kWays, name_of);

}  // namespace
}  // namespace kvferry::cache_manager
