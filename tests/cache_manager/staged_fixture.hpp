// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/ipc/rank/compute_activity.hpp"
#include "mover/transfer_engine.hpp"
#include "support/child_process.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#ifndef KVFERRY_TEST_DEVICE
#define KVFERRY_TEST_DEVICE "host"
#endif

namespace kvferry::cache_manager {

/// A simulated device of this process's own, unless the binary is built for another one.
inline ipc::DeviceSpec staged_device() {
  const std::string device = KVFERRY_TEST_DEVICE;
  return ipc::DeviceSpec::parse(device == "host"
                                    ? "host:staged-loss-" + std::to_string(::getpid()) + ":256MiB"
                                    : device)
      .value();
}

/// A transfer engine with one mapped arena, whose worker's agent is the test: a scripted one on the
/// real socket.
class StagedFixture : public testing::Test {
 protected:
  static constexpr std::uint32_t kSlotsOfLane = 3;
  static constexpr std::uint64_t kSlotBytes = 256ULL << 10;  // One block.
  static constexpr std::uint64_t kPoolBytes = 64ULL << 20;

  void SetUp() override {
    if (spec_.kind == ipc::DeviceKind::kCuda && ipc::cuda_device_count() == 0) {
      if (ipc::environment("KVFERRY_REQUIRE_GPU") == "1") {
        FAIL() << "KVFERRY_REQUIRE_GPU=1, but no CUDA device is usable here";
      }
      GTEST_SKIP() << "no CUDA device";
    }
    device_ = wrap(ipc::open_device(spec_));
    auto geometry = ipc::load_geometry("llama-3-8b", 8);
    ASSERT_TRUE(geometry.has_value()) << geometry.error().to_string();
    ipc::ArenaOptions options;
    options.gpu_blocks = 8;
    options.staging_slots = 2 * kSlotsOfLane;
    options.staging_slot_bytes = kSlotBytes;
    adjust_arena(options);
    const auto layout = ipc::plan_arena(*geometry, options);
    ASSERT_TRUE(layout.has_value()) << layout.error().to_string();
    auto arena =
        ipc::Arena::allocate(*device_, ipc::Epoch{1}, *layout, ipc::HandleKind::kVmm, nullptr);
    ASSERT_TRUE(arena.has_value()) << arena.error().to_string();
    arena_.emplace(std::move(arena).value());
    auto listener = ipc::PacketListener::listen(dir_ / "agent");
    ASSERT_TRUE(listener.has_value()) << listener.error().to_string();
    listener_.emplace(std::move(listener).value());
    TransferEngine::Options engine;
    engine.strategy = CopyStrategy::kStaged;
    engine.staging.agent_path = dir_ / "agent";
    engine.staging.engine = "chat";
    engine.staging.mover = ipc::IncarnationId::random();
    adjust(engine);
    engine_ = std::make_unique<TransferEngine>(
        *device_, engine, [this](ipc::MoverJobDone done) { answer(std::move(done)); },
        [this](const ipc::Error& error) { device_failed(error); });
    auto fd = ipc::SharedMemory::create_pool("kvferry-test-pool", kPoolBytes, false);
    ASSERT_TRUE(fd.has_value());
    auto pool = ipc::PoolMapping::map(*device_, std::move(fd).value(), kPoolBytes);
    ASSERT_TRUE(pool.has_value());
    engine_->set_pool(std::move(pool).value());
    ASSERT_TRUE(engine_->on_mapped(session_, *arena_, ipc::ArenaContents::kUndefined).has_value());
  }
  void TearDown() override {
    if (engine_ == nullptr) return;
    (void)engine_->quiesce(ipc::Epoch{1}, test::soon());
    engine_->on_unmapped(ipc::Epoch{1});
    engine_.reset();
  }

  /// Before the engine is made.
  virtual void adjust(TransferEngine::Options& /*options*/) {}
  /// Before the arena is made.
  virtual void adjust_arena(ipc::ArenaOptions& /*options*/) {}
  /// The device that the engine works with.
  virtual std::unique_ptr<ipc::Device> wrap(std::unique_ptr<ipc::Device> device) { return device; }
  virtual void device_failed(const ipc::Error& error) { ADD_FAILURE() << error.to_string(); }

  /// Of a lane of the test's own, for loads, with the same worker.
  [[nodiscard]] TransferLane::Options load_lane() const {
    TransferLane::Options options;
    options.direction = ipc::CopyDirection::kHostToDevice;
    options.lane = 1;
    options.staging.agent_path = dir_ / "agent";
    options.staging.engine = "chat";
    options.staging.mover = ipc::IncarnationId::random();
    options.staging.lane = 1;
    return options;
  }

  void answer(ipc::MoverJobDone done) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t job = done.job.value;
    EXPECT_TRUE(done_.emplace(job, std::move(done)).second) << "answered twice";
    answered_.notify_all();
  }
  bool is_answered(std::uint64_t job = 1) {
    const std::lock_guard lock(mutex_);
    return done_.contains(job);
  }
  ipc::MoverJobDone wait_answer(std::uint64_t job = 1) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(answered_.wait_until(lock, test::soon().when(),
                                     [this, job] { return done_.contains(job); }));
    return done_[job];
  }

  void forget_answer(std::uint64_t job) {
    const std::lock_guard lock(mutex_);
    done_.erase(job);
  }

  /// The mover's next connection, with its hello read and not yet answered.
  ipc::PacketSocket next_hello() {
    const ipc::Deadline deadline = test::soon();
    while (!deadline.expired()) {
      pollfd waited{listener_->fd(), POLLIN, 0};
      if (::poll(&waited, 1, deadline.poll_timeout_ms()) != 1) break;
      auto accepted = listener_->try_accept();
      if (!accepted || !accepted->has_value()) continue;
      const auto packet = (**accepted).receive(deadline);
      if (!packet) continue;  // it gave up on a hello that nobody answered
      EXPECT_TRUE(ipc::decode<ipc::AgentHello>(packet->bytes, "AgentHello").has_value());
      return std::move(**accepted);
    }
    ADD_FAILURE() << "the mover did not connect";
    return {};
  }
  static void greet(ipc::PacketSocket& socket) {
    static const ipc::ComputeActivity activity;  // which never tells anything
    const int fd = activity.fd().get();
    ASSERT_TRUE(socket.send(ipc::encode(ipc::StageReply{}), {&fd, 1}).has_value());
  }
  static ipc::StageRequest next_request(ipc::PacketSocket& socket) {
    const auto packet = socket.receive(test::soon());
    EXPECT_TRUE(packet.has_value());
    if (!packet) return {};
    auto request = ipc::decode<ipc::StageRequest>(packet->bytes, "StageRequest");
    EXPECT_TRUE(request.has_value());
    return request.value_or(ipc::StageRequest{});
  }
  static void reply(ipc::PacketSocket& socket, const ipc::StageRequest& request) {
    ASSERT_TRUE(socket.send(ipc::encode(ipc::StageReply{request.id, std::nullopt})).has_value());
  }
  /// Of blocks that each fill a good part of a slot: so many chunks.
  void submit(std::uint64_t id,
              ipc::CopyDirection direction,
              std::uint32_t chunks = 1,
              std::uint8_t priority = 0) {
    ipc::MoverJob job;
    job.job = ipc::JobId{id};
    job.session = session_;
    job.epoch = ipc::Epoch{1};
    job.direction = direction;
    job.urgency.priority = priority;
    for (std::uint32_t i = 0; i < chunks; ++i) {
      const std::uint64_t place = (id * 8 + i) * kSlotBytes;
      job.items.push_back({ipc::GroupId{0}, ipc::BlockId{i}, place, place, true});
    }
    engine_->submit(std::move(job));
  }
  void submit_load(std::uint64_t id = 1) { submit(id, ipc::CopyDirection::kHostToDevice); }

  test::ShortTempDir dir_;
  const ipc::DeviceSpec spec_ = staged_device();
  std::unique_ptr<ipc::Device> device_;
  std::optional<ipc::Arena> arena_;
  const ipc::SessionId session_ = ipc::SessionId::random();
  std::optional<ipc::PacketListener> listener_;
  std::mutex mutex_;  // guards done_
  std::condition_variable answered_;
  std::map<std::uint64_t, ipc::MoverJobDone> done_;
  std::unique_ptr<TransferEngine> engine_;
};

}  // namespace kvferry::cache_manager
