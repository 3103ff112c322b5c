// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_broadcast.hpp"

#include "device/host_channel.hpp"
#include "device/host_stream.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "os/syscall.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>
#include <utility>

namespace kvferry::ipc {
namespace {

using std::chrono_literals::operator""ms;

/// Between two looks at whether it was called off.
constexpr auto kStep = 50ms;
/// For a rank that has connected to say which one it is.
constexpr auto kIntroduction = 200ms;
constexpr std::uint8_t kAllSeated = 1;

/// In the abstract namespace, so that nothing is left of it: its secret is the id.
struct Meeting {
  sockaddr_un address{};
  socklen_t size = 0;
};

Meeting meeting_of(const BroadcastId& id) {
  Meeting meeting;
  meeting.address.sun_family = AF_UNIX;
  std::string name = "kvferry-broadcast-";
  Digest digest;
  std::copy(id.begin(), id.end(), digest.bytes.begin());
  name += digest.hex();
  // The first byte, zero, says that it is abstract.
  std::memcpy(&meeting.address.sun_path[1], name.data(), name.size());
  meeting.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return meeting;
}

const sockaddr* raw(const Meeting& meeting) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): the sockets interface.
  return reinterpret_cast<const sockaddr*>(&meeting.address);
}

class HostRoot final : public BroadcastRoot {
 public:
  HostRoot(BroadcastId id, UniqueFd listener)
      : id_(std::move(id)), listener_(std::move(listener)) {}
  [[nodiscard]] const BroadcastId& id() const noexcept override { return id_; }
  [[nodiscard]] int fd() const noexcept { return listener_.get(); }

 private:
  BroadcastId id_;
  UniqueFd listener_;
};

class HostGroup final : public BroadcastGroup {
 public:
  HostGroup(std::uint32_t rank, std::vector<PacketSocket> peers)
      : channel_(std::make_shared<HostChannel>(rank, std::move(peers))) {}
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;
  ~HostGroup() override { channel_->end(); }

  [[nodiscard]] Status broadcast(Stream& stream,
                                 DevicePtr memory,
                                 std::uint64_t size_bytes,
                                 const BroadcastWait& wait) override {
    auto* const own = dynamic_cast<HostStream*>(&stream);
    if (own == nullptr || memory.address == 0) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "a broadcast of {} bytes at {:#x} on a stream of {} device: it takes "
                           "memory and a stream of a host device",
                           size_bytes, memory.address, own == nullptr ? "another" : "a host");
    }
    KVFERRY_TRY(check());
    return own->enqueue(host_work::Broadcast{channel_, memory, size_bytes, wait.deadline});
  }
  [[nodiscard]] Status check() override { return channel_->state(); }

 private:
  std::shared_ptr<HostChannel> channel_;
};

Status check_wait(const BroadcastWait& wait, std::uint32_t rank, std::size_t missing) {
  if (wait.cancelled.load()) {
    return KVFERRY_ERROR(kCancelled, "rank {} was called off before all ranks had joined", rank);
  }
  if (wait.deadline.expired()) {
    return KVFERRY_ERROR(kTimeout, "rank {} waited for {} ranks to join a broadcast", rank,
                         missing);
  }
  return ok();
}

Deadline step_of(const BroadcastWait& wait) {
  return Deadline::after(kStep).earlier(wait.deadline);
}

/// Of one rank that has connected; of no rank: nothing.
Status seat_next(const HostRoot& root,
                 std::vector<PacketSocket>& seats,
                 const BroadcastWait& wait) {
  // wait-none: the listener is O_NONBLOCK
  UniqueFd fd(::accept4(root.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) {
    return errno == EAGAIN || errno == ECONNABORTED || errno == EINTR
               ? ok()
               : Status(KVFERRY_ERRNO("accept a rank of a broadcast"));
  }
  PacketSocket socket(std::move(fd));
  std::uint32_t rank = 0;
  const auto refuse = [](std::string_view why) {
    log_warn("a broadcast: a connection is refused: {}", why);
    return ok();
  };
  if (const Status own = socket.check_peer_uid(); !own) return refuse(own.error().message);
  // wait: a rank that has connected to name itself; kIntroduction; its end
  const auto said = socket.receive(Deadline::after(kIntroduction).earlier(wait.deadline));
  if (!said) return refuse(said.error().message);
  if (said->bytes.size() != sizeof(rank)) return refuse("it does not name its rank");
  std::memcpy(&rank, said->bytes.data(), sizeof(rank));
  if (rank == 0 || rank > seats.size() || seats[rank - 1].valid()) {
    return refuse(fmt::format("it says that it is rank {} of {}", rank, seats.size() + 1));
  }
  seats[rank - 1] = std::move(socket);
  return ok();
}

Result<std::vector<PacketSocket>> seat_all(const HostRoot& root,
                                           const BroadcastSeat& seat,
                                           const BroadcastWait& wait) {
  std::vector<PacketSocket> seats(seat.ranks - 1);
  const auto missing = [&seats] {
    return static_cast<std::size_t>(
        std::count_if(seats.begin(), seats.end(), [](const auto& one) { return !one.valid(); }));
  };
  while (missing() > 0) {
    KVFERRY_TRY(check_wait(wait, 0, missing()));
    // wait: ranks that join; step_of(), of the caller's deadline; being called off
    if (poll_until(root.fd(), POLLIN, step_of(wait)) > 0) KVFERRY_TRY(seat_next(root, seats, wait));
  }
  for (PacketSocket& other : seats) KVFERRY_TRY(other.send(std::span(&kAllSeated, 1)));
  return seats;
}

Result<std::vector<PacketSocket>> join_root(const BroadcastSeat& seat, const BroadcastWait& wait) {
  const Meeting meeting = meeting_of(seat.id);
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return KVFERRY_ERRNO("socket for a broadcast");
  // wait-none: its backlog holds all ranks
  if (::connect(fd.get(), raw(meeting), meeting.size) != 0) {
    if (errno != ECONNREFUSED) return KVFERRY_ERRNO("rank {} joins a broadcast", seat.rank);
    return KVFERRY_ERROR(kPeerDied, "rank {} finds no rank 0 to join: it has left the broadcast",
                         seat.rank);
  }
  std::vector<PacketSocket> seats;
  PacketSocket& root = seats.emplace_back(std::move(fd));
  KVFERRY_TRY(root.check_peer_uid());
  std::array<std::uint8_t, sizeof(seat.rank)> name{};
  std::memcpy(name.data(), &seat.rank, sizeof(seat.rank));
  KVFERRY_TRY(root.send(name));
  for (;;) {
    KVFERRY_ASSIGN(const auto said, root.try_receive());
    if (said) return seats;
    KVFERRY_TRY(check_wait(wait, seat.rank, seat.ranks - 1));
    // wait: all ranks have joined; step_of(), of the caller's deadline; rank 0's end
    (void)poll_until(root.fd(), POLLIN, step_of(wait));
  }
}

}  // namespace

Result<std::unique_ptr<BroadcastRoot>> open_host_broadcast() {
  const Digest name = Digest::random();
  BroadcastId id(name.bytes.begin(), name.bytes.end());
  const Meeting meeting = meeting_of(id);
  UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid() || ::bind(listener.get(), raw(meeting), meeting.size) != 0 ||
      ::listen(listener.get(), SOMAXCONN) != 0) {
    return KVFERRY_ERRNO("open a broadcast");
  }
  return std::unique_ptr<BroadcastRoot>(
      std::make_unique<HostRoot>(std::move(id), std::move(listener)));
}

Result<std::unique_ptr<BroadcastGroup>> join_host_broadcast(const BroadcastSeat& seat,
                                                            const BroadcastWait& wait) {
  const auto* const root = dynamic_cast<const HostRoot*>(seat.root);
  if (seat.ranks < 2 || seat.rank >= seat.ranks || (seat.rank == 0) != (root != nullptr) ||
      seat.id.size() != sizeof(Digest::bytes) || (root != nullptr && root->id() != seat.id)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "rank {} of {} cannot join a broadcast with an id of {} bytes, {} root: "
                         "rank 0 alone brings the root whose id it is",
                         seat.rank, seat.ranks, seat.id.size(),
                         root == nullptr ? "without" : "with");
  }
  auto seats = root != nullptr ? seat_all(*root, seat, wait) : join_root(seat, wait);
  if (!seats) return seats.error();
  return std::unique_ptr<BroadcastGroup>(
      std::make_unique<HostGroup>(seat.rank, std::move(seats).value()));
}

}  // namespace kvferry::ipc
