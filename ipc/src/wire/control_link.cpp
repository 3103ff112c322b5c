// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "os/syscall.hpp"
#include "wire/message_channel.hpp"
#include "wire/wire_version.hpp"
#include "wire/zmq_socket.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <unordered_set>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr int kMaxQueued = 10'000;
constexpr int kBellsPerRound = 64;
constexpr std::size_t kMaxAbandoned = 4096;
// Time for a last message (a bye) to leave when the link ends.
constexpr auto kFarewell = std::chrono::milliseconds(100);
// From here on a wait is noticed, and so it is logged.
constexpr auto kLongWait = std::chrono::seconds(1);

void add_to_epoll(int epoll, int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw Exception(KVFERRY_ERRNO("epoll_ctl of descriptor {}", fd));
  }
}

}  // namespace

class ControlLink::Impl {
 public:
  struct Registered {
    PacketSocket registry;
    ProcessRef server;
    RegistryWelcome welcome;
    UniqueFd memory;     ///< The pool, or the prefix table.
    UniqueFd catalogue;  ///< Of the pool.
    std::optional<MessageChannel> channel;
  };

  static Result<Registered> enroll(const Options& options, Deadline deadline);

  /// Throws Exception.
  Impl(Options options, Registered registered)
      : options_(std::move(options)),
        registered_(std::move(registered)),
        socket_(ZmqSocket::connect(options_.control_path, options_.incarnation, kMaxQueued)),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (!epoll_.valid()) throw Exception(KVFERRY_ERRNO("epoll_create1"));
    add_to_epoll(epoll_.get(), socket_.fd(), EPOLLIN);
    add_to_epoll(epoll_.get(), armed_event_.fd(), EPOLLIN);
    // Its end; and the bell of the rings: nothing else is ever sent on it.
    const std::uint32_t bell = registered_.channel ? static_cast<std::uint32_t>(EPOLLIN) : 0U;
    add_to_epoll(epoll_.get(), registered_.registry.fd(), EPOLLRDHUP | bell);
    add_to_epoll(epoll_.get(), registered_.server.pidfd(), EPOLLIN);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  ~Impl() {
    if (!server_lost()) socket_.set_linger(kFarewell);
  }

  // An empty message and its echo: from here on both directions work, and the server's handler
  // knows this peer.
  Status greet(Deadline deadline) {
    if (const int error = socket_.send(nullptr, std::nullopt, {}); error != 0) {
      errno = error;
      return KVFERRY_ERRNO("greeting {}", server_name());
    }
    for (;;) {
      while (auto message = socket_.try_receive()) {
        if (is_echo(*message)) {
          arm();
          return ok();
        }
        early_.push_back(std::move(*message));
      }
      switch (wait(deadline)) {
        case Woken::kMessage: break;
        case Woken::kLost:
          return KVFERRY_ERROR(kNoManager, "{} ended while we connected", server_name());
        case Woken::kDeadline:
          return KVFERRY_ERROR(kTimeout, "{} registered us but its control socket {} is silent",
                               server_name(), options_.control_path.native());
      }
    }
  }

  [[nodiscard]] bool server_lost() const noexcept {
    std::array<pollfd, 2> fds{pollfd{registered_.registry.fd(), POLLRDHUP, 0},
                              pollfd{registered_.server.pidfd(), POLLIN, 0}};
    // wait-none: looks only
    return retry_interrupted([&] { return ::poll(fds.data(), fds.size(), 0); }) > 0;
  }

  Status send(const Envelope& envelope) {
    if (server_lost()) return lost();
    const Bytes bytes = encode(envelope);
    if (bytes.size() > kMaxWireBytes) {
      return KVFERRY_ERROR(kInvalidArgument, "{} of {} bytes, {} are allowed; split it",
                           to_string(envelope.kind), bytes.size(), kMaxWireBytes);
    }
    std::optional<SequenceFrame> frame;
    if (registered_.channel) {
      MessageChannel& channel = *registered_.channel;
      if (channel.try_send(bytes)) {
        if (channel.take_bell()) ring_bell(registered_.registry);
        return ok();
      }
      frame = channel.next_frame();
    }
    const int error = socket_.send(nullptr, frame, bytes);
    if (error == 0 && frame) registered_.channel->sent_over_socket();
    arm();
    if (error == 0) return ok();
    if (error == EAGAIN) {
      return KVFERRY_ERROR(kBusy, "the queue of {} messages to {} is full", kMaxQueued,
                           server_name());
    }
    errno = error;
    return KVFERRY_ERRNO("sending {} to {}", to_string(envelope.kind), server_name());
  }

  Result<std::optional<Envelope>> try_receive() {
    auto envelope = next_envelope();
    if (envelope && !envelope->has_value()) hear_bells();
    arm();
    return envelope;
  }

  Result<Envelope> request(MessageKind kind, Bytes body, RequestId id, Deadline deadline) {
    Envelope envelope;
    envelope.kind = kind;
    envelope.request = id;
    envelope.body = std::move(body);
    KVFERRY_TRY(send(envelope));

    auto reply = await_reply(kind, id, deadline);
    arm();
    if (reply && reply->error) return std::move(*reply->error);
    return reply;
  }

  [[nodiscard]] const Registered& registered() const noexcept { return registered_; }
  [[nodiscard]] UniqueFd take_memory() noexcept { return std::move(registered_.memory); }
  [[nodiscard]] PoolMemory take_pool() noexcept {
    const RegistryWelcome& welcome = registered_.welcome;
    return {welcome.pool, welcome.pool_bytes, welcome.catalogue_bytes,
            std::move(registered_.memory), std::move(registered_.catalogue)};
  }
  [[nodiscard]] int fd() const noexcept { return epoll_.get(); }

 private:
  enum class Woken : std::uint8_t { kMessage = 1, kLost, kDeadline };

  static std::int64_t elapsed_ms(TimePoint start) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(MonotonicClock::now() - start)
        .count();
  }

  [[nodiscard]] std::string server_name() const {
    return fmt::format("the server of {} (process {})", options_.registry_path.native(),
                       registered_.server.pid());
  }

  [[nodiscard]] Error lost() const {
    return KVFERRY_ERROR(kPeerDied, "{} {}", server_name(),
                         registered_.server.has_died() ? "is dead" : "closed the connection");
  }

  // Without a message in the socket, since its descriptor would not announce that one.
  Woken wait(Deadline deadline) {
    const short bell = registered_.channel ? POLLIN : 0;
    for (;;) {
      hear_bells();
      // In this order: a reply that came before the end is still found.
      const bool gone = server_lost();
      if (ring_waits() || socket_.readable()) return Woken::kMessage;
      if (gone) return Woken::kLost;
      if (deadline.expired()) return Woken::kDeadline;
      std::array<pollfd, 3> fds{
          pollfd{socket_.fd(), POLLIN, 0},
          pollfd{registered_.registry.fd(), static_cast<short>(POLLRDHUP | bell), 0},
          pollfd{registered_.server.pidfd(), POLLIN, 0}};
      // wait: a message of the server; deadline, of the caller; the server's pidfd and connection
      if (::poll(fds.data(), fds.size(), deadline.poll_timeout_ms()) < 0 && errno != EINTR) {
        KVFERRY_CHECK(false, KVFERRY_ERRNO("poll of a control link").to_string());
      }
    }
  }

  // A wait that lasts is logged at its start and at its end.
  Result<Envelope> await_reply(MessageKind kind, RequestId id, Deadline deadline) {
    const TimePoint start = MonotonicClock::now();
    const Deadline notice = Deadline::at(start + kLongWait).earlier(deadline);
    Woken woken = Woken::kMessage;
    auto reply = receive_reply(kind, id, notice, woken);
    if (woken == Woken::kDeadline && !deadline.expired()) {
      log_info("waiting for the reply to {} (request {}) from {}, at most {} ms more",
               to_string(kind), id.value, server_name(), deadline.poll_timeout_ms());
      reply = receive_reply(kind, id, deadline, woken);
      log_info("end of the wait for {} (request {}) after {} ms{}", to_string(kind), id.value,
               elapsed_ms(start), reply ? "" : ": no reply");
    }
    if (reply) return std::move(*reply);
    if (woken == Woken::kLost) return lost();
    abandon(id);
    return KVFERRY_ERROR(kTimeout, "no reply to {} (request {}) from {} in {} ms", to_string(kind),
                         id.value, server_name(), elapsed_ms(start));
  }

  // Nothing, and why in woken, when the server is lost or the deadline has passed.
  std::optional<Envelope> receive_reply(MessageKind kind,
                                        RequestId id,
                                        Deadline deadline,
                                        Woken& woken) {
    for (;;) {
      while (auto message = next_message()) {
        if (auto reply = match(std::move(*message), kind, id)) return reply;
      }
      woken = wait(deadline);
      if (woken != Woken::kMessage) return std::nullopt;
    }
  }

  // fd() stays readable for as long as try_receive() has something, which the socket's own
  // descriptor does not promise.
  void arm() noexcept {
    const bool waiting = !kept_.empty() || !early_.empty() || ring_waits() || socket_.readable();
    if (waiting == armed_) return;
    armed_ = waiting;
    if (waiting) {
      armed_event_.signal();
    } else {
      (void)armed_event_.drain();
    }
  }

  static bool is_echo(const ZmqMessage& message) {
    return message.single && !message.sequence && message.body.empty();
  }

  static Result<Envelope> read(std::span<const std::uint8_t> bytes) {
    return decode_versioned<Envelope>(bytes, "envelope", "the server");
  }

  // Whether the ring has something; if not, the server rings when it has.
  [[nodiscard]] bool ring_waits() noexcept {
    return registered_.channel && !registered_.channel->ask_for_bell();
  }

  // Before ask_for_bell(), which is what makes the server ring again. The end of the connection
  // stays to be seen.
  void hear_bells() noexcept {
    if (!registered_.channel) return;
    for (int i = 0; i < kBellsPerRound; ++i) {
      const auto packet = registered_.registry.try_receive();
      if (!packet || !packet->has_value()) return;
    }
  }

  // The next message, from wherever it comes.
  std::optional<Result<Envelope>> next_message() {
    for (;;) {
      if (registered_.channel) {
        auto message = registered_.channel->try_receive();
        if (!message) return std::move(message).error();
        if (message->has_value()) return read(**message);
      }
      if (early_.empty()) {
        auto message = socket_.try_receive();
        if (!message) return std::nullopt;
        // What was sent before it is in the ring by now, and comes first.
        if (!is_echo(*message)) early_.push_back(std::move(*message));
        continue;
      }
      const ZmqMessage message = std::move(early_.front());
      early_.pop_front();
      if (!message.single) return KVFERRY_ERROR(kProtocol, "envelope in several frames");
      if (Status turn = take_turn(message); !turn) return std::move(turn).error();
      return read(message.bytes());
    }
  }

  Status take_turn(const ZmqMessage& message) {
    if (!registered_.channel && !message.sequence) return ok();
    if (!registered_.channel || !message.sequence ||
        !registered_.channel->is_ours(*message.sequence) ||
        !registered_.channel->take(*message.sequence)) {
      return KVFERRY_ERROR(kProtocol, "message of {} bytes of {} is of another connection or turn",
                           message.body.size(), server_name());
    }
    return ok();
  }

  Result<std::optional<Envelope>> next_envelope() {
    if (!kept_.empty()) {
      Result<Envelope> envelope = std::move(kept_.front());
      kept_.pop_front();
      if (!envelope) return std::move(envelope).error();
      return std::optional<Envelope>(std::move(envelope).value());
    }
    while (auto envelope = next_message()) {
      if (!*envelope) return std::move(*envelope).error();
      if (!is_abandoned(**envelope)) return std::optional<Envelope>(std::move(*envelope).value());
    }
    return std::optional<Envelope>();
  }

  // The reply to this request, or nothing and the message kept.
  std::optional<Envelope> match(Result<Envelope> envelope, MessageKind kind, RequestId id) {
    if (envelope) {
      if (envelope->is_reply && envelope->request == id && envelope->kind == kind) {
        return std::move(envelope).value();
      }
      if (is_abandoned(*envelope)) return std::nullopt;
    }
    kept_.push_back(std::move(envelope));
    return std::nullopt;
  }

  // A reply that comes after its request timed out is nobody's.
  void abandon(RequestId id) {
    if (abandoned_.size() >= kMaxAbandoned) abandoned_.clear();
    abandoned_.insert(id);
  }
  bool is_abandoned(const Envelope& envelope) {
    return envelope.is_reply && abandoned_.erase(envelope.request) != 0;
  }

  Options options_;
  Registered registered_;
  ZmqSocket socket_;
  EventFd armed_event_;
  bool armed_ = false;
  std::deque<ZmqMessage> early_;       // from the socket, and not in turn yet
  std::deque<Result<Envelope>> kept_;  // arrived while a request waited
  std::unordered_set<RequestId> abandoned_;
  UniqueFd epoll_;
};

Result<ControlLink::Impl::Registered> ControlLink::Impl::enroll(const Options& options,
                                                                Deadline deadline) {
  const std::string& path = options.registry_path.native();
  const auto as_no_manager = [&](Error error) {
    if (error.code == ErrorCode::kNotFound || error.code == ErrorCode::kPeerDied) {
      error.code = ErrorCode::kNoManager;
    }
    return error;
  };
  Registered result;
  auto socket = PacketSocket::connect(options.registry_path, deadline);
  if (!socket) return as_no_manager(std::move(socket).error());
  result.registry = std::move(socket).value();
  auto server = result.registry.peer();
  if (!server) return as_no_manager(std::move(server).error());
  result.server = std::move(server).value();

  RegistryHello hello;
  hello.kind = options.kind;
  hello.incarnation = options.incarnation;
  hello.name = options.name;
  hello.wants_rings = options.rings;
  // A server with too many peers says so and closes, which may come before our hello.
  Status sent = result.registry.send(encode(hello));
  if (!sent && sent.error().code != ErrorCode::kPeerDied) return std::move(sent).error();
  // wait: the server's welcome; deadline, of the caller; the end of the connection
  auto packet = result.registry.receive(deadline);
  if (!packet && packet.error().code == ErrorCode::kPeerDied) {
    // The end is told before what came before it when our hello was never read.
    if (auto last = result.registry.try_receive(); last && last->has_value()) {
      packet = std::move(**last);
    }
  }
  if (!packet) {
    if (packet.error().code == ErrorCode::kTimeout) {
      return KVFERRY_ERROR(kTimeout, "the server of {} (process {}) did not answer our hello", path,
                           result.server.pid());
    }
    return as_no_manager(std::move(packet).error());
  }
  KVFERRY_ASSIGN(result.welcome,
                 decode_versioned<RegistryWelcome>(
                     packet->bytes, "registry welcome",
                     fmt::format("the server of {} (process {})", path, result.server.pid())));
  if (result.welcome.refused) return std::move(*result.welcome.refused);
  const std::uint64_t connection = result.welcome.ring_connection;
  const std::size_t rings = connection == 0 ? 0 : 1;
  const std::size_t catalogues = result.welcome.catalogue_bytes > 0 ? 1 : 0;
  if (packet->fds.size() < rings + 2 * catalogues || packet->fds.size() > rings + catalogues + 1) {
    return KVFERRY_ERROR(
        kProtocol, "the server of {} sent {} descriptors, expected {} and perhaps that of memory",
        path, packet->fds.size(), rings);
  }
  if (rings == 1) {
    KVFERRY_ASSIGN(result.channel, MessageChannel::join(packet->fds.back(), connection));
    packet->fds.pop_back();
  }
  if (!packet->fds.empty()) result.memory = std::move(packet->fds.front());
  if (catalogues == 1) result.catalogue = std::move(packet->fds.back());
  return result;
}

ControlLink::ControlLink() = default;
ControlLink::~ControlLink() = default;

Result<std::unique_ptr<ControlLink>> ControlLink::connect(Options options, Deadline deadline) {
  if (options.incarnation.is_zero()) {
    return KVFERRY_ERROR(kInvalidArgument, "a control link needs an incarnation that is not zero");
  }
  KVFERRY_ASSIGN(Impl::Registered registered, Impl::enroll(options, deadline));
  std::unique_ptr<ControlLink> link(new ControlLink());
  try {
    link->impl_ = std::make_unique<Impl>(std::move(options), std::move(registered));
  } catch (const Exception& exception) {
    return exception.error();
  }
  KVFERRY_TRY(link->impl_->greet(deadline));
  return link;
}

const RegistryWelcome& ControlLink::welcome() const noexcept { return impl_->registered().welcome; }

UniqueFd ControlLink::take_memory_fd() { return impl_->take_memory(); }
PoolMemory ControlLink::take_pool() { return impl_->take_pool(); }

const ProcessRef& ControlLink::server() const noexcept { return impl_->registered().server; }

int ControlLink::fd() const noexcept { return impl_->fd(); }

bool ControlLink::server_lost() const noexcept { return impl_->server_lost(); }

Status ControlLink::send(const Envelope& envelope) { return impl_->send(envelope); }

Result<std::optional<Envelope>> ControlLink::try_receive() { return impl_->try_receive(); }

// NOLINTNEXTLINE(readability-convert-member-functions-to-static): callers have a link at hand.
RequestId ControlLink::next_request() noexcept {
  // One counter for the process: a link that connects again must not repeat ids of an earlier one.
  static std::atomic<std::uint64_t> last{0};
  return RequestId{last.fetch_add(1, std::memory_order_relaxed) + 1};
}

Result<Envelope> ControlLink::request(MessageKind kind, Bytes body, Deadline deadline) {
  return impl_->request(kind, std::move(body), next_request(), deadline);
}

}  // namespace kvferry::ipc
