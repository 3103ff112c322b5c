// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/job_rules.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::ipc {

JobRules::JobRules(const TransitionTrace& trace,
                   std::set<const relation::Move*>* taken,
                   Ports ports)
    : trace_(trace), ports_(std::move(ports)), walks_(taken) {
  for (std::size_t i = 0; i < trace.writers.size(); ++i) {
    writer_of_.emplace(trace.writers[i].who.incarnation.low(), i);
  }
}

bool JobRules::lost_some(std::size_t writer) const { return trace_.writers[writer].lost_jobs > 0; }

bool JobRules::runs(const Launch& launch) const {
  return !ports_.is_dead(launch.worker) && !dead_workers_.contains(launch.worker);
}

void JobRules::take(const TransitionRecord& record) {
  if (auto stray = walks_.take(record, lost_some(record.writer))) {
    ports_.breach(stray->rule, std::move(stray->what));
  }
  switch (record.transition) {
    case Transition::kMoverAdmit:
    case Transition::kMoverStart:
    case Transition::kMoverAsk:
    case Transition::kMoverSeesHandOver:
    case Transition::kMoverCopy:
    case Transition::kMoverCopying:
    case Transition::kMoverCopied:
    case Transition::kMoverAbandon:
    case Transition::kMoverProof:
    case Transition::kMoverSeesDeath:
    case Transition::kMoverAnswer: return mover_step(record);
    case Transition::kStagingLaunch:
    case Transition::kStagingEnded:
    case Transition::kStagingAnswer:
    case Transition::kStagingWelcome:
    case Transition::kStagingQuiesced:
    case Transition::kStagingSettled: return staging_step(record);
    case Transition::kEngineDone: return engine_done(record);
    case Transition::kEngineSubmit:
    case Transition::kEngineSubmitted: return;  // of no consequence to the rules
    default: return manager_step(record);
  }
}

// ---- mover ----

void JobRules::mover_step(const TransitionRecord& record) {
  const std::uint64_t self = trace_.writers[record.writer].who.incarnation.low();
  const std::uint64_t lane = record.detail;
  switch (record.transition) {
    case Transition::kMoverAdmit: return admit(record);
    case Transition::kMoverAnswer: return answer(record);
    case Transition::kMoverSeesDeath: return worker_died(static_cast<pid_t>(record.detail));
    case Transition::kMoverProof:
      for (const auto& [key, launch] : launched_) {
        if (key.first == self && (key.second & 1U) == lane && runs(launch)) {
          ports_.breach("ProofMeansEnded", fmt::format("hand-over {} still runs", key.second));
        }
      }
      for (auto& [key, job] : moved_) {
        if (key.first != self) continue;
        std::erase_if(job.abandoned, [lane](HandOver id) { return (id & 1U) == lane; });
      }
      return;
    default: break;
  }
  Moved& job = moved_[{self, record.job.value}];
  switch (record.transition) {
    case Transition::kMoverAsk:
      job.asked.insert(record.detail);
      job.ever_asked.insert(record.detail);
      return;
    case Transition::kMoverSeesHandOver: {
      job.asked.erase(record.detail);
      const auto launch = launched_.find({self, record.detail});
      if (launch != launched_.end() && runs(launch->second)) {
        ports_.breach("HandedOverMeansEnded",
                      fmt::format("the worker has not seen hand-over {} end", record.detail));
      }
      return;
    }
    case Transition::kMoverCopy: job.copying.insert(record.detail); return;
    case Transition::kMoverCopied: job.copying.erase(record.detail); return;
    case Transition::kMoverAbandon: job.abandoned.merge(job.asked); return;
    default: return;
  }
}

void JobRules::admit(const TransitionRecord& record) const {
  if (!ports_.may_use(record.writer, record)) {
    ports_.breach("AdmittedWhileMapped",
                  fmt::format("it has not mapped epoch {}, or has drained it", record.epoch.value));
  }
}

void JobRules::answer(const TransitionRecord& record) {
  const std::uint64_t self = trace_.writers[record.writer].who.incarnation.low();
  Moved& job = moved_[{self, record.job.value}];
  job.answered = true;
  job.failed = record.detail;
  if (!job.copying.empty() || !job.asked.empty() || !job.abandoned.empty()) {
    ports_.breach("AnsweredMeansEnded",
                  fmt::format("{} copies and {} hand-overs of it are not known to have ended",
                              job.copying.size(), job.asked.size() + job.abandoned.size()));
  }
}

// A mover names its worker by pid: it has never heard its incarnation.
void JobRules::worker_died(pid_t pid) {
  for (std::size_t i = 0; i < trace_.writers.size(); ++i) {
    const TransitionWriter& who = trace_.writers[i].who;
    if (who.pid == pid && who.role == "worker") dead_workers_.insert(i);
  }
  for (auto& [key, job] : moved_) {
    std::erase_if(job.abandoned, [&, mover = key.first](HandOver id) {
      const auto launch = launched_.find({mover, id});
      return launch == launched_.end() || !runs(launch->second);
    });
  }
}

void JobRules::drained(const TransitionRecord& record) {
  const std::uint64_t self = trace_.writers[record.writer].who.incarnation.low();
  for (const auto& [key, job] : moved_) {
    if (key.first != self || job.copying.empty()) continue;
    ports_.breach("DrainedMeansIdle",
                  fmt::format("{} copies of job {} run", job.copying.size(), key.second));
  }
  for (const auto& [key, launch] : launched_) {
    if (launch.worker != record.writer || launch.epoch != record.epoch) continue;
    ports_.breach("DrainedMeansIdle", fmt::format("hand-over {} runs", key.second));
  }
}

// ---- worker ----

void JobRules::launch(const TransitionRecord& record) {
  if (!ports_.may_use(record.writer, record)) {
    ports_.breach("LaunchedWhileMapped",
                  fmt::format("it has not mapped epoch {}, or has drained it", record.epoch.value));
  }
  if (quiesced_.contains({record.writer, record.peer})) {
    ports_.breach("NothingStartsAfterProof",
                  fmt::format("it has said that nothing {:016x} asked runs", record.peer));
  }
  launched_[{record.peer, record.detail}] = {record.writer, record.epoch};
}

void JobRules::staging_step(const TransitionRecord& record) {
  const auto none_runs = [&](std::string_view rule, const auto& is_meant) {
    for (const auto& [key, launch] : launched_) {
      if (launch.worker != record.writer || !is_meant(key)) continue;
      ports_.breach(rule, fmt::format("hand-over {} of {:016x} runs", key.second, key.first));
    }
  };
  switch (record.transition) {
    case Transition::kStagingLaunch: return launch(record);
    case Transition::kStagingEnded: launched_.erase({record.peer, record.detail}); return;
    case Transition::kStagingAnswer: return;  // its walk tells whether it has ended
    case Transition::kStagingWelcome:
      return none_runs("WelcomeMeansIdle",
                       [&](const ByMover& key) { return (key.second & 1U) == record.detail; });
    case Transition::kStagingQuiesced:
      quiesced_.insert({record.writer, record.peer});
      return none_runs("QuiescedMeansIdle",
                       [&](const ByMover& key) { return key.first == record.peer; });
    default:  // kStagingSettled
      return none_runs("QuiescedMeansIdle",
                       [&](const ByMover& key) { return key.first != record.peer; });
  }
}

// ---- manager ----

std::string JobRules::touches(std::uint64_t mover, JobNumber job) const {
  const auto moved = moved_.find({mover, job});
  if (moved == moved_.end()) return {};
  const auto writer = writer_of_.find(mover);
  const bool dead = writer != writer_of_.end() && ports_.is_dead(writer->second);
  if (!dead && !moved->second.copying.empty()) {
    return fmt::format("{} copies of mover {:016x}", moved->second.copying.size(), mover);
  }
  for (const HandOver id : moved->second.ever_asked) {
    const auto launch = launched_.find({mover, id});
    if (launch != launched_.end() && runs(launch->second)) {
      return fmt::format("hand-over {} of mover {:016x}", id, mover);
    }
  }
  return {};
}

void JobRules::check_untouched(std::string_view rule, std::uint64_t mover, JobNumber job) {
  if (const std::string what = touches(mover, job); !what.empty()) {
    ports_.breach(rule, what + " may still touch its blocks");
  }
}

void JobRules::manager_step(const TransitionRecord& record) {
  if (record.transition == Transition::kManagerAnswer) return;  // about the client's number
  Managed& job = managed_[record.job.value];
  switch (record.transition) {
    case Transition::kManagerTake:
      job.known = true;
      job.manager = record.writer;
      job.client = record.peer;
      of_client_[{record.peer, record.detail}] = record.job.value;
      return;
    case Transition::kManagerSend:
      job.open.insert(record.peer);
      job.sent[record.peer] = record.detail;
      return;
    case Transition::kManagerSeesEnd: return sees_end(record, job);
    case Transition::kManagerWritesOff:
      job.open.erase(record.peer);
      job.most_failed = std::max(job.most_failed, job.sent[record.peer]);
      return check_untouched("WrittenOffMeansEnded", record.peer, record.job.value);
    case Transition::kManagerCommit: return commit(record, job);
    case Transition::kManagerEnd: return end(record, job);
    default: return;
  }
}

void JobRules::sees_end(const TransitionRecord& record, Managed& job) {
  job.open.erase(record.peer);
  job.most_failed = std::max(job.most_failed, record.detail);
  const auto writer = writer_of_.find(record.peer);
  if (writer == writer_of_.end() || lost_some(writer->second)) return;
  const auto moved = moved_.find({record.peer, record.job.value});
  if (moved == moved_.end() || !moved->second.answered) {
    ports_.breach("EndedAsAnswered", "its mover has not answered it");
  } else if (moved->second.failed != record.detail) {
    ports_.breach("EndedAsAnswered", fmt::format("its mover answered {} failed blocks, not {}",
                                                 moved->second.failed, record.detail));
  }
}

void JobRules::commit(const TransitionRecord& record, const Managed& job) const {
  if (!job.known) return;
  if (!job.open.empty()) {
    ports_.breach("VisibleMeansStoredEverywhere", fmt::format("{} of {} ranks have not ended it",
                                                              job.open.size(), job.sent.size()));
  }
  if (record.detail < job.most_failed) {
    ports_.breach("VisibleMeansStoredEverywhere",
                  fmt::format("{} blocks failed on a rank, only {} are left out", job.most_failed,
                              record.detail));
  }
}

void JobRules::end(const TransitionRecord& record, const Managed& job) {
  if (job.known && !job.open.empty()) {
    ports_.breach("GivenOnMeansEnded", fmt::format("{} of {} ranks have not ended it",
                                                   job.open.size(), job.sent.size()));
  }
  // Whatever the manager believes.
  for (const auto& [mover, blocks] : job.sent) {
    check_untouched("GivenOnMeansEnded", mover, record.job.value);
  }
}

// ---- engine ----

void JobRules::engine_done(const TransitionRecord& record) {
  const std::uint64_t self = trace_.writers[record.writer].who.incarnation.low();
  const auto number = of_client_.find({self, record.job.value});
  if (number == of_client_.end()) return;  // refused, or the manager's record is lost
  const auto job = managed_.find(number->second);
  if (job == managed_.end()) return;
  for (const auto& [mover, blocks] : job->second.sent) {
    check_untouched("DoneMeansEnded", mover, number->second);
  }
}

}  // namespace kvferry::ipc
