// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "stream_completions.hpp"

#include "kvferry/ipc/base/look.hpp"
#include "support/forwarding_stream.hpp"
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
class LateStream final : public test::ForwardingStream {
 public:
  explicit LateStream(std::unique_ptr<ipc::Stream> stream) : ForwardingStream(std::move(stream)) {}

  [[nodiscard]] Status notify(int event_fd) override {
    late_.push_back(event_fd);
    return ipc::ok();
  }
  void let_through(std::size_t count = 1000) {
    for (; count > 0 && !late_.empty(); --count) {
      EXPECT_TRUE(real().notify(late_.front()).has_value());
      late_.erase(late_.begin());
    }
  }
  /// As if the work before a mark took long; or none, so that it is there for whoever looks.
  [[nodiscard]] Status write_word(const ipc::StreamWord& word, std::uint32_t value) override {
    held_ = {word, value};
    if (!holds_marks_) let_marks_through();
    return ipc::ok();
  }
  void hold_marks() { holds_marks_ = true; }
  void let_marks_through() {
    holds_marks_ = false;
    EXPECT_TRUE(real().write_word(held_.first, held_.second).has_value());
    EXPECT_TRUE(ipc::look_for(
        20s, [&] { return ipc::StreamWord::has_reached(held_.first.load(), held_.second); }));
  }
  [[nodiscard]] std::size_t late() const noexcept { return late_.size(); }

 private:
  std::vector<int> late_;
  bool holds_marks_ = false;
  std::pair<ipc::StreamWord, std::uint32_t> held_;
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

TEST_F(StreamCompletionsTest, WorkThatWaitsHoldsUpNoNewsOfWhatIsBeforeIt) {
  const auto words = device_->make_pinned_buffer(64).value();
  const ipc::StreamWord word(reinterpret_cast<std::uint32_t*>(words->data()));
  word.store(0);
  bool first = false;
  bool second = false;
  completions_.when_done([&first](const Status& status) { first = status.has_value(); });
  completions_.ask_now();
  ASSERT_TRUE(completions_.stream().wait_word(word, 1).has_value());
  completions_.when_done([&second](const Status& status) { second = status.has_value(); });
  EXPECT_TRUE(run_until([&first] { return first; }));
  EXPECT_FALSE(second);
  word.store(1);
  EXPECT_TRUE(run_until([&second] { return second; }));
  EXPECT_EQ(completions_.pending(), 0U);
}

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
  StreamCompletions late(
      loop_, std::move(owned), "late", [](const ipc::Error&) { FAIL(); },
      device_->make_pinned_buffer(64).value());
  int done = 0;
  late.when_done([&done](const Status&) { ++done; }, 10s);  // the stream is idle: no time passes
  ASSERT_TRUE(run_until([&] { return done == 1; }));
  EXPECT_EQ(stream.late(), 0U);
  // What does not end while it is looked at, or is not to be looked at, is asked for.
  stream.hold_marks();
  late.when_done([&done](const Status&) { ++done; });
  loop_.run_once(Deadline::after(0s));
  late.when_done([&done](const Status&) { ++done; }, std::chrono::microseconds(1));
  loop_.run_once(Deadline::after(0s));
  EXPECT_EQ(stream.late(), 2U);
  EXPECT_EQ(done, 1);
  stream.let_through();
  EXPECT_TRUE(run_until([&] { return done == 3; }));
}

TEST_F(StreamCompletionsTest, ANoticeOfWorkThatWasSeenToEndEndsNoNewWork) {
  auto owned =
      std::make_unique<LateStream>(device_->make_stream(ipc::StreamPriority::kNormal).value());
  LateStream& stream = *owned;
  StreamCompletions late(
      loop_, std::move(owned), "late", [](const ipc::Error&) { FAIL(); },
      device_->make_pinned_buffer(64).value());
  int done = 0;
  stream.hold_marks();
  late.when_done([&done](const Status&) { ++done; });
  loop_.run_once(Deadline::after(0s));
  ASSERT_EQ(stream.late(), 1U);
  stream.let_marks_through();
  late.when_done([&done](const Status&) { ++done; }, 10s);  // sees that the first has ended
  ASSERT_TRUE(run_until([&] { return done == 2; }));
  EXPECT_EQ(late.pending(), 0U);
  bool third = false;
  stream.hold_marks();
  late.when_done([&third](const Status&) { third = true; });
  loop_.run_once(Deadline::after(0s));
  ASSERT_EQ(stream.late(), 2U);
  stream.let_through(1);  // the first one's, long after it was seen
  bool looked = false;
  loop_.after(std::chrono::milliseconds(50), [&] { looked = true; });
  ASSERT_TRUE(run_until([&] { return looked; }));
  EXPECT_FALSE(third);
  stream.let_through();
  EXPECT_TRUE(run_until([&] { return third; }));
}

}  // namespace
}  // namespace kvferry::worker
