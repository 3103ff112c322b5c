// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/engine.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "status_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using std::chrono_literals::operator""min;

constexpr ipc::Duration kManagerTry = 500ms;
constexpr ipc::Duration kManagerRetry = 20ms;
constexpr ipc::Duration kReasonTime = 500ms;
constexpr ipc::Duration kNotReadyTime = 10min;
constexpr ipc::Duration kWatchPeriod = 1s;
constexpr std::size_t kCompletionBatch = 256;
/// How far behind a request that has to wait for another one's blocks others may go first.
constexpr std::size_t kLookAhead = 64;

}  // namespace

Engine::Engine(ipc::EventLoop& loop,
               EngineOptions options,
               std::span<const TraceRequest> requests,
               ReplayCounters& counters,
               Hooks hooks)
    : loop_(loop),
      options_(std::move(options)),
      units_(options_.tier.unit_blocks),
      lacking_(units_, options_.geometry.groups),
      requests_(requests),
      counters_(counters),
      hooks_(std::move(hooks)),
      write_policy_(options_.tier.write),
      gate_({.most_blocks = options_.tier.store_queue}),
      choice_(options_.tier.recompute),
      storing_(options_.geometry.groups.size()),
      offload_watch_({.start_limit = options_.start_limit, .patience = options_.patience},
                     {.say = [this](const std::string& line) { hooks_.say(line); },
                      .reasons = [this] { return offload_reasons(); }}) {
  for (std::size_t i = 0; i < requests_.size(); ++i) waiting_.insert(waiting_.end(), i);
}

Engine::~Engine() {
  *alive_ = false;
  loop_.cancel(connect_timer_);
  loop_.cancel(watch_timer_);
  loop_.cancel(due_timer_);
  loop_.cancel(room_timer_);
  loop_.cancel(answer_timer_);
  loop_.cancel(prefetch_timer_);
  if (client_ != nullptr) loop_.unwatch(client_->fd());
}

void Engine::start() {
  started_at_ = progress_at_ = not_ready_since_ = ipc::MonotonicClock::now();
  watch_timer_ = loop_.after(kWatchPeriod, [this] { watch_progress(); });
  connect();
}

void Engine::connect() {
  worker::ClientOptions options;
  options.runtime_dir = options_.runtime_dir;
  options.instance = options_.instance;
  options.engine = options_.engine;
  options.ranks = options_.geometry.ranks;
  options.identity.model = options_.geometry.name;
  options.identity.fingerprint = options_.geometry.fingerprint(options_.order);
  options.identity.weights = ipc::Digest::random();
  options.identity.unit_blocks = units_.blocks();
  options.identity.name_space = options_.tier.name_space;
  options.identity.name_space_key = options_.tier.name_space_key;
  options.scheduler = this;
  auto client = worker::Client::connect(options, ipc::Deadline::after(kManagerTry));
  if (!client) {
    const ipc::ErrorCode code = client.error().code;
    const bool may_come = code == ipc::ErrorCode::kNoManager || code == ipc::ErrorCode::kTimeout ||
                          code == ipc::ErrorCode::kPeerDied || code == ipc::ErrorCode::kNotFound;
    if (!may_come) {
      fail(client.error());
      return;
    }
    connect_timer_ = loop_.after(kManagerRetry, [this] { connect(); });
    return;
  }
  client_ = std::move(*client);
  make_prefetcher();
  loop_.watch(client_->fd(), [this] { on_client(); });
  auto dir = ipc::RuntimeDir::open(options_.runtime_dir, options_.instance);
  if (!dir) {
    fail(dir.error());
    return;
  }
  for (std::uint32_t r = 0; r < options_.geometry.ranks; ++r) {
    channels_.push_back(std::make_unique<StepChannel>(
        loop_, *dir, options_.engine, ipc::Rank{r},
        fmt::format("replay engine {}", options_.engine),
        StepChannel::Hooks{[this] { pump_later(); }, [this, r] { on_worker_lost(ipc::Rank{r}); }}));
  }
  on_client();
}

void Engine::on_client() {
  if (ended_) return;
  while (true) {
    const std::vector<worker::Completion> completions = client_->poll(kCompletionBatch);
    for (const worker::Completion& completion : completions) {
      progress_at_ = ipc::MonotonicClock::now();
      if (const auto load = load_jobs_.find(completion.job); load != load_jobs_.end()) {
        const AttemptId attempt = load->second;
        load_jobs_.erase(load);
        on_load_done(attempt, completion);
      } else if (auto store = store_jobs_.extract(completion.job); !store.empty()) {
        on_store_done(std::move(store.mapped()), completion);
      } else if (prefetcher_) {
        const auto landing = prefetcher_->on_completion(completion, ipc::MonotonicClock::now());
        if (landing) on_landing(*landing);
      }
    }
    if (completions.size() < kCompletionBatch) break;
  }
  look_at_state();
  watch_offload();
  pump_later();
}

void Engine::look_at_state() {
  const worker::CacheState state = client_->state();
  // While the manager is away the arenas are as they were: computing goes on without offload.
  if (!state.manager_connected) return;
  const bool ready = state.phase == worker::CachePhase::kReady &&
                     state.ranks.size() == options_.geometry.ranks &&
                     state.group_blocks.size() == options_.geometry.groups.size();
  if (!ready) {
    if (phase_ready_) not_ready_since_ = ipc::MonotonicClock::now();
    phase_ready_ = false;
    return;
  }
  phase_ready_ = true;
  if (std::exchange(weights_, state.weights) != state.weights) forget_contents();
  begin_generation(state);
}

// What was computed with other weights is found by nobody any more; requests that hold it go on.
void Engine::forget_contents() {
  end_prefetches();
  for (GroupIndex& group : index_) group.forget_all();
  write_policy_.forget();
  lacking_.forget_all();
  for (auto& [id, attempt] : attempts_) {
    for (HeldBlock& held : attempt.blocks) held.announced = false;
  }
}

void Engine::begin_generation(const worker::CacheState& state) {
  bool same_counts = index_.size() == state.group_blocks.size();
  for (std::size_t g = 0; same_counts && g < index_.size(); ++g) {
    same_counts = index_[g].block_count() == state.group_blocks[g];
  }
  std::size_t kept = 0;
  for (std::size_t r = 0; r < std::min(arenas_.size(), state.ranks.size()); ++r) {
    if (worker::same_contents(arenas_[r], state.ranks[r])) ++kept;
  }
  reconnects_ = client_->stats().reconnects;
  generation_ = state.generation;
  arenas_ = state.ranks;
  if (std::exchange(contents_, state.contents) == state.contents) return;
  lose_device_contents();
  if (same_counts && kept > 0) return;  // Some rank's memory is the same: ids stay taken.
  ++era_;
  first_of_era_ = next_prefetch_;
  index_.clear();
  for (const std::uint32_t blocks : state.group_blocks) index_.emplace_back(blocks);
  writing_back_.assign(index_.size(), 0);
}

void Engine::lose_device_contents() {
  end_prefetches();
  room_wanted_since_.reset();
  for (GroupIndex& group : index_) group.forget_all();
  std::vector<AttemptId> frozen;  // Nothing of them is in flight that would end them.
  for (auto& [id, attempt] : attempts_) {
    if (!attempt.doomed) put_back(attempt);
    if (attempt.frozen) frozen.push_back(id);
  }
  for (const AttemptId id : frozen) end_attempt(id);
}

void Engine::on_worker_lost(ipc::Rank rank) {
  ++worker_deaths_;
  // Memory that a mover holds lives on, and with it every block but those that unanswered steps
  // wrote: their requests were put back before this.
  if (options_.cache_owner == ipc::CacheOwner::kWorker) {
    ipc::log_debug("rank {} lost its worker: device contents are gone", rank.value);
    lose_device_contents();
  }
  pump_later();
}

bool Engine::is_ready() const {
  return phase_ready_ && std::all_of(channels_.begin(), channels_.end(),
                                     [](const auto& channel) { return channel->is_up(); });
}

bool Engine::offload_usable() const {
  // Looking at the state acknowledges it: what it says and was not acted on yet is not used.
  const worker::CacheState& state = client_->state();
  return state.manager_connected && state.offload_ready && phase_ready_ &&
         state.generation == generation_ && state.weights == weights_ &&
         client_->stats().reconnects == reconnects_;
}

void Engine::pump_later() {
  if (pump_posted_ || ended_) return;
  pump_posted_ = true;
  loop_.post([this, alive = alive_] {
    if (!*alive) return;
    pump_posted_ = false;
    pump();
  });
}

void Engine::pump() {
  if (ended_ || client_ == nullptr) return;
  look_at_state();
  // Whether what was ordered is in effect may have changed.
  (void)client_->poll(0);
  pins_.unpin(*client_);
  if (start_playing() && is_ready() && !held_ && ipc::MonotonicClock::now() >= not_before_) {
    bool device_full = false;
    std::size_t looked_at = 0;
    for (auto next = waiting_.begin();
         next != waiting_.end() && attempts_.size() < options_.in_flight && looked_at < kLookAhead;
         ++looked_at) {
      const Admission admission = try_admit(*next);
      if (ended_) return;
      if (admission == Admission::kConflict) {
        ++next;
        continue;
      }
      if (admission == Admission::kNoRoom || admission == Admission::kNotDue) {
        device_full = admission == Admission::kNoRoom;
        break;
      }
      next = waiting_.erase(next);
    }
    // Nothing else would make room for it.
    const bool stores_end = !store_jobs_.empty() && manager_answers();
    if (device_full && attempts_.empty() && !stores_end && !prefetched_.empty()) {
      end_prefetches();
      pump_later();
    } else {
      prefetch_waiting(device_full);
    }
    write_back_ahead();
  }
  note_counts();
  end_when_done();
}

bool Engine::start_playing() {
  if (playing_) return true;
  if (!is_ready() || !client_->state().offload_ready) return false;
  playing_ = true;
  started_at_ = progress_at_ = ipc::MonotonicClock::now();
  hooks_.on_started();
  return true;
}

void Engine::end_when_done() {
  if (ended_ || !waiting_.empty() || !attempts_.empty() || !store_jobs_.empty()) return;
  if (prefetcher_ && prefetcher_->under_way() > 0) return;
  ended_ = true;
  hooks_.on_end(ipc::ok());
}

void Engine::fail(ipc::Error error) {
  if (ended_) return;
  ended_ = true;
  // From the loop: callers are in the middle of something.
  loop_.post([this, alive = alive_, error = std::move(error)] {
    if (*alive) hooks_.on_end(error);
  });
}

std::string Engine::describe() const {
  const auto up = static_cast<std::size_t>(std::count_if(
      channels_.begin(), channels_.end(), [](const auto& channel) { return channel->is_up(); }));
  return fmt::format(
      "{} requests wait, {} are in flight ({} loads, {} stores); manager {}, cache {}, offload {}, "
      "{} of {} workers reachable",
      waiting_.size(), attempts_.size(), load_jobs_.size(), store_jobs_.size(),
      client_ != nullptr && client_->state().manager_connected ? "connected" : "absent",
      phase_ready_ ? "ready" : "not ready",
      client_ != nullptr && client_->state().offload_ready ? "ready" : "not ready", up,
      options_.geometry.ranks);
}

void Engine::watch_progress() {
  if (ended_) return;
  watch_timer_ = loop_.after(kWatchPeriod, [this] { watch_progress(); });
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  if (now - progress_at_ > kWatchPeriod / 2) ipc::log_debug("nothing goes on: {}", describe());
  if (playing_ && !phase_ready_ && now - not_ready_since_ > kNotReadyTime) {
    fail(KVFERRY_ERROR(kTimeout, "nobody re-initialised the cache for 10 minutes: {}", describe()));
  } else if (playing_ && phase_ready_ && !held_ && options_.speed <= 0 &&
             now - progress_at_ > options_.patience) {
    fail(KVFERRY_ERROR(kTimeout, "nothing went on for {} s: {}",
                       std::chrono::duration_cast<std::chrono::seconds>(options_.patience).count(),
                       describe()));
  }
  watch_offload();
  pump_later();
}

void Engine::watch_offload() {
  if (ended_) return;
  OffloadWatch::Sight sight;
  sight.playing = playing_;
  sight.cache_ready = phase_ready_;
  sight.offload_ready = client_ != nullptr && client_->state().offload_ready;
  sight.deaths = hooks_.deaths();
  const auto status = offload_watch_.update(sight, ipc::MonotonicClock::now());
  counters_.offload_down_s = offload_watch_.down_s();
  if (!status) fail(status.error());
}

std::string Engine::offload_reasons() const {
  if (client_ == nullptr || !client_->state().manager_connected) {
    return "no manager answers: " + describe();
  }
  if (client_->state().offload_ready) return describe();  // It is not offload that lacks.
  const auto status = client_->status(ipc::Deadline::after(kReasonTime));
  if (!status) return status.error().message;
  return describe_missing(*status, options_.engine);
}

}  // namespace kvferry::cli
