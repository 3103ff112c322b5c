// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/death_log.hpp"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <utility>

namespace kvferry::cli {
namespace {

HitCounts counts_of(const ReplayCounters& counters) {
  return {counters.requests, counters.block_references, counters.hits_device, counters.hits_host};
}

HitCounts between(const HitCounts& from, const HitCounts& to) {
  return {to.requests - from.requests, to.block_references - from.block_references,
          to.hits_device - from.hits_device, to.hits_host - from.hits_host};
}

nlohmann::json json_of(const HitCounts& counts) {
  return {{"requests", counts.requests},       {"block_references", counts.block_references},
          {"hits_device", counts.hits_device}, {"hits_host", counts.hits_host},
          {"hit_rate", counts.hit_rate()},     {"host_hit_rate", counts.host_hit_rate()}};
}

}  // namespace

void DeathLog::add(std::string process, double seconds, const ReplayCounters& counters) {
  marks_.push_back({std::move(process), seconds, counts_of(counters)});
}

std::vector<RunDeath> DeathLog::ended(const ReplayCounters& counters) const {
  std::vector<RunDeath> deaths;
  HitCounts before;
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    const Mark& mark = marks_[i];
    const HitCounts after = i + 1 < marks_.size() ? marks_[i + 1].counts : counts_of(counters);
    deaths.push_back({mark.process, mark.counts.requests, mark.seconds,
                      between(before, mark.counts), between(mark.counts, after)});
    before = mark.counts;
  }
  return deaths;
}

nlohmann::json to_json(const std::vector<RunDeath>& deaths) {
  nlohmann::json list = nlohmann::json::array();
  for (const RunDeath& death : deaths) {
    list.push_back({{"process", death.process},
                    {"requests", death.requests},
                    {"seconds", death.seconds},
                    {"before", json_of(death.before)},
                    {"after", json_of(death.after)}});
  }
  return list;
}

}  // namespace kvferry::cli
