// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/waiting_loads.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <algorithm>

namespace kvferry::cache_manager {
namespace {

std::uint8_t result_of(ipc::ErrorCode code) { return static_cast<std::uint8_t>(code); }

}  // namespace

void WaitingLoads::add(Job job,
                       std::vector<ipc::BlockKey> keys,
                       const std::vector<ipc::LoadItem>& items,
                       ipc::TimePoint until) {
  const LoadId id = next_load_++;
  Load& load = loads_[id];
  load.job = std::move(job);
  load.keys = std::move(keys);
  load.until = until;
  load.is_missing.assign(items.size(), true);
  load.missing = items.size();
  for (const ipc::LoadItem& item : items) {
    JobItem& taken = load.job.items.emplace_back();
    taken.group = item.group;
    taken.block = item.block;
    taken.part = item.part;
  }
  by_client_.emplace(ClientKey{load.job.client, load.job.client_job}, id);
  deadlines_.emplace(until, id);
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; i < items.size(); ++i) {
    waits_.emplace(load.keys[i], Wait{id, i});
    all.push_back(i);
  }
  submit_part(id, load, all);
  end_if_over(id);  // of no items
  arm();
}

void WaitingLoads::stored(const ipc::BlockKey& key, const ipc::Digest& /*before*/) {
  const auto [first, last] = waits_.equal_range(key);
  if (first == last) return;
  // Not from within the index: a part takes its slots there.
  if (ready_.empty()) {
    loop_.post([this, living = is_living_] {
      if (*living) flush();
    });
  }
  for (auto at = first; at != last; ++at) ready_[at->second.first].push_back(at->second.second);
}

void WaitingLoads::flush() {
  while (!ready_.empty()) {
    const auto node = ready_.extract(ready_.begin());
    const auto at = loads_.find(node.key());
    if (at == loads_.end()) continue;
    const LoadId id = at->first;
    submit_part(id, at->second, node.mapped());
    end_if_over(id);
  }
}

// A block may have gone again since it was stored: then it is waited for once more.
void WaitingLoads::submit_part(LoadId id, Load& load, const std::vector<std::uint32_t>& items) {
  Job part = load.job;
  part.items.clear();
  part.client_job = ipc::JobId{next_part_++};
  std::vector<std::uint32_t> taken;
  for (const std::uint32_t i : items) {
    if (!load.is_missing[i]) continue;
    JobItem item = load.job.items[i];
    item.host = ports_.acquire(load.keys[i], item);
    if (item.host == nullptr && item.result == 0) continue;
    load.is_missing[i] = false;
    --load.missing;
    const auto [first, last] = waits_.equal_range(load.keys[i]);
    const auto wait = std::find_if(first, last, [&](const auto& entry) {
      return entry.second == Wait{id, i};
    });
    if (wait != last) waits_.erase(wait);
    if (item.host == nullptr) {
      load.job.items[i].result = item.result;
      if (load.job.message.empty()) load.job.message = "some units were stored without these parts";
      continue;
    }
    part.items.push_back(std::move(item));
    taken.push_back(i);
  }
  if (taken.empty()) return;
  by_part_.emplace(std::pair{part.client, part.client_job}, id);
  load.parts.emplace(part.client_job, std::move(taken));
  ports_.submit(std::move(part));
}

void WaitingLoads::part_ended(const Job& part) {
  const auto at = by_part_.find({part.client, part.client_job});
  if (at == by_part_.end()) return;  // nobody is answered
  const LoadId id = at->second;
  by_part_.erase(at);
  Load& load = loads_.at(id);
  const auto node = load.parts.extract(part.client_job);
  const std::vector<std::uint32_t>& items = node.mapped();
  for (std::size_t i = 0; i < items.size(); ++i) {
    load.job.items[items[i]].result = part.items[i].result;
  }
  load.job.bytes += part.bytes;
  if (load.job.message.empty()) load.job.message = part.message;
  end_if_over(id);
}

void WaitingLoads::stop_waiting(LoadId id, Load& load, const ipc::Error& error) {
  for (std::uint32_t i = 0; i < load.is_missing.size(); ++i) {
    if (!load.is_missing[i]) continue;
    load.is_missing[i] = false;
    load.job.items[i].result = result_of(error.code);
    const auto [first, last] = waits_.equal_range(load.keys[i]);
    const auto wait = std::find_if(first, last, [&](const auto& entry) {
      return entry.second == Wait{id, i};
    });
    if (wait != last) waits_.erase(wait);
  }
  if (load.missing > 0 && load.job.message.empty()) load.job.message = error.message;
  load.missing = 0;
}

void WaitingLoads::end_if_over(LoadId id) {
  const auto at = loads_.find(id);
  if (at == loads_.end() || at->second.missing > 0 || !at->second.parts.empty()) return;
  const Load load = std::move(at->second);
  loads_.erase(at);
  by_client_.erase({load.job.client, load.job.client_job});
  deadlines_.erase({load.until, id});
  ready_.erase(id);
  ipc::JobDone done;
  done.job = load.job.client_job;
  for (const JobItem& item : load.job.items) done.results.push_back(item.result);
  done.message = load.job.message;
  done.bytes = load.job.bytes;
  ports_.done(load.job.client, std::move(done));
}

bool WaitingLoads::cancel(const ipc::IncarnationId& client, ipc::JobId job) {
  const auto at = by_client_.find({client, job});
  if (at == by_client_.end()) return false;
  const LoadId id = at->second;
  Load& load = loads_.at(id);
  stop_waiting(id, load, KVFERRY_ERROR(kCancelled, "job {} was cancelled", job.value));
  std::vector<ipc::JobId> parts;
  for (const auto& [part, items] : load.parts) parts.push_back(part);
  for (const ipc::JobId part : parts) ports_.cancel(client, part);
  end_if_over(id);
  return true;
}

void WaitingLoads::drop_client(const ipc::IncarnationId& client) {
  for (auto at = by_client_.lower_bound({client, ipc::JobId{0}});
       at != by_client_.end() && at->first.first == client; at = by_client_.erase(at)) {
    const LoadId id = at->second;
    Load& load = loads_.at(id);
    stop_waiting(id, load, KVFERRY_ERROR(kCancelled, "its client is gone"));
    for (const auto& [part, items] : load.parts) by_part_.erase({client, part});
    deadlines_.erase({load.until, id});
    ready_.erase(id);
    loads_.erase(id);
  }
}

void WaitingLoads::fail_waiting(std::uint32_t engine, const ipc::Error& error) {
  std::vector<LoadId> failed;
  for (auto& [id, load] : loads_) {
    if (load.job.engine != engine || load.missing == 0) continue;
    stop_waiting(id, load, error);
    failed.push_back(id);
  }
  for (const LoadId id : failed) end_if_over(id);
}

void WaitingLoads::fail_all_waiting(const ipc::Error& error) {
  std::set<std::uint32_t> engines;
  for (const auto& [id, load] : loads_) engines.insert(load.job.engine);
  for (const std::uint32_t engine : engines) fail_waiting(engine, error);
}

std::size_t WaitingLoads::count(std::uint32_t engine) const {
  return static_cast<std::size_t>(
      std::count_if(loads_.begin(), loads_.end(),
                    [engine](const auto& entry) { return entry.second.job.engine == engine; }));
}

void WaitingLoads::arm() {
  loop_.cancel(std::exchange(timer_, 0));
  if (deadlines_.empty()) return;
  timer_ = loop_.at(deadlines_.begin()->first, [this] {
    timer_ = 0;
    expire();
  });
}

void WaitingLoads::expire() {
  const ipc::TimePoint now = ports_.now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const LoadId id = deadlines_.begin()->second;
    deadlines_.erase(deadlines_.begin());
    Load& load = loads_.at(id);
    const std::size_t missing = load.missing;
    stop_waiting(id, load,
                 KVFERRY_ERROR(kTimeout, "job {}: {} blocks were not stored in time: compute them",
                               load.job.client_job.value, missing));
    end_if_over(id);
  }
  arm();
}

}  // namespace kvferry::cache_manager
