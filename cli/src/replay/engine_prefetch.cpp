// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "replay/engine.hpp"

#include <algorithm>
#include <utility>

/// What is done for requests while they wait: the host tier's part of their prefixes is loaded, or
/// kept from eviction where the device has no room yet.
namespace kvferry::cli {
namespace {

using ipc::Digest;
using worker::LoadItem;
using worker::Prefetcher;

/// Of a group's blocks, what prefetches may hold: one in so many.
constexpr std::uint64_t kPrefetchShare = 4;

}  // namespace

void Engine::make_prefetcher() {
  if (!options_.tier.prefetch) return;
  Prefetcher::Transport transport;
  transport.load = [this](std::span<const LoadItem> items, std::uint8_t priority,
                          std::optional<ipc::TimePoint> due) {
    return send_load(items, priority, due);
  };
  transport.cancel = [this](ipc::JobId job) {
    if (const auto asked = client_->cancel(job); !asked) {
      ipc::log_debug("cancel of a prefetch: {}", asked.error().to_string());
    }
  };
  prefetcher_.emplace(*options_.tier.prefetch, std::move(transport));
}

void Engine::prefetch_waiting(bool device_full) {
  if (!prefetcher_ || !offload_usable() || !manager_serves_) return;
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  std::vector<std::size_t> next;
  for (const std::size_t request : waiting_) {
    if (next.size() == options_.tier.prefetch_requests || due_at(request) > now) break;
    next.push_back(request);
  }
  const std::uint64_t era = era_;
  for (const std::size_t request : next) {
    const auto known = prefetched_.find(request);
    // One that was only kept is loaded when there is room.
    if (known != prefetched_.end() && (known->second.id != 0 || device_full)) continue;
    prefetch(request, device_full);
    if (era != era_ || !offload_usable() || !manager_serves_) return;
  }
}

void Engine::prefetch(std::size_t request, bool device_full) {
  const std::vector<Digest>& hashes = hashes_of(request);
  if (has_pending_block(hashes)) return;  // They come for another request.
  const PrefixPlan plan = make_plan(requests_[request], hashes, true);
  if (plan.host_hits == 0) return;
  if (!device_full && prefetch_fits(plan, hashes)) {
    // What would have to be stored first is not evicted for one that only waits.
    if (!evicts_unstored(plan)) load_ahead(request, plan, hashes);
  } else if (!prefetched_.contains(request)) {
    lease(request, plan);
  }
}

bool Engine::evicts_unstored(const PrefixPlan& plan) const {
  std::vector<std::uint64_t> needed(index_.size());
  for (const worker::PlannedBlock& planned : plan.blocks) {
    if (planned.source == BlockSource::kHost) ++needed[planned.group.value];
  }
  return worker::plan_write_back(index_, needed, writing_back_, write_policy_).waits;
}

bool Engine::prefetch_fits(const PrefixPlan& plan, const std::vector<Digest>& hashes) const {
  if (!fits(plan, hashes, 0)) return false;
  std::vector<std::uint64_t> held(index_.size());
  for (const auto& [request, prefetched] : prefetched_) {
    for (const HeldBlock& block : prefetched.blocks) ++held[block.group.value];
  }
  for (const worker::PlannedBlock& planned : plan.blocks) {
    if (planned.source != BlockSource::kNowhere) ++held[planned.group.value];
  }
  for (std::size_t g = 0; g < index_.size(); ++g) {
    if (held[g] > index_[g].block_count() / kPrefetchShare) return false;
  }
  return true;
}

std::vector<Engine::HeldBlock> Engine::hold_ahead(const PrefixPlan& plan,
                                                  const std::vector<Digest>& hashes) {
  std::vector<HeldBlock> blocks;
  for (const worker::PlannedBlock& planned : plan.blocks) {
    if (planned.source == BlockSource::kNowhere) continue;
    HeldBlock held;
    held.group = planned.group;
    held.position = planned.position;
    held.hash = hashes[planned.position];
    if (planned.position > 0) held.before = hashes[planned.position - 1];
    held.source = planned.source;
    blocks.push_back(held);
  }
  // What is there is held first, so that making room for the rest does not evict it.
  for (HeldBlock& held : blocks) {
    if (held.source != BlockSource::kDevice) continue;
    const auto found = index_of(held.group).find(held.hash);
    KVFERRY_CHECK(found.has_value(), "a planned device hit is gone");
    held.block = found->block;
    index_of(held.group).acquire(held.block);
  }
  for (HeldBlock& held : blocks) {
    if (held.source != BlockSource::kHost) continue;
    const auto block = index_of(held.group).allocate();
    KVFERRY_CHECK(block.has_value(), "the room that prefetch_fits() saw is gone");
    held.block = *block;
    set_place(held);
    held.announced = index_of(held.group).announce(held.block, held.hash, held.before);
  }
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const HeldBlock& a, const HeldBlock& b) { return a.position < b.position; });
  return blocks;
}

void Engine::load_ahead(std::size_t request,
                        const PrefixPlan& plan,
                        const std::vector<Digest>& hashes) {
  Prefetched made;
  // Jobs of a prefetch go one behind the other: the last ones' blocks have to stay for long.
  if (!pin_loads(plan, made.pinned)) return;
  made.blocks = hold_ahead(plan, hashes);
  std::vector<LoadItem> items;
  for (const HeldBlock& held : made.blocks) {
    if (held.source != BlockSource::kHost) continue;
    items.push_back({held.group, held.block, held.place.key, held.place.part});
  }
  made.id = next_prefetch_++;
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  const auto begun = prefetcher_->begin(made.id, std::move(items), now);
  if (auto leased = prefetched_.extract(request); !leased.empty()) {
    pins_.let_go(std::move(leased.mapped().pinned));
  }
  if (!begun) {
    ipc::log_debug("prefetch not sent: {}", begun.error().to_string());
    for (std::size_t i = made.blocks.size(); i-- > 0;) {
      const HeldBlock& held = made.blocks[i];
      if (held.source == BlockSource::kHost) index_of(held.group).forget(held.block);
      index_of(held.group).release(held.block);
    }
    pins_.let_go(std::move(made.pinned));
    return;
  }
  choice_.on_done(decision_, now);
  prefetching_.emplace(made.id, request);
  prefetched_.emplace(request, std::move(made));
}

bool Engine::prefetch_lets_start(std::size_t request) {
  const auto found = prefetched_.find(request);
  if (found == prefetched_.end() || found->second.id == 0 || found->second.stopped) return true;
  Prefetched& prefetched = found->second;
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  const Prefetcher::Turn turn = prefetcher_->turn(prefetched.id, now);
  if (turn.starts) {
    stop_prefetch(prefetched);
    return true;
  }
  if (!std::exchange(prefetched.waited, true)) ++counters_.prefetch_waits;
  look_again_at(turn.look_again);
  return false;
}

void Engine::look_again_at(ipc::TimePoint when) {
  if (look_again_ && *look_again_ <= when) return;
  loop_.cancel(prefetch_timer_);
  look_again_ = when;
  prefetch_timer_ = loop_.at(when, [this] {
    look_again_.reset();
    pump_later();
  });
}

void Engine::stop_prefetch(Prefetched& prefetched) {
  if (prefetched.id == 0 || std::exchange(prefetched.stopped, true)) return;
  const std::vector<LoadItem> unsent = prefetcher_->stop(prefetched.id);
  prefetching_.erase(prefetched.id);
  // What is under way is kept by its load.
  pins_.let_go(std::exchange(prefetched.pinned, {}));
  // Nobody finds what is still to come; its blocks are free when no copier touches them any more.
  const auto comes = std::stable_partition(
      prefetched.blocks.begin(), prefetched.blocks.end(),
      [](const HeldBlock& held) { return held.source != BlockSource::kHost; });
  prefetched.incomplete = comes != prefetched.blocks.end() || prefetched.incomplete;
  for (auto held = comes; held != prefetched.blocks.end(); ++held) {
    if (held->announced) index_of(held->group).forget(held->block);
  }
  prefetched.blocks.erase(comes, prefetched.blocks.end());
  for (const LoadItem& item : unsent) index_of(item.group).release(item.block);
}

void Engine::on_landing(const Prefetcher::Landing& landing) {
  counters_.bytes_to_device += landing.bytes;
  choice_.on_loaded(landing.bytes, landing.submitted, ipc::MonotonicClock::now());
  if (landing.id < first_of_era_) return;
  const auto request = prefetching_.find(landing.id);
  Prefetched* prefetched =
      request == prefetching_.end() ? nullptr : &prefetched_.at(request->second);
  for (std::size_t i = 0; i < landing.items.size(); ++i) {
    const LoadItem& item = landing.items[i];
    GroupIndex& group = index_of(item.group);
    const worker::UnitPart place{item.key, item.part};
    const bool of_use = landing.wanted && landing.results[i] == 0;
    if (of_use) {
      ++counters_.loads;
      group.make_valid(item.block, worker_deaths_);
      note_loaded(item.group, place);
    } else if (landing.wanted) {
      // One that is not wanted may be of other weights, under which the key is another unit's.
      note_not_loaded(item.group, place, landing.results[i]);
    }
    if (prefetched == nullptr) {
      group.release(item.block);
      continue;
    }
    const auto held = std::find_if(prefetched->blocks.begin(), prefetched->blocks.end(),
                                   [&item](const HeldBlock& block) {
                                     return block.group == item.group && block.block == item.block;
                                   });
    KVFERRY_CHECK(held != prefetched->blocks.end(), "a block landed that was not prefetched");
    if (of_use) {
      held->source = BlockSource::kDevice;
      held->prefetched = true;
      continue;
    }
    if (held->announced) group.forget(item.block);
    prefetched->blocks.erase(held);
    group.release(item.block);
  }
  if (prefetched != nullptr) unpin_landed(*prefetched);
  pump_later();
}

// It may wait for its turn for long.
void Engine::unpin_landed(Prefetched& prefetched) {
  const bool comes =
      std::any_of(prefetched.blocks.begin(), prefetched.blocks.end(),
                  [](const HeldBlock& held) { return held.source == BlockSource::kHost; });
  if (!comes) pins_.let_go(std::exchange(prefetched.pinned, {}));
}

void Engine::end_prefetch(std::size_t request, Attempt* attempt) {
  const auto found = prefetched_.find(request);
  if (found == prefetched_.end()) return;
  Prefetched& prefetched = found->second;
  stop_prefetch(prefetched);
  for (std::size_t i = prefetched.blocks.size(); i-- > 0;) {
    const HeldBlock& held = prefetched.blocks[i];
    if (attempt != nullptr && held.prefetched && held.position < attempt->hit_blocks) {
      attempt->hit_from_host[held.position] = true;
      ++counters_.prefetch_used;
    }
    index_of(held.group).release(held.block);
  }
  pins_.let_go(std::move(prefetched.pinned));
  prefetched_.erase(found);
}

void Engine::end_prefetches() {
  while (!prefetched_.empty()) end_prefetch(prefetched_.begin()->first, nullptr);
}

}  // namespace kvferry::cli
