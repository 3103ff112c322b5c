// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A staging agent whose device fails: what it was asked for and has launched may still write, so
// that it is never answered; nor is anybody told that it has ended. A launch that is refused has
// ended.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "staging_agent.hpp"
#include "support/faulty_device.hpp"
#include "worker/host_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::ErrorCode;
using ipc::IncarnationId;
using ipc::PacketSocket;
using ipc::RegionSet;
using ipc::StageKind;
using ipc::StageReply;
using ipc::StageRequest;
using ipc::Status;
using std::chrono_literals::operator""s;
using test::DeviceCall;
using test::FaultKind;
using testing::HasSubstr;

constexpr std::uint64_t kPoolBytes = 4ULL << 20;

class AgentFailureTest : public ::testing::Test {
 protected:
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
        loop_, dir_, config_, device_, arena_, layers_, activity_, CopyBudget{},
        ipc::TransitionLog{}, [this](const ipc::Error& error) { failures_.push_back(error); });
    pool_ = ipc::SharedMemory::create_pool("kvferry-test-pool", kPoolBytes, false).value();
  }
  void TearDown() override { agent_.reset(); }

  bool run_until(const std::function<bool()>& condition) {
    const Deadline deadline = Deadline::after(20s);
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
        PacketSocket::connect(dir_.rank_socket("chat", 0, "agent"), Deadline::after(20s)).value();
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
  void ask(StageKind kind) {
    StageRequest request;
    request.id = ++last_id_;
    request.session = session_;
    request.epoch = ipc::Epoch{1};
    request.kind = kind;
    request.blocks = {1, 2};
    const bool straight = kind == StageKind::kStore || kind == StageKind::kLoad;
    if (straight) request.parts = {{RegionSet::kSharded, 0, 2, 4096}};
    ASSERT_TRUE(mover_.send(ipc::encode(request)).has_value());
  }

  const test::ShortTempDir temp_;
  const ipc::RuntimeDir dir_ = ipc::RuntimeDir::open(temp_.path().string(), "default").value();
  ipc::RankConfig config_;
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

TEST_F(AgentFailureTest, LaunchThatIsRefusedIsAnsweredAndTheNextOneServed) {
  ASSERT_TRUE(connect().has_value());
  lend();
  for (const auto& [kind, call] : {std::pair{StageKind::kGather, DeviceCall::kGather},
                                   std::pair{StageKind::kStore, DeviceCall::kGather},
                                   std::pair{StageKind::kLoad, DeviceCall::kScatter}}) {
    plan_.fail({call, 1, FaultKind::kOnce, "refused"});
    ask(kind);
    const auto refused = receive();
    ASSERT_TRUE(refused.has_value()) << refused.error().to_string();
    EXPECT_EQ(refused->id, last_id_);
    ASSERT_TRUE(refused->error.has_value());
    EXPECT_THAT(refused->error->message, HasSubstr("refused"));
    ask(kind);
    const auto served = receive();
    ASSERT_TRUE(served.has_value()) << served.error().to_string();
    EXPECT_FALSE(served->error.has_value());
  }
  EXPECT_THAT(failures_, testing::IsEmpty());
}

TEST_F(AgentFailureTest, PoolThatCannotBePinnedIsSaidAndRingsServeOn) {
  ASSERT_TRUE(connect().has_value());
  lend();
  plan_.fail({DeviceCall::kRegisterHost, 1, FaultKind::kOnce, "no memory to pin"});
  ask(StageKind::kStore);
  ask(StageKind::kGather);  // is not held up
  bool has_refused = false;
  for (int i = 0; i < 2; ++i) {
    const auto reply = receive();
    ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
    if (!reply->error) continue;
    has_refused = true;
    EXPECT_EQ(reply->id, last_id_ - 1);
    EXPECT_THAT(reply->error->message, HasSubstr("no memory to pin"));
  }
  EXPECT_TRUE(has_refused);
}

class BrokenAgentTest : public AgentFailureTest, public ::testing::WithParamInterface<StageKind> {};

TEST_P(BrokenAgentTest, NothingIsAnsweredNorGreetedNorSaidToHaveEnded) {
  ASSERT_TRUE(connect().has_value());
  lend();
  const bool gathers = GetParam() == StageKind::kGather || GetParam() == StageKind::kStore;
  plan_.fail({gathers ? DeviceCall::kGather : DeviceCall::kScatter, 1, FaultKind::kBreaks,
              "uncorrectable memory error"});
  ask(GetParam());
  const auto reply = receive();
  ASSERT_FALSE(reply.has_value()) << "it was answered, request " << reply->id;
  EXPECT_EQ(reply.error().code, ErrorCode::kPeerDied);
  ASSERT_TRUE(run_until([this] { return !failures_.empty(); }));
  EXPECT_THAT(failures_.front().message, HasSubstr("uncorrectable"));
  const Status greeted = connect();
  ASSERT_FALSE(greeted.has_value());
  EXPECT_EQ(greeted.error().code, ErrorCode::kCuda);
  EXPECT_THAT(greeted.error().message, HasSubstr("uncorrectable"));
  std::optional<Status> quiesced;
  agent_->quiesce({id_, false, std::chrono::milliseconds(1000)}, Deadline::after(1s),
                  [&](Status status) { quiesced = std::move(status); });
  ASSERT_TRUE(run_until([&] { return quiesced.has_value(); }));
  ASSERT_FALSE(quiesced->has_value());
  EXPECT_EQ(quiesced->error().code, ErrorCode::kCuda);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    BrokenAgentTest,
    testing::Values(StageKind::kGather, StageKind::kScatter, StageKind::kStore, StageKind::kLoad));

}  // namespace
}  // namespace kvferry::worker
