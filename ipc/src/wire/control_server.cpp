// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "os/socket_address.hpp"
#include "wire/log_gate.hpp"
#include "wire/registry.hpp"
#include "wire/reply_cache.hpp"
#include "wire/wire_version.hpp"
#include "wire/zmq_socket.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kMaxPeers = 4096;
constexpr std::size_t kMaxDeparted = 1024;
constexpr auto kPresenceTime = std::chrono::seconds(10);
// A dying process closes its sockets a moment before its death is announced.
constexpr auto kSilenceTime = std::chrono::milliseconds(50);
// Time for last messages to leave when the server ends.
constexpr auto kFarewell = std::chrono::milliseconds(100);
// A round is short, so that timers, deaths and other descriptors have their turn.
constexpr int kMessagesPerRound = 256;
constexpr std::size_t kBytesPerRound = std::size_t{32} << 20;
// Messages of others after which a dead peer has none left: they come from each in turn.
constexpr std::uint64_t kTurnsAfterDeath = 64;

ZmqSocket serve_or_throw(const std::filesystem::path& path, int max_unread) {
  auto listening = listen_on_path(path, SOCK_STREAM);
  if (!listening) throw Exception(std::move(listening).error());
  return ZmqSocket::serve(path, std::move(listening).value(), max_unread);
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
                  [this](RegistryCandidate candidate) { on_hello(std::move(candidate)); }),
        socket_(serve_or_throw(options_.control_path, options_.max_unread_messages)) {
    loop_.watch(socket_.fd(), [this] { drain(); });
    loop_.watch(writable_->fd(), [this] { on_writable(); });
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  ~Impl() {
    loop_.unwatch(socket_.fd());
    loop_.unwatch(writable_->fd());
    for (auto& [id, entry] : peers_) forget(*entry);
    socket_.set_linger(kFarewell);
    // Under the registry's lock, which members hold until after this.
    ::unlink(options_.control_path.c_str());
  }

  Status send(const IncarnationId& id, Bytes bytes) {
    const auto found = peers_.find(id);
    if (found == peers_.end() || !found->second->present || found->second->dead) {
      return KVFERRY_ERROR(kNotFound, "no peer {} is connected", id.hex());
    }
    const Peer& peer = found->second->peer;
    if (bytes.size() > kMaxWireBytes) {
      return KVFERRY_ERROR(kInvalidArgument, "message of {} bytes to {}, {} are allowed",
                           bytes.size(), peer.name, kMaxWireBytes);
    }
    if (!found->second->queue->try_reserve(bytes.size())) {
      return KVFERRY_ERROR(kBusy, "the queue of {} messages or {} bytes to {} (process {}) is full",
                           options_.max_queued_messages, options_.max_queued_bytes, peer.name,
                           peer.pid);
    }
    const int error = socket_.send(id, std::move(bytes), found->second->queue);
    drain_later();
    switch (error) {
      case 0: return ok();
      case EHOSTUNREACH:
        return KVFERRY_ERROR(kNotFound, "{} (process {}) closed its connection", peer.name,
                             peer.pid);
      default:
        errno = error;
        return KVFERRY_ERRNO("sending to {} (process {})", peer.name, peer.pid);
    }
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
    if (const auto found = peers_.find(id); found != peers_.end()) {
      found->second->replies.finish(request.request, std::move(bytes));
      if (!sent && sent.error().code == ErrorCode::kBusy) {
        std::vector<RequestId>& unsent = found->second->unsent;
        if (unsent.size() >= ReplyCache::kMaxReplies) unsent.erase(unsent.begin());
        unsent.push_back(request.request);
      }
    }
    return sent;
  }

  [[nodiscard]] const ProcessRef* process(const IncarnationId& id) const {
    const auto found = peers_.find(id);
    return found == peers_.end() ? nullptr : &found->second->process;
  }

  [[nodiscard]] std::uint64_t protocol_errors() const noexcept {
    return protocol_errors_ + registry_.protocol_errors();
  }

 private:
  struct Entry {
    Peer peer;
    PacketSocket registry;  // invalid once closed
    ProcessRef process;
    ReplyCache replies;
    std::vector<RequestId> unsent;  // replies that its full queue did not take
    bool present = false;           // its first message came: the handler knows it
    bool silent = false;
    bool dead = false;
    bool dying = false;              // dead, but its last messages are still coming in
    std::uint64_t last_message = 0;  // dying: which one of all that came was its last
    std::shared_ptr<SendQueue> queue;
    TimerId timer = 0;  // until present, then from the end of file until silent
  };

  static Bytes encode_reply(const Envelope& request, std::optional<Error> error, Bytes body) {
    Envelope reply;
    reply.kind = request.kind;
    reply.request = request.request;
    reply.is_reply = true;
    reply.error = std::move(error);
    reply.body = std::move(body);
    return encode(reply);
  }

  // ---- registry ----

  void on_hello(RegistryCandidate candidate) {
    const IncarnationId id = candidate.hello.incarnation;
    ReplyCache replies;
    if (auto refused = check_duplicate(id, candidate.process, replies)) {
      warn(*refused);
      refuse_candidate(candidate.socket, std::move(*refused));
      return;
    }
    RegistryWelcome welcome;
    welcome.manager_session = options_.session;
    welcome.pool_bytes = options_.pool_bytes;
    const bool gives_pool = candidate.hello.kind == ProcessKind::kMover && options_.pool_fd >= 0;
    const Status sent = candidate.socket.send(
        encode(welcome), gives_pool ? std::span(&options_.pool_fd, 1) : std::span<const int>());
    if (!sent) {
      warn(sent.error());
      return;
    }
    auto entry = std::make_unique<Entry>();
    entry->peer =
        Peer{id, candidate.hello.kind, std::move(candidate.hello.name), candidate.process.pid()};
    entry->registry = std::move(candidate.socket);
    entry->process = std::move(candidate.process);
    entry->replies = std::move(replies);
    entry->queue =
        std::make_shared<SendQueue>(static_cast<std::size_t>(options_.max_queued_messages),
                                    options_.max_queued_bytes, writable_);
    entry->timer = loop_.after(kPresenceTime, [this, id] { on_absent(id); });
    loop_.watch(entry->registry.fd(), [this, id] { on_registry(id); });
    loop_.watch(entry->process.pidfd(), [this, id] { on_death(id); });
    peers_.emplace(id, std::move(entry));
  }

  // One process may come again under its name once its earlier connection is closed. What it has
  // asked before is not asked anew.
  std::optional<Error> check_duplicate(const IncarnationId& id,
                                       const ProcessRef& process,
                                       ReplyCache& replies) {
    if (const auto found = peers_.find(id); found != peers_.end()) {
      Entry& old = *found->second;
      if (old.registry.valid()) on_registry(id);  // its end may be unread yet
    }
    if (const auto found = peers_.find(id); found != peers_.end()) {
      Entry& old = *found->second;
      if (old.registry.valid() || old.peer.pid != process.pid() ||
          old.process.start_time() != process.start_time()) {
        return KVFERRY_ERROR(kAlreadyExists, "incarnation {} is registered by {} (process {})",
                             id.hex(), old.peer.name, old.peer.pid);
      }
      // It is alive: it just said hello. What is told is that its earlier link has ended.
      if (old.present && !old.silent) handler_.on_peer_silent(old.peer);
      replies = std::move(old.replies);
      remove(id);
    }
    if (peers_.size() >= kMaxPeers) {
      return KVFERRY_ERROR(kBusy, "{} peers are registered already", peers_.size());
    }
    return std::nullopt;
  }

  // Nothing is expected after the hello: this is the end of file, or a violation that ends it.
  void on_registry(const IncarnationId& id) {
    Entry& entry = *peers_.at(id);
    const auto packet = entry.registry.try_receive();
    if (packet && !packet->has_value()) return;
    if (packet || packet.error().code != ErrorCode::kPeerDied) {
      ++protocol_errors_;
      warn(KVFERRY_ERROR(kProtocol, "unexpected packet of {} (process {}) on the registry",
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

  void on_silence(const IncarnationId& id) {
    Entry& entry = *peers_.at(id);
    if (entry.process.has_died()) {
      on_death(id);
      return;
    }
    entry.silent = true;
    handler_.on_peer_silent(entry.peer);
  }

  void on_absent(const IncarnationId& id) {
    warn(KVFERRY_ERROR(kTimeout, "{} registered and sent nothing", peers_.at(id)->peer.name));
    remove(id);
  }

  // What it sent before it died comes before its death: the rounds go on until it has no turn any
  // more. Others may send for ever, so not until nothing comes at all.
  void on_death(const IncarnationId& id) {
    Entry& entry = *peers_.at(id);
    if (std::exchange(entry.dying, true)) return;
    entry.last_message = received_;
    loop_.unwatch(entry.process.pidfd());
    loop_.cancel(entry.timer);
    dying_.push_back(id);
    drain();
  }

  void bury(bool nothing_comes) {
    const std::uint64_t turns = kTurnsAfterDeath + 2 * peers_.size();
    std::vector<IncarnationId> over;
    std::erase_if(dying_, [&](const IncarnationId& id) {
      const auto found = peers_.find(id);
      if (found == peers_.end()) return true;
      if (!nothing_comes && received_ - found->second->last_message < turns) return false;
      over.push_back(id);
      return true;
    });
    for (const IncarnationId& id : over) {
      Entry& entry = *peers_.at(id);
      entry.dead = true;
      if (entry.present) handler_.on_peer_died(entry.peer);
      remove(id);
    }
  }

  // Whoever waits for a reply does not ask again. Forgotten ones are beyond help.
  void send_unsent(Entry& entry) {
    std::size_t sent = 0;
    for (; sent < entry.unsent.size(); ++sent) {
      const Bytes* reply = entry.replies.find(entry.unsent[sent]);
      if (reply == nullptr) continue;
      const Status status = send(entry.peer.id, Bytes(*reply));
      if (!status && status.error().code == ErrorCode::kBusy) break;
    }
    entry.unsent.erase(entry.unsent.begin(),
                       entry.unsent.begin() + static_cast<std::ptrdiff_t>(sent));
  }

  void on_writable() {
    (void)writable_->drain();
    std::vector<Peer> peers;
    for (const auto& [id, entry] : peers_) {
      if (!entry->queue->take_writable() || !entry->present || entry->dead) continue;
      send_unsent(*entry);
      peers.push_back(entry->peer);
    }
    for (const Peer& peer : peers) handler_.on_peer_writable(peer);
  }

  void remove(const IncarnationId& id) {
    auto node = peers_.extract(id);
    forget(*node.mapped());
    if (departed_.size() >= kMaxDeparted) departed_.clear();
    departed_.insert(id);
  }

  void forget(Entry& entry) {
    if (entry.registry.valid()) loop_.unwatch(entry.registry.fd());
    loop_.unwatch(entry.process.pidfd());
    loop_.cancel(entry.timer);
  }

  // ---- messages ----

  // One round.
  void drain() {
    if (draining_) return;
    draining_ = true;
    const Undrain undrain{*this};
    bool nothing_comes = false;
    std::size_t bytes = 0;
    for (int i = 0; i < kMessagesPerRound && bytes < kBytesPerRound; ++i) {
      const auto message = socket_.try_receive();
      if (!message) {
        nothing_comes = true;
        break;
      }
      bytes += message->body.size();
      ++received_;
      dispatch(*message);
    }
    if (!dying_.empty()) bury(nothing_comes || !socket_.readable());
  }

  // The socket's descriptor announces nothing that a call of ours has already noticed.
  void drain_later() {
    if (draining_ || drain_posted_ || !socket_.readable()) return;
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

  void dispatch(const ZmqMessage& message) {
    const auto found = message.sender ? peers_.find(*message.sender) : peers_.end();
    if (found == peers_.end()) {
      if (message.sender && departed_.contains(*message.sender)) return;
      malformed(KVFERRY_ERROR(kProtocol, "message of {} bytes from somebody who is not registered",
                              message.body.size()));
      return;
    }
    Entry& entry = *found->second;
    entry.last_message = received_;
    if (message.single && message.body.empty()) {
      on_presence(entry);
      return;
    }
    if (!message.single || !entry.present) {
      malformed(KVFERRY_ERROR(kProtocol, "message of {} (process {}) {}", entry.peer.name,
                              entry.peer.pid,
                              message.single ? "before its presence" : "in several frames"));
      return;
    }
    auto envelope = decode<Envelope>(message.bytes(), "envelope");
    const std::uint32_t version =
        envelope ? envelope->version : peek_wire_version(message.bytes()).value_or(kWireVersion);
    if (version != kWireVersion) {
      refuse_version(entry, envelope ? *envelope : Envelope(), version);
    } else if (!envelope) {
      malformed(KVFERRY_ERROR(kProtocol, "{} (process {}): {}", entry.peer.name, entry.peer.pid,
                              envelope.error().message));
    } else {
      deliver(entry, std::move(envelope).value());
    }
  }

  // An empty message: the peer's connection works. The answer shows it that ours does, and that the
  // handler knows it: so the handler comes first.
  void on_presence(Entry& entry) {
    const Peer peer = entry.peer;  // a handler may end the entry
    if (!entry.present) {
      entry.present = true;
      loop_.cancel(entry.timer);
      log_debug("{} (process {}) is connected", peer.name, peer.pid);
      handler_.on_peer(peer);
    }
    if (const int error = socket_.send(&peer.id, {}); error != 0) {
      malformed(
          KVFERRY_ERROR(kProtocol, "presence of {} not answered (errno {})", peer.name, error));
    }
  }

  void deliver(Entry& entry, Envelope envelope) {
    const RequestId request = envelope.request;
    if (request.value != 0 && !envelope.is_reply) {
      const ReplyCache::Lookup lookup = entry.replies.begin(request);
      switch (lookup.seen) {
        case ReplyCache::Seen::kNew: break;
        case ReplyCache::Seen::kRunning: return;
        case ReplyCache::Seen::kReplied:
          if (const Status sent = send(entry.peer.id, Bytes(*lookup.reply)); !sent) {
            warn(sent.error());
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
  void refuse(const Entry& entry, const Envelope& request, const Error& error) {
    warn(error);
    if (const Status sent = send(entry.peer.id, encode_reply(request, error, {})); !sent) {
      warn(sent.error());
    }
  }

  void refuse_version(Entry& entry, const Envelope& envelope, std::uint32_t version) {
    const Error error =
        KVFERRY_ERROR(kVersionMismatch,
                      "{} (process {}) sent wire version {}, this process speaks {}; update the "
                      "older side",
                      entry.peer.name, entry.peer.pid, version, kWireVersion);
    malformed(error);
    if (const Status sent = send(entry.peer.id, encode_reply(envelope, error, {})); !sent) {
      warn(sent.error());
    }
  }

  void malformed(const Error& error) {
    ++protocol_errors_;
    warn(error);
  }

  void warn(const Error& error) {
    std::uint64_t suppressed = 0;
    if (gate_.open(suppressed)) {
      log_warn("control: {} ({} more like it)", error.to_string(), suppressed);
    }
  }

  EventLoop& loop_;
  Options options_;
  ControlHandler& handler_;
  std::shared_ptr<EventFd> writable_ = std::make_shared<EventFd>();  // shared with the queues
  Registry registry_;  // holds the lock, under which the control path is ours, too
  ZmqSocket socket_;
  std::unordered_map<IncarnationId, std::unique_ptr<Entry>> peers_;
  std::unordered_set<IncarnationId> departed_;  // their last messages may still come in
  std::vector<IncarnationId> dying_;
  std::uint64_t received_ = 0;  // messages, ever
  std::uint64_t protocol_errors_ = 0;
  LogGate gate_;
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
