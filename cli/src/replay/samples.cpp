// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/samples.hpp"

#include "kvferry/ipc/base/size.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <utility>

namespace kvferry::cli {
namespace {

constexpr std::uint64_t kBytesPerKib = 1024;

std::uint64_t kib_of_kind(const RunSample& sample, std::string_view kind) {
  std::uint64_t kib = 0;
  for (const auto& [name, memory] : sample.anonymous_kib) {
    if (name.substr(0, name.find('/')) == kind) kib += memory;
  }
  return kib;
}

nlohmann::json pool_json(const RunSample& sample) {
  if (!sample.pool) return nullptr;
  return {{"placed_blocks", sample.pool->placed_blocks},
          {"placed_extents", sample.pool->placed_extents},
          {"free", sample.pool->free_bytes},
          {"slabs", sample.pool->slabs},
          {"free_in_slabs", sample.pool->free_in_slabs}};
}

}  // namespace

std::optional<PoolSample> pool_of_status(std::string_view json) {
  const auto status = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!status.is_object()) return std::nullopt;
  const auto pool = status.find("pool");
  if (pool == status.end() || !pool->is_object()) return std::nullopt;
  bool complete = true;
  const auto number = [&pool, &complete](const char* name) -> std::uint64_t {
    const auto found = pool->find(name);
    if (found != pool->end() && found->is_number_unsigned()) return found->get<std::uint64_t>();
    complete = false;
    return 0;
  };
  PoolSample sample;
  sample.placed_blocks = number("placed_blocks");
  sample.placed_extents = number("placed_extents");
  sample.free_bytes = number("free");
  sample.slabs = number("slabs");
  const std::uint64_t unused_pages = number("free_pages") * number("page_bytes");
  sample.free_in_slabs = sample.free_bytes - std::min(sample.free_bytes, unused_pages);
  if (!complete) return std::nullopt;
  return sample;
}

void SampleList::add(RunSample sample) {
  if (!samples_.empty() && samples_.back().requests == sample.requests) samples_.pop_back();
  if (samples_.size() == kMostSamples) {
    for (std::size_t i = 1; 2 * i < samples_.size(); ++i) samples_[i] = std::move(samples_[2 * i]);
    samples_.resize((samples_.size() + 1) / 2);
    interval_ *= 2;
  }
  next_ = sample.requests + interval_;
  samples_.push_back(std::move(sample));
}

nlohmann::json to_json(const std::vector<RunSample>& samples) {
  nlohmann::json list = nlohmann::json::array();
  for (const RunSample& sample : samples) {
    list.push_back({{"requests", sample.requests},
                    {"seconds", sample.seconds},
                    {"anonymous_kib", sample.anonymous_kib},
                    {"pool", pool_json(sample)}});
  }
  return list;
}

std::optional<SamplePair> quarter_and_end(const std::vector<RunSample>& samples, bool with_pool) {
  std::size_t most_processes = 0;
  for (const RunSample& sample : samples) {
    most_processes = std::max(most_processes, sample.anonymous_kib.size());
  }
  const auto is_whole = [&](const RunSample& sample) {
    return sample.anonymous_kib.size() == most_processes && (sample.pool || !with_pool);
  };
  const auto last = std::find_if(samples.rbegin(), samples.rend(), is_whole);
  if (last == samples.rend()) return std::nullopt;
  const std::uint64_t requests = last->requests;
  const auto away = [requests](const RunSample& sample) {  // four times the distance
    const std::uint64_t there = 4 * sample.requests;
    return there > requests ? there - requests : requests - there;
  };
  SamplePair pair{nullptr, &*last};
  for (const RunSample& sample : samples) {
    if (!is_whole(sample) || 8 * sample.requests < requests || 2 * sample.requests > requests ||
        sample.requests == 0) {
      continue;
    }
    if (pair.quarter == nullptr || away(sample) < away(*pair.quarter)) pair.quarter = &sample;
  }
  if (pair.quarter == nullptr) return std::nullopt;
  return pair;
}

std::string describe_memory(const SamplePair& pair) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kKinds = {
      {{"manager", "manager"}, {"mover", "movers"}, {"worker", "workers"}, {"replay", "replay"}}};
  std::string text;
  for (const auto& [kind, shown] : kKinds) {
    const auto size = [kind = kind](const RunSample& sample) {
      return ipc::format_size(kib_of_kind(sample, kind) * kBytesPerKib);
    };
    text += fmt::format("{}{} {} to {}", text.empty() ? "" : ", ", shown, size(*pair.quarter),
                        size(*pair.end));
  }
  return text;
}

}  // namespace kvferry::cli
