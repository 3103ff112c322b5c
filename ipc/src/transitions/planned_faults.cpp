// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/planned_faults.hpp"

#include "kvferry/ipc/base/clock.hpp"

#include <poll.h>
#include <unistd.h>

#include <csignal>

namespace kvferry::ipc::transitions {
namespace {

// A child that nobody ends does not outlive the longest test.
constexpr unsigned kOrphanSeconds = 300;
constexpr unsigned kKindBits = 8;

// It keeps all that is mapped and open. Only async-signal-safe calls in it.
pid_t leave_child_behind() noexcept {
  // lint-allow(fork): that is the fault
  const pid_t child = ::fork();
  if (child != 0) return child;
  // Our threads have it blocked.
  sigset_t none{};
  ::sigemptyset(&none);
  ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
  ::alarm(kOrphanSeconds);
  // wait-none: a child that a planned fault leaves behind, SIGALRM ends it
  for (;;) ::pause();
}

}  // namespace

PlannedFaults::PlannedFaults(const FaultPlan& plan) {
  for (const Fault& fault : plan.faults) faults_.emplace_back(fault);
}

bool PlannedFaults::strike(Transition transition, const Told& told) noexcept {
  bool fails = false;
  for (Planned& planned : faults_) {
    if (planned.fault.at != transition || ++planned.seen != planned.fault.occurrence) continue;
    const auto kind = static_cast<std::uint64_t>(planned.fault.kind);
    switch (planned.fault.kind) {
      case FaultKind::kKill:
        told(kind);
        (void)::raise(SIGKILL);
        break;
      case FaultKind::kStop:
        told(kind);
        // To this thread: it takes the signal before it goes on. All the others stop with it.
        (void)::raise(SIGSTOP);
        break;
      case FaultKind::kDelay:
        told(kind);
        // wait: nothing, it is a planned fault; delay, of the plan; nothing
        ::poll(nullptr, 0, Deadline::after(planned.fault.delay).poll_timeout_ms());
        break;
      case FaultKind::kFail:
        told(kind);
        fails = true;
        break;
      case FaultKind::kOrphan: {
        const auto child = static_cast<std::uint64_t>(leave_child_behind());
        told(kind | (child << kKindBits));
        (void)::raise(SIGKILL);
        break;
      }
    }
  }
  return fails;
}

}  // namespace kvferry::ipc::transitions
