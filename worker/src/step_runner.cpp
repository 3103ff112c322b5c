// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "step_runner.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "make_stream.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using ipc::Envelope;
using ipc::Error;
using ipc::ErrorCode;
using ipc::MessageKind;
using ipc::Status;
using std::chrono_literals::operator""s;

namespace {

/// Split-KV attention keeps partial results per block that it reads; the workspace of a step.
constexpr std::uint64_t kWorkspaceBytesPerRead = 16ULL << 10;
/// Zeroing a few KiB, once.
constexpr auto kTablesTime = 5s;

/// What of a group's step does not go layer by layer.
GroupStep rest_of(const ipc::Step& step, const GroupStep& group) {
  GroupStep rest = group;
  if (step.computes) rest.fills.clear();
  if (step.awaits) {
    rest.verifies.clear();
    rest.verify_places.clear();
  }
  return rest;
}

}  // namespace

StepRunner::StepRunner(ipc::EventLoop& loop,
                       const ipc::RuntimeDir& dir,
                       const ipc::RankConfig& config,
                       ipc::Duration idle_trim,
                       ipc::Device& device,
                       Enter enter,
                       CachingAllocator& allocator,
                       ModelTables& tables,
                       LayerWords& layers,
                       ipc::ComputeActivity& activity,
                       std::atomic<std::uint64_t>& graph_bytes,
                       StreamCompletions::Failed on_device_failed)
    : device_(device),
      enter_(std::move(enter)),
      allocator_(allocator),
      tables_(tables),
      layers_(layers),
      activity_(activity),
      rank_(config.rank),
      tokens_per_block_(config.geometry.tokens_per_block),
      pinned_(device),
      graph_(device, allocator, graph_bytes),
      completions_(loop,
                   make_stream(device, ipc::StreamPriority::kNormal),
                   "compute",
                   std::move(on_device_failed)),
      idle_trim_(loop, idle_trim, [this] { empty_when_idle(); }) {
  ipc::ControlServer::Options options;
  options.registry_path = dir.rank_socket(config.engine, config.rank.value, "step");
  options.control_path =
      dir.rank_socket(config.engine, config.rank.value, ipc::RuntimeDir::kStepControl);
  options.session = ipc::SessionId::random();
  server_ = std::make_unique<ipc::ControlServer>(loop, std::move(options), *this);
}

ipc::Result<std::uint64_t> StepRunner::release(ipc::MemoryTag tag) {
  if (!in_flight_.empty()) {
    return KVFERRY_ERROR(kBusy, "{} steps run on rank {}: pause the engine first, or retry",
                         in_flight_.size(), rank_.value);
  }
  released_.add(tag);
  if (tag != ipc::MemoryTag::kScratch) return 0;
  pinned_.clear();
  return graph_.release();
}

ipc::Result<std::uint64_t> StepRunner::resume(ipc::MemoryTag tag) {
  std::uint64_t bytes = 0;
  if (tag == ipc::MemoryTag::kScratch) {
    KVFERRY_ASSIGN(bytes, graph_.resume());
  }
  released_.remove(tag);
  return bytes;
}

void StepRunner::when_graph_rests(std::function<void()> call) {
  if (graph_.is_busy()) {
    graph_waiters_.push_back(std::move(call));
  } else {
    call();
  }
}

void StepRunner::release_graph() { graph_.give_up(); }

void StepRunner::on_peer(const ipc::Peer& peer) {
  ipc::log_info("steps: {} connected (pid {})", peer.name, peer.pid);
}

void StepRunner::on_peer_silent(const ipc::Peer& peer) {
  ipc::log_info("steps: {} closed its connection", peer.name);
  drop_queued(peer.id);
  // Steps are not asked for again over another connection: an engine may open a channel for each
  // round of its training.
  server_->forget_when_closed(peer.id);
}

void StepRunner::on_peer_died(const ipc::Peer& peer) {
  ipc::log_info("steps: {} (pid {}) is dead", peer.name, peer.pid);
  drop_queued(peer.id);
  // What it has begun may wait for a transfer that it has not asked for, and never will.
  for (const InFlight& work : in_flight_) {
    if (work.peer != peer.id) continue;
    for (const ipc::LayerTicket& ticket : work.tickets) {
      layers_.fail(ticket, KVFERRY_ERROR(kPeerDied, "{} (pid {}) is dead", peer.name, peer.pid));
    }
  }
}

void StepRunner::drop_queued(const ipc::IncarnationId& peer) {
  std::erase_if(queue_, [&peer](const Request& request) { return request.peer == peer; });
}

void StepRunner::on_message(const ipc::Peer& peer, Envelope envelope) {
  if (envelope.is_reply) {
    ipc::log_warn("steps: {} sent a reply that nobody asked for", peer.name);
    return;
  }
  switch (envelope.kind) {
    case MessageKind::kStepHello:
      if (const auto sent = server_->reply(peer.id, envelope, ipc::Empty{}); !sent) {
        ipc::log_warn("steps: {} gets no answer: {}", peer.name, sent.error().to_string());
      }
      return;
    case MessageKind::kStep: enqueue<ipc::Step>(peer, std::move(envelope)); return;
    case MessageKind::kDecode: enqueue<ipc::Decode>(peer, std::move(envelope)); return;
    case MessageKind::kWorkerMemory: on_memory(peer, envelope); return;
    case MessageKind::kBye: drop_queued(peer.id); return;
    default:
      fail(peer.id, envelope,
           KVFERRY_ERROR(kProtocol, "message kind {} does not belong on a step channel",
                         static_cast<unsigned>(envelope.kind)));
  }
}

template <typename Work> void StepRunner::enqueue(const ipc::Peer& peer, Envelope envelope) {
  auto work = ipc::decode<Work>(envelope.body, ipc::to_string(envelope.kind));
  envelope.body.clear();
  if (!work) {
    fail(peer.id, envelope, std::move(work).error());
    return;
  }
  if (queue_.size() >= kMaxQueued) {
    fail(peer.id, envelope,
         KVFERRY_ERROR(kBusy, "{} steps wait already on rank {}; retry later", queue_.size(),
                       rank_.value));
    return;
  }
  queue_.push_back(Request{peer.id, std::move(envelope), std::move(work).value()});
  start_queued();
}

// Looks and touches nothing, whatever runs.
void StepRunner::on_memory(const ipc::Peer& peer, const Envelope& envelope) {
  const AllocatorStats stats = allocator_.stats();
  ipc::WorkerMemory memory;
  memory.reserved = stats.reserved_bytes;
  memory.used = stats.used_bytes;
  memory.peak_reserved = stats.peak_reserved_bytes;
  memory.graph_recordings = graph_.recordings();
  memory.graph_launches = graph_.launches();
  memory.empties.assign(stats.empties_for.begin(), stats.empties_for.end());
  if (const auto seen = device_.memory_info(); seen) memory.free_on_device = seen->free_bytes;
  if (const auto sent = server_->reply(peer.id, envelope, memory); !sent) {
    ipc::log_warn("steps: {} gets no answer: {}", peer.name, sent.error().to_string());
  }
}

ipc::SessionId StepRunner::Request::session() const {
  return std::visit([](const auto& named) { return named.session; }, work);
}

ipc::Epoch StepRunner::Request::epoch() const {
  return std::visit([](const auto& named) { return named.epoch; }, work);
}

void StepRunner::on_revoked() {
  const std::deque<Request> revoked = std::exchange(queue_, {});
  for (const Request& request : revoked) {
    fail(
        request.peer, request.envelope,
        KVFERRY_ERROR(kRevoked, "epoch {} was revoked before the step ran", request.epoch().value));
  }
}

void StepRunner::start_queued() {
  while (!queue_.empty() && in_flight_.size() < kMaxInFlight) {
    Request request = std::move(queue_.front());
    queue_.pop_front();
    start(std::move(request));
  }
}

void StepRunner::start(Request request) {
  if (!released_.empty()) {
    fail(request.peer, request.envelope,
         KVFERRY_ERROR(kNotReady, "rank {}: memory {} is released: resume it first", rank_.value,
                       ipc::to_string(released_)));
    return;
  }
  auto use = enter_(request.session(), request.epoch());
  if (!use) {
    fail(request.peer, request.envelope, std::move(use).error());
    return;
  }
  in_flight_.emplace_back();
  activity_.begin();
  idle_trim_.on_busy();
  const auto work = std::prev(in_flight_.end());
  work->peer = request.peer;
  work->envelope = std::move(request.envelope);
  work->use = std::move(use).value();
  auto launched = guard_step([&] {
    return std::visit([&](const auto& wanted) { return launch(wanted, *work); }, request.work);
  });
  if (!launched) {
    // What was launched before the error still runs: the answer waits for it like any other.
    work->error = std::move(launched).error();
  }
  completions_.when_done([this, work](const Status& status) { finish(work, status); });
}

Status StepRunner::launch(const ipc::Step& step, InFlight& work) {
  KVFERRY_ASSIGN(const auto groups, plan_step(step, work.use.arena()));
  work.verify_count = step.verifies.size();
  KVFERRY_TRY(prepare_workspace(step, work));
  work.results.reserve(groups.size());
  if (step.computes || step.awaits) KVFERRY_TRY(launch_layers(step, groups, work));
  for (const GroupStep& group : groups) {
    KVFERRY_TRY(launch_group(rest_of(step, group), step.decode_steps,
                             work.use.arena().groups[group.group], work.results.emplace_back()));
  }
  return ipc::ok();
}

// As a model would: each layer's part when its blocks are there, and a word when they are written.
Status StepRunner::launch_layers(const ipc::Step& step,
                                 const std::vector<GroupStep>& groups,
                                 InFlight& work) {
  for (const auto& ticket : {step.computes, step.awaits}) {
    if (!ticket) continue;
    const bool is_stored = step.computes && *ticket == *step.computes;
    KVFERRY_TRY(
        layers_.begin(*ticket, ipc::Deadline::after(step.patience),
                      is_stored ? LayerWords::Use::kIsStored : LayerWords::Use::kAwaitsLoad));
    work.tickets.push_back(*ticket);
    if (is_stored) work.computes = *ticket;
  }
  if (step.computes && step.awaits) layers_.follow(*step.computes, *step.awaits);
  for (const GroupStep& group : groups) {
    GroupResult& result = work.results.emplace_back();
    if (!step.awaits || group.verifies.empty()) continue;
    KVFERRY_ASSIGN(result.mismatches, pinned_.take(group.verifies.size()));
    result.places = group.verify_places;
  }
  if (!step.recorded) return enqueue_layers(step, groups, work, completions_.stream());
  KVFERRY_ASSIGN(work.recorded, completions_.stream().record([&](ipc::Stream& stream) {
    return enqueue_layers(step, groups, work, stream);
  }));
  return completions_.stream().launch(*work.recorded);
}

Status StepRunner::enqueue_layers(const ipc::Step& step,
                                  const std::vector<GroupStep>& groups,
                                  InFlight& work,
                                  ipc::Stream& stream) {
  const MappedArena& arena = work.use.arena();
  const std::uint32_t count = arena.layer_count();
  for (std::uint32_t layer = 0; layer < count; ++layer) {
    const bool verifies = step.awaits && (step.layers == 0 || layer < step.layers);
    if (verifies) KVFERRY_TRY(layers_.await_layer(stream, step.awaits->slot, layer));
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const GroupStep& group = groups[g];
      auto regions = arena.groups[group.group].regions(ipc::RegionSet::kAll, {layer, layer + 1});
      if (regions.empty()) continue;
      KVFERRY_ASSIGN(auto table, device_.make_region_table(std::move(regions)));
      if (step.computes && !group.fills.empty()) {
        KVFERRY_TRY(stream.fill_pattern(*table, group.fills));
      }
      if (verifies && !group.verifies.empty()) {
        KVFERRY_TRY(stream.verify_pattern(*table, group.verifies, *work.results[g].mismatches));
      }
      work.layer_tables.push_back(std::move(table));
    }
    if (step.computes) KVFERRY_TRY(layers_.mark_layer(stream, step.computes->slot, layer));
  }
  return ipc::ok();
}

Status StepRunner::launch(const ipc::Decode& pass, InFlight& work) {
  KVFERRY_ASSIGN(const ipc::DevicePtr tables, tables_.address(ipc::Deadline::after(kTablesTime)));
  const MappedArena& arena = work.use.arena();
  KVFERRY_ASSIGN(const std::vector<GroupPass> groups, plan_decode(pass, arena, tokens_per_block_));
  if (graph_.takes(groups, pass.sequences)) {
    const Status launched =
        graph_.launch(groups, arena, completions_.stream(), tables, tokens_per_block_);
    if (launched) {
      work.in_graph = pass.sequences;
      return ipc::ok();
    }
    // Nothing was launched. It may do without, with less memory.
    ipc::log_warn("steps: a pass is computed without the decode graph: {}",
                  launched.error().to_string());
  }
  const DecodeTools tools{completions_.stream(), allocator_, pinned_, tables, tokens_per_block_};
  return launch_decode(groups, pass.sequences, arena, tools, work.decode.emplace());
}

Status StepRunner::prepare_workspace(const ipc::Step& step, InFlight& work) {
  if (step.reads.empty() || step.decode_steps == 0) return ipc::ok();
  KVFERRY_ASSIGN(work.workspace, allocator_.allocate(step.reads.size() * kWorkspaceBytesPerRead));
  return completions_.stream().zero(work.workspace.address(), work.workspace.size_bytes());
}

Status StepRunner::launch_group(const GroupStep& step,
                                std::uint32_t decode_steps,
                                const GroupView& view,
                                GroupResult& result) {
  const ipc::RegionTable* table = view.table(ipc::RegionSet::kAll);
  KVFERRY_CHECK(table != nullptr, "a group without regions passed validation");
  if (!step.fills.empty()) KVFERRY_TRY(completions_.stream().fill_pattern(*table, step.fills));
  if (!step.reads.empty() && decode_steps > 0) {
    KVFERRY_ASSIGN(result.sums, pinned_.take(step.reads.size()));
    result.sum_count = step.reads.size();
    for (std::uint32_t i = 0; i < decode_steps; ++i) {
      KVFERRY_TRY(completions_.stream().checksum(*table, step.reads, *result.sums));
    }
  }
  if (!step.verifies.empty()) {
    KVFERRY_ASSIGN(result.mismatches, pinned_.take(step.verifies.size()));
    result.places = step.verify_places;
    KVFERRY_TRY(completions_.stream().verify_pattern(*table, step.verifies, *result.mismatches));
  }
  return ipc::ok();
}

ipc::StepReply StepRunner::take_results(InFlight& work) {
  ipc::StepReply reply;
  reply.mismatches.resize(work.verify_count);
  for (GroupResult& result : work.results) {
    for (std::size_t i = 0; i < result.sum_count; ++i) {
      reply.checksum = reply.checksum * 0x100000001B3ULL + PinnedPool::word(*result.sums, i);
    }
    for (std::size_t i = 0; i < result.places.size(); ++i) {
      reply.mismatches[result.places[i]] = PinnedPool::word(*result.mismatches, i);
    }
    pinned_.give_back(std::move(result.sums));
    pinned_.give_back(std::move(result.mismatches));
  }
  return reply;
}

std::optional<ipc::DecodeReply> StepRunner::take_outputs_of(InFlight& work) {
  if (work.in_graph) return graph_.take_outputs(*work.in_graph);
  if (work.decode) return take_outputs(*work.decode, pinned_);
  return std::nullopt;
}

void StepRunner::finish(std::list<InFlight>::iterator work, const Status& status) {
  if (!status && !work->error) work->error = status.error();
  // Not all of it may have been launched, and after its end nobody marks what its store waits for.
  if (work->error && work->computes) layers_.fail(*work->computes, *work->error);
  // The load's error is the one to tell, not that of the store which failed with it.
  std::for_each(work->tickets.rbegin(), work->tickets.rend(), [&](const ipc::LayerTicket& ticket) {
    const Status whole = layers_.end(ticket);
    if (!whole && !work->error) work->error = whole.error();
  });
  const ipc::StepReply results = take_results(*work);
  const std::optional<ipc::DecodeReply> outputs = take_outputs_of(*work);
  InFlight ended = std::move(*work);
  in_flight_.erase(work);
  activity_.end();
  // Whoever reads the answer may order the cache emptied or the arena cleared at once: nothing of
  // the step is held by then.
  ended.workspace = ScratchBuffer();
  ended.use = ArenaUse();
  if (ended.error) {
    fail(ended.peer, ended.envelope, *ended.error);
  } else if (const auto sent = outputs ? server_->reply(ended.peer, ended.envelope, *outputs)
                                       : server_->reply(ended.peer, ended.envelope, results);
             !sent) {
    ipc::log_warn("steps: no answer delivered: {}", sent.error().to_string());
  }
  if (in_flight_.empty()) idle_trim_.on_idle();
  if (!graph_.is_busy()) {
    for (const auto& call : std::exchange(graph_waiters_, {})) call();
  }
  start_queued();
}

void StepRunner::fail(const ipc::IncarnationId& peer, const Envelope& envelope, Error error) {
  const bool request_was_bad =
      error.code == ErrorCode::kInvalidArgument || error.code == ErrorCode::kProtocol ||
      error.code == ErrorCode::kStaleEpoch || error.code == ErrorCode::kNotReady ||
      error.code == ErrorCode::kBusy || error.code == ErrorCode::kRevoked;
  if (!request_was_bad) empty_after_failure(error);
  if (const auto sent = server_->reply_error(peer, envelope, std::move(error)); !sent) {
    ipc::log_warn("steps: no refusal delivered: {}", sent.error().to_string());
  }
}

void StepRunner::empty_after_failure(Error& error) {
  const bool out_of_memory = error.code == ErrorCode::kNoDeviceMemory;
  ipc::log_error("steps: a step failed: {}", error.to_string());
  if (!failure_rule_.empties(error)) return;
  const EmptiedCache emptied = allocator_.empty_cache(EmptyReason::kFailure);
  if (out_of_memory) {
    const auto seen = device_.memory_info();
    error.message += fmt::format(
        "; the allocator's cache was emptied: reserved {} -> {} ({} of it used), {} free on the "
        "device; if it happens again, lower the number of GPU blocks or the batch",
        ipc::format_size(emptied.reserved_before), ipc::format_size(emptied.reserved_after),
        ipc::format_size(emptied.used_after),
        seen ? ipc::format_size(seen->free_bytes) : "nobody knows how much");
  }
}

void StepRunner::empty_when_idle() {
  const EmptiedCache emptied = allocator_.empty_cache(EmptyReason::kIdle);
  ipc::log_info("idle: reserved {} -> {} (freed {})", ipc::format_size(emptied.reserved_before),
                ipc::format_size(emptied.reserved_after), ipc::format_size(emptied.freed()));
}

}  // namespace kvferry::worker
