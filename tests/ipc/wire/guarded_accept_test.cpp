// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Whom accept4() of this program turns away when descriptors run short.
#include "wire/guarded_accept.hpp"

#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/descriptors.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <optional>

namespace kvferry::ipc {
namespace {

/// Listens on a name that the kernel chose.
class Listener {
 public:
  Listener() : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    const sockaddr_un any{.sun_family = AF_UNIX, .sun_path = {}};
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any.sun_family)),
              0);
    EXPECT_EQ(::listen(fd_.get(), 8), 0);
    EXPECT_EQ(::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&name_), &length_), 0);
  }

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] UniqueFd connect() const {
    UniqueFd client(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(client.get(), reinterpret_cast<const sockaddr*>(&name_), length_), 0);
    return client;
  }
  /// As ZeroMQ does it.
  [[nodiscard]] UniqueFd accept() const {
    return UniqueFd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }

 private:
  UniqueFd fd_;
  sockaddr_un name_{};
  socklen_t length_ = sizeof(name_);
};

/// Leaves so many descriptors to this process, for as long as it lives.
class FewDescriptors {
 public:
  explicit FewDescriptors(std::size_t left) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    // The lowest free number is what the next one gets.
    const UniqueFd next(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    rlimit few = before_;
    few.rlim_cur = static_cast<rlim_t>(next.get()) + left;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;
  ~FewDescriptors() { (void)::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

bool is_closed(const UniqueFd& client) {
  pollfd entry{client.get(), POLLIN, 0};
  char byte = 0;
  return ::poll(&entry, 1, 0) == 1 && ::read(client.get(), &byte, 1) == 0;
}

TEST(GuardedAcceptTest, WhoWouldTakeALastDescriptorIsClosedAtOnce) {
  const Listener listener;
  const GuardedAccept guard(listener.fd());
  const UniqueFd client = listener.connect();
  const UniqueFd other = listener.connect();
  {
    const FewDescriptors few(kReservedDescriptors);
    EXPECT_FALSE(listener.accept().valid());
    EXPECT_EQ(errno, ECONNABORTED);
    EXPECT_TRUE(is_closed(client));
  }
  EXPECT_TRUE(listener.accept().valid());
}

TEST(GuardedAcceptTest, OneMoreThanTheLastIsTaken) {
  const Listener listener;
  const GuardedAccept guard(listener.fd());
  const UniqueFd client = listener.connect();
  const FewDescriptors few(kReservedDescriptors + 1);
  EXPECT_TRUE(listener.accept().valid());
}

TEST(GuardedAcceptTest, WithoutDescriptorsItIsAnAbortedConnection) {
  const Listener guarded;
  const Listener plain;
  const GuardedAccept guard(guarded.fd());
  const UniqueFd client = guarded.connect();
  const UniqueFd other = plain.connect();
  const FewDescriptors none(0);
  EXPECT_FALSE(guarded.accept().valid());
  EXPECT_EQ(errno, ECONNABORTED) << "ZeroMQ aborts on what it is";
  EXPECT_FALSE(is_closed(client)) << "it waits for its turn";
  EXPECT_FALSE(plain.accept().valid());
  EXPECT_EQ(errno, EMFILE) << "others' sockets are libc's";
}

TEST(GuardedAcceptTest, TheEndOfOneLeavesTheOthersGuarded) {
  const Listener first;
  const Listener second;
  std::optional<GuardedAccept> guard_of_first(std::in_place, first.fd());
  const GuardedAccept guard_of_second(second.fd());
  const UniqueFd client_of_first = first.connect();
  const UniqueFd client_of_second = second.connect();
  guard_of_first.reset();
  const FewDescriptors few(kReservedDescriptors);
  EXPECT_TRUE(first.accept().valid()) << "no longer ours";
  EXPECT_FALSE(second.accept().valid());
  EXPECT_TRUE(is_closed(client_of_second));
}

}  // namespace
}  // namespace kvferry::ipc
