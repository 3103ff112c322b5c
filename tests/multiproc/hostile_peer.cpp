// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A process of the unlink handshake that gets past its hello like any other and then writes garbage
// wherever it may: its words, its ring of transitions, its connection, the worker's staging agent.
//   kvferry_hostile_peer dir= self= owner= handles= device= lives= seed= [lease=yes] [garbage=any]
//                        [worker=yes]
// It owns when self is owner, and attaches otherwise; worker: of the worker fixture's instance.
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"
#include "lease/lease_messages.hpp"
#include "multiproc/hostile_words.hpp"
#include "multiproc/worker_setup.hpp"
#include "support/child_side.hpp"
#include "support/lease_geometry.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace {

using namespace kvferry::ipc;
using namespace kvferry::ipc::lease;
using kvferry::test::hear;
using kvferry::test::say;
using kvferry::test::Scribbler;

using Arguments = std::map<std::string, std::string>;

constexpr int kScribbles = 20'000;  // Between two packets.
constexpr int kPackets = 6;

template <typename T> T value(Result<T> result) {
  if (!result) throw Exception(std::move(result).error());
  return std::move(result).value();
}

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

class Hostile {
 public:
  explicit Hostile(Arguments arguments)
      : arguments_(std::move(arguments)),
        geometry_(of_worker() ? kvferry::test::worker_geometry()
                              : kvferry::test::small_geometry(2, 1)),
        dir_(value(RuntimeDir::open(arguments_["dir"], of_worker() ? "default" : "test"))),
        scribbler_(std::stoull(arguments_["seed"])) {
    me_.instance = dir_.instance();
    me_.engine = "chat";
    me_.ranks = 1;
    me_.self = arguments_["self"] == "mover" ? ProcessKind::kMover : ProcessKind::kWorker;
    me_.cache_owner = arguments_["owner"] == "mover" ? CacheOwner::kMover : CacheOwner::kWorker;
    me_.handles = arguments_["handles"] == "legacy" ? HandleKind::kLegacy : HandleKind::kVmm;
    me_.fingerprint = geometry_.fingerprint(ArenaOrder::kLayerFirst);
    me_.incarnation = Digest::random();
    // A ring like everybody's, under its own name; then it is written over.
    log_ = value(TransitionLog::create(dir_, {.role = arguments_["self"],
                                              .engine = "chat",
                                              .rank = Rank{0},
                                              .incarnation = me_.incarnation}));
    scribbler_.add_ring(dir_.transitions_folder());
  }

  // One connection with words of its own, as an attacher.
  void attack_owner(std::uint64_t life, bool wants_lease) {
    me_.incarnation = Digest::random();
    const auto words = kvferry::test::make_words(words::kAttacherSegmentBytes,
                                                 words::kAttacherMagic, me_.incarnation);
    auto connected = PacketSocket::connect(dir_.rank_socket("chat", 0, "lease"), soon());
    if (!connected) return said("no connection");
    PacketSocket socket = std::move(connected).value();
    const int fd = words.fd.get();
    if (!send(socket, LeaseMessage::kHello, HelloBody{me_}, {&fd, 1})) return said("no hello");
    auto packet = socket.receive(soon());
    if (!packet) return said("no answer");
    const auto incoming = read_header(std::move(packet).value());
    if (!incoming || incoming->message != LeaseMessage::kWelcome) return said("refused");
    if (const std::string open = kvferry::test::try_to_write(incoming->packet.fds.at(0));
        !open.empty()) {
      said("BREACH: the owner's words: " + open);
    }
    const auto welcome = read_body<WelcomeBody>(*incoming, "Welcome", 1);
    if (wants_lease) {
      (void)send(socket, LeaseMessage::kAttach, AttachBody{Epoch{1}});
      // The grant: its descriptors are dropped, unopened. Where a clear may have begun, none comes.
      const bool may_be_late = arguments_["garbage"] == "any";
      (void)socket.receive(may_be_late ? soon() : Deadline::after(std::chrono::milliseconds(100)));
    }
    // Every second life writes what could be true, the others anything.
    scribbler_.set_plausible(life % 2 == 0 && arguments_["garbage"] != "any");
    for (int i = 0; i < kPackets; ++i) {
      scribbler_.scribble(words.mapping, kScribbles);
      if (!socket.send(scribbler_.packet())) break;
    }
    said("dropped");
    if (of_worker() && welcome) ask_agent(welcome->session);
  }

  // As a mover of its own, on a lane of its own: well-formed requests that nobody may grant, of the
  // arena's session and others, and garbage. Reads no answer.
  void ask_agent(const SessionId& session) {
    auto connected = PacketSocket::connect(dir_.rank_socket("chat", 0, "agent"), soon());
    if (!connected) return said("no agent");
    AgentHello hello;
    hello.mover = Digest::random();
    hello.engine = "chat";
    hello.lane = 7;
    if (!connected->send(encode(hello)) || !connected->receive(soon())) return said("no agent");
    for (int i = 0; i < 1000; ++i) {
      StageRequest request;
      request.id = static_cast<std::uint64_t>(i) + 1;
      request.session = scribbler_.number(4) == 0 ? Digest::random() : session;
      request.epoch = Epoch{scribbler_.number(3)};
      request.kind = scribbler_.number(2) == 0 ? StageKind::kGather : StageKind::kScatter;
      request.group = GroupId{static_cast<std::uint32_t>(scribbler_.number(4))};
      request.slot = static_cast<std::uint32_t>(scribbler_.number(8));
      request.blocks.assign(1 + scribbler_.number(100), 0);
      for (std::uint32_t& block : request.blocks) {
        block = kvferry::test::kGpuBlocks + static_cast<std::uint32_t>(scribbler_.number(1U << 31));
      }
      Bytes bytes = encode(request);
      if (scribbler_.number(8) == 0) bytes = scribbler_.packet();
      if (!connected->send(bytes)) break;
    }
    said("asked");
  }

  // An owner: whoever comes is greeted, gets memory that is really there, and is then lied to.
  void attack_attachers(int rounds) {
    const auto spec = value(DeviceSpec::parse(arguments_["device"]));
    const std::unique_ptr<Device> device = open_device(spec);
    const ArenaLayout layout = kvferry::test::small_layout(geometry_, ArenaOrder::kLayerFirst);
    const Arena arena = value(Arena::allocate(*device, Epoch{1}, layout, me_.handles, nullptr));
    PacketListener listener = value(PacketListener::listen(dir_.rank_socket("chat", 0, "lease")));
    said("listening");
    for (int round = 0; round < rounds; ++round) {
      std::optional<PacketSocket> socket = accept(listener);
      if (!socket) return said("nobody came");
      lie_to(*socket, arena, static_cast<std::uint64_t>(round));
    }
    said("spent");
    (void)hear();
  }

 private:
  [[nodiscard]] bool of_worker() { return arguments_["worker"] == "yes"; }
  static std::optional<PacketSocket> accept(PacketListener& listener) {
    const Deadline deadline = Deadline::after(std::chrono::seconds(20));
    while (!deadline.expired()) {
      pollfd waited{listener.fd(), POLLIN, 0};
      (void)::poll(&waited, 1, deadline.poll_timeout_ms());
      auto accepted = listener.try_accept();
      if (!accepted || accepted->has_value()) return value(std::move(accepted));
    }
    return std::nullopt;
  }

  void lie_to(PacketSocket& socket, const Arena& arena, std::uint64_t round) {
    auto packet = socket.receive(soon());
    if (!packet) return;
    const auto hello = read_header(std::move(packet).value());
    if (!hello || hello->message != LeaseMessage::kHello) return;
    if (const std::string open = kvferry::test::try_to_write(hello->packet.fds.at(0));
        !open.empty()) {
      said("BREACH: the attacher's words: " + open);
    }
    WelcomeBody welcome;
    welcome.owner.identity = me_;
    welcome.session = Digest::random();
    welcome.last_lease = LeaseId{round % 3 == 2 ? UINT64_MAX : 0};
    const auto words =
        kvferry::test::make_words(words::kOwnerSegmentBytes, words::kOwnerMagic, welcome.session);
    const std::uint64_t ready = words::pack({Epoch{1}, LeasePhase::kReady});
    kvferry::test::store_word(words.mapping, words::kOwnerWordOffset, ready);
    const int fd = words.fd.get();
    if (!send(socket, LeaseMessage::kWelcome, welcome, {&fd, 1})) return;
    if (round % 4 != 3) {            // Else garbage comes instead of the grant.
      (void)socket.receive(soon());  // Attach.
      grant(socket, arena, round);
      if (round % 2 == 0) wait_mapped(socket, hello->packet.fds.at(0));
    }
    scribbler_.set_plausible(round % 2 == 0);
    for (int i = 0; i < kPackets; ++i) {
      scribbler_.scribble(words.mapping, kScribbles);
      // Look at the word, or at this.
      const Status sent = round % 2 == 0 ? send(socket, LeaseMessage::kRevoke, RevokeBody{Epoch{1}})
                                         : socket.send(scribbler_.packet());
      if (!sent) break;
    }
    said("lied");
  }

  // Until its attached word says so, or it has no need for the grant.
  static void wait_mapped(PacketSocket& socket, const UniqueFd& words_fd) {
    const SharedMapping words =
        value(SharedMemory::map_single_writer(words_fd, words::kAttacherSegmentBytes));
    const Deadline deadline = Deadline::after(std::chrono::seconds(2));
    while (!deadline.expired()) {
      if (kvferry::test::load_word(words, words::kAttachedOffset) != 0) return said("mapped");
      pollfd waited{socket.fd(), POLLIN, 0};
      if (::poll(&waited, 1, 1) > 0) return;
    }
  }

  void grant(PacketSocket& socket, const Arena& arena, std::uint64_t round) {
    const std::vector<ExportedHandle> handles = value(arena.export_handles());
    GrantBody grant;
    grant.epoch = Epoch{1};
    grant.lease = LeaseId{round + 1};
    grant.prepared = LeaseId{0};
    grant.total = static_cast<std::uint32_t>(handles.size());
    grant.layout = arena.layout();
    std::vector<int> fds;
    for (const ExportedHandle& handle : handles) {
      grant.handles.push_back({handle.kind, handle.size_bytes, handle.token, handle.fd.valid()});
      if (handle.fd.valid()) fds.push_back(handle.fd.get());
    }
    if (send(socket, LeaseMessage::kGrant, grant, fds)) said("granted");
  }

  static void said(const std::string& what) { say(what); }

  Arguments arguments_;
  Geometry geometry_;
  RuntimeDir dir_;
  LeaseIdentity me_;
  TransitionLog log_;
  Scribbler scribbler_;
};

int run(Arguments arguments) {
  Hostile hostile(arguments);
  const int lives = std::stoi(arguments["lives"]);
  if (arguments["self"] == arguments["owner"]) {
    hostile.attack_attachers(lives);
    return 0;
  }
  for (int life = 0; life < lives; ++life) {
    hostile.attack_owner(static_cast<std::uint64_t>(life), arguments["lease"] == "yes");
  }
  say("spent");
  (void)hear();  // Stays alive, with whatever leases it has.
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  kvferry::test::disable_core_dumps();
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string text(argv[i]);
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) return 64;
    arguments[text.substr(0, equals)] = text.substr(equals + 1);
  }
  init_logging("hostile", LogLevel::kWarn);
  try {
    return run(std::move(arguments));
  } catch (const std::exception& exception) {
    say(fmt::format("failed {}", exception.what()));
    return 3;
  }
}
