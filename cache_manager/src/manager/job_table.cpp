// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/job_table.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"

#include <algorithm>

namespace kvferry::cache_manager {
namespace {

using ipc::Transition;

/// Of one job, in the sums that are told.
constexpr std::chrono::hours kMostTime{1};
constexpr auto kLargestErrorCode = static_cast<std::uint8_t>(ipc::ErrorCode::kCuda);

// At random, with room to count on: a restarted manager does not repeat ids of the one before,
// whatever became of the clocks.
std::uint64_t first_job_id() { return ipc::Digest::random().low() >> 2U; }

std::uint64_t count_failed(const Job& job) {
  return static_cast<std::uint64_t>(std::count_if(
      job.items.begin(), job.items.end(), [](const JobItem& item) { return item.result != 0; }));
}

bool is_part(const Job& job) { return job.client_job.value >= kFirstPartId; }

// The answer of a mover that took a job out of its queue because it was told to.
bool was_never_started(const ipc::MoverJobDone& done) {
  return done.copied.count() == 0 &&
         std::all_of(done.results.begin(), done.results.end(), [](std::uint8_t result) {
           return result == static_cast<std::uint8_t>(ipc::ErrorCode::kCancelled);
         });
}

// To a client, kNotFound says that its blocks are lost, which nobody but the index knows. What
// failed on its way with this code did not find a mover or a worker.
bool is_known_result(std::uint8_t result) {
  return result <= kLargestErrorCode ||
         result == static_cast<std::uint8_t>(ipc::ErrorCode::kCorrupt);
}

std::uint8_t told_result(std::uint8_t result) {
  if (ipc::is_mutant("takes_failed_as_stored")) {
    return 0;
  }
  return result == static_cast<std::uint8_t>(ipc::ErrorCode::kNotFound)
             ? static_cast<std::uint8_t>(ipc::ErrorCode::kPeerDied)
             : result;
}

}  // namespace

// The replicated bytes are the same on every rank: one rank stores them, chosen by block so that
// the ranks share the work.
bool has_part(const JobItem& item,
              const SlabShape& shape,
              bool to_host,
              std::uint32_t rank) noexcept {
  return shape.bytes.shard_bytes > 0 || !to_host || item.block.value % shape.ranks == rank;
}

JobTable::JobTable(HostPool& pool, Ports ports, const Limits& limits)
    : pool_(pool),
      ports_(std::move(ports)),
      limits_(limits),
      watch_(limits.job_deadline),
      next_id_(first_job_id()) {}

ipc::Status JobTable::check_id(const ipc::IncarnationId& client, ipc::JobId client_job) const {
  if (by_client_.contains({client, client_job})) {
    return KVFERRY_ERROR(kAlreadyExists,
                         "job {} of this client is not finished: give each job an id of its own",
                         client_job.value);
  }
  if (const auto at = over_before_.find(client);
      at != over_before_.end() && at->second.contains(client_job)) {
    return KVFERRY_ERROR(kAlreadyExists,
                         "job {} of this client is over, or older than what is: ids grow, and none "
                         "is used twice",
                         client_job.value);
  }
  return ipc::ok();
}

ipc::Status JobTable::check_room(std::uint32_t engine, std::size_t waiting) const {
  const std::size_t jobs = unfinished_of_clients(engine) + waiting;
  if (jobs >= limits_.max_jobs_per_engine) {
    return KVFERRY_ERROR(kBusy,
                         "{} jobs of this engine are unfinished, the most are {}: submit it "
                         "later, as a job of another id",
                         jobs, limits_.max_jobs_per_engine);
  }
  return ipc::ok();
}

void JobTable::submit(Job job) {
  job.id = ipc::JobId{next_id_++};
  const ipc::JobId id = job.id;
  Entry& entry = entries_[id];
  entry.job = std::move(job);
  ports_.transitions.record(
      Transition::kManagerTake,
      {.job = id, .peer = entry.job.client, .detail = entry.job.client_job.value});
  by_client_.emplace(ClientKey{entry.job.client, entry.job.client_job}, id);
  unfinished_.add(entry.job.engine, is_part(entry.job));
  ++counters_[entry.job.engine].queued;
  entry.submitted = ports_.now();
  const ipc::TimePoint patience = entry.submitted + limits_.queue_deadline;
  set_deadline(entry, std::min(entry.job.urgency.due().value_or(patience), patience));

  std::vector<Claim> claims;
  claims.reserve(entry.job.items.size() * 2);
  const bool to_host = entry.job.to_host();
  for (const JobItem& item : entry.job.items) {
    if (item.host == nullptr) {
      continue;
    }
    claims.push_back({Place::device(entry.job.engine, item.group, item.block),
                      to_host ? Access::kRead : Access::kWrite});
    claims.push_back({Place::host_slot(item.host->slot().generation, item.host->slot().index),
                      to_host ? Access::kWrite : Access::kRead});
  }
  if (hazards_.add(id, claims)) {
    make_runnable(entry);
    pump(entry.job.engine);
  }
}

void JobTable::make_runnable(Entry& entry) {
  entry.state = State::kRunnable;
  runnable_[{entry.job.engine, entry.job.to_host()}].add(entry.job.id, entry.job.urgency);
}

void JobTable::set_share(std::uint32_t engine, ipc::Rank rank, const LinkShares::Member& member) {
  shares_.set(engine, rank, member);
  send_all();
}

void JobTable::drop_share(std::uint32_t engine, ipc::Rank rank) {
  shares_.leave(engine, rank);
  send_all();
}

void JobTable::forget_engine(std::uint32_t engine) {
  counters_.erase(engine);
  shares_.forget(engine);
  send_all();
}

// What engines share may have changed for others than the one of which something was said.
void JobTable::send_all() {
  std::set<LinkShares::Lane> lanes;
  for (const auto& [key, queue] : runnable_) lanes.insert(shares_.lane_of(key.first, key.second));
  for (const LinkShares::Lane& lane : lanes) send_over(lane);
  settle();
}

void JobTable::pump(std::uint32_t engine) {
  send_runnable(engine);
  settle();
}

void JobTable::send_runnable(std::uint32_t engine) {
  for (const bool to_host : {false, true}) {
    send_over(shares_.lane_of(engine, to_host));
  }
}

void JobTable::send_over(const LinkShares::Lane& lane) {
  held_back_.erase(lane);
  for (;;) {
    offers_.clear();
    for (const auto& [key, queue] : runnable_) {
      const auto& [engine, to_host] = key;
      if (shares_.lane_of(engine, to_host) != lane) continue;
      if (!windows_[key].has_room(queue.highest_priority())) continue;
      offers_.push_back({engine, queue.highest_priority()});
    }
    if (offers_.empty()) {
      return;  // nothing is held back: no look at it is due, whatever one was before
    }
    const std::optional<LinkShares::Choice> choice = shares_.next(lane, offers_, ports_.now());
    if (!choice) {
      held_back_.insert(lane);
      return;
    }
    const Queue key{choice->engine, lane.to_host};
    const auto at = runnable_.find(key);
    const ipc::JobId id = choice->urgent
                              ? at->second.take_most_urgent()
                              : at->second.take([&window = windows_[key]](auto priority) {
                                  return window.has_room(priority);
                                });
    if (at->second.empty()) runnable_.erase(at);
    Entry& entry = entries_.at(id);
    if (const auto due = entry.job.urgency.due(); due && *due <= ports_.now()) {
      end_unsent(entry, not_started(entry));
      continue;
    }
    ipc::Result<std::vector<RankTarget>> targets =
        ports_.targets(choice->engine, entry.job.generation);
    if (!targets) {
      end_unsent(entry, targets.error());
      continue;
    }
    entry.lane = lane;
    start(entry, *targets);
  }
}

void JobTable::add_items(const Job& job,
                         std::uint32_t rank,
                         Part& part,
                         ipc::MoverJob& message) const {
  for (std::uint32_t i = 0; i < job.items.size(); ++i) {
    const JobItem& item = job.items[i];
    if (item.host == nullptr) {
      continue;
    }
    const SlabShape& shape = pool_.shape(item.host->slot());
    if (!has_part(item, shape, job.to_host(), rank)) {
      continue;
    }
    const bool with_replicated = !job.to_host() || item.block.value % shape.ranks == rank;
    const bool is_checked = item.sums.size() > rank + 1;
    const SlotOffsets offsets = pool_.offsets(item.host->slot(), ipc::Rank{rank});
    const std::uint64_t shared = shape.bytes.replicated_bytes / shape.parts;
    const std::uint64_t own = shape.bytes.shard_bytes / shape.parts;
    message.items.push_back({.group = item.group,
                             .block = item.block,
                             .replicated_offset = offsets.replicated + item.part * shared,
                             .shard_offset = offsets.shard + item.part * own,
                             .with_replicated = with_replicated,
                             .replicated_sum = is_checked ? item.sums.front() : 0,
                             .shard_sum = is_checked ? item.sums[rank + 1] : 0});
    part.items.push_back(i);
  }
}

void JobTable::start(Entry& entry, const std::vector<RankTarget>& targets) {
  Job& job = entry.job;
  entry.state = State::kRunning;
  --counters_[job.engine].queued;
  ++counters_[job.engine].running;
  windows_[{job.engine, job.to_host()}].sent(job.urgency.priority);
  entry.sent = ports_.now();
  set_deadline(entry, entry.sent + kPatience * limits_.job_deadline);
  const auto ranks = static_cast<std::uint32_t>(targets.size());
  for (const JobItem& item : job.items) {
    if (item.host != nullptr) {
      entry.bytes += pool_.shape(item.host->slot()).part_bytes() / ranks;
    }
  }
  shares_.sent(entry.lane, job.engine, entry.bytes, job.urgency.priority, entry.sent);
  entry.parts.resize(ranks);
  bool any_open = false;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    Part& part = entry.parts[rank];
    part.target = targets[rank];
    ipc::MoverJob message;
    message.job = job.id;
    message.session = part.target.session;
    message.epoch = part.target.epoch;
    message.direction =
        job.to_host() ? ipc::CopyDirection::kDeviceToHost : ipc::CopyDirection::kHostToDevice;
    message.urgency = job.urgency;
    message.brief = job.brief;
    message.layers = job.layers;
    message.wants_sums = limits_.wants_sums && job.to_host();
    message.sums_first = limits_.sums_first && message.wants_sums;
    add_items(job, rank, part, message);
    if (message.items.empty()) {
      continue;
    }
    if (ipc::Status sent = send_part(entry, part, message); !sent) {
      fail_items(job, part.items, sent.error().code, sent.error().message);
      continue;
    }
    part.open = true;
    any_open = true;
    watch_.sent(lane_of(entry, part), entry.sent);
  }
  if (!any_open) {
    finish(entry);
  }
}

ipc::Status JobTable::send_part(const Entry& entry,
                                const Part& part,
                                const ipc::MoverJob& message) const {
  const ipc::TransitionFields step{.session = message.session,
                                   .epoch = message.epoch,
                                   .job = entry.job.id,
                                   .peer = part.target.mover,
                                   .detail = message.items.size()};
  ipc::Status sent = ports_.transitions.attempt(Transition::kManagerSend, step);
  if (sent) {
    sent = ports_.send(part.target.mover, message);
  }
  // What did not leave is over as if its mover were.
  ports_.transitions.record(sent ? Transition::kManagerSent : Transition::kManagerWritesOff, step);
  return sent;
}

void JobTable::fail_items(Job& job,
                          const std::vector<std::uint32_t>& items,
                          ipc::ErrorCode code,
                          const std::string& message) {
  for (const std::uint32_t i : items) {
    if (job.items[i].result == 0) {
      job.items[i].result = told_result(static_cast<std::uint8_t>(code));
    }
  }
  if (job.message.empty()) {
    job.message = message;
  }
}

void JobTable::close_part(Entry& entry, Part& part) {
  part.open = false;
  watch_.closed(lane_of(entry, part));
  if (std::none_of(entry.parts.begin(), entry.parts.end(),
                   [](const Part& other) { return other.open; })) {
    finish(entry);
  }
}

ipc::Status JobTable::mover_done(const ipc::IncarnationId& mover,
                                 std::uint32_t engine,
                                 const ipc::MoverJobDone& done) {
  const auto at = entries_.find(done.job);
  if (at == entries_.end()) {
    count_stale(engine);
    return ipc::ok();
  }
  Entry& entry = at->second;
  const auto part = std::find_if(entry.parts.begin(), entry.parts.end(),
                                 [&](const Part& p) { return p.open && p.target.mover == mover; });
  if (part == entry.parts.end()) {
    count_stale(engine);
    return ipc::ok();
  }
  if (!entry.gives_up || !was_never_started(done)) {
    watch_.answered(lane_of(entry, *part), ports_.now());
  }
  const auto failed = std::count_if(done.results.begin(), done.results.end(),
                                    [](std::uint8_t result) { return result != 0; });
  ports_.transitions.record(
      Transition::kManagerSeesEnd,
      {.job = done.job, .peer = mover, .detail = static_cast<std::uint64_t>(failed)});
  ipc::Status status;
  if (done.results.size() != part->items.size() ||
      std::any_of(done.results.begin(), done.results.end(),
                  [](std::uint8_t result) { return !is_known_result(result); })) {
    status = KVFERRY_ERROR(kProtocol, "answer to job {} has {} results, {} items were sent",
                           done.job.value, done.results.size(), part->items.size());
    fail_items(entry.job, part->items, ipc::ErrorCode::kProtocol, status.error().message);
  } else {
    for (std::size_t i = 0; i < part->items.size(); ++i) {
      JobItem& item = entry.job.items[part->items[i]];
      if (item.result == 0) {
        item.result = told_result(done.results[i]);
        if (entry.gives_up &&
            item.result == static_cast<std::uint8_t>(ipc::ErrorCode::kCancelled)) {
          item.result = static_cast<std::uint8_t>(ipc::ErrorCode::kTimeout);
        }
      }
    }
    if (entry.job.message.empty()) {
      entry.job.message = done.message;
    }
    entry.job.bytes += done.bytes;
    count(entry, done);
  }
  close_part(entry, *part);
  settle();
  return status;
}

// A mover's clock may say anything.
void JobTable::count(const Entry& entry, const ipc::MoverJobDone& done) {
  const auto sane = [](std::chrono::microseconds time) {
    return std::clamp<std::chrono::microseconds>(time, std::chrono::microseconds(0), kMostTime);
  };
  JobCounters& counters = counters_[entry.job.engine];
  JobCounters::Way& way = entry.job.to_host() ? counters.to_host : counters.to_device;
  way.bytes += done.bytes;
  ++way.answers;
  way.queued +=
      sane(std::chrono::duration_cast<std::chrono::microseconds>(entry.sent - entry.submitted)) +
      sane(done.queued);
  way.copied += sane(done.copied);
}

std::vector<ipc::IncarnationId> JobTable::workers_used_by(const ipc::IncarnationId& mover) const {
  std::set<ipc::IncarnationId> workers;
  for (const auto& [id, entry] : entries_) {
    for (const Part& part : entry.parts) {
      if (part.open && part.target.mover == mover) {
        workers.insert(part.target.worker);
      }
    }
  }
  return {workers.begin(), workers.end()};
}

void JobTable::mover_untouchable(const ipc::IncarnationId& mover,
                                 const ipc::IncarnationId& worker) {
  fail_parts(
      [&](const RankTarget& target) { return target.mover == mover && target.worker == worker; },
      "the mover died before it answered");
}

void JobTable::mover_rejoined(const ipc::IncarnationId& mover) {
  fail_parts([&](const RankTarget& target) { return target.mover == mover; },
             "the connection to the mover was lost before it answered; it has ended the job");
}

void JobTable::fail_parts(const std::function<bool(const RankTarget&)>& over,
                          const std::string& why) {
  for (auto& [id, entry] : entries_) {
    for (Part& part : entry.parts) {
      if (part.open && over(part.target)) {
        ports_.transitions.record(Transition::kManagerWritesOff,
                                  {.job = id, .peer = part.target.mover});
        fail_items(entry.job, part.items, ipc::ErrorCode::kPeerDied, why);
        close_part(entry, part);
      }
    }
  }
  settle();
}

std::optional<ipc::LayerTicket> JobTable::layers_of(const ipc::IncarnationId& client,
                                                    ipc::JobId client_job) const {
  const auto at = by_client_.find({client, client_job});
  return at == by_client_.end() ? std::nullopt : entries_.at(at->second).job.layers;
}

std::vector<std::pair<std::uint32_t, ipc::LayerTicket>> JobTable::layers_of(
    const ipc::IncarnationId& client) const {
  std::vector<std::pair<std::uint32_t, ipc::LayerTicket>> layers;
  for (auto at = by_client_.lower_bound({client, ipc::JobId{0}});
       at != by_client_.end() && at->first.first == client; ++at) {
    const Job& job = entries_.at(at->second).job;
    if (job.layers) {
      layers.emplace_back(job.engine, *job.layers);
    }
  }
  return layers;
}

bool JobTable::cancel(const ipc::IncarnationId& client, ipc::JobId client_job) {
  const auto at = by_client_.find({client, client_job});
  if (at == by_client_.end()) {
    return false;
  }
  Entry& entry = entries_.at(at->second);
  if (entry.state == State::kRunning) {
    ask_to_cancel(entry);
  } else {
    end_unsent(entry, KVFERRY_ERROR(kCancelled, "cancelled before it was started"));
    settle();
  }
  return true;
}

void JobTable::end_unsent(Entry& entry, const ipc::Error& error) {
  for (JobItem& item : entry.job.items) {
    if (item.result == 0) {
      item.result = static_cast<std::uint8_t>(error.code);
    }
  }
  if (entry.job.message.empty()) {
    entry.job.message = error.message;
  }
  if (error.code == ipc::ErrorCode::kStaleEpoch) {
    count_stale(entry.job.engine);
  }
  if (const auto at = runnable_.find({entry.job.engine, entry.job.to_host()});
      at != runnable_.end()) {
    at->second.remove(entry.job.id);
    if (at->second.empty()) {
      runnable_.erase(at);
    }
  }
  finish(entry);
}

void JobTable::fail_queued(std::uint32_t engine, const ipc::Error& error) {
  for (auto& [id, entry] : entries_) {
    if (entry.job.engine == engine && entry.state != State::kRunning) {
      end_unsent(entry, error);
    }
  }
  settle();
}

void JobTable::orphan(const ipc::IncarnationId& client) {
  std::vector<ipc::JobId> jobs;
  for (auto at = by_client_.lower_bound({client, ipc::JobId{0}});
       at != by_client_.end() && at->first.first == client; ++at) {
    entries_.at(at->second).job.orphaned = true;
    jobs.push_back(at->first.second);
  }
  for (const ipc::JobId job : jobs) {
    (void)cancel(client, job);
  }
}

bool JobTable::has_orphans(std::uint32_t engine) const {
  return std::any_of(entries_.begin(), entries_.end(), [engine](const auto& item) {
    return item.second.job.engine == engine && item.second.job.orphaned;
  });
}

void JobTable::finish(Entry& entry) {
  KVFERRY_CHECK(!entry.over, "a job ended twice");
  entry.over = true;
  over_.push_back(entry.job.id);
}

// Ends what is over. Kept out of the callers' loops: a job that ends lets others run, which may end
// at once, too.
void JobTable::settle() {
  while (!over_.empty()) {
    const ipc::JobId id = over_.front();
    over_.pop_front();
    auto node = entries_.extract(id);
    Entry& entry = node.mapped();
    Job& job = entry.job;
    const std::uint32_t engine = job.engine;
    std::set<LinkShares::Lane> touched{shares_.lane_of(engine, job.to_host())};
    JobCounters& counters = counters_[engine];
    if (entry.state == State::kRunning) {
      --counters.running;
      windows_.at({engine, job.to_host()}).ended(job.urgency.priority);
      shares_.ended(entry.lane, engine, entry.bytes, job.urgency.priority, ports_.now());
      touched.insert(entry.lane);
    } else {
      --counters.queued;
    }
    deadlines_.erase({entry.deadline, id});
    const auto has_result = [&job](ipc::ErrorCode code) {
      return std::any_of(job.items.begin(), job.items.end(), [code](const JobItem& item) {
        return item.result == static_cast<std::uint8_t>(code);
      });
    };
    if (std::all_of(job.items.begin(), job.items.end(),
                    [&](const JobItem& i) { return i.result == 0 || job.left_out(i); })) {
      ++counters.done;
    } else if (has_result(ipc::ErrorCode::kCancelled)) {
      ++counters.cancelled;
    } else {
      ++counters.failed;
    }
    by_client_.erase({job.client, job.client_job});
    // No client ever names a part's id; and theirs are not next to each other.
    if (!is_part(job)) over_before_[job.client].add(job.client_job);
    unfinished_.remove(engine, is_part(job));
    ports_.finished(job);
    ports_.transitions.record(Transition::kManagerEnd,
                              {.job = id, .peer = job.client, .detail = count_failed(job)});
    for (const ipc::JobId next : hazards_.remove(id)) {
      if (Entry& freed = entries_.at(next); !freed.over) {
        make_runnable(freed);
        touched.insert(shares_.lane_of(freed.job.engine, freed.job.to_host()));
      }
    }
    for (const LinkShares::Lane& lane : touched) {
      send_over(lane);
    }
  }
}

JobCounters JobTable::counters(std::uint32_t engine) const {
  const auto at = counters_.find(engine);
  return at == counters_.end() ? JobCounters{} : at->second;
}

void JobTable::cancel_all() {
  std::vector<ClientKey> keys;
  keys.reserve(by_client_.size());
  for (const auto& [key, id] : by_client_) {
    keys.push_back(key);
  }
  for (const auto& [client, job] : keys) {
    (void)cancel(client, job);
  }
}

}  // namespace kvferry::cache_manager
