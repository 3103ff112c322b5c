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

namespace kvferry::ipc {
namespace {

constexpr std::size_t kMaxPeers = 4096;
constexpr std::size_t kMaxDeparted = 1024;
constexpr auto kPresenceTime = std::chrono::seconds(10);
// A dying process closes its sockets a moment before its death is announced.
constexpr auto kSilenceTime = std::chrono::milliseconds(50);
// Time for last messages to leave when the server ends.
constexpr auto kFarewell = std::chrono::milliseconds(100);
constexpr int kMessagesPerRound = 256;
constexpr int kMessagesAtDeath = 1'000'000;

ZmqSocket serve_or_throw(const std::filesystem::path& path, int max_queued) {
  auto listening = listen_on_path(path, SOCK_STREAM);
  if (!listening) throw Exception(std::move(listening).error());
  return ZmqSocket::serve(path, std::move(listening).value(), max_queued);
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
        socket_(serve_or_throw(options_.control_path, options_.max_queued_messages)) {
    loop_.watch(socket_.fd(), [this] { drain(kMessagesPerRound); });
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  ~Impl() {
    loop_.unwatch(socket_.fd());
    for (auto& [id, entry] : peers_) forget(*entry);
    socket_.set_linger(kFarewell);
    // Under the registry's lock, which members hold until after this.
    ::unlink(options_.control_path.c_str());
  }

  Status send(const IncarnationId& id, std::span<const std::uint8_t> bytes) {
    const auto found = peers_.find(id);
    if (found == peers_.end() || !found->second->present || found->second->dead) {
      return KVFERRY_ERROR(kNotFound, "no peer {} is connected", id.hex());
    }
    const Peer& peer = found->second->peer;
    if (bytes.size() > kMaxWireBytes) {
      return KVFERRY_ERROR(kInvalidArgument, "message of {} bytes to {}, {} are allowed",
                           bytes.size(), peer.name, kMaxWireBytes);
    }
    const int error = socket_.send(&id, bytes);
    drain_later();
    switch (error) {
      case 0: return ok();
      case EAGAIN:
        return KVFERRY_ERROR(kBusy, "the queue of {} messages to {} (process {}) is full",
                             options_.max_queued_messages, peer.name, peer.pid);
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
    Status sent = send(id, bytes);
    // Kept even when it could not be sent: the repeated request gets it.
    if (const auto found = peers_.find(id); found != peers_.end()) {
      found->second->replies.finish(request.request, std::move(bytes));
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
    bool present = false;  // its first message came: the handler knows it
    bool silent = false;
    bool dead = false;
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
    if (auto refused = check_duplicate(id, candidate.process)) {
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
    entry->timer = loop_.after(kPresenceTime, [this, id] { on_absent(id); });
    loop_.watch(entry->registry.fd(), [this, id] { on_registry(id); });
    loop_.watch(entry->process.pidfd(), [this, id] { on_death(id); });
    peers_.emplace(id, std::move(entry));
  }

  // One process may come again under its name once its earlier connection is closed.
  std::optional<Error> check_duplicate(const IncarnationId& id, const ProcessRef& process) {
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

  void on_death(const IncarnationId& id) {
    // What it sent before it died comes before its death.
    drain(kMessagesAtDeath);
    const auto found = peers_.find(id);
    if (found == peers_.end()) return;
    Entry& entry = *found->second;
    entry.dead = true;
    if (entry.present) handler_.on_peer_died(entry.peer);
    remove(id);
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

  void drain(int budget) {
    if (draining_) return;
    draining_ = true;
    const Undrain undrain{*this};
    for (; budget > 0; --budget) {
      const auto message = socket_.try_receive();
      if (!message) break;
      dispatch(*message);
    }
  }

  // The socket's descriptor announces nothing that a call of ours has already noticed.
  void drain_later() {
    if (draining_ || drain_posted_ || !socket_.readable()) return;
    drain_posted_ = true;
    loop_.post([this, alive = std::weak_ptr<bool>(alive_)] {
      if (alive.expired()) return;
      drain_posted_ = false;
      drain(kMessagesPerRound);
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
          if (const Status sent = send(entry.peer.id, *lookup.reply); !sent) warn(sent.error());
          return;
        case ReplyCache::Seen::kTooMany: {
          const Error busy = KVFERRY_ERROR(kBusy, "{} requests of {} are being handled",
                                           ReplyCache::kMaxRunning, entry.peer.name);
          warn(busy);
          if (const Status sent = send(entry.peer.id, encode_reply(envelope, busy, {})); !sent) {
            warn(sent.error());
          }
          return;
        }
      }
    }
    handler_.on_message(entry.peer, std::move(envelope));
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
  Registry registry_;  // holds the lock, under which the control path is ours, too
  ZmqSocket socket_;
  std::unordered_map<IncarnationId, std::unique_ptr<Entry>> peers_;
  std::unordered_set<IncarnationId> departed_;  // their last messages may still come in
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
