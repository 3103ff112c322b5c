// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "scheduler/scheduler.hpp"

#include <algorithm>
#include <utility>

/// What host memory has of the prefixes of requests that wait is loaded before it is their turn.
namespace kvferry::worker {
namespace {

/// Of a group's blocks, what prefetches may hold: one in so many.
constexpr std::uint32_t kHeldAhead = 4;

}  // namespace

void Scheduler::prefetch_waiting() {
  if (!tier_.prefetch || first_alone_ || held_ || !is_ready() || !offload_usable()) return;
  if (!prefetcher_) make_prefetcher();
  std::uint32_t looked_at = 0;
  for (const Number number : waiting_) {
    if (looked_at++ == tier_.prefetch_requests) return;
    if (!prefetched_.contains(number) && !prefetch(sequences_.at(number))) return;
  }
}

void Scheduler::make_prefetcher() {
  Prefetcher::Transport transport;
  transport.load = [this](std::span<const LoadItem> items, std::uint8_t priority,
                          std::optional<ipc::TimePoint> due) {
    return send_load(items, priority, due);
  };
  transport.cancel = [this](ipc::JobId job) {
    if (const auto asked = client_->cancel(job); !asked) {
      ipc::log_debug("scheduler: cancel: {}", asked.error().to_string());
    }
  };
  prefetcher_.emplace(*tier_.prefetch, std::move(transport));
}

bool Scheduler::comes_already(const Sequence& sequence, const PrefixPlan& wanted) const {
  const auto first =
      std::find_if(wanted.blocks.begin(), wanted.blocks.end(),
                   [](const PlannedBlock& block) { return block.source == BlockSource::kHost; });
  if (first == wanted.blocks.end()) return false;
  return std::any_of(prefetched_.begin(), prefetched_.end(), [&](const auto& entry) {
    const std::vector<ipc::Digest>& hashes = sequences_.at(entry.first).hashes;
    return std::any_of(entry.second.blocks.begin(), entry.second.blocks.end(),
                       [&](const PagedCache::Ahead& ahead) {
                         return ahead.loading && ahead.group == first->group &&
                                hashes[ahead.position] == sequence.hashes[first->position];
                       });
  });
}

/// False: there is no room, nor for the next one.
bool Scheduler::prefetch(Sequence& sequence) {
  if (sequence.device_only || sequence.hashes.empty()) return true;
  const PrefixPlan wanted = plan_for(sequence, true);
  if (wanted.host_hits == 0 || comes_already(sequence, wanted)) return true;
  // What would have to be stored first is not evicted for one that only waits.
  if (!cache_.fits(wanted, sequence) ||
      cache_.plan_room(sequence, wanted, 0, writing_back_, write_policy_).waits) {
    return false;
  }
  std::vector<std::uint64_t> held(cache_.group_count());
  for (const auto& [number, other] : prefetched_) {
    for (const PagedCache::Ahead& block : other.blocks) ++held[block.group.value];
  }
  Prefetched made;
  // Jobs of a prefetch go one behind the other: the last ones' blocks have to stay for long.
  if (!pin_loads(wanted, made.pinned)) return true;
  // What runs may grow by a block each, as when one is let in.
  made.blocks = cache_.take_ahead(sequence, wanted, held, kHeldAhead, admitted_.size() + 1);
  if (made.blocks.empty()) {
    pins_.let_go(std::move(made.pinned));
    return false;
  }
  std::vector<LoadItem> items;
  for (const PagedCache::Ahead& block : made.blocks) {
    if (!block.loading) continue;
    const UnitPart place = place_of(block.group, block.position);
    items.push_back({block.group, block.block, place.key, place.part});
  }
  const std::size_t loads = items.size();
  made.id = next_prefetch_++;
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  if (const auto begun = prefetcher_->begin(made.id, std::move(items), now); !begun) {
    ipc::log_debug("scheduler: prefetch not sent: {}", begun.error().to_string());
    for (std::size_t i = made.blocks.size(); i-- > 0;) {
      cache_.release(made.blocks[i].group, made.blocks[i].block);
    }
    pins_.let_go(std::move(made.pinned));
    return false;
  }
  ipc::log_debug("scheduler: prefetches {} blocks for request {}", loads, sequence.number);
  choice_.on_done(decision_, now);
  prefetching_.emplace(made.id, sequence.number);
  prefetched_.emplace(sequence.number, std::move(made));
  return true;
}

bool Scheduler::prefetch_lets_start(Number number) {
  const auto found = prefetched_.find(number);
  if (found == prefetched_.end() || found->second.stopped) return true;
  const Prefetcher::Turn turn = prefetcher_->turn(found->second.id, ipc::MonotonicClock::now());
  if (turn.starts) {
    stop_prefetch(found->second);
    return true;
  }
  look_again_at(turn.look_again);
  return false;
}

void Scheduler::look_again_at(ipc::TimePoint when) {
  if (look_again_ && *look_again_ <= when) return;
  loop_.cancel(prefetch_timer_);
  look_again_ = when;
  prefetch_timer_ = loop_.at(when, [this] {
    look_again_.reset();
    pump_later();
  });
}

void Scheduler::stop_prefetch(Prefetched& prefetched) {
  if (std::exchange(prefetched.stopped, true)) return;
  const std::vector<LoadItem> unsent = prefetcher_->stop(prefetched.id);
  prefetching_.erase(prefetched.id);
  // What is under way is kept by its load.
  pins_.let_go(std::exchange(prefetched.pinned, {}));
  // The blocks of what is under way are free when no copier touches them any more.
  prefetched.incomplete |= std::erase_if(prefetched.blocks, [](const PagedCache::Ahead& block) {
                             return block.loading;
                           }) > 0;
  for (const LoadItem& item : unsent) cache_.release(item.group, item.block);
}

void Scheduler::on_landing(const Prefetcher::Landing& landing) {
  choice_.on_loaded(landing.bytes, landing.submitted, ipc::MonotonicClock::now());
  if (landing.id < first_of_era_) return;
  const auto known = prefetching_.find(landing.id);
  for (std::size_t i = 0; i < landing.items.size(); ++i) {
    const LoadItem& item = landing.items[i];
    if (known == prefetching_.end()) {
      cache_.release(item.group, item.block);
      continue;
    }
    Prefetched& prefetched = prefetched_.at(known->second);
    const auto block = std::find_if(prefetched.blocks.begin(), prefetched.blocks.end(),
                                    [&item](const auto& ahead) {
                                      return ahead.group == item.group && ahead.block == item.block;
                                    });
    KVFERRY_CHECK(block != prefetched.blocks.end(), "a block landed that was not prefetched");
    const UnitPart place{item.key, item.part};
    const bool loaded = landing.wanted && landing.results[i] == 0;
    // One that is not wanted may be of other weights, under which the key is another unit's.
    if (landing.wanted) note_lacking(item.group, place, landing.results[i]);
    if (loaded && cache_.land_ahead(sequences_.at(known->second), *block, place)) continue;
    prefetched.blocks.erase(block);
    cache_.release(item.group, item.block);
  }
  if (known != prefetching_.end()) unpin_landed(prefetched_.at(known->second));
  pump_later();
}

// It may wait for its turn for long.
void Scheduler::unpin_landed(Prefetched& prefetched) {
  const bool comes = std::any_of(prefetched.blocks.begin(), prefetched.blocks.end(),
                                 [](const PagedCache::Ahead& block) { return block.loading; });
  if (!comes) pins_.let_go(std::exchange(prefetched.pinned, {}));
}

void Scheduler::end_prefetch(Number number) {
  const auto found = prefetched_.find(number);
  if (found == prefetched_.end()) return;
  stop_prefetch(found->second);
  const std::vector<PagedCache::Ahead>& blocks = found->second.blocks;
  for (std::size_t i = blocks.size(); i-- > 0;) cache_.release(blocks[i].group, blocks[i].block);
  prefetched_.erase(found);
}

void Scheduler::end_prefetches() {
  while (!prefetched_.empty()) end_prefetch(prefetched_.begin()->first);
}

}  // namespace kvferry::worker
