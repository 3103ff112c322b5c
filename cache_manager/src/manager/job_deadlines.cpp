// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"
#include "manager/job_table.hpp"

#include <algorithm>

/// The deadlines of a JobTable.
namespace kvferry::cache_manager {

void JobTable::set_deadline(Entry& entry, ipc::TimePoint when) {
  deadlines_.erase({entry.deadline, entry.job.id});
  entry.deadline = when;
  deadlines_.emplace(when, entry.job.id);
}

ipc::Error JobTable::not_started(const Entry& entry) const {
  if (const auto due = entry.job.urgency.due(); due && *due <= ports_.now()) {
    return KVFERRY_ERROR(kTimeout,
                         "not started by its deadline, other jobs were before it: nothing of it "
                         "was done");
  }
  return KVFERRY_ERROR(kTimeout,
                       "not started in {} ms, other jobs were before it: nothing of it was done, "
                       "submit it again",
                       limits_.queue_deadline.count());
}

std::optional<ipc::TimePoint> JobTable::next_deadline() const {
  std::optional<ipc::TimePoint> next = watch_.next();
  if (!deadlines_.empty()) {
    next = std::min(next.value_or(deadlines_.begin()->first), deadlines_.begin()->first);
  }
  for (const LinkShares::Lane& lane : held_back_) {
    if (const auto look = shares_.next_look(lane)) {
      next = std::min(next.value_or(*look), *look);
    }
  }
  return next;
}

std::vector<ipc::IncarnationId> JobTable::expire() {
  const ipc::TimePoint now = ports_.now();
  std::set<ipc::IncarnationId> stuck;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Entry& entry = entries_.at(deadlines_.begin()->second);
    deadlines_.erase(deadlines_.begin());
    if (entry.state != State::kRunning) {
      end_unsent(entry, not_started(entry));
      continue;
    }
    const auto patience = kPatience * limits_.job_deadline;
    if (entry.gives_up && now >= entry.sent + 2 * patience) {
      for (const Part& part : entry.parts) {
        if (part.open) {
          stuck.insert(part.target.mover);
        }
      }
    }
    entry.gives_up = true;
    ask_to_cancel(entry);
    set_deadline(entry, now + patience);
  }
  for (const MoverLane& lane : watch_.stalled(now)) {
    expire_lane(lane, now);
  }
  stuck.merge(watch_.stuck(now));
  std::erase_if(stuck, [&](const ipc::IncarnationId& mover) { return spare(mover, now); });
  for (const ipc::IncarnationId& mover : stuck) {
    watch_.forget(mover);
  }
  const std::vector<LinkShares::Lane> held_back(held_back_.begin(), held_back_.end());
  for (const LinkShares::Lane& lane : held_back) {
    if (const auto look = shares_.next_look(lane); look && *look <= now) {
      send_over(lane);
    }
  }
  settle();
  return {stuck.begin(), stuck.end()};
}

bool JobTable::spare(const ipc::IncarnationId& mover, ipc::TimePoint now) {
  for (const auto& [id, entry] : entries_) {
    for (const Part& part : entry.parts) {
      if (part.open && part.target.mover == mover && ports_.is_stopped(part.target.worker)) {
        ipc::log_warn("mover {} gets no further because worker {} is stopped: it is left alone",
                      mover.hex(), part.target.worker.hex());
        for (const bool to_host : {false, true}) {
          watch_.not_before({mover, to_host}, now + limits_.job_deadline);
        }
        return true;
      }
    }
  }
  return false;
}

// The lane has answered nothing for a whole deadline: the jobs that it has had for as long are
// given up. Those that came later keep their time.
void JobTable::expire_lane(const MoverLane& lane, ipc::TimePoint now) {
  std::vector<Entry*> open;
  for (auto& place : entries_) {
    Entry& entry = place.second;
    if (std::any_of(entry.parts.begin(), entry.parts.end(),
                    [&](const Part& part) { return part.open && lane_of(entry, part) == lane; })) {
      open.push_back(&entry);
    }
  }
  const auto oldest = std::min_element(
      open.begin(), open.end(), [](const Entry* a, const Entry* b) { return a->sent < b->sent; });
  if (oldest == open.end()) {
    watch_.forget(lane.mover);
    return;
  }
  if ((*oldest)->sent + limits_.job_deadline > now) {
    watch_.not_before(lane, (*oldest)->sent + limits_.job_deadline);
    return;
  }
  ipc::log_warn("mover {} has answered no {} for {} ms: its overdue jobs are cancelled",
                lane.mover.hex(), lane.to_host ? "store" : "load", limits_.job_deadline.count());
  for (Entry* entry : open) {
    if (entry->sent + limits_.job_deadline <= now) {
      if (ipc::is_mutant("ends_jobs_at_their_deadline")) {
        end_unsent(*entry, KVFERRY_ERROR(kTimeout, "too late"));
        continue;
      }
      entry->gives_up = true;
      ask_to_cancel(*entry);
    }
  }
  watch_.gave_up(lane, now);
}

void JobTable::ask_to_cancel(const Entry& entry) const {
  for (const Part& part : entry.parts) {
    if (part.open) {
      ports_.cancel(part.target.mover, entry.job.id);
    }
  }
}

}  // namespace kvferry::cache_manager
