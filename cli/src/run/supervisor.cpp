// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/supervisor.hpp"

#include "command.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "run/child.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kFirstRestart = 10ms;
constexpr ipc::Duration kNextRestart = 100ms;
constexpr ipc::Duration kLoopWindow = 10s;
constexpr std::size_t kLoopDeaths = 5;
/// A successor that is younger may not have taken over all names of the dead yet.
constexpr ipc::Duration kSettleTime = 2s;
/// For one that the kernel still takes down: a terabyte of pinned memory takes it 51 s.
constexpr ipc::Duration kKilledTime = 60s;
constexpr ipc::Duration kDestroyedTime = 2s;
constexpr std::size_t kTailLines = 12;

}  // namespace

Supervisor::Supervisor(ipc::EventLoop& loop, std::filesystem::path log_dir, Hooks hooks)
    : loop_(loop), log_dir_(std::move(log_dir)), hooks_(std::move(hooks)) {
  std::error_code error;
  program_ = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) {
    errno = error.value();
    throw ipc::Exception(KVFERRY_ERRNO("/proc/self/exe"));
  }
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw ipc::Exception(KVFERRY_ERRNO("pipe for the children"));
  }
  children_end_ = ipc::UniqueFd(ends[0]);
  our_end_ = ipc::UniqueFd(ends[1]);
}

Supervisor::~Supervisor() {
  stopping_ = true;
  for (const ipc::TimerId timer : timers_) loop_.cancel(timer);
  for (const auto& child : children_) {
    if (!child->process.valid()) continue;
    loop_.unwatch(child->process.pidfd());
    (void)child->process.signal(SIGKILL);
    // wait: a killed child; kDestroyedTime; its pidfd
    if (child->process.wait_death(ipc::Deadline::after(kDestroyedTime))) {
      (void)reap_child(child->process.pid());
    }
  }
}

std::filesystem::path Supervisor::log_of(const Child& child) const {
  std::string file = child.spec.name;
  std::replace(file.begin(), file.end(), '/', '-');
  return log_dir_ / (file + ".log");
}

ipc::Status Supervisor::start(ChildSpec spec) {
  children_.push_back(std::make_unique<Child>());
  children_.back()->spec = std::move(spec);
  return spawn(*children_.back());
}

ipc::Status Supervisor::spawn(Child& child) {
  ChildStart start;
  start.program = program_;
  start.arguments = child.spec.arguments;
  start.arguments.push_back(fmt::format("--parent-fd={}", kInheritedFd));
  start.environment = child.spec.environment;
  start.log_file = log_of(child);
  start.inherited_fd = children_end_.get();
  if (child.lives++ == 0) {
    // A folder that the user keeps logs in may have those of an earlier run.
    std::error_code ignored;
    std::filesystem::remove(start.log_file, ignored);
  }
  KVFERRY_ASSIGN(child.process, start_child(start));
  loop_.watch(child.process.pidfd(), [this, &child] { on_death(child); });
  if (hooks_.on_started) hooks_.on_started(child.process.pid());
  return ipc::ok();
}

void Supervisor::on_death(Child& child) {
  const pid_t pid = child.process.pid();
  loop_.unwatch(child.process.pidfd());
  if (!stopping_) hooks_.on_death(child.spec.name);
  const ChildEnd end = reap_child(pid);
  child.process = ipc::ProcessRef();
  if (stopping_) {
    ipc::log_debug("{} (pid {}) ended: {}", child.spec.name, pid, end.text);
    return;
  }
  ++deaths_;
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  child.deaths.push_back(now);
  while (now - child.deaths.front() > kLoopWindow) child.deaths.pop_front();
  const std::string died = fmt::format("{} (pid {}) died: {}", child.spec.name, pid, end.text);
  // A successor may only lack what the dead one has not given back yet.
  const bool first_life = child.lives == 1;
  const bool refused = end.exit_code == kExitCannotRun || end.exit_code == kExitUsage;
  if (refused && first_life) {
    hooks_.say(died);
    give_up(child, "cannot run");
  } else if (child.deaths.size() >= kLoopDeaths) {
    hooks_.say(died);
    give_up(child, fmt::format("died {} times within 10 s, the last time by {}",
                               child.deaths.size(), end.text));
  } else {
    tell(child, died + "; starting another one");
    replace_later(child);
  }
}

ipc::Status Supervisor::kill(std::string_view name) {
  for (const auto& child : children_) {
    if (child->spec.name != name || !child->process.valid()) continue;
    child->killed = true;
    return child->process.signal(SIGKILL);
  }
  return KVFERRY_ERROR(kNotFound, "{} does not run now", name);
}

std::vector<std::pair<std::string, pid_t>> Supervisor::running() const {
  std::vector<std::pair<std::string, pid_t>> running;
  for (const auto& child : children_) {
    if (child->process.valid()) running.emplace_back(child->spec.name, child->process.pid());
  }
  return running;
}

void Supervisor::tell(const Child& child, const std::string& line) const {
  if (child.killed) {
    ipc::log_info("{}", line);
  } else {
    hooks_.say(line);
  }
}

void Supervisor::give_up(const Child& child, const std::string& what) {
  hopeless_ = true;
  hooks_.on_hopeless(KVFERRY_ERROR(kPeerDied, "{} {}; the end of its log:\n{}", child.spec.name,
                                   what, tail_of(log_of(child), kTailLines)));
}

void Supervisor::replace_later(Child& child) {
  ++restarts_;
  const ipc::Duration delay = child.deaths.size() > 1 ? kNextRestart : kFirstRestart;
  timers_.push_back(loop_.after(delay, [this, &child] {
    if (stopping_) return;
    if (const auto started = spawn(child); !started) {
      hopeless_ = true;
      hooks_.on_hopeless(started.error());
      return;
    }
    tell(child, fmt::format("{} runs again (pid {})", child.spec.name, child.process.pid()));
    child.killed = false;
  }));
}

bool Supervisor::any_running(bool ends_last) const {
  return std::any_of(children_.begin(), children_.end(), [ends_last](const auto& child) {
    return child->process.valid() && child->spec.ends_last == ends_last;
  });
}

void Supervisor::signal_all(int number, bool ends_last) {
  for (const auto& child : children_) {
    if (!child->process.valid() || child->spec.ends_last != ends_last) continue;
    if (const auto sent = child->process.signal(number); !sent) {
      ipc::log_debug("signal {} to {}: {}", number, child->spec.name, sent.error().to_string());
    }
  }
}

void Supervisor::stop(ipc::Duration grace) {
  stopping_ = true;
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  ended_unreplaced_ = std::any_of(children_.begin(), children_.end(), [now](const auto& child) {
    return !child->process.valid() ||
           (!child->deaths.empty() && now - child->deaths.back() < kSettleTime);
  });
  const ipc::Deadline first = ipc::Deadline::after(grace / 2);
  last_ = ipc::Deadline::after(grace).earlier(last_);
  signal_all(SIGTERM, false);
  while (any_running(false) && !first.expired() && !hurried_) loop_.run_once(first);
  signal_all(SIGTERM, true);
  while ((any_running(false) || any_running(true)) && !last_.expired()) loop_.run_once(last_);
  for (const auto& child : children_) {
    if (!child->process.valid()) continue;
    hooks_.say(fmt::format("{} (pid {}) did not end in time and is killed; the end of its log:\n{}",
                           child->spec.name, child->process.pid(),
                           tail_of(log_of(*child), kTailLines)));
    (void)child->process.signal(SIGKILL);
    ended_unreplaced_ = true;
  }
  // A killed process ends when the kernel has taken its memory down.
  const ipc::Deadline gone = ipc::Deadline::after(kKilledTime);
  while ((any_running(false) || any_running(true)) && !gone.expired()) loop_.run_once(gone);
  for (const auto& child : children_) {
    if (!child->process.valid()) continue;
    hooks_.say(fmt::format("{} (pid {}) is not gone {} s after SIGKILL; it is left behind",
                           child->spec.name, child->process.pid(), kKilledTime / 1s));
  }
}

std::string Supervisor::logs(std::size_t lines_each) const {
  std::string text;
  for (const auto& child : children_) {
    text += fmt::format("  {}, the end of its log:\n{}", child->spec.name,
                        tail_of(log_of(*child), lines_each));
  }
  return text;
}

}  // namespace kvferry::cli
