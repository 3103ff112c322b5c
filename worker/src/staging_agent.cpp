// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "staging_agent.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"
#include "make_stream.hpp"
#include "stage_check.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using ipc::Error;
using ipc::IncarnationId;
using ipc::Packet;
using ipc::Result;
using ipc::StageRequest;
using ipc::Status;
using ipc::Transition;

namespace {

constexpr std::size_t kMaxFenced = 4096;
constexpr std::size_t kMaxConnections = 64;
constexpr std::ptrdiff_t kMaxSilentOfProcess = 16;
constexpr auto kAcceptPause = std::chrono::milliseconds(200);
// Connections, and packets of one connection, in one go: a flood of them does not hold up the rest
// of the worker.
constexpr int kAcceptsPerRound = 16;
constexpr int kPacketsPerRound = 64;
// The gather of a slot takes 10 to 30 us, when compute leaves room for it; a notice takes 40 us of
// a processor, and twice as long.
constexpr std::uint64_t kWatchedBytes = std::uint64_t{16} << 20;
constexpr std::chrono::microseconds kWatch{40};
constexpr std::uint64_t kWordsBytes = 64;

ipc::PacketListener make_listener(const ipc::RuntimeDir& dir, const ipc::RankConfig& config) {
  auto listener =
      ipc::PacketListener::listen(dir.rank_socket(config.engine, config.rank.value, "agent"));
  if (!listener) throw ipc::Exception(std::move(listener).error());
  return std::move(listener).value();
}

Status expect_no_descriptors(const Packet& packet) {
  if (packet.fds.empty()) return ipc::ok();
  return KVFERRY_ERROR(kProtocol, "a staging message carries {} descriptors, expected none",
                       packet.fds.size());
}

bool is_meant(const ipc::QuiesceStaging& request, const IncarnationId& mover) {
  return (mover == request.mover) != request.others;
}

std::string describe(const ipc::QuiesceStaging& request) {
  return fmt::format("{}{}", request.others ? "others than mover " : "dead mover ",
                     request.mover.hex());
}

}  // namespace

StagingAgent::StagingAgent(ipc::EventLoop& loop,
                           const ipc::RuntimeDir& dir,
                           const ipc::RankConfig& config,
                           ipc::Device& device,
                           WorkerArena& arena,
                           LayerWords& layers,
                           const ipc::ComputeActivity& activity,
                           const CopyBudget& budget,
                           ipc::TransitionLog transitions,
                           StreamCompletions::Failed on_device_failed)
    : loop_(loop),
      config_(config),
      device_(device),
      arena_(arena),
      layers_(layers),
      activity_(activity),
      budget_(budget),
      transitions_(std::move(transitions)),
      pools_(device),
      completions_(loop,
                   make_stream(device, ipc::StreamPriority::kHigh),
                   "staging",
                   on_device_failed,
                   make_pinned(device, kWordsBytes)),
      behind_compute_(loop,
                      make_stream(device, ipc::StreamPriority::kHigh),
                      "staging behind compute",
                      std::move(on_device_failed),
                      make_pinned(device, kWordsBytes)),
      listener_(make_listener(dir, config)) {
  loop_.watch(listener_.fd(), [this] { on_connect(); });
}

StagingAgent::~StagingAgent() {
  if (accept_pause_ != 0) {
    loop_.cancel(accept_pause_);
  } else {
    loop_.unwatch(listener_.fd());
  }
  for (const Connection& connection : connections_) {
    loop_.unwatch(connection.socket.fd());
    loop_.cancel(connection.hello_timer);
  }
  for (const Waiter& waiter : waiters_) loop_.cancel(waiter.timer);
  loop_.cancel(layers_timer_);
  // Before the streams end, which wait for what is in them.
  layers_.fail_all(KVFERRY_ERROR(kCancelled, "the worker's staging agent ends"));
}

void StagingAgent::on_connect() {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    auto accepted = listener_.try_accept();
    if (!accepted) {
      // No descriptors left, say: the listener stays readable, so it is left alone for a while.
      ipc::log_warn("staging: cannot accept: {}", accepted.error().to_string());
      loop_.unwatch(listener_.fd());
      accept_pause_ = loop_.after(kAcceptPause, [this] {
        accept_pause_ = 0;
        loop_.watch(listener_.fd(), [this] { on_connect(); });
      });
      return;
    }
    if (!accepted->has_value()) return;
    const pid_t pid = (*accepted)->peer_pid();
    const auto silent = std::count_if(
        connections_.begin(), connections_.end(),
        [pid](const Connection& c) { return c.mover.is_zero() && c.socket.peer_pid() == pid; });
    if (connections_.size() >= kMaxConnections || silent >= kMaxSilentOfProcess) {
      warn(fmt::format("{} connections already, {} of pid {} without a hello; refusing another",
                       connections_.size(), silent, pid));
      continue;
    }
    Connection& connection = connections_.emplace_back();
    connection.id = next_id_++;
    connection.socket = std::move(**accepted);
    connection.hello_timer =
        loop_.after(config_.timeouts.hello, [this, id = connection.id] { on_silent(id); });
    loop_.watch(connection.socket.fd(), [this, id = connection.id] { on_readable(id); });
  }
}

void StagingAgent::warn(const std::string& text) {
  std::uint64_t suppressed = 0;
  if (log_gate_.open(suppressed)) {
    ipc::log_warn("staging: {} ({} more like it)", text, suppressed);
  }
}

// Silent connections would fill the table, and then no mover could get in.
void StagingAgent::on_silent(std::uint64_t connection) {
  const Connection* silent = find(connection);
  if (silent == nullptr || !silent->mover.is_zero()) return;
  drop(connection, fmt::format("it said no hello within {} ms", config_.timeouts.hello.count()));
}

StagingAgent::Connection* StagingAgent::find(std::uint64_t connection) {
  const auto found = std::find_if(connections_.begin(), connections_.end(),
                                  [connection](const Connection& c) { return c.id == connection; });
  return found == connections_.end() ? nullptr : &*found;
}

void StagingAgent::on_readable(std::uint64_t connection) {
  for (int i = 0; i < kPacketsPerRound; ++i) {
    Connection* from = find(connection);
    if (from == nullptr) return;
    auto packet = from->socket.try_receive();
    if (!packet) {
      drop(connection, packet.error().to_string());
      return;
    }
    if (!packet->has_value()) return;
    if (const auto status = on_packet(*from, std::move(**packet)); !status) {
      drop(connection, status.error().to_string());
      return;
    }
  }
}

Status StagingAgent::on_packet(Connection& connection, Packet packet) {
  if (connection.mover.is_zero()) {
    Status accepted = on_hello(connection, packet);
    if (!accepted) answer(connection.id, 0, accepted.error());
    return accepted;
  }
  if (!connection.welcome) {
    return KVFERRY_ERROR(kProtocol, "a request on lane {} came before its hello was answered",
                         connection.lane);
  }
  KVFERRY_ASSIGN(StageRequest stage, ipc::decode<StageRequest>(packet.bytes, "StageRequest"));
  if (stage.id <= connection.last_request) {
    return KVFERRY_ERROR(kProtocol, "request {} on lane {} after request {}: their numbers grow",
                         stage.id, connection.lane, connection.last_request);
  }
  connection.last_request = stage.id;
  if (stage.kind == ipc::StageKind::kPool) return on_pool(connection, stage, std::move(packet));
  KVFERRY_TRY(expect_no_descriptors(packet));
  if (queue_.size() >= kMaxQueued) {
    answer(connection.id, stage.id,
           KVFERRY_ERROR(kBusy, "{} staging requests wait already; retry later", queue_.size()));
    return ipc::ok();
  }
  queue_.push_back(
      Request{connection.id, connection.mover, connection.lane, std::move(stage), connection.pool});
  start_queued();
  return ipc::ok();
}

Status StagingAgent::on_hello(Connection& connection, const Packet& packet) {
  KVFERRY_TRY(expect_no_descriptors(packet));
  KVFERRY_ASSIGN(const ipc::AgentHello hello,
                 ipc::decode<ipc::AgentHello>(packet.bytes, "AgentHello"));
  KVFERRY_TRY(check_hello(hello, connection));
  connection.mover = hello.mover;
  connection.lane = hello.lane;
  std::vector<std::uint64_t> earlier;
  for (const Connection& other : connections_) {
    const bool same_lane = !other.mover.is_zero() && other.lane == connection.lane;
    if (same_lane && other.id != connection.id) earlier.push_back(other.id);
  }
  for (const std::uint64_t other : earlier) drop(other, "its lane has connected anew");
  if (const std::size_t left = left_on_lane(connection); left > 0) {
    ipc::log_info(
        "staging: mover {} connected on lane {}, where {} launches of an ended connection "
        "still run: it waits for them",
        connection.mover.hex(), connection.lane, left);
    return ipc::ok();
  }
  ipc::log_info("staging: mover {} connected on lane {}", connection.mover.hex(), connection.lane);
  welcome_waiting();
  return ipc::ok();
}

// The answer to a hello has id 0, and is the proof that nothing of the lane's past runs any more.
void StagingAgent::welcome_waiting() {
  if (device_failure_) return;  // what has not been seen to end is not counted any more
  for (Connection& connection : connections_) {
    if (connection.mover.is_zero() || connection.welcome || left_on_lane(connection) > 0) continue;
    connection.welcome = true;
    transitions_.record(Transition::kStagingWelcome,
                        {.peer = connection.mover, .detail = connection.lane});
    answer(connection.id, 0, std::nullopt);
  }
}

std::size_t StagingAgent::left_on_lane(const Connection& connection) const {
  return static_cast<std::size_t>(
      std::count_if(in_flight_.begin(), in_flight_.end(), [&connection](const InFlight& work) {
        return work.lane == connection.lane && work.connection != connection.id;
      }));
}

Status StagingAgent::check_hello(const ipc::AgentHello& hello, const Connection& connection) const {
  if (connection.socket.peer_closed()) {
    // Given up by its mover, whose next connection this one must not push out.
    return KVFERRY_ERROR(kPeerDied, "mover {} closed the connection before its hello was read",
                         hello.mover.hex());
  }
  if (device_failure_) {
    return KVFERRY_ERROR(kCuda, "the worker's device has failed: {}", device_failure_->message);
  }
  if (hello.version != ipc::kWireVersion) {
    return KVFERRY_ERROR(kVersionMismatch, "mover speaks version {}, this worker {}", hello.version,
                         ipc::kWireVersion);
  }
  if (hello.engine != config_.engine || hello.rank != config_.rank) {
    return KVFERRY_ERROR(kProtocol, "mover of {}/{} connected to the agent of {}/{}", hello.engine,
                         hello.rank.value, config_.engine, config_.rank.value);
  }
  if (hello.mover.is_zero() || is_fenced(hello.mover)) {
    return KVFERRY_ERROR(kProtocol, "mover {} was declared dead", hello.mover.hex());
  }
  return ipc::ok();
}

void StagingAgent::drop(std::uint64_t connection, std::string_view why) {
  const auto found = std::find_if(connections_.begin(), connections_.end(),
                                  [connection](const Connection& c) { return c.id == connection; });
  if (found == connections_.end()) return;
  const std::size_t dropped = std::erase_if(
      queue_, [connection](const Request& request) { return request.connection == connection; });
  ipc::log_info("staging: connection of mover {} ended ({}); {} queued requests dropped",
                found->mover.hex(), why, dropped);
  loop_.unwatch(found->socket.fd());
  loop_.cancel(found->hello_timer);
  fail_layers(*found, why);
  connections_.erase(found);
}

void StagingAgent::fail_layers(const Connection& connection, std::string_view why) {
  for (const auto& [slot, ticket] : connection.tickets) {
    layers_.fail(ticket, KVFERRY_ERROR(kPeerDied, "the connection of mover {} ended ({})",
                                       connection.mover.hex(), why));
  }
}

// Also right before the device is looked at for them: a failed use lets its waiters go.
void StagingAgent::look_at_layers() {
  layers_.expire(ipc::MonotonicClock::now());
  loop_.cancel(std::exchange(layers_timer_, 0));
  if (const auto next = layers_.next_look()) {
    layers_timer_ = loop_.at(*next, [this] {
      layers_timer_ = 0;
      look_at_layers();
    });
  }
}

void StagingAgent::on_revoked() {
  const std::deque<Request> revoked = std::exchange(queue_, {});
  for (const Request& request : revoked) {
    answer(request.connection, request.stage.id,
           KVFERRY_ERROR(kRevoked, "epoch {} was revoked before request {} ran",
                         request.stage.epoch.value, request.stage.id));
  }
  layers_.fail_all(KVFERRY_ERROR(kRevoked, "the epoch is being revoked"));
}

void StagingAgent::start_queued() {
  if (device_failure_) return;
  // In their order, but those that wait for compute hold nobody else up.
  for (auto next = queue_.begin(); next != queue_.end();) {
    if (!has_room_for(*next)) {
      ++next;
      continue;
    }
    Request request = std::move(*next);
    queue_.erase(next);
    start(std::move(request));
    next = queue_.begin();
  }
}

bool StagingAgent::has_room_for(const Request& request) const {
  if (request.is_pinning) return false;
  const auto alike = static_cast<std::size_t>(
      std::count_if(in_flight_.begin(), in_flight_.end(), [&request](const InFlight& work) {
        return work.awaits_compute == request.awaits_compute();
      }));
  return alike < (request.awaits_compute() ? kMaxAwaiting : kMaxInFlight);
}

Status StagingAgent::enter_layers(const Request& request) {
  if (!request.stage.layers) return ipc::ok();
  const ipc::LayerTicket& ticket = request.stage.layers->ticket;
  KVFERRY_TRY(layers_.enter(ticket));
  if (Connection* from = find(request.connection); from != nullptr) {
    from->tickets[ticket.slot] = ticket;
  }
  return ipc::ok();
}

void StagingAgent::start(Request request) {
  auto use = arena_.enter(request.stage.session, request.stage.epoch);
  if (!use) {
    answer(request.connection, request.stage.id, std::move(use).error());
    return;
  }
  if (!request.pool && !request.stage.parts.empty()) {
    answer(request.connection, request.stage.id, std::move(request.pool).error());
    return;
  }
  const std::shared_ptr<ipc::PoolMapping> pool = request.pool.value_or(nullptr);
  const std::uint64_t pool_bytes = pool == nullptr ? 0 : pool->size_bytes();
  if (auto valid = check_stage_request(request.stage, use->arena(), pool_bytes); !valid) {
    answer(request.connection, request.stage.id, std::move(valid).error());
    return;
  }
  if (!request.stage.parts.empty() && !is_pinned(request, *pool, use->arena())) {
    pin(std::move(request), use->arena());
    return;
  }
  if (auto entered = enter_layers(request); !entered) {
    answer(request.connection, request.stage.id, std::move(entered).error());
    return;
  }
  in_flight_.emplace_back();
  const auto work = std::prev(in_flight_.end());
  work->connection = request.connection;
  work->mover = request.mover;
  work->lane = request.lane;
  work->id = request.stage.id;
  work->awaits_compute = request.awaits_compute();
  work->layers = request.stage.layers;
  work->pool = pool;
  work->use = std::move(use).value();
  if (work->awaits_compute) stream_of(*work).ask_now();
  if (auto launched = launch(request, *work); !launched) {
    // A part of it may run already: the answer waits for the stream like any other.
    work->error = std::move(launched).error();
    if (work->layers) layers_.fail(work->layers->ticket, *work->error);
  }
  if (ipc::is_mutant("answers_at_the_launch")) {
    answer(work->connection, work->id, std::nullopt);
    work->connection = 0;  // not twice
  }
  const bool watched = stage_bytes(request.stage, work->use.arena()) <= kWatchedBytes;
  stream_of(*work).when_done([this, work](const Status& status) { finish(work, status); },
                             watched ? kWatch : ipc::Duration::zero());
}

void StagingAgent::finish(std::list<InFlight>::iterator work, const Status& status) {
  if (!status) return lose_track(work, status.error());
  if (work->layers) {
    if (work->error) layers_.fail(work->layers->ticket, *work->error);
    const Status whole = layers_.leave(work->layers->ticket, work->layers->last && !work->error);
    if (!whole && !work->error) work->error = whole.error();
    Connection* from = find(work->connection);
    if (work->layers->last && from != nullptr) from->tickets.erase(work->layers->ticket.slot);
  }
  const InFlight ended = std::move(*work);
  transitions_.record(
      Transition::kStagingEnded,
      {.job = ipc::JobId{ended.connection}, .peer = ended.mover, .detail = ended.id});
  in_flight_.erase(work);
  answer(ended.connection, ended.id, ended.error);
  welcome_waiting();
  settle_waiters();
  start_queued();
}

// An answer would give on blocks, or places in a pool, that a kernel may still write: the death of
// this process gives it.
void StagingAgent::lose_track(std::list<InFlight>::iterator work, const Error& error) {
  if (!device_failure_) device_failure_ = error;
  if (work->layers) {
    layers_.fail(work->layers->ticket, error);
    (void)layers_.leave(work->layers->ticket, /*is_last=*/false);
  }
  const std::uint64_t connection = work->connection;
  in_flight_.erase(work);
  drop(connection, "the device has failed");
}

Status StagingAgent::launch(const Request& request, InFlight& work) {
  const StageRequest& stage = request.stage;
  KVFERRY_TRY(
      transitions_.attempt(Transition::kStagingLaunch, {.session = stage.session,
                                                        .epoch = stage.epoch,
                                                        .job = ipc::JobId{request.connection},
                                                        .peer = request.mover,
                                                        .detail = stage.id}));
  ipc::Stream& stream = stream_of(work).stream();
  if (work.awaits_compute) {
    KVFERRY_TRY(stream.wait_word(layers_.word(work.layers->ticket.slot), work.layers->through));
  }
  if (!stage.blocks.empty()) KVFERRY_TRY(launch_kernel(stage, work));
  if (!work.layers || work.awaits_compute) return ipc::ok();
  // In the order of the stream: behind the kernels of this request and of those before it.
  return stream.write_word(layers_.word(work.layers->ticket.slot), work.layers->through);
}

Status StagingAgent::launch_kernel(const StageRequest& stage, InFlight& work) {
  if (!stage.parts.empty()) return launch_straight(stage, work);
  const MappedArena& arena = work.use.arena();
  const GroupView& group = arena.groups[stage.group.value];
  const ipc::RegionTable* table = group.table(stage.set);
  std::uint64_t stride = group.packed(stage.set);
  if (stage.layers) {
    KVFERRY_ASSIGN(work.table,
                   device_.make_region_table(group.regions(stage.set, stage.layers->range)));
    table = work.table.get();
    stride = group.packed(stage.set, stage.layers->range);
  }
  ipc::Stream& stream = stream_of(work).stream();
  const ipc::DevicePtr slot = arena.slots[stage.slot];
  const bool stores = stage.kind == ipc::StageKind::kGather;
  stream.limit_thread_blocks(budget_.of(stores, stage.is_ahead));
  return stores ? stream.gather(*table, stage.blocks, slot, stride)
                : stream.scatter(*table, stage.blocks, slot, stride);
}

void StagingAgent::answer(std::uint64_t connection, std::uint64_t id, std::optional<Error> error) {
  Connection* to = find(connection);
  if (to == nullptr) return;  // The mover is gone; nobody waits for this.
  if (error) {
    warn(
        fmt::format("request {} of mover {} refused: {}", id, to->mover.hex(), error->to_string()));
  }
  if (id != 0) {
    transitions_.record(Transition::kStagingAnswer,
                        {.job = ipc::JobId{connection}, .peer = to->mover, .detail = id});
  }
  std::vector<int> with;
  if (id == 0 && !error) with.push_back(activity_.fd().get());
  const ipc::StageReply reply{id, std::move(error)};
  if (const auto sent = to->socket.send(ipc::encode(reply), with); !sent) {
    // A mover that does not read its answers has more requests out than its ring has slots.
    loop_.post([this, connection, why = sent.error().to_string()] { drop(connection, why); });
  }
}

std::size_t StagingAgent::running(const ipc::QuiesceStaging& request) const {
  return static_cast<std::size_t>(
      std::count_if(in_flight_.begin(), in_flight_.end(),
                    [&request](const InFlight& work) { return is_meant(request, work.mover); }));
}

bool StagingAgent::is_fenced(const IncarnationId& mover) const {
  return std::find(fenced_.begin(), fenced_.end(), mover) != fenced_.end();
}

void StagingAgent::quiesce(const ipc::QuiesceStaging& request,
                           ipc::Deadline deadline,
                           Quiesced quiesced) {
  // First the fence and the sockets, so that nothing which was sent earlier can still start:
  // neither requests unread in a socket nor a hello that waits to be accepted.
  if (!request.others && !is_fenced(request.mover)) fenced_.push_back(request.mover);
  if (fenced_.size() > kMaxFenced) fenced_.pop_front();
  std::vector<std::uint64_t> ended;
  for (const Connection& connection : connections_) {
    const bool greeted = !connection.mover.is_zero();
    if (greeted && is_meant(request, connection.mover)) ended.push_back(connection.id);
  }
  for (const std::uint64_t connection : ended) drop(connection, "quiesced by the manager");
  if (device_failure_) {
    return quiesced(KVFERRY_ERROR(kCuda, "nothing shows what runs for {}: {}", describe(request),
                                  device_failure_->message));
  }
  const std::size_t left = running(request);
  if (left == 0) return say_quiesced(request, quiesced);
  ipc::log_info("staging: waits for {} launches asked by {}, deadline in {} ms", left,
                describe(request), deadline.poll_timeout_ms());
  Waiter& waiter = waiters_.emplace_back();
  waiter.id = next_id_++;
  waiter.request = request;
  waiter.quiesced = std::move(quiesced);
  waiter.timer = loop_.at(deadline.when(), [this, id = waiter.id] {
    const auto found = std::find_if(waiters_.begin(), waiters_.end(),
                                    [id](const Waiter& w) { return w.id == id; });
    if (found == waiters_.end()) return;
    const Waiter late = std::move(*found);
    waiters_.erase(found);
    late.quiesced(KVFERRY_ERROR(kTimeout, "{} launches asked by {} have not ended",
                                running(late.request), describe(late.request)));
  });
}

void StagingAgent::say_quiesced(const ipc::QuiesceStaging& request,
                                const Quiesced& quiesced) const {
  transitions_.record(request.others ? Transition::kStagingSettled : Transition::kStagingQuiesced,
                      {.peer = request.mover});
  quiesced(ipc::ok());
}

void StagingAgent::settle_waiters() {
  if (device_failure_) return;  // they hear of their deadlines
  for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
    if (running(waiter->request) > 0) {
      ++waiter;
      continue;
    }
    const Waiter settled = std::move(*waiter);
    waiter = waiters_.erase(waiter);
    loop_.cancel(settled.timer);
    ipc::log_info("staging: nothing asked by {} runs any more", describe(settled.request));
    say_quiesced(settled.request, settled.quiesced);
  }
}

}  // namespace kvferry::worker
