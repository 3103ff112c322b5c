// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/job_service.hpp"

#include "kvferry/ipc/base/size.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace kvferry::cache_manager {
namespace {

// A few blocks through mover and worker; the loop of a manager with more to do does not sleep
// anyway.
constexpr std::uint64_t kBriefBytes = std::uint64_t{4} << 20;
constexpr std::size_t kFewJobs = 4;
constexpr auto kBriefTime = std::chrono::microseconds(400);

std::uint8_t code_of(ipc::ErrorCode code) { return static_cast<std::uint8_t>(code); }

/// A load has found it.
void count_hit(const HostBlock& block) {
  if (NamespaceAccount* account = block.account()) ++account->counters.hits;
}

}  // namespace

JobService::JobService(ManagerContext& context)
    : context_(context),
      sums_([this](const HostSlot& slot, const std::vector<std::uint64_t>& sums) {
        ++context_.integrity.summed;
        context_.catalogue.on_summed(slot, sums);
      }),
      waiting_(context.loop,
               {.acquire =
                    [this](const ipc::BlockKey& key, JobItem& item) {
                      HostBlockRef block = context_.index.acquire(key);
                      if (block != nullptr && !block->has_part(item.part)) {
                        item.result = code_of(ipc::ErrorCode::kNotFound);
                        block.reset();
                      }
                      if (block != nullptr && !set_sums(*block, item)) {
                        context_.index.drop_block(*block);
                        block.reset();
                      }
                      if (block != nullptr) count_hit(*block);
                      return block;
                    },
                .submit = [this](Job part) { context_.jobs.submit(std::move(part)); },
                .cancel = [this](const ipc::IncarnationId& client,
                                 ipc::JobId part) { (void)context_.jobs.cancel(client, part); },
                .done =
                    [this](const ipc::IncarnationId& client, ipc::JobDone done) {
                      context_.jobs.note_over(client, done.job);
                      send(client, std::move(done));
                    }}) {
  context_.index.add_observer(waiting_);
}

JobService::~JobService() { context_.index.remove_observer(waiting_); }

template <typename Items>
ipc::Status JobService::check(const ClientRecord& client,
                              ipc::JobId job,
                              std::uint64_t generation,
                              const Items& items) const {
  const EngineRecord& engine = *client.engine;
  // First: a second answer to that id would be taken for the first one's.
  KVFERRY_TRY(context_.jobs.check_id(client.peer.id, job));
  if (waiting_.has(client.peer.id, job)) {
    return KVFERRY_ERROR(kAlreadyExists, "job {} of {} waits for blocks", job.value,
                         client.peer.name);
  }
  if (WaitingLoads::is_part(job)) {
    return KVFERRY_ERROR(kInvalidArgument, "job {}: ids begin below {}", job.value, kFirstPartId);
  }
  if (context_.stopping) {
    return KVFERRY_ERROR(kNotReady, "the manager is ending: reconnect to its successor");
  }
  if (client.mismatch) return *client.mismatch;
  if (auto targets = engine.targets(generation); !targets) {
    return targets.error();
  }
  const std::vector<std::uint32_t>& blocks = engine.group_blocks();
  std::unordered_set<std::uint64_t> seen;
  seen.reserve(items.size());
  for (const auto& item : items) {
    if (item.group.value >= blocks.size() || item.block.value >= blocks[item.group.value]) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "job {}: engine {} has no block {} in group {}: see group_blocks",
                           job.value, engine.name(), item.block.value, item.group.value);
    }
    if (!seen.insert((std::uint64_t{item.group.value} << 32U) | item.block.value).second) {
      return KVFERRY_ERROR(kInvalidArgument, "job {}: block {} of group {} is named twice",
                           job.value, item.block.value, item.group.value);
    }
  }
  return ipc::ok();
}

template ipc::Status JobService::check(const ClientRecord& client,
                                       ipc::JobId job,
                                       std::uint64_t generation,
                                       const std::vector<ipc::StoreItem>& items) const;

ipc::Status JobService::admit(const ClientRecord& client) const {
  const std::uint32_t engine = client.engine->id();
  KVFERRY_TRY(context_.jobs.check_room(engine, waiting_.count(engine)));
  if (has_backlog(client)) {
    return KVFERRY_ERROR(kBusy,
                         "{} completions wait until {} reads them: read, then submit it as a "
                         "job of another id",
                         unsent(client.peer.id), client.peer.name);
  }
  return ipc::ok();
}

// What a client does not read must not grow for as long as it submits.
bool JobService::has_backlog(const ClientRecord& client) const {
  const std::uint32_t engine = client.engine->id();
  return unsent(client.peer.id) + context_.jobs.unfinished_of_clients(engine) +
             waiting_.count(engine) >=
         context_.config.max_jobs_per_engine;
}

Job JobService::begin(const ClientRecord& client,
                      ipc::JobId job,
                      std::uint64_t generation,
                      JobKind kind) {
  Job begun;
  begun.client = client.peer.id;
  begun.client_job = job;
  begun.engine = client.engine->id();
  begun.kind = kind;
  begun.generation = generation;
  return begun;
}

void JobService::refuse(const ClientRecord& client,
                        const ipc::Envelope& request,
                        ipc::JobId job,
                        std::size_t items,
                        const ipc::Error& error) {
  if (error.code == ipc::ErrorCode::kStaleEpoch) {
    context_.jobs.count_stale(client.engine->id());
  }
  context_.jobs.count_refused(client.engine->id());
  if (error.code != ipc::ErrorCode::kAlreadyExists) {
    context_.jobs.note_over(client.peer.id, job);
  }
  if (error.code == ipc::ErrorCode::kAlreadyExists || unsent(client.peer.id) > 0) {
    // The job of that id will be answered; a second answer would be taken for its own. And a client
    // that does not read its completions gets no more of them for what it was refused.
    context_.refuse(client.peer, request, error);
    return;
  }
  context_.reply(client.peer, request, ipc::Empty{});
  ipc::JobDone done;
  done.job = job;
  done.results.assign(items, code_of(error.code));
  done.message = error.message;
  send(client.peer.id, std::move(done));
}

void JobService::tell_failed(std::uint32_t engine,
                             const ipc::LayerTicket& layers,
                             const ipc::Error& error) {
  const EngineRecord* record = context_.directory.find(engine);
  if (record == nullptr) {
    return;
  }
  for (const RankRecord& rank : record->ranks()) {
    if (!rank.worker || !rank.worker->connected) {
      continue;
    }
    const ipc::Status told = context_.server.notify(
        rank.worker->id, ipc::MessageKind::kLayersFailed, ipc::LayersFailed{layers, error});
    if (!told) {
      ipc::log_warn("engine {}: a worker is not told that use {} of layer slot {} failed: {}",
                    record->name(), layers.use, layers.slot, told.error().to_string());
    }
  }
}

void JobService::accept(const ClientRecord& client, const ipc::Envelope& request, Job job) {
  job.brief = is_brief(job);
  // Its answer comes soon, and somebody waits for it.
  if (job.brief) context_.loop.stay_awake(kBriefTime);
  context_.reply(client.peer, request, ipc::Empty{});
  context_.jobs.submit(std::move(job));
}

bool JobService::is_brief(const Job& job) const {
  if (context_.jobs.unfinished() >= kFewJobs) {
    return false;
  }
  std::uint64_t bytes = 0;
  for (const JobItem& item : job.items) {
    if (item.host != nullptr) {
      bytes += context_.pool.shape(item.host->slot()).part_bytes();
    }
  }
  return bytes <= kBriefBytes;
}

ipc::Status JobService::check_parts(const ClientRecord& client, const ipc::SubmitLoad& load) {
  const std::uint32_t parts = client.identity.unit_blocks;
  for (const ipc::LoadItem& item : load.items) {
    if (item.part < parts) continue;
    return KVFERRY_ERROR(kInvalidArgument, "job {}: part {} of units of {} blocks", load.job.value,
                         item.part, parts);
  }
  return ipc::ok();
}

HostBlockRef JobService::acquire(const ipc::BlockKey& key, std::uint32_t part) const {
  HostBlockRef block = context_.index.acquire(key);
  return block != nullptr && block->has_part(part) ? block : nullptr;
}

// Compute goes on by layers, not by blocks.
ipc::Status JobService::check_all_there(const ClientRecord& client,
                                        ipc::JobId job,
                                        const std::vector<ipc::LoadItem>& items) const {
  for (const ipc::LoadItem& item : items) {
    const HostBlockRef block = acquire({client.root, item.key, item.group}, item.part);
    if (block == nullptr || must_not_load(*block)) {
      return KVFERRY_ERROR(kNotFound,
                           "job {}: block {} of group {} is not in the host pool (any more), and a "
                           "load by layers needs all of its blocks: look them up again",
                           job.value, item.block.value, item.group.value);
    }
  }
  return ipc::ok();
}

void JobService::submit_load(const ClientRecord& client, const ipc::Envelope& request) {
  const auto load = ipc::decode<ipc::SubmitLoad>(request.body, "SubmitLoad");
  if (!load) {
    context_.refuse(client.peer, request, load.error());
    return;
  }
  ipc::Status status = check(client, load->job, load->generation, load->items);
  if (status) {
    status = check_parts(client, *load);
  }
  if (status) {
    status = admit(client);
  }
  if (status && load->waits && (load->layers || !load->urgency.due())) {
    status = KVFERRY_ERROR(kInvalidArgument,
                           "job {}: a load that waits for its blocks does so until it is due, and "
                           "not layer by layer",
                           load->job.value);
  }
  if (status && load->layers) {
    status = check_all_there(client, load->job, load->items);
  }
  if (!status) {
    refuse(client, request, load->job, load->items.size(), status.error());
    if (load->layers) {
      tell_failed(client.engine->id(), *load->layers, status.error());
    }
    return;
  }
  if (load->waits) {
    return wait_for(client, request, *load);
  }
  Job job = begin(client, load->job, load->generation, JobKind::kLoad);
  job.layers = load->layers;
  // Above every store, whatever the client says.
  job.urgency = load->urgency;
  job.urgency.priority = std::max(job.urgency.priority, ipc::Urgency::kAhead);
  job.items.resize(load->items.size());
  // Last to first: of one prefix, the first block becomes the most recently used.
  for (std::size_t i = load->items.size(); i-- > 0;) {
    const ipc::LoadItem& item = load->items[i];
    JobItem& taken = job.items[i];
    taken.group = item.group;
    taken.block = item.block;
    taken.part = item.part;
    taken.host = acquire({client.root, item.key, item.group}, item.part);
    if (taken.host != nullptr && !set_sums(*taken.host, taken)) {
      context_.index.drop_block(*taken.host);
      taken.host = nullptr;
    }
    if (taken.host == nullptr) {
      taken.result = code_of(ipc::ErrorCode::kNotFound);
      job.message = "some blocks are not in the host pool (any more): look them up again";
      ++client.account->counters.misses;
    } else {
      count_hit(*taken.host);
    }
  }
  accept(client, request, std::move(job));
}

void JobService::wait_for(const ClientRecord& client,
                          const ipc::Envelope& request,
                          const ipc::SubmitLoad& load) {
  Job job = begin(client, load.job, load.generation, JobKind::kLoad);
  job.urgency = load.urgency;
  job.urgency.priority = std::max(job.urgency.priority, ipc::Urgency::kAhead);
  std::vector<ipc::BlockKey> keys;
  keys.reserve(load.items.size());
  for (const ipc::LoadItem& item : load.items) keys.push_back({client.root, item.key, item.group});
  context_.reply(client.peer, request, ipc::Empty{});
  waiting_.add(std::move(job), std::move(keys), load.items, *load.urgency.due());
}

// A sequence that is half on the host is of no use: all or nothing, and nothing is evicted for what
// does not fit.
ipc::Status JobService::take_slots(const ClientRecord& client,
                                   const ipc::SwapSequence& swap,
                                   Job& job) {
  const std::vector<SlabShape>& shapes = client.engine->config()->shapes;
  std::map<std::uint32_t, Extent> extents;  // by group
  for (const ipc::SequenceBlock& item : swap.items) {
    const auto [extent, is_first] = extents.try_emplace(item.group.value);
    if (!is_first) ++extent->second.left;
  }
  std::vector<PrefixIndex::Wanted> wanted;
  wanted.reserve(extents.size());
  for (const auto& [group, extent] : extents) wanted.push_back({shapes[group], extent.left});
  if (const auto fit = context_.index.fit(wanted, client.account); fit != PrefixIndex::Fit::kFits) {
    NamespaceAccount::Counters& counters = client.account->counters;
    ++(fit == PrefixIndex::Fit::kOverLimit ? counters.refused_quota : counters.refused_room);
    return does_not_fit(client, swap, fit);
  }
  for (const ipc::SequenceBlock& item : swap.items) {
    JobItem taken;
    taken.group = item.group;
    taken.block = item.block;
    taken.sequence_index = item.index;
    const SlabShape& shape = shapes[item.group.value];
    taken.host = context_.index.allocate(shape, extents[item.group.value], client.account);
    if (taken.host == nullptr) {
      const bool is_over = !client.account->has_room_for(shape.block_bytes());
      return does_not_fit(client, swap,
                          is_over ? PrefixIndex::Fit::kOverLimit : PrefixIndex::Fit::kNoRoom);
    }
    job.items.push_back(std::move(taken));
  }
  return ipc::ok();
}

ipc::Error JobService::does_not_fit(const ClientRecord& client,
                                    const ipc::SwapSequence& swap,
                                    PrefixIndex::Fit why) const {
  const std::size_t blocks = swap.items.size();
  if (!context_.index.evicts()) {
    return KVFERRY_ERROR(kBusy,
                         "sequence {}: nothing is evicted until the movers of an earlier manager "
                         "have come: submit it later, as a job of another id",
                         swap.sequence);
  }
  if (why == PrefixIndex::Fit::kOverLimit) {
    return KVFERRY_ERROR(
        kNoHostMemory,
        "sequence {}: {} blocks do not fit: namespace {} has {} in host memory, of "
        "a hard limit of {}, and too little of that can be evicted: drop "
        "sequences, or raise its --namespace-quota",
        swap.sequence, blocks, client.account->name(), ipc::format_size(client.account->bytes()),
        ipc::format_size(client.account->limits().hard));
  }
  if (const HostPool::Stats pool = context_.pool.stats(); pool.is_filling()) {
    return KVFERRY_ERROR(kBusy,
                         "sequence {}: {} of the host pool's {} are there so far and have no room "
                         "for {} blocks: submit it later, as a job of another id",
                         swap.sequence, ipc::format_size(pool.ready_bytes),
                         ipc::format_size(pool.bytes), blocks);
  }
  return KVFERRY_ERROR(kNoHostMemory,
                       "sequence {}: the host pool has no room for {} blocks beside what is pinned "
                       "or in use: drop sequences or start a larger pool",
                       swap.sequence, blocks);
}

void JobService::swap_out(const ClientRecord& client, const ipc::Envelope& request) {
  const auto swap = ipc::decode<ipc::SwapSequence>(request.body, "SwapSequence");
  if (!swap) {
    context_.refuse(client.peer, request, swap.error());
    return;
  }
  ipc::Status status = check(client, swap->job, swap->generation, swap->items);
  std::set<std::pair<std::uint32_t, std::uint32_t>> places;
  for (std::size_t i = 0; status && i < swap->items.size(); ++i) {
    const ipc::SequenceBlock& item = swap->items[i];
    if (!places.emplace(item.group.value, item.index).second) {
      status = KVFERRY_ERROR(kInvalidArgument, "job {}: index {} of group {} is named twice",
                             swap->job.value, item.index, item.group.value);
    }
  }
  if (status) {
    status = admit(client);
  }
  Job job = begin(client, swap->job, swap->generation, JobKind::kSwapOut);
  if (status) {
    status = take_slots(client, *swap, job);
  }
  if (!status) {
    refuse(client, request, swap->job, swap->items.size(), status.error());
    return;
  }
  job.sequence = swap->sequence;
  job.sequence_life =
      context_.sequences.open(job.sequence_key(), client.engine->config()->fingerprint);
  accept(client, request, std::move(job));
}

void JobService::swap_in(const ClientRecord& client, const ipc::Envelope& request) {
  const auto swap = ipc::decode<ipc::SwapSequence>(request.body, "SwapSequence");
  if (!swap) {
    context_.refuse(client.peer, request, swap.error());
    return;
  }
  ipc::Status status = check(client, swap->job, swap->generation, swap->items);
  if (status) {
    status = admit(client);
  }
  if (!status) {
    refuse(client, request, swap->job, swap->items.size(), status.error());
    return;
  }
  Job job = begin(client, swap->job, swap->generation, JobKind::kSwapIn);
  job.urgency.priority = ipc::Urgency::kOrdinary;
  job.sequence = swap->sequence;
  for (const ipc::SequenceBlock& item : swap->items) {
    JobItem taken;
    taken.group = item.group;
    taken.block = item.block;
    taken.sequence_index = item.index;
    taken.host = context_.sequences.find(job.sequence_key(), item.group, item.index);
    if (taken.host == nullptr) {
      taken.result = code_of(ipc::ErrorCode::kNotFound);
      job.message = "some blocks of the sequence are not swapped out";
    } else if (context_.pool.shape(taken.host->slot()) !=
               client.engine->config()->shapes[item.group.value]) {
      // Sequences of another geometry are dropped when it changes: reading one as this geometry's
      // would read its neighbours.
      taken.host = nullptr;
      taken.result = code_of(ipc::ErrorCode::kGeometryMismatch);
      job.message = "the sequence was swapped out with another geometry";
    } else if (!set_sums(*taken.host, taken)) {
      taken.host = nullptr;
      job.message = "some blocks of the sequence have no checksums, and all loads are checked";
    }
    job.items.push_back(std::move(taken));
  }
  accept(client, request, std::move(job));
}

void JobService::cancel(const ClientRecord& client, ipc::JobId job) {
  // What of it waits for compute may wait for long.
  if (const auto layers = context_.jobs.layers_of(client.peer.id, job)) {
    tell_failed(client.engine->id(), *layers, KVFERRY_ERROR(kCancelled, "its job was cancelled"));
  }
  // A job that is over already was or will be answered: nothing to do, and no error.
  if (!waiting_.cancel(client.peer.id, job)) (void)context_.jobs.cancel(client.peer.id, job);
}

void JobService::finished(Job& job) {
  if (job.to_host()) {
    const auto failed = std::count_if(job.items.begin(), job.items.end(),
                                      [](const JobItem& item) { return item.result != 0; });
    context_.transitions.record(ipc::Transition::kManagerCommit,
                                {.job = job.id, .detail = static_cast<std::uint64_t>(failed)});
  }
  if (job.kind == JobKind::kStore) {
    commit_store(job);
  } else if (job.kind == JobKind::kSwapOut) {
    commit_swap_out(job);
  } else {
    end_load(job);
  }
  if (job.to_host() && context_.config.checksums) {
    note_awaited(job);
    sums_.add(job, context_.pool);
  }
  if (const auto failed = std::find_if(
          job.items.begin(), job.items.end(),
          [&job](const JobItem& item) { return item.result != 0 && !job.left_out(item); });
      job.layers && failed != job.items.end()) {
    tell_failed(job.engine, *job.layers,
                ipc::Error{static_cast<ipc::ErrorCode>(failed->result), job.message});
  }
  if (WaitingLoads::is_part(job.client_job)) {
    waiting_.part_ended(job);
    return;
  }
  if (job.orphaned) {
    return;
  }
  ipc::JobDone done;
  done.job = job.client_job;
  done.results.reserve(job.items.size());
  for (const JobItem& item : job.items) {
    done.results.push_back(item.result);
  }
  done.message = job.message;
  done.bytes = job.bytes;
  send(job.client, std::move(done));
}

// A completion waits while its client's queue is full, and behind those that wait already.
void JobService::send(const ipc::IncarnationId& client, ipc::JobDone done) {
  unsent_[client].push_back(std::move(done));
  if (unsent(client) == 1) {
    on_writable(client);
  }
}

void JobService::on_writable(const ipc::IncarnationId& client) {
  const auto at = unsent_.find(client);
  if (at == unsent_.end()) {
    return;
  }
  std::deque<ipc::JobDone>& waiting = at->second;
  while (!waiting.empty()) {
    const ipc::JobDone& done = waiting.front();
    const auto failed = std::count_if(done.results.begin(), done.results.end(),
                                      [](std::uint8_t code) { return code != 0; });
    context_.transitions.record(
        ipc::Transition::kManagerAnswer,
        {.job = done.job, .peer = client, .detail = static_cast<std::uint64_t>(failed)});
    const ipc::Status sent = context_.server.notify(client, ipc::MessageKind::kJobDone, done);
    if (!sent && sent.error().code == ipc::ErrorCode::kBusy) {
      return;
    }
    if (!sent) {
      ipc::log_debug("completion of job {} not sent: {}", waiting.front().job.value,
                     sent.error().to_string());
    }
    waiting.pop_front();
  }
  unsent_.erase(at);
}

std::size_t JobService::unsent() const noexcept {
  std::size_t count = 0;
  for (const auto& [client, waiting] : unsent_) {
    count += waiting.size();
  }
  return count;
}

std::size_t JobService::unsent(const ipc::IncarnationId& client) const {
  const auto at = unsent_.find(client);
  return at == unsent_.end() ? 0 : at->second.size();
}

void JobService::fail_layers(const ipc::IncarnationId& client) {
  for (const auto& [engine, layers] : context_.jobs.layers_of(client)) {
    tell_failed(engine, layers, KVFERRY_ERROR(kPeerDied, "whoever asked for its job has ended"));
  }
}

void JobService::forget_client(const ipc::IncarnationId& client) {
  unsent_.erase(client);
  waiting_.drop_client(client);
}

}  // namespace kvferry::cache_manager
