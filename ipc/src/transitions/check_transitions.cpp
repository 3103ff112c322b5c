// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "transitions/hello_rules.hpp"
#include "transitions/job_rules.hpp"
#include "transitions/lease_rules.hpp"
#include "transitions/lost_deaths.hpp"
#include "transitions/order_rules.hpp"
#include "transitions/relation.hpp"

#include <set>
#include <utility>

namespace kvferry::ipc {
namespace {

bool is_drained(Transition transition) noexcept {
  return transition == Transition::kOwnerDrained || transition == Transition::kAttacherDrained;
}

/// Takes a trace through all rules, record by record.
class Checker {
 public:
  Checker(const TransitionTrace& trace, std::set<const relation::Move*>* taken)
      : trace_(trace),
        hellos_(trace, taken, breach_),
        leases_(trace, taken, breach_),
        jobs_(trace,
              taken,
              {.breach = breach_,
               .is_dead =
                   [this](std::size_t writer) {
                     return leases_.is_dead(writer) ||
                            lost_deaths_.may_be_of(writer, trace_.records[at_]);
                   },
               .may_use =
                   [this](std::size_t writer, const TransitionRecord& record) {
                     return leases_.may_use(writer, record);
                   }}),
        orders_(trace, taken, leases_, breach_) {}

  std::vector<TransitionBreach> run() {
    for (at_ = 0; at_ < trace_.records.size(); ++at_) {
      const TransitionRecord& record = trace_.records[at_];
      // What a process says of itself when it has drained is compared with what it has said of
      // jobs.
      if (is_drained(record.transition)) jobs_.drained(record);
      hellos_.take(record);
      leases_.take(record);
      orders_.take(record);
      if (is_of_jobs(record.transition)) jobs_.take(record);
    }
    return std::move(violations_);
  }

 private:
  const TransitionTrace& trace_;
  const LostDeaths lost_deaths_{trace_};
  std::size_t at_ = 0;
  std::vector<TransitionBreach> violations_;
  const LeaseRules::Breach breach_ = [this](std::string_view rule, std::string what) {
    violations_.push_back({rule, at_, std::move(what)});
  };
  HelloRules hellos_;
  LeaseRules leases_;
  JobRules jobs_;
  OrderRules orders_;
};

}  // namespace

std::vector<TransitionBreach> check_transitions(const TransitionTrace& trace) {
  return Checker(trace, nullptr).run();
}

std::vector<TransitionBreach> relation::check(const TransitionTrace& trace,
                                              std::set<const Move*>& taken) {
  return Checker(trace, &taken).run();
}

}  // namespace kvferry::ipc
