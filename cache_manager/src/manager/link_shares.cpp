// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/link_shares.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/model/urgency.hpp"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

void LinkShares::set(std::uint32_t engine, ipc::Rank rank, const Member& member) {
  KVFERRY_CHECK(member.weight >= 1, "a share is of no weight");
  Engine& record = engines_[engine];
  record.weight = member.weight;
  record.ranks[rank] = member;
  regroup();
}

void LinkShares::leave(std::uint32_t engine, ipc::Rank rank) {
  const auto at = engines_.find(engine);
  if (at == engines_.end() || at->second.ranks.erase(rank) == 0) return;
  if (at->second.ranks.empty()) engines_.erase(at);
  regroup();
}

void LinkShares::regroup() {
  // Links that some engine's jobs take together have one root.
  std::map<std::string, std::string> above;
  const auto root = [&above](std::string link) {
    for (auto at = above.find(link); at != above.end() && at->second != link;
         at = above.find(link)) {
      link = at->second;
    }
    return link;
  };
  for (const auto& [id, engine] : engines_) {
    const std::string first = root(engine.ranks.begin()->second.link);
    above.try_emplace(first, first);
    for (const auto& [rank, member] : engine.ranks) above[root(member.link)] = first;
  }
  std::map<std::string, std::vector<Engine*>> groups;
  for (auto& [id, engine] : engines_) {
    groups[root(engine.ranks.begin()->second.link)].push_back(&engine);
  }
  // Of several groups that were one, the first keeps the number; of one that was several, the
  // lowest.
  std::set<std::uint32_t> taken;
  for (auto& [link, engines] : groups) {
    std::uint32_t number = 0;
    for (const Engine* engine : engines) {
      if (engine->number == 0 || taken.contains(engine->number)) continue;
      number = number == 0 ? engine->number : std::min(number, engine->number);
    }
    if (number == 0) number = ++last_number_;
    taken.insert(number);
    for (Engine* engine : engines) engine->number = number;
  }
}

void LinkShares::forget(std::uint32_t engine) {
  if (engines_.erase(engine) != 0) regroup();
  for (auto& [lane, state] : lanes_) {
    state.uses.erase(engine);
  }
}

std::uint32_t LinkShares::weight_of(std::uint32_t engine) const {
  const auto at = engines_.find(engine);
  return at == engines_.end() ? 1 : at->second.weight;
}

LinkShares::Lane LinkShares::lane_of(std::uint32_t engine, bool to_host) const {
  const auto at = engines_.find(engine);
  return {at == engines_.end() ? 0 : at->second.number, to_host};
}

// Its own share's worth is always an engine's to have under way: whoever comes last finds the link
// full of what the first ones sent while they were alone.
bool LinkShares::has_room(const State& state, const Use& use, double share) {
  return state.bytes < kBytesUnderWay || state.jobs < kJobsUnderWay ||
         static_cast<double>(use.bytes) < share * static_cast<double>(kBytesUnderWay);
}

ipc::TimePoint LinkShares::loses_its_turn(const Lane& lane,
                                          std::uint32_t engine,
                                          const Use& use) const {
  if (const auto at = engines_.find(engine); at != engines_.end()) {
    // Its slowest rank is what a job waits for.
    const auto& ranks = at->second.ranks;
    if (std::any_of(ranks.begin(), ranks.end(), [&lane](const auto& entry) {
          return lane.to_host ? entry.second.paced_stores : entry.second.paced_loads;
        })) {
      return use.moved;
    }
  }
  const std::chrono::duration<double> slow(static_cast<double>(use.bytes) /
                                           static_cast<double>(kSlowBytesPerSecond));
  return use.moved + kPatience + std::chrono::ceil<ipc::Duration>(slow);
}

std::optional<LinkShares::Choice> LinkShares::next(const Lane& lane,
                                                   std::span<const Offer> offers,
                                                   ipc::TimePoint now) {
  if (offers.empty()) {
    if (const auto at = lanes_.find(lane); at != lanes_.end()) {
      at->second.look.reset();
    }
    return std::nullopt;
  }
  State& state = lanes_[lane];
  state.look.reset();
  for (const Offer& offer : offers) {
    Use& use = state.uses[offer.engine];
    use.tag = std::max(use.tag, state.now);
  }
  // Of two that are even, the one that has less under way.
  const auto order = [&](const Offer& offer) {
    const Use& use = state.uses[offer.engine];
    return std::pair(use.tag, static_cast<double>(use.bytes) / weight_of(offer.engine));
  };
  std::vector<Offer> in_turn(offers.begin(), offers.end());
  std::sort(in_turn.begin(), in_turn.end(),
            [&](const Offer& a, const Offer& b) { return order(a) < order(b); });
  double weights = 0;
  bool alone = true;
  for (const auto& entry : state.uses) {
    const std::uint32_t engine = entry.first;
    // What it has under way was sent when it had ranks there: it goes over this link no more.
    if (lane_of(engine, lane.to_host) != lane) continue;
    const bool offers_one = std::any_of(offers.begin(), offers.end(),
                                        [&](const Offer& offer) { return offer.engine == engine; });
    if (!entry.second.jobs.empty() || offers_one) {
      weights += weight_of(engine);
      alone = alone && engine == in_turn.front().engine;
    }
  }
  for (const Offer& offer : in_turn) {
    const Use& use = state.uses[offer.engine];
    if (alone || has_room(state, use, weight_of(offer.engine) / weights)) {
      return Choice{offer.engine, false};
    }
    if (const ipc::TimePoint passed = loses_its_turn(lane, offer.engine, use); now < passed) {
      state.look = passed;
      break;
    }
  }
  for (const Offer& offer : offers) {
    const Use& use = state.uses[offer.engine];
    const std::uint8_t others =
        std::max(use.jobs.empty() ? ipc::Urgency::kOrdinary : use.jobs.rbegin()->first,
                 ipc::Urgency::kOrdinary);
    if (offer.priority > others) {
      return Choice{offer.engine, true};
    }
  }
  return std::nullopt;
}

std::optional<ipc::TimePoint> LinkShares::next_look(const Lane& lane) const {
  const auto at = lanes_.find(lane);
  return at == lanes_.end() ? std::nullopt : at->second.look;
}

void LinkShares::sent(const Lane& lane,
                      std::uint32_t engine,
                      std::uint64_t bytes,
                      std::uint8_t priority,
                      ipc::TimePoint now) {
  State& state = lanes_[lane];
  Use& use = state.uses[engine];
  if (use.jobs.empty()) {
    use.moved = now;
  }
  state.now = std::max(state.now, use.tag);
  use.tag = std::max(use.tag, state.now) + static_cast<double>(bytes) / weight_of(engine);
  use.bytes += bytes;
  ++use.jobs[priority];
  state.bytes += bytes;
  ++state.jobs;
}

void LinkShares::ended(const Lane& lane,
                       std::uint32_t engine,
                       std::uint64_t bytes,
                       std::uint8_t priority,
                       ipc::TimePoint now) {
  const auto at = lanes_.find(lane);
  KVFERRY_CHECK(at != lanes_.end(), "a job ended on a link that has none");
  State& state = at->second;
  Use& use = state.uses[engine];
  use.moved = now;
  use.bytes -= bytes;
  if (--use.jobs.at(priority) == 0) {
    use.jobs.erase(priority);
  }
  state.bytes -= bytes;
  // An idle link owes nobody anything.
  if (--state.jobs == 0) {
    lanes_.erase(at);
  }
}

}  // namespace kvferry::cache_manager
