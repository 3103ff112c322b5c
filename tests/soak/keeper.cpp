// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/keeper.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <csignal>
#include <future>
#include <utility>

namespace kvferry::soak {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

/// Who cannot even be started again and again ends the run.
constexpr std::size_t kMaxUnexpected = 20;
/// A stop of at least this long may end a mover's life: its owner waits no longer (revoke, 5 s).
constexpr ipc::Duration kStalled = 4s;

}  // namespace

Keeper::Keeper(Fleet& fleet) : fleet_(fleet), fates_(fleet.members().size()) {
  for (std::size_t i = 0; i < fleet_.members().size(); ++i) watch_member(i);
  thread_ = std::thread([this] { loop_.run(); });
}

Keeper::~Keeper() { stop(); }

void Keeper::stop() {
  if (!thread_.joinable()) return;
  loop_.stop();
  thread_.join();
}

void Keeper::watch_member(std::size_t index) {
  loop_.watch(fleet_.members()[index].process.pidfd(), [this, index] { on_death(index); });
}

void Keeper::begin(std::vector<Blow> blows) {
  {
    const std::lock_guard lock(mutex_);
    pending_ += blows.size();
  }
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  loop_.post([this, now, blows = std::move(blows)] {
    for (Fate& fate : fates_) fate.stalled = false;
    for (const Blow& blow : blows) {
      loop_.at(now + blow.delay, [this, blow] { strike(blow); });
    }
  });
}

void Keeper::strike(const Blow& blow) {
  Member& member = fleet_.members()[blow.member];
  if (!member.process.valid()) return finish_one();
  if (blow.is_kill()) {
    if (watch_.before_kill) watch_.before_kill(member);
    fates_[blow.member].killed = true;
    (void)member.process.signal(SIGKILL);
    {
      const std::lock_guard lock(mutex_);
      ++kills_;
      ++pending_;  // until the next life has begun
    }
    return finish_one();
  }
  (void)member.process.signal(SIGSTOP);
  if (blow.stopped >= kStalled) fates_[blow.member].stalled = true;
  {
    const std::lock_guard lock(mutex_);
    ++stops_;
  }
  // To this very life: a mover may have been ended and replaced meanwhile.
  const std::uint64_t life = member.lives;
  loop_.after(blow.stopped, [this, index = blow.member, life] {
    const Member& stopped = fleet_.members()[index];
    if (stopped.process.valid() && stopped.lives == life) (void)stopped.process.signal(SIGCONT);
    finish_one();
  });
}

void Keeper::on_death(std::size_t index) {
  Member& member = fleet_.members()[index];
  Fate& fate = fates_[index];
  loop_.unwatch(member.process.pidfd());
  const pid_t pid = member.process.pid();
  const cli::ChildEnd end = fleet_.reap(member);
  const bool by_us = std::exchange(fate.killed, false);
  const bool by_owner = !by_us && fate.stalled && member.role == Role::kMover;
  bool hopeless = false;
  {
    const std::lock_guard lock(mutex_);
    if (by_owner) ++ended_by_owner_;
    if (!by_us && !by_owner) {
      unexpected_.push_back({fmt::format("{} (pid {}): {}", member.name, pid, end.text),
                             fleet_.log_tail(member, 30)});
      hopeless = unexpected_.size() >= kMaxUnexpected;
    }
  }
  if (!hopeless) {
    fleet_.start(member);
    watch_member(index);
  }
  if (by_us) look_whether_over(index);
}

void Keeper::look_whether_over(std::size_t index) {
  if (!watch_.is_over || watch_.is_over(fleet_.members()[index])) return finish_one();
  loop_.after(2ms, [this, index] { look_whether_over(index); });
}

void Keeper::finish_one() {
  const std::lock_guard lock(mutex_);
  --pending_;
  changed_.notify_all();
}

bool Keeper::wait_over(ipc::Deadline deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline.when(), [this] { return pending_ == 0; });
}

void Keeper::call(const std::function<void()>& function) {
  std::promise<void> done;
  loop_.post([&] {
    function();
    done.set_value();
  });
  done.get_future().wait();
}

std::uint64_t Keeper::kills() const {
  const std::lock_guard lock(mutex_);
  return kills_;
}

std::uint64_t Keeper::stops() const {
  const std::lock_guard lock(mutex_);
  return stops_;
}

std::uint64_t Keeper::ended_by_owner() const {
  const std::lock_guard lock(mutex_);
  return ended_by_owner_;
}

std::vector<UnexpectedDeath> Keeper::unexpected() const {
  const std::lock_guard lock(mutex_);
  return unexpected_;
}

}  // namespace kvferry::soak
