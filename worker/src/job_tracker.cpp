// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "job_tracker.hpp"

#include "kvferry/ipc/wire/messages.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace kvferry::worker {

void JobTracker::add(JobId job,
                     const ipc::SessionId& manager,
                     std::span<const DeviceBlock> blocks) {
  Job& added = jobs_[job.value];
  added.manager = manager;
  added.blocks.reserve(blocks.size());
  for (const DeviceBlock& block : blocks) {
    added.blocks.push_back(block.key());
    jobs_of_block_[block.key()].push_back(job.value);
  }
}

bool JobTracker::finish(JobId job,
                        std::vector<std::uint8_t> results,
                        std::string message,
                        std::uint64_t bytes) {
  const auto found = jobs_.find(job.value);
  if (found == jobs_.end()) return false;
  const bool known_codes = std::all_of(results.begin(), results.end(), [](std::uint8_t result) {
    return result <= ipc::wire_max(ErrorCode{});
  });
  const std::size_t items = found->second.blocks.size();
  if (results.size() != items || !known_codes) {
    return finish_all_items(job, ErrorCode::kProtocol,
                            fmt::format("job {}: {} results for {} items, or an unknown error code",
                                        job.value, results.size(), items));
  }
  end(job, Completion{job, std::move(results), std::move(message), bytes});
  return true;
}

bool JobTracker::finish_all_items(JobId job, ErrorCode code, std::string message) {
  const auto found = jobs_.find(job.value);
  if (found == jobs_.end()) return false;
  std::vector<std::uint8_t> results(found->second.blocks.size(), static_cast<std::uint8_t>(code));
  end(job, Completion{job, std::move(results), std::move(message), 0});
  return true;
}

void JobTracker::end(JobId job, Completion completion) {
  const auto failed = std::count_if(completion.results.begin(), completion.results.end(),
                                    [](std::uint8_t code) { return code != 0; });
  transitions_.record(ipc::Transition::kEngineDone,
                      {.job = job, .detail = static_cast<std::uint64_t>(failed)});
  auto node = jobs_.extract(job.value);
  const Job& ended = node.mapped();
  if (ended.orphan) --orphans_;
  for (const std::uint64_t block : ended.blocks) {
    const auto jobs = jobs_of_block_.find(block);
    if (jobs == jobs_of_block_.end()) continue;  // A block that the job names twice.
    std::erase(jobs->second, job.value);
    if (jobs->second.empty()) jobs_of_block_.erase(jobs);
  }
  for (const std::uint64_t id : ended.waiters) {
    const auto waiter = waiters_.find(id);
    if (--waiter->second.jobs_left > 0) continue;
    released_.push_back(std::move(waiter->second.released));
    waiters_.erase(waiter);
  }
  completions_.push_back(std::move(completion));
}

void JobTracker::orphan_all(const std::vector<ArenaId>& arenas) {
  for (auto& [id, job] : jobs_) {
    if (job.orphan) continue;
    job.orphan = true;
    job.arenas = arenas;
    ++orphans_;
  }
}

bool JobTracker::all_replaced(const std::vector<ArenaId>& before, const std::vector<ArenaId>& now) {
  if (before.empty() || before.size() != now.size()) return false;
  for (std::size_t i = 0; i < before.size(); ++i) {
    // A manager that does not know the rank's arena (yet) says nothing about it.
    if (now[i].epoch.value == 0 || now[i].session.is_zero()) return false;
    if (now[i].session == before[i].session && now[i].epoch == before[i].epoch) return false;
  }
  return true;
}

std::size_t JobTracker::settle_orphans(const ipc::SessionId& manager,
                                       bool offload_ready,
                                       const std::vector<ArenaId>& arenas) {
  std::vector<std::uint64_t> idle;
  for (const auto& [id, job] : jobs_) {
    if (!job.orphan) continue;
    const bool movers_idle = offload_ready && job.manager != manager;
    if (movers_idle || all_replaced(job.arenas, arenas)) idle.push_back(id);
  }
  return end_orphans(std::move(idle));
}

std::size_t JobTracker::settle_greeted(const ipc::SessionId& manager) {
  std::vector<std::uint64_t> idle;
  for (const auto& [id, job] : jobs_) {
    if (job.orphan && job.manager == manager) idle.push_back(id);
  }
  return end_orphans(std::move(idle));
}

std::size_t JobTracker::end_orphans(std::vector<std::uint64_t> idle) {
  std::sort(idle.begin(), idle.end());
  for (const std::uint64_t id : idle) {
    finish_all_items(
        JobId{id}, ErrorCode::kPeerDied,
        fmt::format("job {}: the manager was lost and no mover works for it; whether it "
                    "was done is not known, submit it again",
                    id));
  }
  return idle.size();
}

bool JobTracker::release_when_done(std::span<const DeviceBlock> blocks, Released released) {
  std::unordered_set<std::uint64_t> touching;
  for (const DeviceBlock& block : blocks) {
    const auto jobs = jobs_of_block_.find(block.key());
    if (jobs != jobs_of_block_.end()) touching.insert(jobs->second.begin(), jobs->second.end());
  }
  if (touching.empty()) return true;
  const std::uint64_t id = ++last_waiter_;
  waiters_.emplace(id, Waiter{touching.size(), std::move(released)});
  for (const std::uint64_t job : touching) jobs_.at(job).waiters.push_back(id);
  return false;
}

std::vector<JobTracker::Released> JobTracker::take_released() {
  return std::exchange(released_, {});
}

std::vector<Completion> JobTracker::take(std::size_t max) {
  const auto count = static_cast<std::ptrdiff_t>(std::min<std::size_t>(max, completions_.size()));
  std::vector<Completion> taken(std::make_move_iterator(completions_.begin()),
                                std::make_move_iterator(completions_.begin() + count));
  completions_.erase(completions_.begin(), completions_.begin() + count);
  return taken;
}

bool JobTracker::has_completion(JobId job) const {
  return std::any_of(completions_.begin(), completions_.end(),
                     [job](const Completion& done) { return done.job == job; });
}

std::optional<Completion> JobTracker::take_job(JobId job) {
  const auto found = std::find_if(completions_.begin(), completions_.end(),
                                  [job](const Completion& done) { return done.job == job; });
  if (found == completions_.end()) return std::nullopt;
  Completion taken = std::move(*found);
  completions_.erase(found);
  return taken;
}

}  // namespace kvferry::worker
