// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A mover whose worker is lost with a scatter under way: the job ends only when that scatter cannot
// write any more. The agent here is a scripted one on the real socket.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "mover/transfer_engine.hpp"
#include "support/child_process.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <optional>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;
using ipc::PacketSocket;
using test::soon;

constexpr std::uint64_t kPoolBytes = 32ULL << 20;

class StagedLossTest : public testing::Test {
 protected:
  void SetUp() override {
    device_ = ipc::open_device(
        ipc::DeviceSpec::parse("host:staged-loss-" + std::to_string(::getpid()) + ":64MiB")
            .value());
    auto geometry = ipc::load_geometry("llama-3-8b", 8);
    ASSERT_TRUE(geometry.has_value()) << geometry.error().to_string();
    ipc::ArenaOptions options;
    options.gpu_blocks = 8;
    options.staging_slots = 2;
    options.staging_slot_bytes = 2ULL << 20;
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
    engine_ = std::make_unique<TransferEngine>(
        *device_, engine, [this](ipc::MoverJobDone done) { answer(std::move(done)); },
        [](const ipc::Error& error) { ADD_FAILURE() << error.to_string(); });
    auto fd = ipc::SharedMemory::create_pool("kvferry-test-pool", kPoolBytes, false);
    ASSERT_TRUE(fd.has_value());
    auto pool = PoolMapping::map(*device_, std::move(fd).value(), kPoolBytes);
    ASSERT_TRUE(pool.has_value());
    engine_->set_pool(std::move(pool).value());
    ASSERT_TRUE(engine_->on_mapped(session_, *arena_, ipc::ArenaContents::kUndefined).has_value());
  }
  void TearDown() override {
    (void)engine_->quiesce(ipc::Epoch{1}, soon());
    engine_->on_unmapped(ipc::Epoch{1});
    engine_.reset();
  }

  void answer(ipc::MoverJobDone done) {
    const std::lock_guard lock(mutex_);
    EXPECT_FALSE(done_.has_value()) << "answered twice";
    done_ = std::move(done);
    answered_.notify_all();
  }
  bool is_answered() {
    const std::lock_guard lock(mutex_);
    return done_.has_value();
  }
  ipc::MoverJobDone wait_answer() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(answered_.wait_until(lock, soon().when(), [this] { return done_.has_value(); }));
    return done_.value_or(ipc::MoverJobDone{});
  }

  /// The mover's next connection, with its hello read and not yet answered.
  PacketSocket next_hello() {
    const ipc::Deadline deadline = soon();
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
  static void greet(PacketSocket& socket) {
    ASSERT_TRUE(socket.send(ipc::encode(ipc::StageReply{})).has_value());
  }
  static ipc::StageRequest next_request(PacketSocket& socket) {
    const auto packet = socket.receive(soon());
    EXPECT_TRUE(packet.has_value());
    if (!packet) return {};
    auto request = ipc::decode<ipc::StageRequest>(packet->bytes, "StageRequest");
    EXPECT_TRUE(request.has_value());
    return request.value_or(ipc::StageRequest{});
  }
  void submit_load(std::uint64_t id = 1) {
    ipc::MoverJob job;
    job.job = ipc::JobId{id};
    job.session = session_;
    job.epoch = ipc::Epoch{1};
    job.direction = ipc::CopyDirection::kHostToDevice;
    job.items = {{ipc::GroupId{0}, ipc::BlockId{3}, 0, 0, true}};
    engine_->submit(std::move(job));
  }

  test::ShortTempDir dir_;
  std::unique_ptr<ipc::Device> device_;
  std::optional<ipc::Arena> arena_;
  const ipc::SessionId session_ = ipc::SessionId::random();
  std::optional<ipc::PacketListener> listener_;
  std::mutex mutex_;  // guards done_
  std::condition_variable answered_;
  std::optional<ipc::MoverJobDone> done_;
  std::unique_ptr<TransferEngine> engine_;
};

TEST_F(StagedLossTest, ClosedConnectionOfALivingWorkerEndsNoJobBeforeItsAgentSaysSo) {
  submit_load();
  {
    PacketSocket agent = next_hello();
    greet(agent);
    EXPECT_EQ(next_request(agent).kind, ipc::StageKind::kScatter);
  }
  // It asks the agent again, for it must know when the scatter has ended. That takes as long as it
  // takes: the first attempt is left without an answer.
  (void)next_hello();
  PacketSocket agent = next_hello();
  EXPECT_FALSE(is_answered());
  greet(agent);
  EXPECT_EQ(wait_answer().results,
            std::vector<std::uint8_t>{static_cast<std::uint8_t>(ErrorCode::kPeerDied)});
}

TEST_F(StagedLossTest, AProvenJobIsAnsweredAlthoughTheNextOneIsNotOver) {
  submit_load(1);
  {
    PacketSocket agent = next_hello();
    greet(agent);
    EXPECT_EQ(next_request(agent).kind, ipc::StageKind::kScatter);
  }
  PacketSocket agent = next_hello();
  submit_load(2);
  EXPECT_FALSE(is_answered());
  greet(agent);
  const ipc::StageRequest request = next_request(agent);
  EXPECT_EQ(wait_answer().job, ipc::JobId{1});
  {
    const std::lock_guard lock(mutex_);
    done_.reset();
  }
  ASSERT_TRUE(agent.send(ipc::encode(ipc::StageReply{request.id, std::nullopt})).has_value());
  EXPECT_EQ(wait_answer().job, ipc::JobId{2});
}

TEST_F(StagedLossTest, EndOfTheEpochIsNotHeldUpByTheWaitAndDoesNotEndIt) {
  submit_load();
  {
    PacketSocket agent = next_hello();
    greet(agent);
    EXPECT_EQ(next_request(agent).kind, ipc::StageKind::kScatter);
  }
  (void)next_hello();
  EXPECT_FALSE(is_answered());
  EXPECT_TRUE(engine_->quiesce(ipc::Epoch{1}, soon()).has_value());
  EXPECT_FALSE(is_answered()) << "the worker may still write the block";
  PacketSocket agent = next_hello();
  greet(agent);
  EXPECT_EQ(wait_answer().results.size(), 1U);
}

TEST_F(StagedLossTest, JobAfterAWorkersReplacementGoesToTheNextAgent) {
  submit_load();
  {
    PacketSocket agent = next_hello();
    greet(agent);
    const ipc::StageRequest request = next_request(agent);
    ASSERT_TRUE(agent.send(ipc::encode(ipc::StageReply{request.id, std::nullopt})).has_value());
    EXPECT_EQ(wait_answer().results, std::vector<std::uint8_t>{0});
  }
  // The agent is gone while the mover is idle. The next job does not pay for that.
  {
    const std::lock_guard lock(mutex_);
    done_.reset();
  }
  submit_load();
  PacketSocket agent = next_hello();
  greet(agent);
  const ipc::StageRequest request = next_request(agent);
  ASSERT_TRUE(agent.send(ipc::encode(ipc::StageReply{request.id, std::nullopt})).has_value());
  EXPECT_EQ(wait_answer().results, std::vector<std::uint8_t>{0});
}

}  // namespace
}  // namespace kvferry::cache_manager
