// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/trace_watch.hpp"

#include "kvferry/ipc/transitions/transition_trace.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::soak {
namespace {

constexpr std::size_t kMaxTold = 20;

/// What led there: the transitions that name the same epoch, oldest first.
std::string what_came_before(const ipc::TransitionTrace& trace, std::size_t at) {
  constexpr std::size_t kTold = 40;
  const ipc::TransitionRecord& last = trace.records[at];
  std::string text;
  std::size_t told = 0;
  for (std::size_t i = at + 1; i-- > 0 && told < kTold;) {
    const ipc::TransitionRecord& record = trace.records[i];
    if (record.epoch != last.epoch || record.session != last.session) continue;
    text = fmt::format("\n    {}.{:06} {} {}", record.time.count() / 1'000'000'000,
                       record.time.count() / 1000 % 1'000'000, record.number,
                       ipc::describe(trace, record)) +
           text;
    ++told;
  }
  return text;
}

}  // namespace

void TraceWatch::check() {
  const auto trace = ipc::read_transitions(dir_);
  if (!trace) {
    if (counts_.breaches.size() < kMaxTold) {
      counts_.breaches.push_back("not readable: " + trace.error().to_string());
    }
    return;
  }
  ++counts_.checks;
  for (const ipc::TransitionBreach& breach : ipc::check_transitions(*trace)) {
    if (counts_.breaches.size() >= kMaxTold) break;
    counts_.breaches.push_back(fmt::format("{}: {}: {}{}", breach.rule,
                                           ipc::describe(*trace, trace->records[breach.record]),
                                           breach.what, what_came_before(*trace, breach.record)));
  }
  std::vector<std::uint64_t> newest(trace->writers.size(), 0);
  std::vector<std::uint64_t> oldest(trace->writers.size(), 0);
  for (const ipc::TransitionRecord& record : trace->records) {
    newest[record.writer] = std::max(newest[record.writer], record.number);
    auto& first = oldest[record.writer];
    first = first == 0 ? record.number : std::min(first, record.number);
  }
  decltype(last_) now;
  for (std::size_t i = 0; i < trace->writers.size(); ++i) {
    if (newest[i] == 0) continue;
    const ipc::TransitionWriter& who = trace->writers[i].who;
    const std::pair key(static_cast<std::uint32_t>(who.pid), who.incarnation.low());
    const auto known = last_.find(key);
    const std::uint64_t last = known == last_.end() ? 0 : known->second;
    counts_.transitions += newest[i] - std::max(last, oldest[i] - 1);
    counts_.unseen += oldest[i] - 1 > last ? oldest[i] - 1 - last : 0;
    now[key] = newest[i];
  }
  last_ = std::move(now);
}

}  // namespace kvferry::soak
