// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "scheduler/scheduler.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "scheduler/model_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using ipc::Envelope;
using ipc::MessageKind;

namespace {

using std::chrono_literals::operator""ms;

constexpr ipc::Duration kConnectTry = 500ms;
constexpr ipc::Duration kConnectRetry = 50ms;
constexpr std::size_t kCompletionBatch = 256;
constexpr std::uint64_t kMaxTokens = 1U << 20;

ipc::Status check_request(const ipc::Generate& request) {
  if (request.prompt.empty() || request.max_tokens == 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "a prompt of {} tokens, {} more asked for: give at least one of each",
                         request.prompt.size(), request.max_tokens);
  }
  if (request.prompt.size() + request.max_tokens > kMaxTokens) {
    return KVFERRY_ERROR(kInvalidArgument, "a prompt of {} tokens and {} more: at most {} together",
                         request.prompt.size(), request.max_tokens, kMaxTokens);
  }
  return ipc::ok();
}

}  // namespace

Scheduler::Scheduler(ipc::EventLoop& loop,
                     ipc::RuntimeDir dir,
                     ipc::RankConfig config,
                     bool weights,
                     const TierOptions& tier)
    : loop_(loop),
      dir_(std::move(dir)),
      config_(std::move(config)),
      weights_named_(weights),
      tier_(tier),
      write_policy_(tier.write),
      gate_({.most_blocks = tier.store_queue}),
      choice_(tier.recompute),
      storing_(config_.geometry.groups.size()),
      cache_(config_.geometry, tier.unit_blocks),
      lacking_(cache_.units(), config_.geometry.groups),
      dead_workers_(config_.geometry.ranks) {
  ipc::ControlServer::Options options;
  options.registry_path = dir_.rank_socket(config_.engine, 0, ipc::RuntimeDir::kGenerate);
  options.control_path = dir_.rank_socket(config_.engine, 0, ipc::RuntimeDir::kGenerateControl);
  options.session = ipc::SessionId::random();
  server_ = std::make_unique<ipc::ControlServer>(loop_, std::move(options), *this);
  connect_timer_ = loop_.after(ipc::Duration::zero(), [this] { connect(); });
}

Scheduler::~Scheduler() {
  *alive_ = false;
  loop_.cancel(connect_timer_);
  loop_.cancel(prefetch_timer_);
  loop_.cancel(room_timer_);
  loop_.cancel(answer_timer_);
  if (client_ != nullptr) loop_.unwatch(client_->fd());
}

void Scheduler::connect() {
  ClientOptions options;
  options.runtime_dir = config_.runtime_dir;
  options.instance = config_.instance;
  options.engine = config_.engine;
  options.ranks = config_.geometry.ranks;
  options.identity.model = "reference/" + config_.geometry.name;
  options.identity.fingerprint = config_.geometry.fingerprint(config_.arena.order);
  // Without weights the model is the same everywhere, and so is what it computes.
  if (!weights_named_) options.identity.weights = ipc::chain_block_hash({}, "none", 4);
  options.identity.unit_blocks = tier_.unit_blocks;
  options.identity.name_space = tier_.name_space;
  options.identity.name_space_key = tier_.name_space_key;
  options.scheduler = this;
  auto client = Client::connect(std::move(options), ipc::Deadline::after(kConnectTry));
  if (!client) {
    const std::string trouble = client.error().to_string();
    if (std::exchange(connect_trouble_, trouble) != trouble) {
      ipc::log_info("scheduler: not connected yet: {}", trouble);
    }
    connect_timer_ = loop_.after(kConnectRetry, [this] { connect(); });
    return;
  }
  client_ = std::move(*client);
  loop_.watch(client_->fd(), [this] { on_client(); });
  for (std::uint32_t r = 0; r < config_.geometry.ranks; ++r) {
    channels_.push_back(std::make_unique<StepChannel>(
        loop_, dir_, config_.engine, ipc::Rank{r}, fmt::format("scheduler {}", config_.engine),
        StepChannel::Hooks{[this] { pump_later(); }, [this, r] { on_worker_lost(ipc::Rank{r}); }}));
  }
  on_client();
}

void Scheduler::on_peer(const ipc::Peer& peer) {
  ipc::log_info("scheduler: {} connected (pid {})", peer.name, peer.pid);
}

void Scheduler::on_peer_silent(const ipc::Peer& peer) {
  ipc::log_info("scheduler: {} closed its connection", peer.name);
  drop_requests(peer.id);
  server_->forget_when_closed(peer.id);
}

void Scheduler::on_peer_died(const ipc::Peer& peer) {
  ipc::log_info("scheduler: {} (pid {}) is dead", peer.name, peer.pid);
  drop_requests(peer.id);
}

void Scheduler::on_message(const ipc::Peer& peer, Envelope envelope) {
  if (envelope.is_reply) {
    ipc::log_warn("scheduler: {} sent a reply that nobody asked for", peer.name);
    return;
  }
  switch (envelope.kind) {
    case MessageKind::kGenerate: on_generate(peer, std::move(envelope)); return;
    case MessageKind::kBye: drop_requests(peer.id); return;
    default:
      refuse({peer.id, envelope},
             KVFERRY_ERROR(kProtocol, "message kind {} does not belong on a generation channel",
                           static_cast<unsigned>(envelope.kind)));
  }
}

void Scheduler::on_generate(const ipc::Peer& peer, Envelope envelope) {
  auto request = ipc::decode<ipc::Generate>(envelope.body, "Generate");
  envelope.body.clear();
  Asker asker{peer.id, std::move(envelope)};
  if (!request) return refuse(asker, request.error());
  if (const auto sound = check_request(*request); !sound) return refuse(asker, sound.error());
  if (sequences_.size() >= kMaxSequences) {
    return refuse(asker, KVFERRY_ERROR(kBusy, "engine {} has {} requests already; retry later",
                                       config_.engine, sequences_.size()));
  }
  const std::uint64_t tokens = request->prompt.size() + request->max_tokens;
  if (tokens_owed_ + tokens > kMaxTokensOwed) {
    return refuse(asker,
                  KVFERRY_ERROR(kBusy,
                                "engine {} has requests of {} tokens together, {} more would "
                                "be over {}; retry later",
                                config_.engine, tokens_owed_, tokens, kMaxTokensOwed));
  }
  tokens_owed_ += tokens;
  Sequence sequence;
  sequence.number = next_number_++;
  sequence.asker = std::move(asker);
  sequence.prompt_tokens = static_cast<std::uint32_t>(request->prompt.size());
  sequence.max_tokens = request->max_tokens;
  sequence.tokens = std::move(request->prompt);
  for (const std::uint32_t token : sequence.tokens) {
    sequence.inputs.push_back(
        model_input(sequence.inputs.empty() ? 0 : sequence.inputs.back(), token));
  }
  hash_full_blocks(sequence, config_.geometry.tokens_per_block);
  waiting_.insert(sequence.number);
  sequences_.emplace(sequence.number, std::move(sequence));
  pump_later();
}

void Scheduler::drop_requests(const ipc::IncarnationId& peer) {
  std::vector<Number> dropped;
  for (auto& [number, sequence] : sequences_) {
    if (sequence.asker.peer != peer) continue;
    sequence.fate = Sequence::Fate::kEnds;
    if (!sequence.in_flight()) dropped.push_back(number);
  }
  for (const Number number : dropped) end(number);
  pump_later();
}

void Scheduler::on_client() {
  while (true) {
    const std::vector<Completion> completions = client_->poll(kCompletionBatch);
    for (const Completion& completion : completions) {
      if (const auto load = load_jobs_.find(completion.job); load != load_jobs_.end()) {
        LoadJob job = std::move(load->second);
        load_jobs_.erase(load);
        on_load_done(std::move(job), completion);
      } else if (auto store = store_jobs_.extract(completion.job); !store.empty()) {
        on_store_done(store.mapped(), completion);
      } else if (prefetcher_) {
        const auto landing = prefetcher_->on_completion(completion, ipc::MonotonicClock::now());
        if (landing) on_landing(*landing);
      }
    }
    if (completions.size() < kCompletionBatch) break;
  }
  look_at_state();
  pump_later();
}

void Scheduler::look_at_state() {
  const CacheState state = client_->state();
  // While the manager is away the arenas are as they were: computing goes on without offload.
  if (!state.manager_connected) return;
  if (state.phase == CachePhase::kClearing || state.phase == CachePhase::kCleared) {
    lose_device_contents();
  }
  phase_ready_ = state.phase == CachePhase::kReady &&
                 state.ranks.size() == config_.geometry.ranks &&
                 state.group_blocks.size() == config_.geometry.groups.size();
  if (!phase_ready_) return;
  if (std::exchange(weights_, state.weights) != state.weights) forget_contents();
  begin_generation(state);
}

// What was computed with other weights is found by nobody any more; requests that hold it go on.
void Scheduler::forget_contents() {
  write_policy_.forget();
  lacking_.forget_all();
  end_prefetches();
  cache_.forget_contents();
  for (const Number number : admitted_) sequences_.at(number).mixed = true;
}

void Scheduler::begin_generation(const CacheState& state) {
  const bool same_counts = cache_.has_counts(state.group_blocks);
  std::size_t kept = 0;
  for (std::size_t r = 0; r < std::min(arenas_.size(), state.ranks.size()); ++r) {
    if (same_contents(arenas_[r], state.ranks[r])) ++kept;
  }
  reconnects_ = client_->stats().reconnects;
  generation_ = state.generation;
  arenas_ = state.ranks;
  if (std::exchange(contents_, state.contents) == state.contents) return;
  lose_device_contents();
  if (same_counts && kept > 0) return;  // Some rank's memory is the same: ids stay taken.
  ++era_;
  first_of_era_ = next_prefetch_;
  cache_.remake(state.group_blocks);
  writing_back_.assign(cache_.group_count(), 0);
  // Of what is still in flight: its blocks were of the other memory.
  for (const Number number : admitted_) sequences_.at(number).table.clear();
}

void Scheduler::lose_device_contents() {
  end_prefetches();
  room_wanted_since_.reset();
  cache_.forget_contents();
  std::vector<Number> idle;
  for (const Number number : admitted_) {
    Sequence& sequence = sequences_.at(number);
    if (sequence.fate == Sequence::Fate::kGoesOn) sequence.fate = Sequence::Fate::kWaits;
    if (!sequence.in_flight()) idle.push_back(number);
  }
  for (const Number number : idle) settle(number);
}

void Scheduler::on_worker_lost(ipc::Rank rank) {
  if (rank.value < arenas_.size()) dead_workers_[rank.value] = arenas_[rank.value].worker;
  // Memory that a mover holds lives on, and with it every block but those that the unanswered pass
  // wrote, which nobody was told of.
  if (config_.cache_owner == ipc::CacheOwner::kWorker) {
    ipc::log_info("scheduler: rank {} lost its worker, and with it what the device held",
                  rank.value);
    lose_device_contents();
  }
  pump_later();
}

bool Scheduler::is_ready() const {
  if (!phase_ready_) return false;
  for (std::size_t r = 0; r < channels_.size(); ++r) {
    const ipc::IncarnationId& worker = arenas_[r].worker;
    if (!channels_[r]->is_up() || (!worker.is_zero() && worker == dead_workers_[r])) return false;
  }
  return true;
}

bool Scheduler::offload_usable() const {
  // Looking at the state acknowledges it: what it says and was not acted on yet is not used.
  const CacheState& state = client_->state();
  return state.manager_connected && state.offload_ready && phase_ready_ &&
         state.generation == generation_ && state.weights == weights_ &&
         client_->stats().reconnects == reconnects_ &&
         ipc::MonotonicClock::now() >= no_offload_before_;
}

void Scheduler::pump_later() {
  if (pump_posted_) return;
  pump_posted_ = true;
  loop_.post([this, alive = alive_] {
    if (!*alive) return;
    pump_posted_ = false;
    pump();
  });
}

void Scheduler::pump() {
  if (client_ == nullptr) return;
  // Whether what was ordered is in effect may have changed.
  (void)client_->poll(0);
  pins_.unpin(*client_);
  look_at_state();
  if (held_ || !is_ready() || ipc::MonotonicClock::now() < not_before_) return;
  if (pass_) return prefetch_waiting();
  admit_waiting();
  start_pass();
  prefetch_waiting();
  // Beside the pass: no step waits for it.
  write_back_ahead();
}

}  // namespace kvferry::worker
