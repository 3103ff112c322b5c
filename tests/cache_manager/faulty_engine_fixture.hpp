// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cache_manager/block_access.hpp"
#include "cache_manager/staged_fixture.hpp"
#include "support/faulty_device.hpp"

#include <fcntl.h>

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// The staged fixture on a device that does what a plan says, with a pool and an arena whose
/// contents the test knows: block by block, in the order in which they lie in the pool.
class FaultyEngineFixture : public StagedFixture {
 protected:
  using Bytes = BlockAccess::Bytes;
  static constexpr std::uint64_t kBlockBytes = kSlotBytes;
  static constexpr std::uint32_t kPlaces = kPoolBytes / kBlockBytes;

  /// Device block and place in the pool.
  struct Move {
    std::uint32_t block = 0;
    std::uint32_t place = 0;
  };

  void SetUp() override {
    StagedFixture::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    gate_ = device_->make_pinned_buffer(sizeof(std::uint32_t)).value();
    plan_.use_gate(reinterpret_cast<std::uint32_t*>(gate_->data()));
    access_ = make_access();
    auto fd = ipc::SharedMemory::create_pool("kvferry-test-pool", kPoolBytes, false);
    ASSERT_TRUE(fd.has_value());
    pool_fd_ = std::move(fd).value();
    auto view = ipc::SharedMemory::map_pool(pool_fd_, kPoolBytes);
    ASSERT_TRUE(view.has_value());
    pool_view_ = std::move(view).value();
    renew_pool();
  }
  void TearDown() override {
    plan_.let_all_go();
    StagedFixture::TearDown();
  }
  std::unique_ptr<ipc::Device> wrap(std::unique_ptr<ipc::Device> device) override {
    auto faulty = std::make_unique<test::FaultyDevice>(std::move(device), plan_);
    faulty_ = faulty.get();
    return faulty;
  }
  /// By a stream of its own, with which nothing goes wrong.
  [[nodiscard]] std::unique_ptr<BlockAccess> make_access() const {
    auto stream = faulty_->ForwardingDevice::make_stream(ipc::StreamPriority::kNormal);
    EXPECT_TRUE(stream.has_value()) << stream.error().to_string();
    return std::make_unique<BlockAccess>(
        *device_, std::move(stream).value(),
        arena_->strided(ipc::GroupId{0}, ipc::RegionSet::kAll, ipc::Rank{0}), kBlockBytes);
  }

  /// The same memory, and none of it registered.
  void renew_pool() {
    auto pool = ipc::PoolMapping::map(
        *device_, ipc::UniqueFd(::fcntl(pool_fd_.get(), F_DUPFD_CLOEXEC, 0)), kPoolBytes);
    ASSERT_TRUE(pool.has_value());
    pool_ = std::move(pool).value();
    engine_->set_pool(pool_);
  }

  static Bytes contents(std::uint64_t seed) {
    Bytes bytes(kBlockBytes);
    std::uint64_t word = (seed + 1) * 0x9E3779B97F4A7C15ULL;
    for (std::uint64_t i = 0; i < kBlockBytes; i += sizeof(word)) {
      word = word * 6364136223846793005ULL + 1442695040888963407ULL;
      std::memcpy(&bytes[i], &word, sizeof(word));
    }
    return bytes;
  }
  void put_block(std::uint32_t block, const Bytes& bytes) { access_->put(block, bytes); }
  Bytes block(std::uint32_t block) { return access_->get(block); }
  void put_place(std::uint32_t place, const Bytes& bytes) {
    std::memcpy(pool_view_.data() + place * kBlockBytes, bytes.data(), kBlockBytes);
  }
  Bytes place(std::uint32_t place) {
    Bytes bytes(kBlockBytes);
    std::memcpy(bytes.data(), pool_view_.data() + place * kBlockBytes, kBlockBytes);
    return bytes;
  }
  /// What a job reads and writes: before it and, if it is whole, after it.
  void put_source(ipc::CopyDirection direction, const Move& move, const Bytes& bytes) {
    const Bytes wiped(kBlockBytes, 0xEE);
    const bool stores = direction == ipc::CopyDirection::kDeviceToHost;
    put_block(move.block, stores ? bytes : wiped);
    put_place(move.place, stores ? wiped : bytes);
  }
  Bytes target(ipc::CopyDirection direction, const Move& move) {
    return direction == ipc::CopyDirection::kDeviceToHost ? place(move.place) : block(move.block);
  }

  ipc::MoverJob job(std::uint64_t id,
                    ipc::CopyDirection direction,
                    const std::vector<Move>& moves) const {
    ipc::MoverJob made;
    made.job = ipc::JobId{id};
    made.session = session_;
    made.epoch = ipc::Epoch{1};
    made.direction = direction;
    for (const Move& move : moves) {
      const std::uint64_t offset = move.place * kBlockBytes;
      made.items.push_back({ipc::GroupId{0}, ipc::BlockId{move.block}, offset, offset, true});
    }
    return made;
  }

  /// Until a lane has looked at its stream, begun what it could, and looked again; wake: has it do
  /// so. @pre something of it is under way.
  void wait_looks(const std::function<void()>& wake) {
    constexpr int kLooks = 4;  // The first one may have begun before.
    for (int i = 0; i < kLooks; ++i) {
      const std::uint64_t looks = plan_.calls(test::DeviceCall::kQuery);
      wake();
      ASSERT_TRUE(plan_.wait_calls(test::DeviceCall::kQuery, looks + 1, test::soon()));
    }
  }
  /// Of the engine's lane of that direction.
  void wait_lane(ipc::CopyDirection direction) {
    wait_looks([this, direction] {
      // Work for it that is none.
      engine_->submit(job(++last_empty_, direction, {}));
      engine_->cancel(ipc::JobId{last_empty_});
    });
  }
  static void expect_silent(ipc::PacketSocket& worker) {
    const auto told = worker.try_receive();
    ASSERT_TRUE(told.has_value()) << told.error().to_string();
    EXPECT_FALSE(told->has_value()) << "the worker was told something";
  }

  test::FaultPlan plan_;
  ipc::UniqueFd pool_fd_;
  ipc::SharedMapping pool_view_;
  std::shared_ptr<ipc::PoolMapping> pool_;
  std::unique_ptr<BlockAccess> access_;

 private:
  test::FaultyDevice* faulty_ = nullptr;  ///< device_.
  std::uint64_t last_empty_ = 1'000'000;
  std::unique_ptr<ipc::PinnedBuffer> gate_;  ///< Of the plan.
};

}  // namespace kvferry::cache_manager
