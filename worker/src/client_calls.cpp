// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "client_checks.hpp"
#include "client_impl.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/wire/component_messages.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "kvferry/ipc/wire/store_messages.hpp"
#include "kvferry/worker/client.hpp"
#include "unit_match.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

/// The calls of a client that are one message each, and its submits.
namespace kvferry::worker {

using ipc::MessageKind;

namespace {

/// The time that the manager is given; the rest is for its answer, and for ending a stuck mover.
std::chrono::milliseconds manager_time(Deadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.remaining());
  return std::max(std::chrono::milliseconds(1),
                  left - std::min(left / 4, std::chrono::milliseconds(3000)));
}

static_assert(ipc::Retention::kLongest == ipc::kMaxWireDuration);

/// What the manager could not even read, so that it would say nothing of the block or the value.
Status check_targets(std::span<const StoreTarget> targets, std::string_view what) {
  KVFERRY_TRY(check_count(targets.size(), what));
  constexpr std::chrono::milliseconds kLongest = ipc::Retention::kLongest;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i].retention) continue;
    const std::chrono::milliseconds duration = targets[i].retention->duration;
    if (duration >= std::chrono::milliseconds::zero() && duration <= kLongest) continue;
    return KVFERRY_ERROR(kInvalidArgument,
                         "target {}: a retention for {} ms; give 1 to {} ms, or 0 for as long as "
                         "the block is there",
                         i, duration.count(), kLongest.count());
  }
  return ipc::ok();
}

template <typename Item> std::vector<DeviceBlock> blocks_of(std::span<const Item> items) {
  std::vector<DeviceBlock> blocks;
  blocks.reserve(items.size());
  for (const Item& item : items) blocks.push_back({item.group, item.block});
  return blocks;
}

std::vector<ipc::StoreKey> keys_of(std::span<const StoreTarget> targets) {
  std::vector<ipc::StoreKey> keys;
  keys.reserve(targets.size());
  for (const StoreTarget& target : targets) {
    keys.push_back({target.group, target.block, target.before, target.retention, target.parts});
  }
  return keys;
}

ipc::SubmitStore store_message(ClientLink& link,
                               std::span<const StoreItem> items,
                               std::optional<LayerTicket> layers) {
  ipc::SubmitStore message;
  message.job = link.jobs().next_id();
  message.generation = link.acknowledged_generation();
  message.layers = layers;
  message.items.reserve(items.size());
  for (const StoreItem& item : items) {
    message.items.push_back({item.group, item.block, item.slot, item.part});
  }
  return message;
}

Result<JobId> send_load(ClientLink& link,
                        ipc::SubmitLoad message,
                        std::span<const LoadItem> items) {
  KVFERRY_TRY(check_count(items.size(), "blocks to load"));
  message.job = link.jobs().next_id();
  message.generation = link.acknowledged_generation();
  message.items.reserve(items.size());
  for (const LoadItem& item : items) {
    message.items.push_back({item.group, item.block, item.key, item.part});
  }
  KVFERRY_TRY(
      link.submit(MessageKind::kSubmitLoad, message.job, ipc::encode(message), blocks_of(items)));
  return message.job;
}

Result<JobId> submit_swap(ClientLink& link,
                          MessageKind kind,
                          std::uint64_t sequence,
                          std::span<const SequenceItem> items) {
  KVFERRY_TRY(check_count(items.size(), "blocks to swap"));
  ipc::SwapSequence message;
  message.job = link.jobs().next_id();
  message.generation = link.acknowledged_generation();
  message.sequence = sequence;
  message.items.reserve(items.size());
  for (const SequenceItem& item : items) {
    message.items.push_back({item.group, item.block, item.index});
  }
  KVFERRY_TRY(link.submit(kind, message.job, ipc::encode(message), blocks_of(items)));
  return message.job;
}

std::vector<RankMemory> memory_of(const std::vector<ipc::RankMemory>& ranks) {
  std::vector<RankMemory> seen;
  seen.reserve(ranks.size());
  for (const ipc::RankMemory& rank : ranks) {
    seen.push_back({.rank = rank.rank.value,
                    .absent = rank.absent,
                    .reserved_before = rank.memory.reserved_before,
                    .reserved_after = rank.memory.reserved_after,
                    .used_after = rank.memory.used_after,
                    .free_on_device = rank.memory.free_on_device});
  }
  return seen;
}

}  // namespace

Result<LookupResult> Client::lookup(std::span<const Digest> hashes, Deadline deadline) {
  if (hashes.empty()) return LookupResult{};
  KVFERRY_TRY(check_count(hashes.size(), "hashes"));
  const ipc::Lookup request{{hashes.begin(), hashes.end()}};
  KVFERRY_ASSIGN(const auto reply,
                 impl_->link.call<ipc::LookupReply>(MessageKind::kLookup, request, deadline));
  if (reply.usable_prefix > hashes.size() || reply.presence.size() % hashes.size() != 0) {
    return bad_reply("lookup of {} blocks: usable prefix {}, {} presence entries", hashes.size(),
                     reply.usable_prefix, reply.presence.size());
  }
  LookupResult result;
  result.usable_prefix = reply.usable_prefix;
  for (std::size_t i = 0; i < reply.presence.size(); ++i) {
    if (i % hashes.size() == 0) result.presence.emplace_back().reserve(hashes.size());
    const std::uint8_t presence = reply.presence[i];
    if (presence < 1 || presence > ipc::wire_max(ipc::BlockPresence{})) {
      return bad_reply("lookup: presence {} is unknown", presence);
    }
    result.presence.back().push_back(static_cast<Presence>(presence));
  }
  return result;
}

Result<PrefixMatch> Client::match_prefix(std::span<const Digest> hashes) {
  ClientLink& link = impl_->link;
  KVFERRY_ASSIGN(const ipc::PrefixTableView* table, link.table());
  return table->match(link.root(), hashes, link.rules());
}

Result<std::uint32_t> Client::match_in_units(std::span<const Digest> hashes) {
  ClientLink& link = impl_->link;
  KVFERRY_ASSIGN(const ipc::PrefixTableView* table, link.table());
  return usable_in_units(*table, link.root(), hashes, link.rules(), link.unit_blocks());
}

Presence Client::presence(GroupId group, const Digest& hash) {
  ClientLink& link = impl_->link;
  const auto table = link.table();
  if (!table) return Presence::kMiss;
  const auto found = (*table)->find({link.root(), hash, group});
  if (!found) return Presence::kMiss;
  return found->pending ? Presence::kHitPending : Presence::kHit;
}

Status Client::use_prefix(std::span<const Digest> hashes) {
  if (hashes.empty()) return ipc::ok();
  KVFERRY_TRY(check_count(hashes.size(), "hashes"));
  return impl_->link.tell(MessageKind::kUsePrefix,
                          ipc::encode(ipc::UsePrefix{{hashes.begin(), hashes.end()}}));
}

Result<std::vector<StoreSlot>> Client::reserve_store(std::span<const StoreTarget> targets,
                                                     Deadline deadline) {
  if (targets.empty()) return std::vector<StoreSlot>{};
  KVFERRY_TRY(check_targets(targets, "blocks to store"));
  const ipc::ReserveStore request{keys_of(targets), impl_->link.acknowledged_weights()};
  KVFERRY_ASSIGN(const auto reply, impl_->link.call<ipc::ReserveStoreReply>(
                                       MessageKind::kReserveStore, request, deadline));
  if (reply.slots.size() != targets.size()) {
    return bad_reply("{} reservations for {} blocks", reply.slots.size(), targets.size());
  }
  std::vector<StoreSlot> slots;
  slots.reserve(reply.slots.size());
  for (const ipc::ReservedSlot& slot : reply.slots) {
    slots.push_back({static_cast<Reservation>(slot.outcome), slot.slot});
  }
  return slots;
}

Status Client::abandon_store(std::span<const std::uint64_t> slots) {
  if (slots.empty()) return ipc::ok();
  KVFERRY_TRY(check_count(slots.size(), "slots"));
  const ipc::AbandonStore message{{slots.begin(), slots.end()}};
  return impl_->link.send_only(MessageKind::kAbandonStore, ipc::encode(message));
}

Result<JobId> Client::submit_store(std::span<const StoreItem> items,
                                   std::optional<LayerTicket> layers) {
  KVFERRY_TRY(check_count(items.size(), "blocks to store"));
  ClientLink& link = impl_->link;
  const ipc::SubmitStore message = store_message(link, items, layers);
  KVFERRY_TRY(
      link.submit(MessageKind::kSubmitStore, message.job, ipc::encode(message), blocks_of(items)));
  return message.job;
}

Result<JobId> Client::offer_store(std::span<const StoreTarget> targets,
                                  std::span<const StoreItem> items,
                                  std::optional<LayerTicket> layers) {
  KVFERRY_TRY(check_targets(targets, "keys to store under"));
  KVFERRY_TRY(check_count(items.size(), "blocks to store"));
  ClientLink& link = impl_->link;
  const ipc::OfferStore message{store_message(link, items, layers), keys_of(targets),
                                link.acknowledged_weights()};
  const JobId job = message.store.job;
  KVFERRY_TRY(link.submit(MessageKind::kOfferStore, job, ipc::encode(message), blocks_of(items)));
  return job;
}

// Of every process of a machine that clock is the same, and a worker does not outlive it.
LayerTicket Client::layer_ticket(std::uint32_t slot) {
  const auto now = ipc::MonotonicClock::now().time_since_epoch();
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  impl_->last_use = std::max(impl_->last_use + 1, static_cast<std::uint64_t>(ns));
  return {slot, impl_->last_use};
}

Result<JobId> Client::submit_load(std::span<const LoadItem> items,
                                  std::uint8_t priority,
                                  std::optional<LayerTicket> layers,
                                  std::optional<ipc::TimePoint> due) {
  ipc::SubmitLoad message;
  message.urgency = {priority, ipc::Urgency::ns_of(due)};
  message.layers = layers;
  return send_load(impl_->link, std::move(message), items);
}

Result<JobId> Client::submit_load_when_stored(std::span<const LoadItem> items,
                                              std::uint8_t priority,
                                              ipc::TimePoint until) {
  ipc::SubmitLoad message;
  message.urgency = {priority, ipc::Urgency::ns_of(until)};
  message.waits = true;
  return send_load(impl_->link, std::move(message), items);
}

Result<JobId> Client::swap_out(std::uint64_t sequence, std::span<const SequenceItem> items) {
  return submit_swap(impl_->link, MessageKind::kSwapOut, sequence, items);
}

Result<JobId> Client::swap_in(std::uint64_t sequence, std::span<const SequenceItem> items) {
  return submit_swap(impl_->link, MessageKind::kSwapIn, sequence, items);
}

Status Client::drop_sequence(std::uint64_t sequence, Deadline deadline) {
  KVFERRY_TRY(impl_->link.request(MessageKind::kDropSequence,
                                  ipc::encode(ipc::DropSequence{sequence}), deadline));
  return ipc::ok();
}

Status Client::cancel(JobId job) {
  impl_->link.pump();
  if (!impl_->link.jobs().is_unfinished(job)) return ipc::ok();
  return impl_->link.send_only(MessageKind::kCancel, ipc::encode(ipc::CancelJob{job}));
}

std::optional<ipc::TimePoint> Client::unanswered_since() {
  return impl_->link.is_forked() ? std::nullopt : impl_->link.unanswered_since();
}

Result<ClearSummary> Client::clear(HostPolicy host, Deadline deadline) {
  ipc::ClearRequest request;
  request.engine = impl_->link.options().engine;
  request.host = static_cast<ipc::HostPolicy>(host);
  request.deadline = manager_time(deadline);
  KVFERRY_ASSIGN(const auto reply,
                 impl_->link.call<ipc::ClearReply>(MessageKind::kClear, request, deadline));
  ClearSummary summary;
  summary.host_blocks_dropped = reply.host_blocks_dropped;
  summary.took = reply.took;
  for (const ipc::RankOutcome& rank : reply.ranks) {
    if (rank.error) return *rank.error;
    summary.quarantined |= rank.outcome.kind == ipc::ClearKind::kQuarantined;
    if (!rank.outcome.detail.empty()) {
      if (!summary.detail.empty()) summary.detail += "; ";
      summary.detail += fmt::format("rank {}: {}", rank.rank.value, rank.outcome.detail);
    }
    summary.free_before += rank.outcome.free_before;
    summary.free_after += rank.outcome.free_after;
  }
  return summary;
}

Result<std::uint64_t> Client::reinit(std::uint32_t gpu_blocks, Deadline deadline) {
  ipc::ReinitRequest request;
  request.engine = impl_->link.options().engine;
  request.gpu_blocks = gpu_blocks;
  request.deadline = manager_time(deadline);
  KVFERRY_ASSIGN(const auto reply,
                 impl_->link.call<ipc::ReinitReply>(MessageKind::kReinit, request, deadline));
  // Who re-creates the arena knows that its blocks are new.
  impl_->link.acknowledge_generation(reply.generation);
  return reply.generation;
}

Result<PauseSummary> Client::pause(PauseMode mode, Deadline deadline) {
  ipc::PauseRequest request;
  request.engine = impl_->link.options().engine;
  request.mode = static_cast<ipc::PauseMode>(mode);
  request.deadline = manager_time(deadline);
  KVFERRY_ASSIGN(const auto reply, impl_->link.call_and_obey<ipc::PauseReply>(MessageKind::kPause,
                                                                              request, deadline));
  PauseSummary summary;
  summary.work = {
      .running = reply.load.running, .frozen = reply.load.frozen, .waiting = reply.load.waiting};
  summary.transfers = reply.load.transfers;
  summary.took = reply.took;
  return summary;
}

Result<ContinueSummary> Client::continue_generation(bool empty_cache, Deadline deadline) {
  ipc::ContinueRequest request;
  request.engine = impl_->link.options().engine;
  request.empty_cache = empty_cache;
  request.deadline = manager_time(deadline);
  KVFERRY_ASSIGN(const auto reply, impl_->link.call_and_obey<ipc::ContinueReply>(
                                       MessageKind::kContinue, request, deadline));
  return ContinueSummary{memory_of(reply.ranks), reply.took};
}

namespace {

/// What the manager has for a command once its engine is idle.
Result<std::chrono::milliseconds> time_once_idle(std::string_view command,
                                                 std::chrono::milliseconds timeout,
                                                 Deadline deadline) {
  const std::chrono::milliseconds time = manager_time(deadline);
  if (timeout.count() < 0) {
    return KVFERRY_ERROR(kInvalidArgument, "{} with a timeout of {} ms: give none, or 0 and more",
                         command, timeout.count());
  }
  if (timeout >= time) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} that waits up to {} ms for its engine to be idle cannot be answered "
                         "in {} ms: give it a later deadline",
                         command, timeout.count(), time.count());
  }
  return time - timeout;
}

}  // namespace

Result<FlushSummary> Client::flush(const FlushOptions& options, Deadline deadline) {
  ipc::FlushRequest request;
  KVFERRY_ASSIGN(request.deadline, time_once_idle("a flush", options.timeout, deadline));
  request.engine = impl_->link.options().engine;
  request.empty_cache = options.empty_cache;
  request.host = static_cast<ipc::HostPolicy>(options.host);
  request.timeout = options.timeout;
  KVFERRY_ASSIGN(const auto reply, impl_->link.call_and_obey<ipc::FlushReply>(MessageKind::kFlush,
                                                                              request, deadline));
  return FlushSummary{memory_of(reply.ranks), reply.host_blocks_dropped, reply.took};
}

// Part by part, each answered by all ranks: what is not sent yet takes no memory but the caller's.
Result<Digest> Client::send_weights(std::span<const std::byte> tensors, Deadline deadline) {
  ipc::WeightsPart part;
  part.engine = impl_->link.options().engine;
  part.upload = Digest::random();
  part.total_bytes = tensors.size();
  while (part.offset < part.total_bytes) {
    const auto size = static_cast<std::size_t>(
        std::min<std::uint64_t>(ipc::WeightsPart::kMaxBytes, part.total_bytes - part.offset));
    const auto* const from = reinterpret_cast<const std::uint8_t*>(tensors.data()) + part.offset;
    part.bytes.assign(from, from + size);
    KVFERRY_TRY(impl_->link.call_and_obey<ipc::Empty>(MessageKind::kWeightsPart, part, deadline));
    part.offset += size;
  }
  return part.upload;
}

Result<UpdateSummary> Client::update_weights(const UpdateOptions& options, Deadline deadline) {
  const int places =
      static_cast<int>(!options.file.empty()) + static_cast<int>(!options.tensors.empty()) +
      static_cast<int>(!options.distributed.empty()) + static_cast<int>(!options.lender.empty());
  if (places != 1) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "an update from {} places: give a file, tensors, a file of rank 0, or a "
                         "lender",
                         places);
  }
  // Before anything is sent, and again after it.
  KVFERRY_TRY(time_once_idle("an update", options.timeout, deadline));
  ipc::UpdateWeightsRequest request;
  request.engine = impl_->link.options().engine;
  request.source.location = options.file;
  if (!options.distributed.empty()) {
    request.source = {ipc::WeightsFrom::kDistributed, options.distributed};
  }
  if (!options.lender.empty()) request.source = {ipc::WeightsFrom::kIpc, options.lender};
  if (!options.tensors.empty()) {
    KVFERRY_ASSIGN(const Digest upload, send_weights(options.tensors, deadline));
    request.source = {ipc::WeightsFrom::kTensors, upload.hex()};
  }
  request.flush_cache = options.flush_cache;
  request.empty_cache = options.empty_cache;
  request.weights = options.weights;
  request.timeout = options.timeout;
  KVFERRY_ASSIGN(request.deadline, time_once_idle("an update", options.timeout, deadline));
  KVFERRY_ASSIGN(const auto reply, impl_->link.call_and_obey<ipc::UpdateWeightsReply>(
                                       MessageKind::kUpdateWeights, request, deadline));
  UpdateSummary summary{reply.weights, {}, memory_of(reply.ranks), reply.took};
  for (const ipc::RankUpdate& update : reply.updates) {
    summary.updates.push_back({.rank = update.rank.value, .bytes = update.bytes});
  }
  return summary;
}

namespace {

std::vector<ReleasedMemory> released_of(const std::vector<ipc::RankReleased>& ranks) {
  std::vector<ReleasedMemory> released;
  released.reserve(ranks.size());
  for (const ipc::RankReleased& rank : ranks) {
    released.push_back({.rank = rank.rank.value,
                        .weights = rank.outcome.weights_bytes,
                        .scratch = rank.outcome.scratch_bytes});
  }
  return released;
}

}  // namespace

Result<ReleaseSummary> Client::release_memory(const ReleaseOptions& options, Deadline deadline) {
  ipc::ReleaseRequest request;
  request.engine = impl_->link.options().engine;
  request.tags = options.tags;
  request.backup = options.backup;
  request.host = static_cast<ipc::HostPolicy>(options.host);
  request.timeout = options.timeout;
  KVFERRY_ASSIGN(request.deadline, time_once_idle("a release", options.timeout, deadline));
  KVFERRY_ASSIGN(const auto reply, impl_->link.call_and_obey<ipc::ReleaseReply>(
                                       MessageKind::kReleaseMemory, request, deadline));
  ReleaseSummary summary;
  summary.released = reply.released;
  summary.ranks = released_of(reply.ranks);
  summary.host_blocks_dropped = reply.host_blocks_dropped;
  summary.took = reply.took;
  for (const ipc::RankReleased& rank : reply.ranks) {
    summary.free_before += rank.outcome.free_before;
    if (reply.cleared.empty()) summary.free_after += rank.outcome.memory.free_on_device;
  }
  for (const ipc::RankOutcome& rank : reply.cleared) {
    summary.quarantined |= rank.outcome.kind == ipc::ClearKind::kQuarantined;
    if (!rank.outcome.detail.empty()) {
      if (!summary.detail.empty()) summary.detail += "; ";
      summary.detail += fmt::format("rank {}: {}", rank.rank.value, rank.outcome.detail);
    }
    if (reply.ranks.empty()) summary.free_before += rank.outcome.free_before;
    summary.free_after += rank.outcome.free_after;
  }
  return summary;
}

Result<ResumeSummary> Client::resume_memory(MemoryTags tags, Deadline deadline) {
  ipc::ResumeRequest request;
  request.engine = impl_->link.options().engine;
  request.tags = tags;
  request.deadline = manager_time(deadline);
  KVFERRY_ASSIGN(const auto reply, impl_->link.call_and_obey<ipc::ResumeReply>(
                                       MessageKind::kResumeMemory, request, deadline));
  if (reply.resumed.has(MemoryTag::kKvCache)) {
    impl_->link.acknowledge_generation(reply.generation);
  }
  return ResumeSummary{.resumed = reply.resumed,
                       .released = reply.released,
                       .weights_lost = reply.weights_lost,
                       .ranks = released_of(reply.ranks),
                       .generation = reply.generation,
                       .paused = reply.paused.has_value(),
                       .took = reply.took};
}

namespace {

Result<std::vector<RankComponent>> ask_components(ClientLink& link,
                                                  ipc::ComponentNames release,
                                                  Deadline deadline) {
  ipc::ComponentsRequest request;
  request.engine = link.options().engine;
  request.release = std::move(release);
  request.deadline = manager_time(deadline);
  KVFERRY_ASSIGN(const auto reply, link.call_and_obey<ipc::ComponentsReply>(
                                       MessageKind::kComponents, request, deadline));
  std::vector<RankComponent> components;
  for (const ipc::RankComponentsOutcome& rank : reply.ranks) {
    for (const ipc::ComponentOutcome& one : rank.reply.components) {
      components.push_back({.rank = rank.rank.value,
                            .state = one.outcome.component,
                            .device_bytes_before = one.outcome.device_bytes_before,
                            .emptied = one.outcome.emptied});
    }
  }
  return components;
}

}  // namespace

Result<std::vector<RankComponent>> Client::components(Deadline deadline) {
  return ask_components(impl_->link, {}, deadline);
}

Result<std::vector<RankComponent>> Client::release_components(const std::vector<std::string>& names,
                                                              Deadline deadline) {
  return ask_components(impl_->link, {.all = names.empty(), .names = names}, deadline);
}

Result<std::string> Client::status(Deadline deadline) {
  KVFERRY_ASSIGN(auto reply,
                 impl_->link.call<ipc::StatusReply>(MessageKind::kStatus, ipc::Empty{}, deadline));
  return std::move(reply.json);
}

}  // namespace kvferry::worker
