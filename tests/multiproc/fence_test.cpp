// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What a real worker computes and what a real mover copies, in their order, by every strategy: the
// test is engine and manager, holds one side where it stands, and compares the bytes.
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "multiproc/worker_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <thread>

namespace kvferry {
namespace {

using ipc::CopyDirection;
using ipc::LayerTicket;
using ipc::Transition;
using test::soon;
using testing::Each;

constexpr std::uint64_t kReplicatedBytes = 1024;
constexpr std::uint64_t kLayerBytes = 2 * 4096;  ///< Of a block's shard: K and V.
constexpr std::uint32_t kComputed = 1;           ///< The block that is stored,
constexpr std::uint32_t kLoaded = 2;             ///< and the one that is loaded.
constexpr std::uint64_t kSeed = 900;

class FenceTest : public test::WorkerFixture, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    pool_.bytes = 1 << 20;
    auto fd = ipc::SharedMemory::create_pool("kvferry-fence-test", pool_.bytes, true);
    ASSERT_TRUE(fd.has_value()) << fd.error().to_string();
    pool_fd_ = std::move(fd).value();
    pool_.fd = pool_fd_.get();
    auto view = ipc::SharedMemory::map_pool(pool_fd_, pool_.bytes);
    ASSERT_TRUE(view.has_value()) << view.error().to_string();
    view_ = std::move(view).value();
    worker_program_ = "kvferry_gated_worker_child";
    start_all();
    mover_.emplace(test::ChildOptions{
        .program = test::sibling_program("kvferry_mover_child"),
        .arguments = {temp_.path().string(), device_text_, "worker", "vmm", GetParam()}});
    std::unique_lock lock(shared_.mutex);
    ASSERT_TRUE(shared_.changed.wait_until(lock, soon().when(), [this] {
      return shared_.mover_state && shared_.mover_state->mapped;
    })) << mover_->stderr_text();
  }
  void TearDown() override {
    WorkerFixture::TearDown();
    if (!worker_) return;
    worker_->write_line("open");
    worker_->write_line("open compute");
  }

  static bool is_staged() { return std::string(GetParam()) == "staged"; }
  /// Whether the worker's kernels move jobs that do not go layer by layer.
  static bool is_workers() { return is_staged() || std::string(GetParam()) == "agent"; }

  std::uint64_t submit(CopyDirection direction,
                       std::uint32_t block,
                       std::optional<LayerTicket> layers = std::nullopt) {
    ipc::MoverJob message;
    message.job = ipc::JobId{++job_};
    message.session = arena_.session;
    message.epoch = arena_.epoch;
    message.direction = direction;
    message.layers = layers;
    message.items.push_back({ipc::GroupId{0}, ipc::BlockId{block}, 0, kReplicatedBytes, true});
    tell(ipc::ProcessKind::kMover, ipc::MessageKind::kMoverJob, message);
    return job_;
  }
  [[nodiscard]] const ipc::MoverJobDone* find(std::uint64_t job) const {
    const auto found =
        std::find_if(shared_.answers.begin(), shared_.answers.end(),
                     [job](const ipc::MoverJobDone& done) { return done.job.value == job; });
    return found == shared_.answers.end() ? nullptr : &*found;
  }
  bool is_answered(std::uint64_t job) {
    const std::lock_guard lock(shared_.mutex);
    return find(job) != nullptr;
  }
  void expect_done(std::uint64_t job) {
    std::unique_lock lock(shared_.mutex);
    ASSERT_TRUE(shared_.changed.wait_until(lock, soon().when(), [&] { return find(job); }))
        << mover_->stderr_text();
    EXPECT_THAT(find(job)->results, Each(0)) << find(job)->message;
  }

  /// The worker computes the step while the test goes on, which sends no other meanwhile.
  std::future<ipc::Result<ipc::StepReply>> begin(const ipc::Step& step) {
    return std::async(std::launch::async, [this, step] { return run(step); });
  }
  static bool is_over(const std::future<ipc::Result<ipc::StepReply>>& step) {
    return step.wait_for(ipc::Duration::zero()) == std::future_status::ready;
  }
  static void expect_clean(std::future<ipc::Result<ipc::StepReply>>& step) {
    const auto reply = step.get();
    ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
    EXPECT_THAT(reply->mismatches, Each(0U));
  }
  [[nodiscard]] ipc::Step filling(std::uint32_t block, std::uint64_t seed) const {
    ipc::Step step = make_step();
    step.fills = seeded(block, 1, seed);
    return step;
  }
  [[nodiscard]] ipc::Step verifying(std::uint32_t block) const {
    ipc::Step step = make_step();
    step.verifies = seeded(block, 1, kSeed);
    return step;
  }
  void expect_whole(std::uint32_t block) {
    EXPECT_THAT(run_ok(verifying(block)).mismatches, Each(0U));
  }
  void tell_worker(const std::string& command, const std::string& answer) {
    worker_->write_line(command);
    wait_worker_says(answer);
  }
  void wait_worker_says(const std::string& line) {
    ASSERT_TRUE(worker_->wait_line(line, soon())) << worker_->stderr_text();
  }

  [[nodiscard]] std::ptrdiff_t count(Transition transition) const {
    const auto trace = ipc::read_transitions(dir_);
    if (!trace) return 0;
    return std::count_if(
        trace->records.begin(), trace->records.end(),
        [transition](const auto& record) { return record.transition == transition; });
  }
  /// Looks until it has been recorded so often.
  [[nodiscard]] bool wait_count(Transition transition, std::ptrdiff_t at_least) const {
    const ipc::Deadline deadline = soon();
    while (count(transition) < at_least && !deadline.expired()) std::this_thread::yield();
    return count(transition) >= at_least;
  }
  /// Of the place of a layer's shard; layer 0 has the replicated part, too.
  [[nodiscard]] bool is_untouched(std::uint32_t layer) const {
    const auto* begin = view_.data() + kReplicatedBytes + layer * kLayerBytes;
    return std::all_of(begin, begin + kLayerBytes,
                       [](auto byte) { return static_cast<unsigned>(byte) == 0; });
  }
  /// What lies in the host's place is what was computed.
  void expect_stored() {
    run_ok(filling(kLoaded, 1));
    ASSERT_NO_FATAL_FAILURE(expect_done(submit(CopyDirection::kHostToDevice, kLoaded)));
    expect_whole(kLoaded);
  }

  ipc::UniqueFd pool_fd_;
  ipc::SharedMapping view_;
  std::optional<test::ChildProcess> mover_;
  std::uint64_t job_ = 0;
};

TEST_P(FenceTest, StoreOfComputeThatIsHeldTakesEachLayerWhenItIsComputed) {
  constexpr LayerTicket kTicket{5, 1};
  run_ok(filling(kComputed, 1));  // what an early store would take
  ASSERT_NO_FATAL_FAILURE(tell_worker("hold compute", "holding compute"));
  ipc::Step computes = filling(kComputed, kSeed);
  computes.computes = kTicket;
  auto step = begin(computes);
  ASSERT_NO_FATAL_FAILURE(wait_worker_says("compute held"));
  const std::uint64_t store = submit(CopyDirection::kDeviceToHost, kComputed, kTicket);
  ASSERT_TRUE(wait_count(Transition::kStagingLaunch, 1)) << "the store was not asked for";
  EXPECT_TRUE(is_untouched(0));
  EXPECT_EQ(count(Transition::kMoverCopying), 0);

  worker_->write_line("pass compute");
  ASSERT_NO_FATAL_FAILURE(wait_worker_says("compute held"));
  ASSERT_TRUE(wait_count(Transition::kMoverCopied, 1)) << "its first layer is computed";
  EXPECT_FALSE(is_untouched(0));
  EXPECT_TRUE(is_untouched(1));
  EXPECT_FALSE(is_over(step));
  EXPECT_FALSE(is_answered(store));

  worker_->write_line("open compute");
  ASSERT_NO_FATAL_FAILURE(expect_done(store));
  ASSERT_NO_FATAL_FAILURE(expect_clean(step));
  expect_stored();
}

// The answer to the step is what a store that does not go layer by layer waits for.
TEST_P(FenceTest, StepIsAnsweredOnlyAfterItsComputeAndItsStoreIsWhole) {
  run_ok(filling(kComputed, 1));
  ASSERT_NO_FATAL_FAILURE(tell_worker("hold compute", "holding compute"));
  auto step = begin(filling(kComputed, kSeed));
  ASSERT_NO_FATAL_FAILURE(wait_worker_says("compute held"));
  // Of another block: nothing but that answer says that the first one's is not computed.
  ASSERT_NO_FATAL_FAILURE(expect_done(submit(CopyDirection::kDeviceToHost, kLoaded)));
  EXPECT_FALSE(is_over(step));
  worker_->write_line("open compute");
  ASSERT_NO_FATAL_FAILURE(expect_clean(step));
  ASSERT_NO_FATAL_FAILURE(expect_done(submit(CopyDirection::kDeviceToHost, kComputed)));
  expect_stored();
}

TEST_P(FenceTest, ComputeBehindALoadByLayersReadsNoLayerBeforeItIsThere) {
  constexpr LayerTicket kTicket{6, 1};
  run_ok(filling(kComputed, kSeed));
  ASSERT_NO_FATAL_FAILURE(expect_done(submit(CopyDirection::kDeviceToHost, kComputed)));
  run_ok(filling(kLoaded, 1));
  if (is_staged()) {
    ASSERT_NO_FATAL_FAILURE(tell_worker("hold", "holding"));
  }
  ipc::Step waits = verifying(kLoaded);
  waits.awaits = kTicket;
  auto step = begin(waits);
  const std::uint64_t load = submit(CopyDirection::kHostToDevice, kLoaded, kTicket);
  if (is_staged()) {
    ASSERT_NO_FATAL_FAILURE(wait_worker_says("held"));
    EXPECT_FALSE(is_over(step)) << "its layers are not scattered";
    EXPECT_FALSE(is_answered(load));
    worker_->write_line("open");
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean(step));
  ASSERT_NO_FATAL_FAILURE(expect_done(load));
}

TEST_P(FenceTest, JobsAreAnsweredOnlyAfterTheWorkersKernels) {
  if (!is_workers()) GTEST_SKIP() << "the worker's kernels have no part in it";
  run_ok(filling(kComputed, kSeed));
  ASSERT_NO_FATAL_FAILURE(tell_worker("hold", "holding"));
  const std::uint64_t store = submit(CopyDirection::kDeviceToHost, kComputed);
  ASSERT_NO_FATAL_FAILURE(wait_worker_says("held"));
  EXPECT_FALSE(is_answered(store));
  EXPECT_TRUE(is_untouched(0));
  worker_->write_line("open");
  ASSERT_NO_FATAL_FAILURE(expect_done(store));
  run_ok(filling(kLoaded, 1));
  ASSERT_NO_FATAL_FAILURE(tell_worker("hold", "holding"));
  const std::uint64_t load = submit(CopyDirection::kHostToDevice, kLoaded);
  ASSERT_NO_FATAL_FAILURE(wait_worker_says("held"));
  EXPECT_FALSE(is_answered(load));
  worker_->write_line("open");
  ASSERT_NO_FATAL_FAILURE(expect_done(load));
  expect_whole(kLoaded);
}

INSTANTIATE_TEST_SUITE_P(Strategies,
                         FenceTest,
                         testing::Values("staged", "kernel", "agent", "batch"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace kvferry
