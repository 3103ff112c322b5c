// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/overdue_jobs.hpp"

#include <csignal>
#include <utility>

namespace kvferry::cache_manager {

OverdueJobs::OverdueJobs(ManagerContext& context, std::function<void()> on_expired)
    : context_(context), on_expired_(std::move(on_expired)) {}

OverdueJobs::~OverdueJobs() { context_.loop.cancel(timer_); }

void OverdueJobs::arm() {
  const std::optional<ipc::TimePoint> next = context_.jobs.next_deadline();
  // Answers move deadlines on all the time: a timer that fires too early arms itself again.
  if (!next || (armed_ && *armed_ <= *next)) {
    return;
  }
  context_.loop.cancel(timer_);
  armed_ = next;
  timer_ = context_.loop.at(*next, [this] {
    armed_.reset();
    kill_stuck();
    on_expired_();
  });
}

// Movers are ours to end. Their jobs go on being unfinished until the kernel proves the death.
void OverdueJobs::kill_stuck() {
  for (const ipc::IncarnationId& mover : context_.jobs.expire()) {
    const ipc::ProcessRef* process = context_.server.process(mover);
    if (process == nullptr) {
      continue;
    }
    ipc::log_warn("mover {} (pid {}) did not give up overdue jobs in {} ms: killed", mover.hex(),
                  process->pid(), context_.config.job_deadline.count());
    context_.transitions.record(ipc::Transition::kManagerKill, {.peer = mover});
    if (const ipc::Status killed = process->signal(SIGKILL); !killed) {
      ipc::log_warn("mover {} could not be killed: {}", mover.hex(), killed.error().to_string());
    }
  }
}

}  // namespace kvferry::cache_manager
