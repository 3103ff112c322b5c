// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/packet_socket.hpp"

#include "ipc/os/temp_dir.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

namespace kvferry::ipc {
namespace {

using ::testing::HasSubstr;

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

std::pair<PacketSocket, PacketSocket> connected_pair() {
  std::array<int, 2> fds{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()), 0);
  return {PacketSocket(UniqueFd(fds[0])), PacketSocket(UniqueFd(fds[1]))};
}

std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

ino_t inode_of(int fd) {
  struct stat info {};
  EXPECT_EQ(::fstat(fd, &info), 0);
  return info.st_ino;
}

// Sends what PacketSocket::send refuses to.
bool send_raw(int fd, std::size_t bytes, std::size_t fd_count) {
  std::vector<std::uint8_t> data(bytes, 1);
  iovec part{data.data(), data.size()};
  std::vector<std::byte> control(CMSG_SPACE(sizeof(int) * fd_count));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd_count != 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
    const std::vector<int> fds(fd_count, STDERR_FILENO);
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fd_count);
  }
  return ::sendmsg(fd, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

TEST(PacketSocketTest, CarriesPacketsWithTheirBordersAndDescriptors) {
  auto [left, right] = connected_pair();
  const test::ShortTempDir temp;
  const UniqueFd file(::open((temp / "file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  const std::vector<std::uint8_t> first{1, 2, 3};
  const std::vector<std::uint8_t> largest(PacketSocket::kMaxPacketBytes, 7);
  const std::vector<int> fds(PacketSocket::kMaxFds, file.get());
  ASSERT_TRUE(left.send(first).has_value());
  ASSERT_TRUE(left.send(first, fds).has_value());
  EXPECT_EQ(right.receive(soon())->bytes, first);
  const Packet packet = *right.receive(soon());
  ASSERT_EQ(packet.fds.size(), PacketSocket::kMaxFds);
  for (const UniqueFd& fd : packet.fds) {
    EXPECT_EQ(inode_of(fd.get()), inode_of(file.get()));
    EXPECT_NE(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  }
  EXPECT_FALSE(right.try_receive()->has_value());
}

TEST(PacketSocketTest, TheLargestPacketPassesBetweenConnectedProcessesSockets) {
  const test::ShortTempDir temp;
  PacketListener listener = *PacketListener::listen(temp / "socket");
  PacketSocket client = *PacketSocket::connect(temp / "socket", soon());
  PacketSocket served = std::move(**listener.try_accept());
  const std::vector<std::uint8_t> largest(PacketSocket::kMaxPacketBytes, 7);
  ASSERT_TRUE(client.send(largest).has_value());
  EXPECT_EQ(served.receive(soon())->bytes, largest);
  ASSERT_TRUE(served.send(largest).has_value());
  EXPECT_EQ(client.receive(soon())->bytes, largest);
  EXPECT_EQ(client.peer()->pid(), ::getpid());
}

TEST(PacketSocketTest, RefusesToSendEmptyAndOversizedPackets) {
  auto [left, right] = connected_pair();
  const std::vector<std::uint8_t> one{1};
  EXPECT_EQ(left.send({}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(left.send(std::vector<std::uint8_t>(PacketSocket::kMaxPacketBytes + 1)).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(left.send(one, std::vector<int>(PacketSocket::kMaxFds + 1, 0)).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_FALSE(right.try_receive()->has_value());
}

TEST(PacketSocketTest, CutPacketsAreProtocolErrorsAndLeakNoDescriptor) {
  auto [left, right] = connected_pair();
  const std::ptrdiff_t before = open_descriptors();
  ASSERT_TRUE(send_raw(left.fd(), PacketSocket::kMaxPacketBytes + 1, 3));
  ASSERT_TRUE(send_raw(left.fd(), 10, PacketSocket::kMaxFds + 1));
  for (int i = 0; i < 2; ++i) {
    const auto packet = right.try_receive();
    ASSERT_FALSE(packet.has_value());
    EXPECT_EQ(packet.error().code, ErrorCode::kProtocol);
  }
  EXPECT_EQ(open_descriptors(), before);
  ASSERT_TRUE(send_raw(left.fd(), 1, 0)) << "the connection itself goes on";
  EXPECT_TRUE(right.try_receive()->has_value());
}

TEST(PacketSocketTest, AFullBufferIsBusyAndAClosedPeerIsItsEnd) {
  auto [left, right] = connected_pair();
  const std::vector<std::uint8_t> bytes(1000, 1);
  int sent = 0;
  Status status;
  while ((status = left.send(bytes))) ASSERT_LT(++sent, 100'000);
  EXPECT_EQ(status.error().code, ErrorCode::kBusy);
  left = PacketSocket();
  for (int i = 0; i < sent; ++i) ASSERT_TRUE(right.try_receive()->has_value());
  EXPECT_EQ(right.try_receive().error().code, ErrorCode::kPeerDied);
  EXPECT_EQ(right.receive(soon()).error().code, ErrorCode::kPeerDied);
  EXPECT_EQ(right.send(bytes).error().code, ErrorCode::kPeerDied);
}

TEST(PacketSocketTest, ReceiveEndsAtItsDeadline) {
  auto [left, right] = connected_pair();
  const auto packet = right.receive(Deadline::after(std::chrono::milliseconds(10)));
  ASSERT_FALSE(packet.has_value());
  EXPECT_EQ(packet.error().code, ErrorCode::kTimeout);
}

TEST(PacketSocketTest, ConnectEndsAtItsDeadlineWhenNobodyAccepts) {
  const test::ShortTempDir temp;
  const PacketListener listener = *PacketListener::listen(temp / "socket");
  std::vector<PacketSocket> waiting;
  for (;;) {
    auto socket =
        PacketSocket::connect(temp / "socket", Deadline::after(std::chrono::milliseconds(20)));
    if (!socket) {
      EXPECT_EQ(socket.error().code, ErrorCode::kTimeout);
      break;
    }
    waiting.push_back(std::move(*socket));
    ASSERT_LT(waiting.size(), 5000U);
  }
}

TEST(PacketSocketTest, ConnectNamesWhatIsThere) {
  const test::ShortTempDir temp;
  EXPECT_EQ(PacketSocket::connect(temp / "none", soon()).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(PacketSocket::connect(temp / std::string(120, 'x'), soon()).error().code,
            ErrorCode::kInvalidArgument);
}

TEST(PacketListenerTest, ReplacesAStaleSocketButNothingElse) {
  const test::ShortTempDir temp;
  {
    std::optional<PacketListener> first = *PacketListener::listen(temp / "socket");
    const auto second = PacketListener::listen(temp / "socket");
    ASSERT_FALSE(second.has_value());
    EXPECT_EQ(second.error().code, ErrorCode::kAlreadyExists);
    EXPECT_TRUE(PacketSocket::connect(temp / "socket", soon()).has_value());
  }
  EXPECT_TRUE(std::filesystem::is_empty(temp.path()));
  std::ofstream(temp / "socket") << "precious";
  const auto refused = PacketListener::listen(temp / "socket");
  ASSERT_FALSE(refused.has_value());
  EXPECT_THAT(refused.error().message, HasSubstr("no socket"));
  EXPECT_TRUE(std::filesystem::exists(temp / "socket"));
}

}  // namespace
}  // namespace kvferry::ipc
