// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/bounded_write.hpp"

#include "base/stderr_sink.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

namespace kvferry::ipc {
namespace {

using std::chrono_literals::operator""ms;

struct Ends {
  UniqueFd read;
  UniqueFd write;
};

Ends make_pipe() {
  std::array<int, 2> fds{};
  EXPECT_EQ(::pipe2(fds.data(), O_CLOEXEC), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

Ends make_stream_pair() {
  std::array<int, 2> fds{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

/// What can be read now.
std::string drain(int fd) {
  EXPECT_EQ(::fcntl(fd, F_SETFL, O_NONBLOCK), 0);
  std::string text;
  std::array<char, 65536> chunk{};
  for (ssize_t size = 0; (size = ::read(fd, chunk.data(), chunk.size())) > 0;) {
    text.append(chunk.data(), static_cast<std::size_t>(size));
  }
  return text;
}

// The descriptors block, as those that a process is started with do: without the limit these tests
// never end.
TEST(BoundedWriteTest, WritesAllToAReaderThatReads) {
  const Ends ends = make_pipe();
  const std::string text(30'000, 'a');
  EXPECT_EQ(write_bounded(ends.write.get(), text, 100ms), 0);
  EXPECT_EQ(drain(ends.read.get()), text);
}

TEST(BoundedWriteTest, GivesUpOnAPipeThatNobodyReads) {
  const Ends ends = make_pipe();
  EXPECT_EQ(write_bounded(ends.write.get(), std::string(1 << 20, 'a'), 1ms), EAGAIN);
  EXPECT_EQ(write_bounded(ends.write.get(), "more", Duration::zero()), EAGAIN);
  EXPECT_GT(drain(ends.read.get()).size(), 0U);
  EXPECT_EQ(write_bounded(ends.write.get(), "again", 1ms), 0);
  EXPECT_EQ(drain(ends.read.get()), "again");
}

TEST(BoundedWriteTest, GivesUpOnASocketThatNobodyReads) {
  const Ends ends = make_stream_pair();
  EXPECT_EQ(write_bounded(ends.write.get(), std::string(8 << 20, 'a'), 1ms), EAGAIN);
}

TEST(BoundedWriteTest, SaysWhyItCannotWrite) {
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  EXPECT_EQ(write_bounded(full.get(), "text", 1ms), ENOSPC);
  EXPECT_EQ(write_bounded(-1, "text", 1ms), EBADF);
}

TEST(StderrSinkTest, DropsLinesThatNobodyReadsAndCountsThem) {
  const Ends ends = make_pipe();
  spdlog::logger logger("test", std::make_shared<StderrSink>(ends.write.get(), 1ms));
  logger.set_pattern("%v");
  // More than any pipe takes.
  const std::string line(4000, 'x');
  constexpr int kLines = 1000;
  for (int i = 0; i < kLines; ++i) logger.info(line);
  const std::string before = drain(ends.read.get());
  EXPECT_LT(before.size(), kLines * line.size());
  logger.info("goes on");
  EXPECT_THAT(
      drain(ends.read.get()),
      testing::MatchesRegex("[0-9]+ log lines were dropped: nobody read stderr\ngoes on\n"));
}

}  // namespace
}  // namespace kvferry::ipc
