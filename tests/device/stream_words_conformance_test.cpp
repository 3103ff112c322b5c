// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Words that streams wait for and write: what every backend must do alike.
#include "device_fixture.hpp"

#include <cstring>
#include <vector>

namespace kvferry::ipc {
namespace {

class StreamWordsConformanceTest : public DeviceConformanceTest {
 protected:
  void SetUp() override {
    DeviceConformanceTest::SetUp();
    if (device_ == nullptr) return;
    words_ = pinned(64);
    value_ = pinned(8);
    memory_ = allocate(kMiB);
    ASSERT_NE(memory_, nullptr);
  }

  StreamWord word(std::size_t index) {
    return StreamWord(reinterpret_cast<std::uint32_t*>(words_->data()) + index);
  }
  std::unique_ptr<Stream> another(StreamPriority priority = StreamPriority::kNormal) {
    auto stream = device_->make_stream(priority);
    EXPECT_TRUE(stream.has_value());
    return std::move(stream).value();
  }
  void set(std::uint64_t value) { std::memcpy(value_->data(), &value, sizeof(value)); }
  /// What value_ is when the stream gets there goes into the memory.
  Status take(Stream& stream) {
    const CopyOp op{value_->data(), memory_->address(), 8};
    return stream.copy(CopyDirection::kHostToDevice, {&op, 1}, CopyMode::kEach);
  }
  std::uint64_t taken() {
    const auto seen = pinned(8);
    copy(CopyDirection::kDeviceToHost, seen->data(), memory_->address(), 8);
    std::uint64_t value = 0;
    std::memcpy(&value, seen->data(), sizeof(value));
    return value;
  }
  bool is_idle(Stream& stream) {
    const auto idle = stream.query();
    EXPECT_TRUE(idle.has_value());
    return idle.value_or(true);
  }

  std::unique_ptr<PinnedBuffer> words_;
  std::unique_ptr<PinnedBuffer> value_;
  std::unique_ptr<DeviceMemory> memory_;
};

TEST_P(StreamWordsConformanceTest, WorkBehindAWaitRunsAfterTheHostWroteTheWord) {
  set(1);
  ASSERT_TRUE(stream_->wait_word(word(0), 3).has_value());
  ASSERT_TRUE(take(*stream_).has_value());
  word(0).store(2);  // not enough
  EXPECT_FALSE(is_idle(*stream_));
  set(2);
  word(0).store(3);
  finish();
  EXPECT_EQ(taken(), 2U);
}

TEST_P(StreamWordsConformanceTest, WordReachesAStreamAfterWhatWasEnqueuedBeforeItsWrite) {
  const auto reader = another(StreamPriority::kHigh);
  const auto seen = pinned(8);
  for (std::uint32_t round = 1; round <= 50; ++round) {
    ASSERT_TRUE(reader->wait_word(word(1), round).has_value());
    const CopyOp op{seen->data(), memory_->address(), 8};
    ASSERT_TRUE(reader->copy(CopyDirection::kDeviceToHost, {&op, 1}, CopyMode::kEach).has_value());
    ASSERT_TRUE(reader->write_word(word(2), round).has_value());
    set(round);
    ASSERT_TRUE(take(*stream_).has_value());
    ASSERT_TRUE(stream_->write_word(word(1), round).has_value());
    ASSERT_TRUE(stream_->wait_word(word(2), round).has_value());
    finish();
    std::uint64_t value = 0;
    std::memcpy(&value, seen->data(), sizeof(value));
    ASSERT_EQ(value, round);
    ASSERT_EQ(word(1).load(), round);
  }
}

TEST_P(StreamWordsConformanceTest, RecordedWaitsAndWritesWorkAtEachLaunch) {
  auto recorded = stream_->record([this](Stream& stream) -> Status {
    KVFERRY_TRY(stream.wait_word(word(0), 1));
    KVFERRY_TRY(take(stream));
    return stream.write_word(word(1), 7);
  });
  ASSERT_TRUE(recorded.has_value()) << recorded.error().to_string();
  for (std::uint64_t round = 1; round <= 3; ++round) {
    word(0).store(0);
    word(1).store(0);
    set(100);
    ASSERT_TRUE(stream_->launch(**recorded).has_value());
    EXPECT_FALSE(is_idle(*stream_));
    EXPECT_EQ(word(1).load(), 0U);
    set(round);
    word(0).store(1);
    finish();
    EXPECT_EQ(word(1).load(), 7U);
    EXPECT_EQ(taken(), round);
  }
}

// Fewer than CUDA_DEVICE_MAX_CONNECTIONS, which is 8: with as many as that waiting, kernels and
// small copies of other streams stand still, whatever their priorities (H100, driver 580).
TEST_P(StreamWordsConformanceTest, ManyWaitingStreamsDoNotHoldUpTheOneTheyWaitFor) {
  constexpr std::size_t kStreams = 6;
  std::vector<std::unique_ptr<Stream>> waiting;
  for (std::size_t i = 0; i < kStreams; ++i) waiting.push_back(another());
  const auto writer = another(StreamPriority::kHigh);
  for (const auto& stream : waiting) ASSERT_TRUE(stream->wait_word(word(0), 1).has_value());
  set(5);
  ASSERT_TRUE(take(*writer).has_value());
  ASSERT_TRUE(writer->write_word(word(1), 1).has_value());
  const EventFd written;
  ASSERT_TRUE(writer->notify(written.fd()).has_value());
  pollfd waited{written.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&waited, 1, test::soon().poll_timeout_ms()), 1);
  word(0).store(1);
  for (const auto& stream : waiting) {
    const EventFd ended;
    ASSERT_TRUE(stream->notify(ended.fd()).has_value());
    pollfd end{ended.fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&end, 1, test::soon().poll_timeout_ms()), 1);
  }
}

TEST_P(StreamWordsConformanceTest, WaitsCompareNumbersThatWrap) {
  word(0).store(0xFFFF'FFF0U);
  ASSERT_TRUE(stream_->wait_word(word(0), 0xFFFF'FFE0U).has_value());
  finish();
  ASSERT_TRUE(stream_->wait_word(word(0), 5).has_value());
  EXPECT_FALSE(is_idle(*stream_));
  word(0).store(6);
  finish();
}

TEST_P(StreamWordsConformanceTest, WordThatIsNoneOrOffItsPlaceIsRefused) {
  EXPECT_EQ(stream_->wait_word(StreamWord(), 1).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(stream_->write_word(StreamWord(), 1).error().code, ErrorCode::kInvalidArgument);
  const StreamWord off(reinterpret_cast<std::uint32_t*>(words_->data() + 2));
  EXPECT_EQ(stream_->wait_word(off, 1).error().code, ErrorCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Handles,
                         StreamWordsConformanceTest,
                         testing::Values(HandleKind::kVmm),
                         [](const auto& handles) { return std::string(to_string(handles.param)); });

}  // namespace
}  // namespace kvferry::ipc
