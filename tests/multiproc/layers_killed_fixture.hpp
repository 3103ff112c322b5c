// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "multiproc/layers_fixture.hpp"
#include "support/descriptors.hpp"
#include "support/instance_checks.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry {

/// The mover stands between two layers of the first load that a test asks for.
class LayersKilledTest : public LayersTest {
 protected:
  using Transition = ipc::Transition;
  static constexpr std::uint32_t kCount = 8;
  /// An answer that does not wait for any deadline but a death's news is there by then.
  static constexpr std::chrono::seconds kPromptly{5};

  /// What holds it there.
  [[nodiscard]] virtual std::string hold() const { return "delay:600000"; }
  void SetUp() override {
    if (!ipc::FaultPlan::is_supported()) GTEST_SKIP() << "this build has no fault points";
    LayersTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    dir_ = ipc::RuntimeDir::open(temp_.path().string(), "default").value();
    store_by_layers(0, kSeed, {30, 1}, 1);
    const std::size_t asked = count(*mover_, Transition::kMoverAsk);
    expect_done(submit_load(20, kCount, LayerTicket{31, 1}));
    hand_overs_ = count(*mover_, Transition::kMoverAsk) - asked;
    ASSERT_GE(hand_overs_, 2U) << "a load of so few blocks goes as a whole";
    descriptors_ = descriptors();
    // The next one stops to work when all layers but the last ones are loaded.
    ASSERT_NO_FATAL_FAILURE(end(*mover_));
    ASSERT_TRUE(sees_offload(false));
    start_mover(fmt::format("mover.ask#{}={}", hand_overs_, hold()));
    ASSERT_TRUE(sees_offload(true));
  }

  /// Who stands where is in the trace.
  void TearDown() override {
    if (HasFailure() && dir_) {
      if (const auto trace = ipc::read_transitions(*dir_)) {
        constexpr std::size_t kShown = 200;
        const std::size_t count = trace->records.size();
        for (std::size_t i = count - std::min(count, kShown); i < count; ++i) {
          fmt::print(stderr, "{} {}\n", trace->records[i].time.count(),
                     ipc::describe(*trace, trace->records[i]));
        }
      }
    }
    dir_.reset();
    LayersTest::TearDown();
  }

  void store_by_layers(std::uint32_t first,
                       std::uint64_t seed,
                       const LayerTicket& ticket,
                       std::uint8_t prompt) {
    ipc::Step fill = step();
    fill.fills = seeded(first, kCount, seed);
    fill.computes = ticket;
    const auto filled = send(fill);
    expect_done(submit_store(first, kCount, ticket, prompt));
    expect_clean(filled);
  }
  static void end(test::ChildProcess& process) {
    process.signal(SIGTERM);
    ASSERT_EQ(process.wait(test::soon()), test::ChildExit::exited(0)) << process.stderr_text();
  }
  /// How often it has taken that transition.
  std::size_t count(const test::ChildProcess& process, Transition transition) const {
    const auto trace = ipc::read_transitions(*dir_);
    if (!trace) return 0;
    return static_cast<std::size_t>(
        std::count_if(trace->records.begin(), trace->records.end(), [&](const auto& record) {
          return record.transition == transition &&
                 trace->writers[record.writer].who.pid == process.pid();
        }));
  }
  /// The worker's, but for eventfds: it keeps as many as it has ever waited for at a time.
  test::DescriptorKinds descriptors() const {
    auto kinds = test::descriptor_kinds(worker_->pid());
    kinds.erase("[eventfd]");
    return kinds;
  }
  /// The mover stands between the layers of its load.
  bool is_held(std::size_t answered_before) const {
    return count(*mover_, Transition::kStruck) == 1 &&
           count(*worker_, Transition::kStagingAnswer) == answered_before + hand_overs_ - 1;
  }
  /// Kills it; all that it had to do fails soon.
  void kill_mover(const std::vector<ipc::JobId>& jobs, const std::shared_ptr<Answer>& step) {
    const ipc::TimePoint killed = ipc::MonotonicClock::now();
    mover_->kill();
    for (const ipc::JobId job : jobs) expect_job_failed(job, ErrorCode::kPeerDied);
    if (step != nullptr) expect_failed(step, ErrorCode::kPeerDied);
    EXPECT_LT(ipc::MonotonicClock::now() - killed, kPromptly);
    ASSERT_TRUE(sees_offload(false));
    start_mover();
    ASSERT_TRUE(sees_offload(true));
  }
  /// Blocks are as they were seeded.
  void verify(std::uint32_t first, std::uint64_t seed) {
    ipc::Step verify = step();
    verify.verifies = seeded(first, kCount, seed);
    expect_clean(send(verify));
  }
  /// Neither with those who live on, nor when all have ended.
  void expect_nothing_left() {
    EXPECT_TRUE(run_until([&] { return descriptors() == descriptors_; }))
        << testing::PrintToString(descriptors()) << " are open, before it were "
        << testing::PrintToString(descriptors_);
    loop_.unwatch(client_->fd());
    channel_.reset();
    client_.reset();
    for (auto* process : {&*mover_, &*worker_, &*manager_}) ASSERT_NO_FATAL_FAILURE(end(*process));
    if (!is_cuda()) {
      const auto used = ipc::host_device_used_bytes(temp_.path().filename().string());
      EXPECT_EQ(used.value_or(0), 0U) << "device memory was leaked";
    }
    EXPECT_THAT(test::find_breaches(*dir_), testing::IsEmpty());
    dir_.reset();
    EXPECT_THAT(test::names_below(temp_.path()), testing::IsEmpty());
  }

  std::optional<ipc::RuntimeDir> dir_;  ///< Of the instance, which this process keeps with it.
  std::size_t hand_overs_ = 0;          ///< That a load has.
  test::DescriptorKinds descriptors_;   ///< With a mover that has loaded and stored by layers.
};

}  // namespace kvferry
