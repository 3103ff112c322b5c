// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/rendezvous.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "lease/hello.hpp"
#include "lease/lease_messages.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvferry::ipc::lease {
namespace {
constexpr std::size_t kMaxPeers = 8;
constexpr auto kConnect = std::chrono::milliseconds(100);
constexpr auto kAcceptPause = std::chrono::milliseconds(200);
}  // namespace

Rendezvous::Rendezvous(EventLoop& loop,
                       const LeaseIdentity& identity,
                       std::chrono::milliseconds timeout,
                       TransitionLog transitions,
                       OnConflict on_conflict)
    : loop_(loop),
      identity_(identity),
      timeout_(timeout),
      transitions_(std::move(transitions)),
      on_conflict_(std::move(on_conflict)) {}

Rendezvous::~Rendezvous() { close(); }

void Rendezvous::open(const std::filesystem::path& path) {
  if (listener_ || !peers_.empty()) return;
  auto listening = PacketListener::listen(path);
  if (listening) {
    listener_.emplace(std::move(listening).value());
    transitions_.record(Transition::kHelloMeet, {.detail = compared_as_listener(identity_)});
    loop_.watch(listener_->fd(), [this] { accept(); });
    return;
  }
  // Somebody waits here already. When it cannot be reached it is on its way out: next time.
  auto socket = PacketSocket::connect(path, Deadline::after(kConnect));
  if (!socket) return;
  // Once for all that it meets there, which may be many a minute.
  if (!std::exchange(said_, true)) {
    transitions_.record(Transition::kHelloSay, {.detail = compared_as_greeter(identity_)});
  }
  if (const Status sent = send(*socket, LeaseMessage::kHello, HelloBody{identity_}); !sent) return;
  add(std::move(socket).value(), true);
}

void Rendezvous::accept() {
  auto accepted = listener_->try_accept();
  if (accepted) {
    if (*accepted && peers_.size() < kMaxPeers) add(std::move(**accepted), false);
    return;
  }
  // No descriptors left, say: the listener stays readable, so it is left alone for a while.
  log_warn("lease: rendezvous: accept: {}", accepted.error().to_string());
  loop_.unwatch(listener_->fd());
  pause_timer_ = loop_.after(kAcceptPause, [this] {
    pause_timer_ = 0;
    loop_.watch(listener_->fd(), [this] { accept(); });
  });
}

void Rendezvous::close() {
  while (!peers_.empty()) drop(peers_.front().socket.fd());
  said_ = false;
  if (!listener_) return;
  loop_.cancel(std::exchange(pause_timer_, 0));
  loop_.unwatch(listener_->fd());
  listener_.reset();
}

void Rendezvous::add(PacketSocket socket, bool ours) {
  const int fd = socket.fd();
  const TimerId timer = loop_.after(timeout_, [this, fd] { drop(fd); });
  peers_.push_back({std::move(socket), timer, ours});
  loop_.watch(fd, [this, fd] { on_packet(fd); });
}

void Rendezvous::drop(int fd) {
  const auto found = std::find_if(peers_.begin(), peers_.end(),
                                  [fd](const Peer& peer) { return peer.socket.fd() == fd; });
  if (found == peers_.end()) return;
  loop_.cancel(found->timer);
  loop_.unwatch(fd);
  peers_.erase(found);
}

void Rendezvous::on_packet(int fd) {
  const auto found = std::find_if(peers_.begin(), peers_.end(),
                                  [fd](const Peer& peer) { return peer.socket.fd() == fd; });
  KVFERRY_CHECK(found != peers_.end(), "a packet of a peer that is gone");
  auto packet = found->socket.try_receive();
  if (packet && !packet->has_value()) return;
  const Status agreed = packet ? answer(*found, std::move(**packet)) : ok();
  drop(fd);
  if (!agreed && is_permanent(agreed.error())) return on_conflict_(agreed.error());
  if (!agreed) log_debug("lease: rendezvous: {}", agreed.error().to_string());
}

Status Rendezvous::answer(Peer& peer, Packet packet) const {
  KVFERRY_ASSIGN(const Incoming incoming, read_header(std::move(packet)));
  if (peer.ours) {
    if (incoming.message != LeaseMessage::kRefused) return ok();
    KVFERRY_ASSIGN(RefusedBody refused, read_body<RefusedBody>(incoming, "Refused"));
    if (is_permanent(refused.error)) {
      transitions_.record(Transition::kHelloRefused,
                          {.detail = static_cast<std::uint64_t>(refused.error.code)});
    }
    return std::move(refused.error);
  }
  if (incoming.message != LeaseMessage::kHello || incoming.version != kLeaseProtocolVersion) {
    return KVFERRY_ERROR(kProtocol, "message {} of version {} instead of a hello",
                         static_cast<int>(incoming.message), incoming.version);
  }
  KVFERRY_ASSIGN(const HelloBody hello, read_body<HelloBody>(incoming, "Hello"));
  KVFERRY_ASSIGN(const ProcessRef process, peer.socket.peer());
  Status agreed = compare_roles(identity_, ::getpid(), hello.identity, process.pid());
  if (!agreed) {
    transitions_.record(Transition::kHelloRefuse,
                        {.peer = hello.identity.incarnation,
                         .detail = static_cast<std::uint64_t>(agreed.error().code)});
    // Should it not arrive, the other side finds out from whoever comes next.
    (void)send(peer.socket, LeaseMessage::kRefused, RefusedBody{agreed.error()});
  }
  return agreed;
}

}  // namespace kvferry::ipc::lease
