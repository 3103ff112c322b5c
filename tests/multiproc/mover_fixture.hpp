// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/shared_memory.hpp"
#include "multiproc/worker_fixture.hpp"

#include <gtest/gtest.h>

#include <optional>

namespace kvferry::test {

/// A real worker and a real mover that stages over it; the test is their manager.
class MoverFixture : public WorkerFixture {
 protected:
  void SetUp() override {
    pool_.bytes = 1 << 20;
    auto fd = ipc::SharedMemory::create_pool("kvferry-mover-test", pool_.bytes, true);
    ASSERT_TRUE(fd.has_value()) << fd.error().to_string();
    pool_fd_ = std::move(fd).value();
    pool_.fd = pool_fd_.get();
    start_all();
    mover_.emplace(ChildOptions{
        .program = sibling_program("kvferry_mover_child"),
        .arguments = {temp_.path().string(), device_text_, "worker", "vmm", "staged"}});
    ASSERT_NO_FATAL_FAILURE(wait_mover());
  }
  void wait_mover() {
    std::unique_lock lock(shared_.mutex);
    ASSERT_TRUE(shared_.changed.wait_until(lock, soon().when(), [this] {
      return shared_.mover_state && shared_.mover_state->mapped;
    })) << mover_->stderr_text();
  }
  /// Block 1 of the main group to the pool or back: the item's result.
  [[nodiscard]] std::uint8_t copy(ipc::CopyDirection direction) {
    ipc::MoverJob message;
    message.job = ipc::JobId{++job_};
    message.session = arena_.session;
    message.epoch = arena_.epoch;
    message.direction = direction;
    message.items.push_back({ipc::GroupId{0}, ipc::BlockId{1}, 0, kReplicatedBytes, true});
    tell(ipc::ProcessKind::kMover, ipc::MessageKind::kMoverJob, message);
    std::unique_lock lock(shared_.mutex);
    const bool answered = shared_.changed.wait_until(lock, soon().when(), [this] {
      return !shared_.answers.empty() && shared_.answers.back().job.value == job_;
    });
    EXPECT_TRUE(answered && shared_.answers.back().results.size() == 1) << mover_->stderr_text();
    return answered ? shared_.answers.back().results.at(0) : UINT8_MAX;
  }
  void store() { EXPECT_EQ(copy(ipc::CopyDirection::kDeviceToHost), 0); }
  void load() { EXPECT_EQ(copy(ipc::CopyDirection::kHostToDevice), 0); }
  void fill(std::uint64_t seed) {
    ipc::Step step = make_step();
    step.fills = seeded(1, 1, seed);
    run_ok(step);
  }
  /// Words of block 1 that are not what fill() wrote.
  [[nodiscard]] std::vector<std::uint64_t> verify(std::uint64_t seed) {
    ipc::Step step = make_step();
    step.verifies = seeded(1, 1, seed);
    return run_ok(step).mismatches;
  }

  static constexpr std::uint64_t kReplicatedBytes = 1024;
  ipc::UniqueFd pool_fd_;
  std::optional<ChildProcess> mover_;
  std::uint64_t job_ = 0;
};

}  // namespace kvferry::test
