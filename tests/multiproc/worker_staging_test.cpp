// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"
#include "multiproc/mover_mapping.hpp"
#include "multiproc/worker_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace kvferry {
namespace {

using ipc::AgentHello;
using ipc::Arena;
using ipc::Deadline;
using ipc::Epoch;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::MessageKind;
using ipc::RegionSet;
using ipc::StageKind;
using ipc::StageReply;
using ipc::StageRequest;
using ipc::Status;
using std::chrono_literals::operator""ms;
using test::soon;
using testing::Each;
using testing::Gt;

/// Requests of a scripted mover over the real socket, on the really shared arena.
class WorkerStagingTest : public test::WorkerFixture {
 protected:
  void SetUp() override {
    start_all();
    device_ = ipc::open_device(ipc::DeviceSpec::parse(device_text_).value());
    attach();
    ASSERT_TRUE(connect(mover_).has_value());
  }

  void attach() {
    const ipc::RankConfig config =
        test::rank_config(temp_.path().string(), device_text_, "worker", "vmm");
    ipc::LeaseOptions options;
    options.identity.instance = "default";
    options.identity.engine = config.engine;
    options.identity.self = ipc::ProcessKind::kMover;
    options.identity.fingerprint = config.geometry.fingerprint(config.arena.order);
    options.identity.incarnation = mover_;
    lease_ = std::make_unique<ipc::LeaseAttacher>(options, dir_, *device_, geometry_, mapping_,
                                                  [](const ipc::LeaseView&) {});
    const Status mapped = lease_->wait_mapped(arena_.epoch, soon());
    ASSERT_TRUE(mapped.has_value()) << mapped.error().to_string();
  }

  /// A new connection; the answer to its hello is an error or ok.
  Status connect(const ipc::IncarnationId& mover, ipc::Rank rank = {}, std::uint32_t lane = 0) {
    KVFERRY_ASSIGN(agent_,
                   ipc::PacketSocket::connect(dir_.rank_socket(test::kEngine, 0, "agent"), soon()));
    AgentHello hello;
    hello.mover = mover;
    hello.engine = test::kEngine;
    hello.rank = rank;
    hello.lane = lane;
    KVFERRY_TRY(agent_.send(ipc::encode(hello)));
    KVFERRY_ASSIGN(const StageReply reply, receive());
    EXPECT_EQ(reply.id, 0U);
    if (reply.error) return *reply.error;
    return ipc::ok();
  }
  ipc::Result<StageReply> receive() {
    KVFERRY_ASSIGN(const ipc::Packet packet, agent_.receive(soon()));
    return ipc::decode<StageReply>(packet.bytes, "StageReply");
  }
  StageRequest make_request(StageKind kind,
                            std::uint32_t slot,
                            std::vector<std::uint32_t> blocks,
                            std::uint32_t group = 0,
                            RegionSet set = RegionSet::kAll) {
    StageRequest request;
    request.id = ++last_id_;
    request.session = mapping_.session();
    request.epoch = arena_.epoch;
    request.kind = kind;
    request.group = GroupId{group};
    request.set = set;
    request.slot = slot;
    request.blocks = std::move(blocks);
    return request;
  }
  Status stage(const StageRequest& request) {
    KVFERRY_TRY(agent_.send(ipc::encode(request)));
    KVFERRY_ASSIGN(const StageReply reply, receive());
    EXPECT_EQ(reply.id, request.id);
    if (reply.error) return *reply.error;
    return ipc::ok();
  }
  void stage_ok(const StageRequest& request) {
    const Status status = stage(request);
    EXPECT_TRUE(status.has_value()) << status.error().to_string();
  }
  void fill(std::uint32_t count, std::uint64_t seed, std::uint32_t group = 0) {
    ipc::Step step = make_step();
    step.fills = seeded(0, count, seed, group);
    run_ok(step);
  }
  std::vector<std::uint64_t> verify(std::uint32_t count,
                                    std::uint64_t seed,
                                    std::uint32_t group = 0) {
    ipc::Step step = make_step();
    step.verifies = seeded(0, count, seed, group);
    return run_ok(step).mismatches;
  }
  std::byte* slot(std::uint32_t index) {
    return static_cast<std::byte*>(mapping_.arena()->staging_slot(index).raw());
  }

  const ipc::IncarnationId mover_ = ipc::IncarnationId::random();
  const ipc::Geometry geometry_ = test::worker_geometry();
  std::unique_ptr<ipc::Device> device_;
  test::MoverMapping mapping_;
  std::unique_ptr<ipc::LeaseAttacher> lease_;
  ipc::PacketSocket agent_;
  std::uint64_t last_id_ = 0;
};

TEST_F(WorkerStagingTest, BlocksComeBackWordForWordOverTheRing) {
  for (const std::uint32_t group : {0U, 1U}) {
    SCOPED_TRACE(group);
    const std::uint64_t packed = mapping_.arena()->packed_bytes(GroupId{group}, RegionSet::kAll);
    fill(3, 100, group);
    stage_ok(make_request(StageKind::kGather, 0, {2, 0, 1}, group));
    // What a mover's DMA would do: out to the host, and later back into another slot.
    std::vector<std::byte> host(3 * packed);
    std::memcpy(host.data(), slot(0), host.size());
    fill(3, 900, group);
    EXPECT_THAT(verify(3, 100, group), Each(Gt(0U)));
    std::memcpy(slot(3), host.data(), host.size());
    stage_ok(make_request(StageKind::kScatter, 3, {2, 0, 1}, group));
    EXPECT_THAT(verify(3, 100, group), Each(0U));
  }
}

TEST_F(WorkerStagingTest, ReplicatedAndShardedPartsMakeUpTheWhole) {
  const Arena& arena = *mapping_.arena();
  const std::uint64_t replicated = arena.packed_bytes(GroupId{0}, RegionSet::kReplicated);
  const std::uint64_t sharded = arena.packed_bytes(GroupId{0}, RegionSet::kSharded);
  fill(1, 7);
  stage_ok(make_request(StageKind::kGather, 0, {0}));
  stage_ok(make_request(StageKind::kGather, 1, {0}, 0, RegionSet::kReplicated));
  stage_ok(make_request(StageKind::kGather, 2, {0}, 0, RegionSet::kSharded));
  EXPECT_EQ(std::memcmp(slot(0), slot(1), replicated), 0);
  EXPECT_EQ(std::memcmp(slot(0) + replicated, slot(2), sharded), 0);
  fill(1, 8);
  stage_ok(make_request(StageKind::kScatter, 1, {0}, 0, RegionSet::kReplicated));
  EXPECT_THAT(verify(1, 7), Each(Gt(0U)));
  stage_ok(make_request(StageKind::kScatter, 2, {0}, 0, RegionSet::kSharded));
  EXPECT_THAT(verify(1, 7), Each(0U));
}

TEST_F(WorkerStagingTest, ManyRequestsAreAnsweredInOrder) {
  fill(test::kGpuBlocks, 1);
  for (std::uint32_t i = 0; i < 100; ++i) {
    const auto request = make_request(StageKind::kGather, i % 4, {i % test::kGpuBlocks});
    ASSERT_TRUE(agent_.send(ipc::encode(request)).has_value());
  }
  for (std::uint64_t id = 1; id <= 100; ++id) {
    const auto reply = receive();
    ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
    EXPECT_EQ(reply->id, id);
    EXPECT_FALSE(reply->error.has_value());
  }
}

TEST_F(WorkerStagingTest, RefusesWhatIsOutOfRangeAndServesOn) {
  auto block = make_request(StageKind::kGather, 0, {test::kGpuBlocks});
  auto slot = make_request(StageKind::kGather, test::kSlots, {0});
  auto group = make_request(StageKind::kGather, 0, {0}, 2);
  auto size = make_request(StageKind::kScatter, 0, {0, 1, 2, 3});
  auto set = make_request(StageKind::kGather, 0, {0}, 1, RegionSet::kReplicated);
  for (const auto& request : {block, slot, group, size, set}) {
    EXPECT_EQ(stage(request).error().code, ErrorCode::kInvalidArgument);
  }
  auto epoch = make_request(StageKind::kGather, 0, {0});
  epoch.epoch = Epoch{99};
  EXPECT_EQ(stage(epoch).error().code, ErrorCode::kStaleEpoch);
  stage_ok(make_request(StageKind::kGather, 0, {0}));
}

TEST_F(WorkerStagingTest, DropsWhoeverBreaksTheProtocol) {
  ASSERT_TRUE(agent_.send(std::vector<std::uint8_t>{1, 2, 3}).has_value());
  EXPECT_EQ(receive().error().code, ErrorCode::kPeerDied);
  EXPECT_EQ(connect(mover_, ipc::Rank{1}).error().code, ErrorCode::kProtocol);
  EXPECT_TRUE(connect(mover_).has_value());
  // A number names one request.
  const auto request = make_request(StageKind::kGather, 0, {0});
  stage_ok(request);
  ASSERT_TRUE(agent_.send(ipc::encode(request)).has_value());
  EXPECT_EQ(receive().error().code, ErrorCode::kPeerDied);
}

TEST_F(WorkerStagingTest, QuiescedMoverIsShutOutForGood) {
  fill(1, 5);
  stage_ok(make_request(StageKind::kGather, 0, {0}));
  const auto reply = ask(MessageKind::kQuiesceStaging, ipc::QuiesceStaging{mover_, false, 15000ms});
  ASSERT_FALSE(reply.error.has_value()) << reply.error->to_string();
  EXPECT_FALSE(receive().has_value());
  EXPECT_EQ(connect(mover_).error().code, ErrorCode::kProtocol);
  EXPECT_TRUE(connect(ipc::IncarnationId::random()).has_value());
  stage_ok(make_request(StageKind::kGather, 0, {0}));
}

TEST_F(WorkerStagingTest, UnreadRequestsOfAQuiescedMoverNeverRun) {
  fill(3, 100);
  stage_ok(make_request(StageKind::kGather, 0, {0, 1, 2}));
  fill(3, 200);
  // The agent is stopped, so the scatter waits unread when the mover is declared dead. Whichever of
  // the two it then reads first: after the answer nothing is written any more.
  EXPECT_TRUE(worker_->stop());
  const auto scatter = make_request(StageKind::kScatter, 0, {0, 1, 2});
  ASSERT_TRUE(agent_.send(ipc::encode(scatter)).has_value());
  std::thread resume([this] { worker_->signal(SIGCONT); });
  const auto reply = ask(MessageKind::kQuiesceStaging, ipc::QuiesceStaging{mover_, false, 15000ms});
  resume.join();
  ASSERT_FALSE(reply.error.has_value()) << reply.error->to_string();
  fill(3, 300);
  EXPECT_THAT(verify(3, 300), Each(0U));
}

TEST_F(WorkerStagingTest, HelloOfALaneEndsItsEarlierConnectionAndNothingOfThatRunsAfterTheAnswer) {
  fill(3, 100);
  stage_ok(make_request(StageKind::kGather, 0, {0, 1, 2}));
  fill(3, 200);
  // The scatter waits unread in a connection that is still open when the lane says hello again.
  EXPECT_TRUE(worker_->stop());
  const auto scatter = make_request(StageKind::kScatter, 0, {0, 1, 2});
  ASSERT_TRUE(agent_.send(ipc::encode(scatter)).has_value());
  ipc::PacketSocket before = std::move(agent_);
  std::thread resume([this] { worker_->signal(SIGCONT); });
  EXPECT_TRUE(connect(mover_).has_value());
  resume.join();
  fill(3, 300);
  EXPECT_THAT(verify(3, 300), Each(0U));
  auto end = before.receive(soon());
  if (end) end = before.receive(soon());  // the scatter may have been answered before
  EXPECT_EQ(end.error().code, ErrorCode::kPeerDied);
  stage_ok(make_request(StageKind::kGather, 0, {0}));
}

TEST_F(WorkerStagingTest, LanesOfAMoverHaveConnectionsOfTheirOwn) {
  ipc::PacketSocket first = std::move(agent_);
  EXPECT_TRUE(connect(mover_, {}, 1).has_value());
  stage_ok(make_request(StageKind::kGather, 0, {0}));
  agent_ = std::move(first);
  stage_ok(make_request(StageKind::kGather, 0, {0}));
}

/// A pool that the mover lends to the worker, whose agent then copies without a ring.
class LentPoolTest : public WorkerStagingTest {
 protected:
  static constexpr const char* kName = "kvferry-lent-pool";
  static constexpr std::uint64_t kPoolBytes = 80ULL << 20;  // two registered pieces

  void SetUp() override {
    WorkerStagingTest::SetUp();
    pool_fd_ = ipc::SharedMemory::create_pool(kName, kPoolBytes, false).value();
    pool_ = ipc::SharedMemory::map_pool(pool_fd_, kPoolBytes).value();
  }
  void lend(std::uint64_t size_bytes, const std::vector<int>& fds) {
    StageRequest request = make_request(StageKind::kPool, 0, {});
    request.pool_bytes = size_bytes;
    ASSERT_TRUE(agent_.send(ipc::encode(request), fds).has_value());
  }
  void lend() { lend(kPoolBytes, {pool_fd_.get()}); }
  /// One part of each kind, from these places on.
  StageRequest straight(StageKind kind,
                        std::vector<std::uint32_t> blocks,
                        std::uint64_t sharded,
                        std::uint64_t replicated) {
    const auto count = static_cast<std::uint32_t>(blocks.size());
    StageRequest request = make_request(kind, 0, std::move(blocks));
    request.parts = {{RegionSet::kSharded, 0, count, sharded},
                     {RegionSet::kReplicated, 0, count, replicated}};
    return request;
  }
  /// The worker maps it.
  [[nodiscard]] bool is_mapped() const {
    std::stringstream maps;
    maps << std::ifstream(fmt::format("/proc/{}/maps", worker_->pid())).rdbuf();
    return maps.str().find(kName) != std::string::npos;
  }
  /// It is given back in the background.
  [[nodiscard]] bool wait_unmapped() const {
    const Deadline deadline = soon();
    while (is_mapped() && !deadline.expired()) std::this_thread::yield();
    return !is_mapped();
  }

  ipc::UniqueFd pool_fd_;
  ipc::SharedMapping pool_;
};

TEST_F(LentPoolTest, BlocksComeBackWordForWordWithoutARing) {
  constexpr std::uint64_t kAcross = (64ULL << 20) - 1000;  // in both pieces
  lend();
  fill(3, 100);
  stage_ok(straight(StageKind::kStore, {2, 0, 1}, kAcross, 8));
  const std::uint64_t sharded = mapping_.arena()->packed_bytes(GroupId{0}, RegionSet::kSharded);
  // As a gather brings them.
  stage_ok(make_request(StageKind::kGather, 1, {2, 0, 1}, 0, RegionSet::kSharded));
  EXPECT_EQ(std::memcmp(pool_.data() + kAcross, slot(1), 3 * sharded), 0);
  fill(3, 900);
  EXPECT_THAT(verify(3, 100), Each(Gt(0U)));
  stage_ok(straight(StageKind::kLoad, {2, 0, 1}, kAcross, 8));
  EXPECT_THAT(verify(3, 100), Each(0U));
}

TEST_F(LentPoolTest, NothingIsCopiedThatIsOutsideThePoolOrHasNone) {
  EXPECT_EQ(stage(straight(StageKind::kStore, {0}, 0, 0)).error().code,
            ErrorCode::kInvalidArgument);
  lend();
  EXPECT_EQ(stage(straight(StageKind::kStore, {0}, kPoolBytes, 0)).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(stage(straight(StageKind::kLoad, {0}, ~std::uint64_t{0} - 8, 0)).error().code,
            ErrorCode::kInvalidArgument);
  stage_ok(straight(StageKind::kStore, {0}, 0, 4 << 20));
  lend(0, {});
  EXPECT_EQ(stage(straight(StageKind::kStore, {0}, 0, 0)).error().code,
            ErrorCode::kInvalidArgument);
}

TEST_F(LentPoolTest, WhatIsNoPoolIsRefusedWithItsReasonAndRingsServeOn) {
  // Not as large as is said, not sealed, no memory at all.
  lend(2 * kPoolBytes, {pool_fd_.get()});
  const Status larger = stage(straight(StageKind::kStore, {0}, 0, 4 << 20));
  ASSERT_FALSE(larger.has_value());
  const ipc::UniqueFd loose(::memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(loose.get(), kPoolBytes), 0);
  lend(kPoolBytes, {loose.get()});
  EXPECT_FALSE(stage(straight(StageKind::kStore, {0}, 0, 4 << 20)).has_value());
  const ipc::EventFd event;
  lend(kPoolBytes, {event.fd()});
  EXPECT_FALSE(stage(straight(StageKind::kStore, {0}, 0, 4 << 20)).has_value());
  stage_ok(make_request(StageKind::kGather, 0, {0}));
  lend();
  stage_ok(straight(StageKind::kStore, {0}, 0, 4 << 20));
  // Descriptors where none belong, or too many: that is no mover.
  lend(kPoolBytes, {pool_fd_.get(), pool_fd_.get()});
  EXPECT_EQ(receive().error().code, ErrorCode::kPeerDied);
  ASSERT_TRUE(connect(mover_).has_value());
  const int fd = pool_fd_.get();
  ASSERT_TRUE(
      agent_.send(ipc::encode(make_request(StageKind::kGather, 0, {0})), {&fd, 1}).has_value());
  EXPECT_EQ(receive().error().code, ErrorCode::kPeerDied);
  EXPECT_TRUE(wait_unmapped());
}

TEST_F(LentPoolTest, WorkerLetsGoOfAPoolThatIsTakenBackOrWhoseMoverIsGone) {
  lend();
  stage_ok(straight(StageKind::kStore, {0}, 0, 4 << 20));
  EXPECT_TRUE(is_mapped());
  lend(0, {});
  EXPECT_TRUE(wait_unmapped());
  lend();
  stage_ok(straight(StageKind::kStore, {0}, 0, 4 << 20));
  EXPECT_TRUE(is_mapped());
  agent_ = {};
  EXPECT_TRUE(wait_unmapped());
}

TEST_F(LentPoolTest, BothLanesOfAMoverShareOneMapping) {
  lend();
  stage_ok(straight(StageKind::kStore, {0}, 0, 4 << 20));
  ipc::PacketSocket first = std::move(agent_);
  ASSERT_TRUE(connect(mover_, {}, 1).has_value());
  lend();
  stage_ok(straight(StageKind::kLoad, {0}, 0, 4 << 20));
  std::stringstream maps;
  maps << std::ifstream(fmt::format("/proc/{}/maps", worker_->pid())).rdbuf();
  const std::string text = maps.str();
  EXPECT_EQ(text.find(kName), text.rfind(kName));
  agent_ = {};
  first = {};
  EXPECT_TRUE(wait_unmapped());
}

TEST_F(WorkerStagingTest, ClearRevokesStagingAndTakesTheArenaFromBoth) {
  const auto cleared =
      ask(MessageKind::kRankClear, ipc::RankClear{arena_.session, arena_.epoch, 15000ms});
  ASSERT_FALSE(cleared.error.has_value()) << cleared.error->to_string();
  EXPECT_EQ(mapping_.arena(), nullptr);
  EXPECT_EQ(device_used(), 0U);
  EXPECT_EQ(stage(make_request(StageKind::kGather, 0, {0})).error().code, ErrorCode::kNotReady);
}

}  // namespace
}  // namespace kvferry
