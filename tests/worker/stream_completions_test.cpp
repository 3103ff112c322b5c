// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "stream_completions.hpp"

#include "worker/host_device.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::Status;
using std::chrono_literals::operator""s;

/// A real stream whose notifications stay on their way until they are let through, as those of a
/// driver that calls back from a thread of its own may.
class LateStream final : public ipc::Stream {
 public:
  explicit LateStream(std::unique_ptr<ipc::Stream> stream) : stream_(std::move(stream)) {}

  [[nodiscard]] Status notify(int event_fd) override {
    late_.push_back(event_fd);
    return ipc::ok();
  }
  void let_through() {
    for (const int fd : std::exchange(late_, {})) {
      EXPECT_TRUE(stream_->notify(fd).has_value());
    }
  }
  [[nodiscard]] std::size_t late() const noexcept { return late_.size(); }
  [[nodiscard]] ipc::Result<bool> query() override { return stream_->query(); }

  [[nodiscard]] Status copy(ipc::CopyDirection direction,
                            std::span<const ipc::CopyOp> ops,
                            ipc::CopyMode mode) override {
    return stream_->copy(direction, ops, mode);
  }
  [[nodiscard]] Status copy_rows(ipc::CopyDirection direction,
                                 std::span<const ipc::RowCopyOp> ops) override {
    return stream_->copy_rows(direction, ops);
  }
  [[nodiscard]] Status zero(ipc::DevicePtr target, std::uint64_t size_bytes) override {
    return stream_->zero(target, size_bytes);
  }
  [[nodiscard]] Status copy_within(ipc::DevicePtr source,
                                   ipc::DevicePtr target,
                                   std::uint64_t size_bytes) override {
    return stream_->copy_within(source, target, size_bytes);
  }
  [[nodiscard]] Status gather(const ipc::RegionTable& table,
                              std::span<const std::uint32_t> ids,
                              ipc::DevicePtr packed,
                              std::uint64_t stride) override {
    return stream_->gather(table, ids, packed, stride);
  }
  [[nodiscard]] Status scatter(const ipc::RegionTable& table,
                               std::span<const std::uint32_t> ids,
                               ipc::DevicePtr packed,
                               std::uint64_t stride) override {
    return stream_->scatter(table, ids, packed, stride);
  }
  [[nodiscard]] Status fill_pattern(const ipc::RegionTable& table,
                                    std::span<const kernels::SeededBlock> blocks) override {
    return stream_->fill_pattern(table, blocks);
  }
  [[nodiscard]] Status verify_pattern(const ipc::RegionTable& table,
                                      std::span<const kernels::SeededBlock> blocks,
                                      ipc::PinnedBuffer& results) override {
    return stream_->verify_pattern(table, blocks, results);
  }
  [[nodiscard]] Status checksum(const ipc::RegionTable& table,
                                std::span<const std::uint32_t> ids,
                                ipc::PinnedBuffer& results) override {
    return stream_->checksum(table, ids, results);
  }
  [[nodiscard]] Status decode(const ipc::RegionTable& table,
                              const kernels::DecodePass& pass) override {
    return stream_->decode(table, pass);
  }
  [[nodiscard]] Status fold(ipc::DevicePtr source,
                            std::uint64_t size_bytes,
                            std::uint64_t seed,
                            ipc::DevicePtr sums) override {
    return stream_->fold(source, size_bytes, seed, sums);
  }
  [[nodiscard]] Status expand(ipc::DevicePtr source,
                              std::uint64_t source_bytes,
                              ipc::DevicePtr target,
                              std::uint64_t target_bytes) override {
    return stream_->expand(source, source_bytes, target, target_bytes);
  }
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::RecordedWork>> record(
      const std::function<Status(ipc::Stream&)>& body) override {
    return stream_->record(body);
  }
  [[nodiscard]] Status launch(const ipc::RecordedWork& work) override {
    return stream_->launch(work);
  }

 private:
  std::unique_ptr<ipc::Stream> stream_;
  std::vector<int> late_;
};

class StreamCompletionsTest : public ::testing::Test {
 protected:
  bool run_until(const std::function<bool()>& condition) {
    const Deadline deadline = Deadline::after(20s);
    while (!condition() && !deadline.expired()) loop_.run_once(deadline);
    return condition();
  }

  std::unique_ptr<ipc::Device> device_ = test::open_host_device(64ULL << 20);
  ipc::EventLoop loop_;
  StreamCompletions completions_{loop_, device_->make_stream(ipc::StreamPriority::kNormal).value(),
                                 "test", [](const ipc::Error&) { FAIL(); }};
};

TEST_F(StreamCompletionsTest, CallsBackInOrderAfterTheWork) {
  auto memory = device_->allocate(8ULL << 20, ipc::HandleKind::kVmm, nullptr).value();
  auto* bytes = static_cast<unsigned char*>(memory->address().raw());
  std::memset(bytes, 1, 8ULL << 20);
  std::vector<int> order;
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t offset = static_cast<std::uint64_t>(i) << 20;
    ASSERT_TRUE(completions_.stream().zero(memory->address() + offset, 1ULL << 20).has_value());
    completions_.when_done([&order, bytes, i, offset](const Status& status) {
      EXPECT_TRUE(status.has_value());
      EXPECT_EQ(bytes[offset + (1ULL << 20) - 1], 0);
      order.push_back(i);
    });
  }
  EXPECT_EQ(completions_.pending(), 8U);
  EXPECT_TRUE(run_until([&] { return order.size() == 8; }));
  EXPECT_EQ(completions_.pending(), 0U);
}

TEST_F(StreamCompletionsTest, CalleesMayStartNewWorkInTheFreedSlot) {
  int left = 50;
  std::function<void(const Status&)> again = [&](const Status&) {
    if (--left > 0) completions_.when_done(again);
  };
  completions_.when_done(again);
  EXPECT_TRUE(run_until([&] { return left == 0; }));
}

TEST_F(StreamCompletionsTest, ASignalThatIsLateEndsNoNewWork) {
  auto owned =
      std::make_unique<LateStream>(device_->make_stream(ipc::StreamPriority::kNormal).value());
  LateStream& stream = *owned;
  StreamCompletions late(loop_, std::move(owned), "late", [](const ipc::Error&) { FAIL(); });
  bool first_done = false;
  late.when_done([&](const Status&) { first_done = true; });
  // A round of the watchdog: the stream is idle, and yet the slot's signal is to come.
  bool looked = false;
  loop_.after(std::chrono::milliseconds(700), [&] { looked = true; });
  ASSERT_TRUE(run_until([&] { return looked; }));
  EXPECT_FALSE(first_done);
  stream.let_through();
  ASSERT_TRUE(run_until([&] { return first_done; }));
  bool second_done = false;
  late.when_done([&](const Status&) { second_done = true; });
  loop_.run_once(Deadline::after(0s));
  EXPECT_FALSE(second_done);
  stream.let_through();
  EXPECT_TRUE(run_until([&] { return second_done; }));
}

TEST_F(StreamCompletionsTest, TheDeviceIsAskedOnceForWhatARoundOfTheLoopStarts) {
  auto owned =
      std::make_unique<LateStream>(device_->make_stream(ipc::StreamPriority::kNormal).value());
  LateStream& stream = *owned;
  StreamCompletions late(loop_, std::move(owned), "late", [](const ipc::Error&) { FAIL(); });
  std::vector<int> done;
  for (int i = 0; i < 5; ++i) {
    late.when_done([&done, i](const Status& status) {
      EXPECT_TRUE(status.has_value());
      done.push_back(i);
    });
  }
  loop_.run_once(Deadline::after(0s));
  EXPECT_EQ(stream.late(), 1U);
  EXPECT_TRUE(done.empty()) << "and none ends before it has told";
  late.when_done([&done](const Status&) { done.push_back(5); });
  loop_.run_once(Deadline::after(0s));
  EXPECT_EQ(stream.late(), 2U);
  stream.let_through();
  ASSERT_TRUE(run_until([&] { return done.size() == 6; }));
  EXPECT_EQ(done, (std::vector<int>{0, 1, 2, 3, 4, 5}));
}

TEST_F(StreamCompletionsTest, TheDeviceIsNotAskedForWhatEndsWhileItIsLookedAt) {
  auto owned =
      std::make_unique<LateStream>(device_->make_stream(ipc::StreamPriority::kNormal).value());
  LateStream& stream = *owned;
  StreamCompletions late(loop_, std::move(owned), "late", [](const ipc::Error&) { FAIL(); });
  int done = 0;
  late.when_done([&done](const Status&) { ++done; }, 10s);  // the stream is idle: no time passes
  ASSERT_TRUE(run_until([&] { return done == 1; }));
  EXPECT_EQ(stream.late(), 0U);
  // With something pending it is not looked at: who waits for the other is not held up.
  late.when_done([&done](const Status&) { ++done; });
  loop_.run_once(Deadline::after(0s));
  late.when_done([&done](const Status&) { ++done; }, 10s);
  loop_.run_once(Deadline::after(0s));
  EXPECT_EQ(stream.late(), 2U);
  stream.let_through();
  EXPECT_TRUE(run_until([&] { return done == 3; }));
}

}  // namespace
}  // namespace kvferry::worker
