// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/registered_peers.hpp"

#include "kvferry/ipc/os/descriptors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kMaxPeers = 4096;
constexpr std::size_t kMaxConnectedOfProcess = 256;
// With those that have closed their connection, whose process's death is still waited for: a client
// for each round of a training is no flood, and the other half is for others.
constexpr std::size_t kMaxPeersOfProcess = kMaxPeers / 2;
constexpr std::size_t kMaxDeparted = 1024;
// Bells of one peer in one go.
constexpr int kPacketsPerRound = 64;
constexpr auto kPresenceTime = std::chrono::seconds(10);
// A dying process closes its sockets a moment before its death is announced.
constexpr auto kSilenceTime = std::chrono::milliseconds(50);

}  // namespace

RegisteredPeers::RegisteredPeers(EventLoop& loop,
                                 const ControlServer::Options& options,
                                 ProtocolErrors& errors,
                                 Hooks hooks)
    : loop_(loop), options_(options), errors_(errors), hooks_(std::move(hooks)) {}

RegisteredPeers::~RegisteredPeers() {
  for (auto& [id, peer] : peers_) forget(*peer);
}

void RegisteredPeers::on_hello(RegistryCandidate candidate) {
  const IncarnationId id = candidate.hello.incarnation;
  ReplyCache replies;
  if (auto refused = check_duplicate(id, candidate.process, replies)) {
    errors_.warn(*refused);
    refuse_candidate(candidate.socket, std::move(*refused));
    return;
  }
  RegistryWelcome welcome;
  welcome.manager_session = options_.session;
  welcome.pool_bytes = options_.pool_bytes;
  std::array<int, 3> fds{};
  std::size_t given = 0;
  if (candidate.hello.kind == ProcessKind::kMover && options_.pool_fd >= 0) {
    fds.at(given++) = options_.pool_fd;
    if (options_.catalogue_fd >= 0) {
      welcome.pool = options_.pool;
      welcome.catalogue_bytes = options_.catalogue_bytes;
      fds.at(given++) = options_.catalogue_fd;
    }
  } else if (candidate.hello.kind == ProcessKind::kEngine && options_.table_fd >= 0) {
    welcome.table_bytes = options_.table_bytes;
    fds.at(given++) = options_.table_fd;
  }
  std::optional<MessageChannel::Made> made = make_channel(candidate.hello);
  if (made) {
    welcome.ring_connection = last_connection_;
    fds.at(given++) = made->fd.get();
  }
  const Status sent = candidate.socket.send(encode(welcome), std::span(fds).first(given));
  if (!sent) {
    errors_.warn(sent.error());
    return;
  }
  Peer peer{id, candidate.hello.kind, std::move(candidate.hello.name), candidate.process.pid()};
  auto queue = std::make_shared<SendQueue>(static_cast<std::size_t>(options_.max_queued_messages),
                                           options_.max_queued_bytes, writable_);
  auto entry = std::make_unique<RegisteredPeer>(RegisteredPeer{
      .peer = peer,
      .registry = std::move(candidate.socket),
      .process = std::move(candidate.process),
      .outbox = PeerOutbox(peer, made ? std::optional(std::move(made->channel)) : std::nullopt,
                           std::move(queue), std::move(replies))});
  entry->timer = loop_.after(kPresenceTime, [this, id] { on_absent(id); });
  loop_.watch(entry->registry.fd(), [this, id] { on_registry(id); });
  loop_.watch(entry->process.pidfd(), [this, id] { on_death(id); });
  peers_.emplace(id, std::move(entry));
}

// Without memory for one, its messages take the socket.
std::optional<MessageChannel::Made> RegisteredPeers::make_channel(const RegistryHello& hello) {
  if (!hello.wants_rings) return std::nullopt;
  auto made = MessageChannel::create("kvferry-messages", ++last_connection_);
  if (made) return std::move(made).value();
  errors_.warn(made.error());
  return std::nullopt;
}

// One process may come again under its name once its earlier connection is closed. What it has
// asked before is not asked anew.
std::optional<Error> RegisteredPeers::check_duplicate(const IncarnationId& id,
                                                      const ProcessRef& process,
                                                      ReplyCache& replies) {
  if (const RegisteredPeer* old = find(id); old != nullptr && old->registry.valid()) {
    on_registry(id);  // its end may be unread yet
  }
  if (RegisteredPeer* old = find(id); old != nullptr) {
    if (old->registry.valid() || old->peer.pid != process.pid() ||
        old->process.start_time() != process.start_time()) {
      return KVFERRY_ERROR(kAlreadyExists, "incarnation {} is registered by {} (process {})",
                           id.hex(), old->peer.name, old->peer.pid);
    }
    // It is alive: it just said hello. What is told is that its earlier link has ended.
    if (old->present && !old->silent) hooks_.on_silent(old->peer);
    replies = old->outbox.take_replies();
    remove(id);
  }
  if (Status room = check_room(process); !room) return std::move(room).error();
  return std::nullopt;
}

Status RegisteredPeers::check_room(const ProcessRef& process) const {
  if (peers_.size() >= kMaxPeers) {
    return KVFERRY_ERROR(kBusy, "{} peers are registered already", peers_.size());
  }
  std::size_t absent = 0;
  std::size_t of_process = 0;
  std::size_t connected = 0;
  for (const auto& [id, entry] : peers_) {
    if (!entry->present) ++absent;
    if (entry->peer.pid == process.pid() && entry->process.start_time() == process.start_time()) {
      ++of_process;
      if (entry->registry.valid()) ++connected;
    }
  }
  if (connected >= kMaxConnectedOfProcess || of_process >= kMaxPeersOfProcess) {
    return KVFERRY_ERROR(kBusy, "process {} is {} peers already, {} of them connected",
                         process.pid(), of_process, connected);
  }
  // Each one that is welcome makes another connection, to the control socket.
  return need_descriptors(absent + 1);
}

void RegisteredPeers::set_present(RegisteredPeer& peer) {
  peer.present = true;
  loop_.cancel(peer.timer);
}

// Only bells are expected after the hello: all else is the end of file, or a violation that ends
// it.
void RegisteredPeers::on_registry(const IncarnationId& id) {
  RegisteredPeer& entry = *peers_.at(id);
  const bool rings = entry.outbox.channel() != nullptr;
  auto packet = entry.registry.try_receive();
  bool rung = false;
  for (int i = 1; rings && packet && packet->has_value() && is_bell(**packet); ++i) {
    rung = true;
    if (i == kPacketsPerRound) break;
    packet = entry.registry.try_receive();
  }
  const bool open = packet && (!packet->has_value() || (rung && is_bell(**packet)));
  if (rung || (rings && !open)) hooks_.on_bell(entry);
  if (open) return;
  if (packet || packet.error().code != ErrorCode::kPeerDied) {
    errors_.count(KVFERRY_ERROR(kProtocol, "unexpected packet of {} (process {}) on the registry",
                                entry.peer.name, entry.peer.pid));
  }
  loop_.unwatch(entry.registry.fd());
  entry.registry = PacketSocket();
  loop_.cancel(entry.timer);
  if (!entry.present) {
    remove(id);
    return;
  }
  entry.timer = loop_.after(kSilenceTime, [this, id] { on_silence(id); });
}

// One that has said nothing gave up waiting for our greeting, such as of a manager that was
// stopped, and comes back under another name: nothing of it is here that its death would have to
// give back. But a mover was given the pool.
bool RegisteredPeers::goes_with_its_connection(const RegisteredPeer& peer) noexcept {
  return peer.leaving || (!peer.spoken && peer.peer.kind != ProcessKind::kMover);
}

void RegisteredPeers::on_silence(const IncarnationId& id) {
  RegisteredPeer& entry = *peers_.at(id);
  if (entry.process.has_died()) {
    on_death(id);
    return;
  }
  if (goes_with_its_connection(entry)) {
    const Peer left = entry.peer;
    remove(id);
    hooks_.on_left(left);
    return;
  }
  entry.silent = true;
  hooks_.on_silent(entry.peer);
}

void RegisteredPeers::remove_when_closed(RegisteredPeer& peer) {
  if (std::exchange(peer.leaving, true) || peer.dying || !peer.silent) return;
  // It has closed before, and all that waits for the end of its connection is done.
  peer.timer = loop_.after(Duration::zero(), [this, id = peer.peer.id] { on_silence(id); });
}

void RegisteredPeers::on_absent(const IncarnationId& id) {
  errors_.warn(KVFERRY_ERROR(kTimeout, "{} registered and sent nothing", peers_.at(id)->peer.name));
  remove(id);
}

void RegisteredPeers::on_death(const IncarnationId& id) {
  RegisteredPeer& entry = *peers_.at(id);
  if (std::exchange(entry.dying, true)) return;
  loop_.unwatch(entry.process.pidfd());
  loop_.cancel(entry.timer);
  hooks_.on_dying(entry);
}

void RegisteredPeers::remove(const IncarnationId& id) {
  auto node = peers_.extract(id);
  forget(*node.mapped());
  if (departed_.size() >= kMaxDeparted) departed_.clear();
  departed_.insert(id);
}

void RegisteredPeers::forget(RegisteredPeer& peer) {
  if (peer.registry.valid()) loop_.unwatch(peer.registry.fd());
  loop_.unwatch(peer.process.pidfd());
  loop_.cancel(peer.timer);
}

RegisteredPeer* RegisteredPeers::find(const IncarnationId& id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second.get();
}

}  // namespace kvferry::ipc
