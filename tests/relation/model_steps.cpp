// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Holds runs of tests/model/lease.pml to check_transitions(), as if real processes had recorded
// them. Reads from standard input, for each run,
//   TRACE worker|mover NAME            what the attachers are
//   STEP WRITER TRANSITION SESSION EPOCH LEASE PEER   (owners are writers below 11)
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
/// Any number but 0, which says nothing.
constexpr std::uint64_t kIncarnations = 100;

class Run {
 public:
  Run(std::string name, std::string attachers)
      : name_(std::move(name)), attachers_(std::move(attachers)) {}

  bool add(std::istream& line) {
    std::uint64_t writer = 0;
    std::uint64_t peer = 0;
    std::string transition;
    TransitionRecord record;
    line >> writer >> transition >> record.session >> record.epoch.value >> record.lease.value >>
        peer;
    const auto parsed = parse_transition(transition);
    if (!line || !parsed) return false;
    record.transition = *parsed;
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
      const bool mover = (attachers_ == "mover") == (writer >= kFirstAttacher);
      who.who.role = mover ? "mover" : "worker";
      who.who.engine = "model";
      who.who.incarnation = Digest::from_words(0, kIncarnations + writer);
      who.who.pid = static_cast<pid_t>(writer);
      trace_.writers.push_back(who);
    }
    return place->second;
  }

  std::string name_;
  std::string attachers_;
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
      std::string attachers;
      std::string name;
      line >> attachers >> std::ws;
      std::getline(line, name);
      if (name.empty() || (attachers != "worker" && attachers != "mover")) return fail();
      if (run && !run->report(taken)) return EXIT_FAILURE;
      run.emplace(name, attachers);
    } else if (kind != "STEP" || !run || !run->add(line)) {
      return fail();
    }
  }
  if (run && !run->report(taken)) return EXIT_FAILURE;
  for (const relation::Move* move : taken) std::cout << "move " << describe(*move) << "\n";
  return EXIT_SUCCESS;
}
