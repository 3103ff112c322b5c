// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "staging_agent.hpp"
#include "support/faulty_device.hpp"
#include "worker/host_device.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::worker {

/// A staging agent of this process over a device that does what a plan says, and a mover that is
/// the test.
class AgentFixture : public ::testing::Test {
 protected:
  using Deadline = ipc::Deadline;
  using IncarnationId = ipc::IncarnationId;
  using PacketSocket = ipc::PacketSocket;
  using RegionSet = ipc::RegionSet;
  using StageKind = ipc::StageKind;
  using StageReply = ipc::StageReply;
  using StageRequest = ipc::StageRequest;
  using Status = ipc::Status;
  static constexpr std::uint64_t kPoolBytes = 4ULL << 20;
  static constexpr ipc::Duration kSoon = std::chrono::seconds(20);

  void SetUp() override {
    config_.engine = "chat";
    config_.geometry = ipc::load_geometry("tiny", 1).value();
    config_.arena.gpu_blocks = 8;
    config_.arena.staging_slots = 2;
    config_.arena.staging_slot_bytes = 1 << 20;
    const auto layout = ipc::plan_arena(config_.geometry, config_.arena).value();
    memory_.emplace(
        ipc::Arena::allocate(device_, ipc::Epoch{1}, layout, ipc::HandleKind::kVmm, nullptr)
            .value());
    ASSERT_TRUE(arena_.on_mapped(session_, *memory_, ipc::ArenaContents::kPrepared).has_value());
    agent_ = std::make_unique<StagingAgent>(
        loop_, dir_, config_, device_, arena_, layers_, activity_, budget_, ipc::TransitionLog{},
        [this](const ipc::Error& error) { failures_.push_back(error); });
    pool_ = ipc::SharedMemory::create_pool("kvferry-test-pool", kPoolBytes, false).value();
  }
  void TearDown() override { agent_.reset(); }

  bool run_until(const std::function<bool()>& condition) {
    const Deadline deadline = Deadline::after(kSoon);
    while (!condition() && !deadline.expired()) {
      loop_.run_once(deadline.earlier(Deadline::after(std::chrono::milliseconds(20))));
    }
    return condition();
  }
  /// What comes next: a reply, or that the connection has ended.
  ipc::Result<StageReply> receive() {
    std::optional<ipc::Result<StageReply>> reply;
    EXPECT_TRUE(run_until([&] {
      if (reply) return true;
      auto packet = mover_.try_receive();
      if (!packet) {
        reply = packet.error();
      } else if (packet->has_value()) {
        reply = ipc::decode<StageReply>((**packet).bytes, "StageReply");
      }
      return reply.has_value();
    }));
    return reply.value_or(KVFERRY_ERROR(kTimeout, "nothing came"));
  }
  /// The answer to a hello.
  Status connect() {
    mover_ =
        PacketSocket::connect(dir_.rank_socket("chat", 0, "agent"), Deadline::after(kSoon)).value();
    ipc::AgentHello hello;
    hello.mover = id_;
    hello.engine = "chat";
    KVFERRY_TRY(mover_.send(ipc::encode(hello)));
    KVFERRY_ASSIGN(const StageReply reply, receive());
    EXPECT_EQ(reply.id, 0U);
    if (reply.error) return *reply.error;
    return ipc::ok();
  }
  void lend() {
    StageRequest request;
    request.id = ++last_id_;
    request.kind = StageKind::kPool;
    request.pool_bytes = kPoolBytes;
    const int fd = pool_.get();
    ASSERT_TRUE(mover_.send(ipc::encode(request), {&fd, 1}).has_value());
  }
  void ask(StageKind kind, bool is_ahead = false) {
    StageRequest request;
    request.id = ++last_id_;
    request.session = session_;
    request.epoch = ipc::Epoch{1};
    request.kind = kind;
    request.blocks = {1, 2};
    request.is_ahead = is_ahead;
    const bool straight = kind == StageKind::kStore || kind == StageKind::kLoad;
    if (straight) request.parts = {{RegionSet::kSharded, 0, 2, 4096}};
    ASSERT_TRUE(mover_.send(ipc::encode(request)).has_value());
  }

  const test::ShortTempDir temp_;
  const ipc::RuntimeDir dir_ = ipc::RuntimeDir::open(temp_.path().string(), "default").value();
  ipc::RankConfig config_;
  CopyBudget budget_;  ///< Before SetUp().
  test::FaultPlan plan_;
  test::FaultyDevice device_{test::open_host_device(64ULL << 20), plan_};
  ipc::EventLoop loop_;
  const ipc::SessionId session_ = ipc::SessionId::random();
  std::optional<ipc::Arena> memory_;
  WorkerArena arena_{device_, ipc::Rank{0}};
  LayerWords layers_{device_};
  const ipc::ComputeActivity activity_;
  std::vector<ipc::Error> failures_;
  ipc::UniqueFd pool_;
  std::unique_ptr<StagingAgent> agent_;
  PacketSocket mover_;
  const IncarnationId id_ = IncarnationId::random();
  std::uint64_t last_id_ = 0;
};

}  // namespace kvferry::worker
