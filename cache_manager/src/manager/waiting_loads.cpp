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
  take(id, load, all);
  end_if_over(id);  // of no items
  arm();
}

// Not from within the index or the job table: a part takes its slots there, and goes there.
std::vector<std::uint32_t>& WaitingLoads::ready(LoadId id) {
  if (ready_.empty()) {
    loop_.post([this, living = is_living_] {
      if (*living) flush();
    });
  }
  return ready_[id];
}

void WaitingLoads::stored(const ipc::BlockKey& key, const ipc::Digest& /*before*/) {
  const auto [first, last] = waits_.equal_range(key);
  for (auto at = first; at != last; ++at) ready(at->second.first).push_back(at->second.second);
}

void WaitingLoads::flush() {
  while (!ready_.empty()) {
    const auto node = ready_.extract(ready_.begin());
    const auto at = loads_.find(node.key());
    if (at == loads_.end()) continue;
    const LoadId id = at->first;
    take(id, at->second, node.mapped());
    end_if_over(id);
  }
}

void WaitingLoads::forget_wait(LoadId id, const Load& load, std::uint32_t item) {
  const auto [first, last] = waits_.equal_range(load.keys[item]);
  const auto wait = std::find_if(first, last, [&](const auto& entry) {
    return entry.second == Wait{id, item};
  });
  if (wait != last) waits_.erase(wait);
}

// A block may have gone again since it was stored: then it is waited for once more.
void WaitingLoads::take(LoadId id, Load& load, const std::vector<std::uint32_t>& items) {
  for (const std::uint32_t i : items) {
    if (!load.is_missing[i]) continue;
    JobItem item = load.job.items[i];
    item.host = ports_.acquire(load.keys[i], item);
    if (item.host == nullptr && item.result == 0) continue;
    load.is_missing[i] = false;
    --load.missing;
    forget_wait(id, load, i);
    if (item.host == nullptr) {
      load.job.items[i].result = item.result;
      if (load.job.message.empty()) load.job.message = "some units were stored without these parts";
      continue;
    }
    load.held.push_back(i);
    load.held_items.push_back(std::move(item));
  }
  submit_held(id, load);
}

void WaitingLoads::submit_held(LoadId id, Load& load) {
  if (load.held.empty() || load.parts.size() >= kMostParts) return;
  Job part = load.job;
  part.items = std::exchange(load.held_items, {});
  part.client_job = ipc::JobId{next_part_++};
  by_part_.emplace(std::pair{part.client, part.client_job}, id);
  load.parts.emplace(part.client_job, std::exchange(load.held, {}));
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
  if (!load.held.empty()) (void)ready(id);
  end_if_over(id);
}

void WaitingLoads::stop_waiting(LoadId id, Load& load, const ipc::Error& error) {
  for (std::uint32_t i = 0; i < load.is_missing.size(); ++i) {
    if (!load.is_missing[i]) continue;
    load.is_missing[i] = false;
    load.job.items[i].result = result_of(error.code);
    forget_wait(id, load, i);
  }
  for (const std::uint32_t i : load.held) load.job.items[i].result = result_of(error.code);
  if (load.has_unsubmitted() && load.job.message.empty()) load.job.message = error.message;
  load.missing = 0;
  load.held.clear();
  load.held_items.clear();
}

void WaitingLoads::end_if_over(LoadId id) {
  const auto at = loads_.find(id);
  if (at == loads_.end() || at->second.has_unsubmitted() || !at->second.parts.empty()) return;
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
    if (load.job.engine != engine || !load.has_unsubmitted()) continue;
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
    const std::size_t held = load.held.size();
    stop_waiting(
        id, load,
        missing > 0
            ? KVFERRY_ERROR(kTimeout, "job {}: {} blocks were not stored in time: compute them",
                            load.job.client_job.value, missing)
            : KVFERRY_ERROR(kTimeout, "job {}: {} blocks were not copied in time: compute them",
                            load.job.client_job.value, held));
    end_if_over(id);
  }
  arm();
}

}  // namespace kvferry::cache_manager
