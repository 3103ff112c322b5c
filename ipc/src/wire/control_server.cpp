// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "os/socket_address.hpp"
#include "wire/guarded_accept.hpp"
#include "wire/protocol_errors.hpp"
#include "wire/registered_peers.hpp"
#include "wire/registry.hpp"
#include "wire/wire_version.hpp"
#include "wire/zmq_socket.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

// Time for last messages to leave when the server ends.
constexpr auto kFarewell = std::chrono::milliseconds(100);
// A round is short, so that timers, deaths and other descriptors have their turn.
constexpr int kMessagesPerRound = 256;
constexpr std::size_t kBytesPerRound = std::size_t{32} << 20;
// No ring holds more.
constexpr int kMessagesOfARing = MessageChannel::kCapacity / ring::kHeaderBytes;
// Messages of others after which a dead peer has none left: they come from each in turn.
constexpr std::uint64_t kTurnsAfterDeath = 64;

UniqueFd listen_or_throw(const std::filesystem::path& path) {
  auto listening = listen_on_path(path, SOCK_STREAM);
  if (!listening) throw Exception(std::move(listening).error());
  return std::move(listening).value();
}

Bytes encode_reply(const Envelope& request, std::optional<Error> error, Bytes body) {
  Envelope reply;
  reply.kind = request.kind;
  reply.request = request.request;
  reply.is_reply = true;
  reply.error = std::move(error);
  reply.body = std::move(body);
  return encode(reply);
}

}  // namespace

class ControlServer::Impl {
 public:
  Impl(EventLoop& loop, Options options, ControlHandler& handler)
      : loop_(loop),
        options_(std::move(options)),
        handler_(handler),
        registry_(loop,
                  options_.registry_path,
                  [this](RegistryCandidate candidate) { peers_.on_hello(std::move(candidate)); }),
        listening_(listen_or_throw(options_.control_path)),
        guard_(listening_.get()),
        socket_(ZmqSocket::serve(
            options_.control_path, std::move(listening_), options_.max_unread_messages)),
        peers_(loop,
               options_,
               errors_,
               {.on_silent = [this](const Peer& peer) { handler_.on_peer_silent(peer); },
                .on_dying = [this](RegisteredPeer& peer) { on_dying(peer); },
                .on_left = [this](const Peer& peer) { handler_.on_peer_left(peer); },
                .on_bell = [this](RegisteredPeer& peer) { take_ring_round(peer); }}) {
    loop_.watch(socket_.fd(), [this] { drain(); });
    loop_.watch(peers_.writable().fd(), [this] { on_writable(); });
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  ~Impl() {
    loop_.unwatch(socket_.fd());
    loop_.unwatch(peers_.writable().fd());
    socket_.set_linger(kFarewell);
    // Under the registry's lock, which members hold until after this.
    ::unlink(options_.control_path.c_str());
  }

  Status send(const IncarnationId& id, Bytes bytes) {
    RegisteredPeer* peer = peers_.find(id);
    if (peer == nullptr || !peer->can_be_sent_to()) {
      return KVFERRY_ERROR(kNotFound, "no peer {} is connected", id.hex());
    }
    Status sent = peer->outbox.send(socket_, peer->registry, std::move(bytes));
    drain_later();
    return sent;
  }

  Status send_reply(const IncarnationId& id,
                    const Envelope& request,
                    std::optional<Error> error,
                    Bytes body) {
    if (request.request.value == 0 || request.is_reply) {
      return KVFERRY_ERROR(kInvalidArgument, "{} from {} is no request: it has no reply",
                           to_string(request.kind), id.hex());
    }
    Bytes bytes = encode_reply(request, std::move(error), std::move(body));
    Status sent = send(id, Bytes(bytes));
    // Kept even when it could not be sent: the repeated request gets it.
    if (RegisteredPeer* peer = peers_.find(id); peer != nullptr) {
      const bool refused = !sent && sent.error().code == ErrorCode::kBusy;
      peer->outbox.remember(request.request, std::move(bytes), refused);
    }
    return sent;
  }

  void forget_when_closed(const IncarnationId& id) {
    if (RegisteredPeer* peer = peers_.find(id); peer != nullptr) peers_.remove_when_closed(*peer);
  }

  [[nodiscard]] const ProcessRef* process(const IncarnationId& id) const {
    const RegisteredPeer* peer = peers_.find(id);
    return peer == nullptr ? nullptr : &peer->process;
  }

  [[nodiscard]] std::uint64_t protocol_errors() const noexcept {
    return errors_.count() + registry_.protocol_errors();
  }

 private:
  // ---- last messages ----

  // What it sent before it died comes before its death: the rounds go on until it has no turn any
  // more. Others may send for ever, so not until nothing comes at all.
  void on_dying(RegisteredPeer& peer) {
    peer.last_message = received_;
    dying_.push_back(peer.peer.id);
    drain();
  }

  void bury(bool nothing_comes) {
    const std::uint64_t turns = kTurnsAfterDeath + 2 * peers_.all().size();
    std::vector<IncarnationId> over;
    std::erase_if(dying_, [&](const IncarnationId& id) {
      const RegisteredPeer* peer = peers_.find(id);
      if (peer == nullptr) return true;
      if (!nothing_comes && received_ - peer->last_message < turns) return false;
      over.push_back(id);
      return true;
    });
    for (const IncarnationId& id : over) {
      RegisteredPeer& peer = *peers_.find(id);
      peer.ring_posted = false;
      int last_messages = kMessagesOfARing;
      take_ring(peer, last_messages);
      peer.dead = true;
      if (peer.present) handler_.on_peer_died(peer.peer);
      peers_.remove(id);
    }
  }

  // ---- room in the queues ----

  void on_writable() {
    (void)peers_.writable().drain();
    std::vector<Peer> writable;
    for (const auto& [id, peer] : peers_.all()) {
      if (!peer->outbox.take_writable() || !peer->can_be_sent_to()) continue;
      peer->outbox.send_unsent(socket_, peer->registry);
      writable.push_back(peer->peer);
    }
    drain_later();
    for (const Peer& peer : writable) handler_.on_peer_writable(peer);
  }

  // ---- messages ----

  // One round.
  void drain() {
    if (draining_) return;
    draining_ = true;
    const Undrain undrain{*this};
    bool nothing_comes = false;
    std::size_t bytes = 0;
    int left = kMessagesPerRound;
    while (left > 0 && bytes < kBytesPerRound) {
      if (!received_early_) {
        received_early_ = socket_.try_receive();
        if (!received_early_) {
          nothing_comes = true;
          break;
        }
        ++received_;
      }
      bytes += received_early_->body.size();
      --left;
      if (!dispatch(*received_early_, left)) break;
      received_early_.reset();
    }
    if (!dying_.empty()) bury(nothing_comes || !has_received());
  }

  [[nodiscard]] bool has_received() noexcept {
    return received_early_.has_value() || socket_.readable();
  }

  // The socket's descriptor announces nothing that a call of ours has already noticed.
  void drain_later() {
    if (draining_ || drain_posted_ || !has_received()) return;
    drain_posted_ = true;
    loop_.post([this, alive = std::weak_ptr<bool>(alive_)] {
      if (alive.expired()) return;
      drain_posted_ = false;
      drain();
    });
  }

  struct Undrain {
    Impl& impl;
    explicit Undrain(Impl& target) : impl(target) {}
    Undrain(const Undrain&) = delete;
    Undrain& operator=(const Undrain&) = delete;
    ~Undrain() {
      impl.draining_ = false;
      impl.drain_later();
    }
  };

  // False: there is more before it than is left of this round.
  bool dispatch(const ZmqMessage& message, int& left) {
    RegisteredPeer* found = message.sender ? peers_.find(*message.sender) : nullptr;
    if (found == nullptr) {
      if (message.sender && peers_.has_departed(*message.sender)) return true;
      errors_.count(KVFERRY_ERROR(kProtocol,
                                  "message of {} bytes from somebody who is not registered",
                                  message.body.size()));
      return true;
    }
    RegisteredPeer& entry = *found;
    entry.last_message = received_;
    if (message.single && message.body.empty() && !message.sequence) {
      on_presence(entry);
      return true;
    }
    if (!message.single || !entry.present) {
      errors_.count(KVFERRY_ERROR(kProtocol, "message of {} (process {}) {}", entry.peer.name,
                                  entry.peer.pid,
                                  message.single ? "before its presence" : "in several frames"));
      return true;
    }
    if (MessageChannel* channel = entry.outbox.channel(); channel != nullptr && message.sequence) {
      // What was sent before it, and is in the ring, comes first.
      while (channel->is_early(*message.sequence)) {
        if (left == 0) return false;
        --left;
        if (!take_from_ring(entry)) break;
      }
    }
    if (!take_turn(entry, message)) return true;
    handle(entry, message.bytes());
    take_ring(entry, left);  // what waited for it
    return true;
  }

  // ---- messages in rings ----

  bool take_turn(RegisteredPeer& entry, const ZmqMessage& message) {
    MessageChannel* channel = entry.outbox.channel();
    if (channel == nullptr && !message.sequence) return true;
    if (channel == nullptr || !message.sequence || !channel->is_ours(*message.sequence)) {
      // The last case: one that was sent over an earlier connection.
      errors_.count(KVFERRY_ERROR(kProtocol, "message of {} (process {}) {}", entry.peer.name,
                                  entry.peer.pid,
                                  channel == nullptr  ? "in several frames"
                                  : !message.sequence ? "without its number"
                                                      : "of another connection"));
      return false;
    }
    const bool early = channel->is_early(*message.sequence);
    const bool taken = channel->take(*message.sequence);
    if (early || !taken) {
      errors_.count(KVFERRY_ERROR(kProtocol, "message {} of {} (process {}) is out of turn",
                                  message.sequence->sequence, entry.peer.name, entry.peer.pid));
    }
    return taken;  // what is missing before it never comes
  }

  void take_ring_round(RegisteredPeer& entry) {
    int left = kMessagesPerRound;
    take_ring(entry, left);
  }

  // What is left of a round; the next bell comes when there is nothing more.
  void take_ring(RegisteredPeer& entry, int& left) {
    MessageChannel* channel = entry.outbox.channel();
    if (channel == nullptr || !entry.present || entry.ring_posted) return;
    for (; left > 0; --left) {
      if (!take_from_ring(entry) && channel->ask_for_bell()) return;
    }
    entry.ring_posted = true;
    loop_.post([this, id = entry.peer.id, alive = std::weak_ptr<bool>(alive_)] {
      if (alive.expired()) return;
      RegisteredPeer* again = peers_.find(id);
      if (again == nullptr) return;
      again->ring_posted = false;
      take_ring_round(*again);
    });
  }

  // False when there is nothing whose turn it is.
  bool take_from_ring(RegisteredPeer& entry) {
    const auto message = entry.outbox.channel()->try_receive();
    if (!message) {
      errors_.count(KVFERRY_ERROR(kProtocol, "{} (process {}): {}", entry.peer.name, entry.peer.pid,
                                  message.error().message));
      return true;
    }
    if (!message->has_value()) return false;
    handle(entry, **message);
    return true;
  }

  // ---- messages of either way ----

  void handle(RegisteredPeer& entry, std::span<const std::uint8_t> bytes) {
    auto envelope = decode<Envelope>(bytes, "envelope");
    const std::uint32_t version =
        envelope ? envelope->version : peek_wire_version(bytes).value_or(kWireVersion);
    if (version != kWireVersion) {
      refuse_version(entry, envelope ? *envelope : Envelope(), version);
    } else if (!envelope) {
      errors_.count(KVFERRY_ERROR(kProtocol, "{} (process {}): {}", entry.peer.name, entry.peer.pid,
                                  envelope.error().message));
    } else {
      deliver(entry, std::move(envelope).value());
    }
  }

  // An empty message: the peer's connection works. The answer shows it that ours does, and that the
  // handler knows it: so the handler comes first.
  void on_presence(RegisteredPeer& entry) {
    const Peer peer = entry.peer;  // a handler may end the entry
    if (!entry.present) {
      peers_.set_present(entry);
      log_debug("{} (process {}) is connected", peer.name, peer.pid);
      handler_.on_peer(peer);
    }
    if (const int error = socket_.send(&peer.id, std::nullopt, {}); error != 0) {
      errors_.count(
          KVFERRY_ERROR(kProtocol, "presence of {} not answered (errno {})", peer.name, error));
    }
    if (RegisteredPeer* known = peers_.find(peer.id); known != nullptr) {
      take_ring_round(*known);
    }
  }

  void deliver(RegisteredPeer& entry, Envelope envelope) {
    entry.spoken = true;
    const RequestId request = envelope.request;
    if (request.value != 0 && !envelope.is_reply) {
      const ReplyCache::Lookup lookup = entry.outbox.begin(request);
      switch (lookup.seen) {
        case ReplyCache::Seen::kNew: break;
        case ReplyCache::Seen::kRunning: return;
        case ReplyCache::Seen::kReplied:
          if (const Status sent = send(entry.peer.id, Bytes(*lookup.reply)); !sent) {
            errors_.warn(sent.error());
          }
          return;
        case ReplyCache::Seen::kForgotten:
          refuse(entry, envelope,
                 KVFERRY_ERROR(kStaleEpoch,
                               "request {} of {} is older than the {} replies that are remembered: "
                               "whether it took effect is not known; look, then ask anew",
                               request.value, entry.peer.name, ReplyCache::kMaxReplies));
          return;
        case ReplyCache::Seen::kTooMany:
          refuse(entry, envelope,
                 KVFERRY_ERROR(kBusy, "{} requests of {} are being handled",
                               ReplyCache::kMaxRunning, entry.peer.name));
          return;
      }
    }
    handler_.on_message(entry.peer, std::move(envelope));
  }

  // Not remembered: nothing was done.
  void refuse(const RegisteredPeer& entry, const Envelope& request, const Error& error) {
    errors_.warn(error);
    if (const Status sent = send(entry.peer.id, encode_reply(request, error, {})); !sent) {
      errors_.warn(sent.error());
    }
  }

  void refuse_version(RegisteredPeer& entry, const Envelope& envelope, std::uint32_t version) {
    const Error error =
        KVFERRY_ERROR(kVersionMismatch,
                      "{} (process {}) sent wire version {}, this process speaks {}; update the "
                      "older side",
                      entry.peer.name, entry.peer.pid, version, kWireVersion);
    errors_.count(error);
    if (const Status sent = send(entry.peer.id, encode_reply(envelope, error, {})); !sent) {
      errors_.warn(sent.error());
    }
  }

  EventLoop& loop_;
  Options options_;
  ControlHandler& handler_;
  ProtocolErrors errors_;
  Registry registry_;   // holds the lock, under which the control path is ours, too
  UniqueFd listening_;  // ZeroMQ's, as soon as it serves it
  GuardedAccept guard_;
  ZmqSocket socket_;
  RegisteredPeers peers_;
  std::vector<IncarnationId> dying_;
  std::optional<ZmqMessage> received_early_;  // its turn has not come
  std::uint64_t received_ = 0;                // messages from the socket, ever
  bool draining_ = false;
  bool drain_posted_ = false;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // shared with posted calls only
};

ControlServer::ControlServer(EventLoop& loop, Options options, ControlHandler& handler)
    : impl_(std::make_unique<Impl>(loop, std::move(options), handler)) {}

ControlServer::~ControlServer() = default;

Status ControlServer::send(const IncarnationId& peer, const Envelope& envelope) {
  return impl_->send(peer, encode(envelope));
}

void ControlServer::forget_when_closed(const IncarnationId& peer) {
  impl_->forget_when_closed(peer);
}

const ProcessRef* ControlServer::process(const IncarnationId& peer) const {
  return impl_->process(peer);
}

std::uint64_t ControlServer::protocol_errors() const noexcept { return impl_->protocol_errors(); }

Status ControlServer::send_reply(const IncarnationId& peer,
                                 const Envelope& request,
                                 std::optional<Error> error,
                                 Bytes body) {
  return impl_->send_reply(peer, request, std::move(error), std::move(body));
}

}  // namespace kvferry::ipc
