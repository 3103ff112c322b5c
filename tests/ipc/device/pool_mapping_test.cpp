// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/device/pool_mapping.hpp"

#include "kvferry/ipc/os/pool_filler.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "support/child_process.hpp"
#include "support/forwarding_device.hpp"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

constexpr std::uint64_t kPiece = PoolMapping::kPieceBytes;
constexpr std::size_t kPieces = 64;

/// Keeps what is registered, and can fail or stand still.
class CountingDevice final : public test::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  Status register_host(void* data, std::uint64_t /*size_bytes*/) override {
    std::unique_lock lock(mutex_);
    ++calls_;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::seconds(20), [this] { return !held_; });
    if (failures_ > 0) {
      --failures_;
      return KVFERRY_ERROR(kCuda, "out of what it takes to pin memory");
    }
    EXPECT_TRUE(registered_.insert(data).second) << "registered twice";
    changed_.notify_all();
    return ok();
  }
  Status unregister_host(void* data) override {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(registered_.erase(data), 1U);
    changed_.notify_all();
    return ok();
  }
  bool wait(const std::function<bool(std::size_t registered, int calls)>& condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, test::soon().when(),
                               [&] { return condition(registered_.size(), calls_); });
  }
  void hold(bool held) {
    {
      const std::lock_guard lock(mutex_);
      held_ = held;
    }
    changed_.notify_all();
  }
  void fail_next() { failures_ = 1; }
  [[nodiscard]] std::size_t registered() {
    const std::lock_guard lock(mutex_);
    return registered_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<void*> registered_;
  bool held_ = false;
  int failures_ = 0;
  int calls_ = 0;
};

class PoolMappingTest : public testing::Test {
 protected:
  PoolMappingTest() {
    DeviceSpec spec;
    spec.host_name = fmt::format("pool-mapping-{}", ::getpid());
    spec.host_capacity_bytes = 1U << 20;
    device_.emplace(open_device(spec));
  }
  std::shared_ptr<PoolMapping> map(Background* background) {
    return PoolMapping::map(
               *device_,
               SharedMemory::create_large_pool("pool-mapping-test", kPieces * kPiece, false)
                   .value(),
               kPieces * kPiece, background)
        .value();
  }
  static void touch(PoolMapping& pool, std::size_t piece) {
    const auto address = pool.pinned(piece * kPiece + 100, 50);
    ASSERT_TRUE(address.has_value()) << address.error().to_string();
  }

  std::optional<CountingDevice> device_;
};

TEST_F(PoolMappingTest, OnlyWhatIsTouchedIsRegisteredAndAllIsGivenBack) {
  {
    const auto pool = map(nullptr);
    EXPECT_EQ(device_->registered(), 0U);
    touch(*pool, 3);
    touch(*pool, 3);
    touch(*pool, 4);
    touch(*pool, 5);
    EXPECT_EQ(device_->registered(), 3U);
    EXPECT_EQ(pool->registered(), 3U);
  }
  EXPECT_EQ(device_->registered(), 0U);
}

TEST_F(PoolMappingTest, NeighboursAreFollowedByThoseAfterThemBeforeTheyAreTouched) {
  Background background("test-pool");
  const auto pool = map(&background);
  touch(*pool, 0);
  touch(*pool, 1);
  EXPECT_TRUE(device_->wait(
      [](std::size_t registered, int) { return registered == 2 + PoolMapping::kAhead; }));
  touch(*pool, 2);  // finds its memory registered, and one more is
  EXPECT_TRUE(device_->wait(
      [](std::size_t registered, int) { return registered == 3 + PoolMapping::kAhead; }));
}

TEST_F(PoolMappingTest, ExpectedPlacesAreRegisteredBeforeTheyAreTouchedAndNoOthers) {
  Background background("test-pool");
  const auto pool = map(&background);
  touch(*pool, 7);
  pool->expect(std::vector<std::uint64_t>{40 * kPiece + 5, 7 * kPiece, 40 * kPiece + 900,
                                          3 * kPiece, kPieces * kPiece, ~std::uint64_t{0}});
  // Behind what was asked for: the device is done with a piece before the piece says so.
  std::promise<void> done;
  background.post([&done] { done.set_value(); });
  ASSERT_EQ(done.get_future().wait_until(test::soon().when()), std::future_status::ready);
  EXPECT_EQ(device_->registered(), 3U);
  EXPECT_TRUE(pool->is_pinned(40 * kPiece, kPiece));
  EXPECT_TRUE(pool->is_pinned(3 * kPiece, kPiece));
  // One that cannot be had is the affair of the copy that comes.
  device_->fail_next();
  pool->expect(std::vector<std::uint64_t>{9 * kPiece});
  EXPECT_TRUE(device_->wait([](std::size_t, int calls) { return calls == 4; }));
  touch(*pool, 9);
  EXPECT_EQ(device_->registered(), 4U);
}

TEST_F(PoolMappingTest, RankWithPagesOfItsOwnGetsThoseAndNoOthers) {
  Background background("test-pool");
  const auto pool = map(&background);
  constexpr std::size_t kRanks = 8;
  constexpr std::size_t kOwn = 3;
  touch(*pool, kOwn);
  touch(*pool, kOwn + kRanks);
  EXPECT_EQ(device_->registered(), 2U);  // chance
  touch(*pool, kOwn + 2 * kRanks);
  EXPECT_TRUE(device_->wait([](std::size_t registered, int) { return registered == 8; }));
  touch(*pool, kOwn + 7 * kRanks);
  EXPECT_EQ(device_->registered(), 8U);  // all that it has
}

TEST_F(PoolMappingTest, PieceThatCannotBeRegisteredFailsItsCopyAloneAndIsTriedAgain) {
  const auto pool = map(nullptr);
  device_->fail_next();
  EXPECT_EQ(pool->pinned(0, 10).error().code, ErrorCode::kCuda);
  touch(*pool, 0);
  EXPECT_EQ(device_->registered(), 1U);
}

TEST_F(PoolMappingTest, TwoCopiesThatTouchAPieceAtOnceRegisterItOnce) {
  const auto pool = map(nullptr);
  device_->hold(true);
  std::thread first([&] { touch(*pool, 9); });
  EXPECT_TRUE(device_->wait([](std::size_t, int calls) { return calls == 1; }));
  std::thread second([&] { touch(*pool, 9); });
  device_->hold(false);
  first.join();
  second.join();
  EXPECT_EQ(device_->registered(), 1U);
}

TEST_F(PoolMappingTest, LostPoolIsGivenBackInTheBackgroundAndItsRestIsNotRegistered) {
  {
    Background background("test-pool");
    auto pool = map(&background);
    touch(*pool, 0);
    touch(*pool, 1);
    // The background stands in its first piece while the pool goes.
    pool.reset();
    EXPECT_TRUE(device_->wait([](std::size_t registered, int) { return registered == 0; }));
    touch(*map(&background), 5);
  }
  EXPECT_EQ(device_->registered(), 0U);
}

TEST_F(PoolMappingTest, RangesThatLeaveAPieceOrThePoolAreRefused) {
  const auto pool = map(nullptr);
  EXPECT_EQ(pool->pinned(kPiece - 1, 2).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(pool->pinned(kPieces * kPiece, 1).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(pool->pinned(kPieces * kPiece - 1, 2).error().code, ErrorCode::kInvalidArgument);
}

TEST_F(PoolMappingTest, RangesOverSeveralPiecesHaveAllOfThemRegistered) {
  const auto pool = map(nullptr);
  EXPECT_FALSE(pool->is_pinned(kPiece - 10, 20));
  const auto address = pool->pinned_across(kPiece - 10, 20);
  ASSERT_TRUE(address.has_value()) << address.error().to_string();
  EXPECT_EQ(pool->registered(), 2U);
  EXPECT_TRUE(pool->is_pinned(kPiece - 10, 20));
  EXPECT_FALSE(pool->is_pinned(kPiece, kPiece + 1));
  ASSERT_TRUE(pool->pinned_across(kPiece / 2, 3 * kPiece).has_value());
  EXPECT_EQ(pool->registered(), 4U);
}

TEST_F(PoolMappingTest, NothingOutsideIsPinned) {
  const auto pool = map(nullptr);
  constexpr std::uint64_t kAll = kPieces * kPiece;
  for (const auto& [offset, bytes] :
       {std::pair{kAll, std::uint64_t{1}}, std::pair{kAll - 1, std::uint64_t{2}},
        std::pair{std::uint64_t{0}, std::uint64_t{0}}, std::pair{~std::uint64_t{0}, kPiece},
        std::pair{kAll + 5, ~std::uint64_t{0} - 3}}) {
    EXPECT_FALSE(pool->pinned(offset, bytes).has_value()) << offset;
    EXPECT_FALSE(pool->is_pinned(offset, bytes)) << offset;
  }
  EXPECT_EQ(pool->registered(), 0U);
}

TEST_F(PoolMappingTest, RangesArePinnedInTheBackgroundAndItsFailureIsTold) {
  Background background("test");
  const auto pool = map(&background);
  std::promise<Status> first;
  pool->pin(kPiece - 1, 2, [&](Status status) { first.set_value(std::move(status)); });
  EXPECT_TRUE(first.get_future().get().has_value());
  EXPECT_TRUE(pool->is_pinned(kPiece - 1, 2));
  device_->fail_next();
  std::promise<Status> second;
  pool->pin(4 * kPiece, kPiece, [&](Status status) { second.set_value(std::move(status)); });
  const Status failed = second.get_future().get();
  ASSERT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().code, ErrorCode::kCuda);
  EXPECT_FALSE(pool->is_pinned(4 * kPiece, kPiece));
  std::promise<Status> third;
  pool->pin(4 * kPiece, kPiece, [&](Status status) { third.set_value(std::move(status)); });
  EXPECT_TRUE(third.get_future().get().has_value());
}

class PlacingTest : public PoolMappingTest {
 protected:
  struct Policy {
    int mode = -1;
    unsigned long nodes = 0;
  };
  static Policy policy_of(const void* page) {
    Policy policy;
    constexpr unsigned long kBits = 64;
    EXPECT_EQ(::syscall(SYS_get_mempolicy, &policy.mode, &policy.nodes, kBits + 1, page,
                        static_cast<unsigned long>(MPOL_F_ADDR)),
              0);
    return policy;
  }
  static int node_of(void* page) {
    int status = -1;
    EXPECT_EQ(::syscall(SYS_move_pages, 0, 1UL, &page, nullptr, &status, 0), 0);
    return status;
  }
  std::shared_ptr<PoolMapping> map_near(std::vector<int> nodes) {
    return PoolMapping::map(
               *device_, SharedMemory::create_large_pool("placing-test", 4 * kPiece, false).value(),
               4 * kPiece, nullptr, std::move(nodes))
        .value();
  }
};

TEST_F(PlacingTest, OnlyWhatIsRegisteredGoesToTheNode) {
  const auto pool = map_near({0});
  void* const page = pool->pinned(kPiece, kPiece).value();
  EXPECT_EQ(policy_of(page).mode, MPOL_PREFERRED);
  EXPECT_EQ(policy_of(page).nodes, 1UL);
  EXPECT_EQ(node_of(page), 0);
  EXPECT_EQ(policy_of(static_cast<std::byte*>(page) + kPiece - 1).mode, MPOL_PREFERRED);
  EXPECT_EQ(policy_of(static_cast<std::byte*>(page) - 1).mode, MPOL_DEFAULT);
  EXPECT_EQ(policy_of(static_cast<std::byte*>(page) + kPiece).mode, MPOL_DEFAULT);
}

TEST_F(PlacingTest, NothingIsPlacedUnlessItIsAskedFor) {
  const auto pool = map_near({});
  EXPECT_EQ(policy_of(pool->pinned(0, kPiece).value()).mode, MPOL_DEFAULT);
}

TEST_F(PlacingTest, PagesThatExistElsewhereAreMovedAndKeepWhatIsInThem) {
  if (!parse_numa_nodes("0,1")) GTEST_SKIP() << "this machine has one NUMA node";
  for (const int node : {1, 0}) {
    const UniqueFd fd = SharedMemory::create_large_pool("placing-test", kPiece, false).value();
    {
      PoolFiller filler(
          fd, {"placing-test", kPiece, 1, {1 - node}}, [](std::uint64_t) {},
          [](const Error& error) { ADD_FAILURE() << error.to_string(); });
      ASSERT_TRUE(filler.wait_filled(kPiece, {}).has_value());
      *SharedMemory::map_pool(fd, kPiece)->data() = std::byte{42};
    }
    const auto pool =
        PoolMapping::map(*device_, UniqueFd(::dup(fd.get())), kPiece, nullptr, {node}).value();
    void* const page = pool->pinned(0, kPiece).value();
    EXPECT_EQ(node_of(page), node);
    EXPECT_EQ(*static_cast<std::byte*>(page), std::byte{42});
  }
}

}  // namespace
}  // namespace kvferry::ipc
