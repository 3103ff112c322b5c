// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Holds runs of tests/model/hello.pml, lease.pml, staging.pml and ranks.pml to check_transitions(),
// as if real processes had recorded them. Reads from standard input, for each run,
//   TRACE worker|mover|jobs NAME       what the attachers of a lease are, or that it is of jobs
//   STEP WRITER TRANSITION SESSION EPOCH LEASE-OR-JOB PEER DETAIL
// where the numbers of writers tell their roles (lease_steps.pml and its like),
// and prints "trace NAME: COUNT transitions: RULE..." with the rules that are broken, or "none"; at
// the end "move ..." for each move of relation.inc that was taken.
#include "transitions/relation.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <string>

namespace {

using namespace kvferry::ipc;

constexpr std::uint64_t kFirstAttacher = 11;
constexpr std::uint64_t kFirstMover = 20;
constexpr std::uint64_t kFirstWorker = 40;
constexpr std::uint64_t kEachRank = 10;
constexpr std::uint64_t kEngine = 60;
/// Any number but 0, which says nothing.
constexpr std::uint64_t kIncarnations = 100;

class Run {
 public:
  Run(std::string name, std::string kind) : name_(std::move(name)), kind_(std::move(kind)) {}

  bool add(std::istream& line) {
    std::uint64_t writer = 0;
    std::uint64_t number = 0;
    std::uint64_t peer = 0;
    std::string transition;
    TransitionRecord record;
    line >> writer >> transition >> record.session >> record.epoch.value >> number >> peer >>
        record.detail;
    const auto parsed = parse_transition(transition);
    if (!line || !parsed) return false;
    record.transition = *parsed;
    if (is_of_jobs(*parsed)) {
      record.job = JobId{number};
    } else {
      record.lease = LeaseId{number};
    }
    record.peer = peer == 0 ? 0 : kIncarnations + peer;
    record.writer = writer_at(writer);
    record.number = ++numbers_[writer];
    record.time = std::chrono::nanoseconds(trace_.records.size());
    trace_.records.push_back(record);
    return true;
  }

  bool report(std::set<const relation::Move*>& taken) const {
    if (trace_.records.empty()) {
      std::cerr << fmt::format("run {} has no transitions\n", name_);
      return false;
    }
    std::set<std::string> rules;
    for (const TransitionBreach& breach : relation::check(trace_, taken)) {
      rules.emplace(breach.rule);
      std::cerr << fmt::format("{}: transition {}: {}: {}: {}\n", name_, breach.record + 1,
                               describe(trace_, trace_.records[breach.record]), breach.rule,
                               breach.what);
    }
    std::cout << fmt::format("trace {}: {} transitions: {}\n", name_, trace_.records.size(),
                             rules.empty() ? "none" : fmt::format("{}", fmt::join(rules, " ")));
    return true;
  }

 private:
  std::size_t writer_at(std::uint64_t writer) {
    const auto [place, fresh] = writers_.try_emplace(writer, trace_.writers.size());
    if (fresh) {
      TransitionTrace::Writer who;
      who.who.role = role_of(writer);
      who.who.engine = "model";
      who.who.rank = rank_of(writer);
      who.who.incarnation = Digest::from_words(0, kIncarnations + writer);
      who.who.pid = static_cast<pid_t>(writer);
      trace_.writers.push_back(who);
    }
    return place->second;
  }

  [[nodiscard]] Rank rank_of(std::uint64_t writer) const {
    const bool is_worker = kind_ == "jobs" && writer >= kFirstWorker && writer < kEngine;
    return Rank{is_worker ? static_cast<std::uint32_t>((writer - kFirstWorker) / kEachRank) : 0};
  }

  [[nodiscard]] std::string role_of(std::uint64_t writer) const {
    if (kind_ != "jobs") {
      return (kind_ == "mover") == (writer >= kFirstAttacher) ? "mover" : "worker";
    }
    if (writer >= kEngine) return "engine";
    if (writer >= kFirstWorker) return "worker";
    return writer >= kFirstMover ? "mover" : "manager";
  }

  std::string name_;
  std::string kind_;
  std::map<std::uint64_t, std::size_t> writers_;
  std::map<std::uint64_t, std::uint64_t> numbers_;
  TransitionTrace trace_;
};

}  // namespace

int main() {
  std::set<const relation::Move*> taken;
  std::optional<Run> run;
  std::string text;
  const auto fail = [&text] {
    std::cerr << fmt::format("no line of a run: \"{}\"\n", text);
    return EXIT_FAILURE;
  };
  while (std::getline(std::cin, text)) {
    std::istringstream line(text);
    std::string kind;
    line >> kind;
    if (kind == "TRACE") {
      std::string of;
      std::string name;
      line >> of >> std::ws;
      std::getline(line, name);
      if (name.empty() || (of != "worker" && of != "mover" && of != "jobs")) return fail();
      if (run && !run->report(taken)) return EXIT_FAILURE;
      run.emplace(name, of);
    } else if (kind != "STEP" || !run || !run->add(line)) {
      return fail();
    }
  }
  if (run && !run->report(taken)) return EXIT_FAILURE;
  for (const relation::Move* move : taken) std::cout << "move " << describe(*move) << "\n";
  return EXIT_SUCCESS;
}
