// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "simulate/simulation.hpp"

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/clock.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>

namespace kvferry::cli {
namespace {

using Request = std::vector<std::uint32_t>;

double rate(std::uint64_t hits, std::uint64_t references) {
  return references == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(references);
}

class OptimalCache {
 public:
  OptimalCache(const BlockTrace& trace, std::size_t capacity)
      : capacity_(capacity), blocks_(trace.distinct) {
    for (std::uint32_t number = 0; number < trace.requests.size(); ++number) {
      for (const std::uint32_t block : trace.requests[number]) {
        blocks_[block].uses.push_back(number);
      }
    }
  }

  [[nodiscard]] bool has(std::uint32_t block) const { return blocks_[block].kept; }

  /// @return how many were evicted
  std::uint64_t use(std::uint32_t number, const Request& request) {
    // A block that comes twice is as deep as its first place, which is looked at first.
    for (auto depth = static_cast<std::uint32_t>(request.size()); depth-- > 0;) {
      Block& block = blocks_[request[depth]];
      if (block.kept) order_.erase(block.place);
      while (block.next < block.uses.size() && block.uses[block.next] <= number) ++block.next;
      block.kept = block.next < block.uses.size();
      if (!block.kept) continue;
      block.place = {block.uses[block.next], depth, request[depth]};
      order_.insert(block.place);
    }
    std::uint64_t evicted = 0;
    for (; order_.size() > capacity_; ++evicted) {
      const auto last = std::prev(order_.end());
      blocks_[std::get<2>(*last)].kept = false;
      order_.erase(last);
    }
    return evicted;
  }

 private:
  using Place =
      std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;  ///< Next use, depth, which.
  struct Block {
    std::vector<std::uint32_t> uses;  ///< Requests.
    std::size_t next = 0;             ///< Of those.
    Place place{};
    bool kept = false;
  };

  std::size_t capacity_;
  std::vector<Block> blocks_;
  std::set<Place> order_;
};

template <typename Cache> std::uint64_t found(const Cache& cache, const Request& request) {
  return static_cast<std::uint64_t>(
      std::find_if_not(request.begin(), request.end(),
                       [&cache](std::uint32_t block) { return cache.has(block); }) -
      request.begin());
}

void run_optimal(const BlockTrace& trace, SimulatedCache& result) {
  OptimalCache cache(trace, result.capacity);
  for (std::uint32_t number = 0; number < trace.requests.size(); ++number) {
    const Request& request = trace.requests[number];
    result.hits += found(cache, request);
    result.evictions += cache.use(number, request);
  }
}

void run_policy(const BlockTrace& trace,
                cache_manager::EvictionPolicy& policy,
                const cache_manager::Watermarks& ahead,
                SimulatedCache& result) {
  std::vector<cache_manager::BlockUse> path;
  const std::uint64_t low = ahead.low_of(result.capacity);
  const std::uint64_t high = ahead.high_of(result.capacity);
  const auto evict_to = [&](std::size_t most) {
    for (; policy.size() > most; ++result.evictions) {
      const bool evicted = policy.evict([](cache_manager::EntryId) { return true; }).has_value();
      KVFERRY_CHECK(evicted, "a policy finds nothing to evict");
    }
  };
  for (const Request& request : trace.requests) {
    result.hits += found(policy, request);
    path.clear();
    for (const std::uint32_t block : request) path.push_back({block, block});
    policy.use(path);
    const std::uint64_t before = result.evictions;
    evict_to(result.capacity);
    result.evictions_at_need += result.evictions - before;
    if (result.capacity - policy.size() < low) evict_to(result.capacity - high);
  }
}

}  // namespace

double BlockTrace::unlimited_hit_rate() const { return rate(unlimited_hits, references); }
double SimulatedCache::hit_rate() const { return rate(hits, references); }

BlockTrace number_blocks(const std::vector<TraceRequest>& requests) {
  BlockTrace trace;
  std::unordered_map<std::uint64_t, std::uint32_t> numbers;
  for (const TraceRequest& request : requests) {
    Request& blocks = trace.requests.emplace_back();
    bool hits = true;
    const auto known = static_cast<std::uint32_t>(numbers.size());
    for (const std::uint64_t id : request.hash_ids) {
      const auto number = static_cast<std::uint32_t>(numbers.size());
      blocks.push_back(numbers.try_emplace(id, number).first->second);
      hits = hits && blocks.back() < known;
      trace.unlimited_hits += hits ? 1U : 0U;
    }
    trace.references += blocks.size();
  }
  trace.distinct = static_cast<std::uint32_t>(numbers.size());
  return trace;
}

ipc::Result<SimulatedCache> simulate(const BlockTrace& trace,
                                     std::string_view policy,
                                     std::size_t capacity,
                                     const cache_manager::Watermarks& ahead) {
  SimulatedCache result;
  result.policy = policy;
  result.capacity = capacity;
  result.references = trace.references;
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  if (policy == kOptimalPolicy) {
    run_optimal(trace, result);
  } else {
    std::unique_ptr<cache_manager::EvictionPolicy> chosen;
    KVFERRY_ASSIGN(chosen, cache_manager::make_eviction_policy(policy, capacity));
    run_policy(trace, *chosen, ahead, result);
  }
  result.seconds = std::chrono::duration<double>(ipc::MonotonicClock::now() - start).count();
  return result;
}

double gain(const SimulatedCache& policy,
            const SimulatedCache& lru,
            const SimulatedCache& optimal) {
  const double whole = optimal.hit_rate() - lru.hit_rate();
  return whole <= 0 ? 0 : (policy.hit_rate() - lru.hit_rate()) / whole;
}

}  // namespace kvferry::cli
