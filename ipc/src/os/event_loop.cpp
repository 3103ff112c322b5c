// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/event_loop.hpp"

#include "base/descriptor_order.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/look.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "os/syscall.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

// Engine, manager, mover and worker with their threads: with fewer, who looks keeps another from
// what it looks for.
constexpr int kProcessorsToSpare = 8;

int processors() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
}

}  // namespace

EventFd::EventFd() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!fd_.valid()) throw Exception(KVFERRY_ERRNO("eventfd"));
}

void EventFd::signal() const noexcept {
  const std::uint64_t one = 1;
  // EAGAIN: the counter is at its maximum and so readable already.
  // wait-none: an eventfd of ours, O_NONBLOCK
  (void)retry_interrupted([&] { return ::write(fd_.get(), &one, sizeof(one)); });
}

bool EventFd::drain() const noexcept {
  std::uint64_t count = 0;
  // wait-none: an eventfd of ours, O_NONBLOCK
  return retry_interrupted([&] { return ::read(fd_.get(), &count, sizeof(count)); }) ==
         static_cast<ssize_t>(sizeof(count));
}

struct EventLoop::State {
  struct Watch {
    int fd = -1;
    Callback on_readable;
  };
  static constexpr std::uint64_t kWakeToken = 0;

  UniqueFd epoll{::epoll_create1(EPOLL_CLOEXEC)};
  EventFd wake;
  // Tokens are never reused: an event of this round whose watch an earlier callback removed (or
  // replaced, under the same descriptor number) is not found and thus dropped.
  std::uint64_t next_token = kWakeToken + 1;
  std::unordered_map<std::uint64_t, std::shared_ptr<Watch>> watches;
  std::unordered_map<int, std::uint64_t> tokens;

  TimerId next_timer = 1;
  std::map<std::pair<TimePoint, TimerId>, Callback> timers;
  std::unordered_map<TimerId, TimePoint> timer_times;

  const bool has_processors = processors() >= kProcessorsToSpare;
  TimePoint awake_until{};
  std::atomic<std::thread::id> runner{};  ///< Whose rounds these are.

  std::atomic<bool> stopped{false};
  bool failed = false;
  std::mutex posted_mutex;  // guards posted
  std::vector<Callback> posted;

  bool has_posted() {
    const std::lock_guard lock(posted_mutex);
    return !posted.empty();
  }
  // False when the callback threw: logged, and the loop ends.
  bool call(const Callback& callback) noexcept;
  bool run_posted();
  bool run_timers();
};

bool EventLoop::State::call(const Callback& callback) noexcept {
  try {
    callback();
    return true;
  } catch (const std::exception& exception) {
    log_error("event loop ends: a callback threw: {}", exception.what());
  } catch (...) {
    log_error("event loop ends: a callback threw something that is no std::exception");
  }
  failed = true;
  stopped.store(true, std::memory_order_relaxed);
  return false;
}

bool EventLoop::State::run_posted() {
  std::vector<Callback> batch;
  {
    const std::lock_guard lock(posted_mutex);
    batch.swap(posted);
  }
  for (const Callback& callback : batch) {
    if (!call(callback)) return false;
  }
  return true;
}

bool EventLoop::State::run_timers() {
  const TimePoint now = MonotonicClock::now();
  // A timer set by a callback gets a larger id, and one due at once waits for the next round.
  const TimerId end = next_timer;
  for (auto it = timers.begin(); it != timers.end() && it->first.first <= now;) {
    if (it->first.second >= end) {
      ++it;
      continue;
    }
    const Callback callback = std::move(it->second);
    timer_times.erase(it->first.second);
    timers.erase(it);
    if (!call(callback)) return false;
    it = timers.begin();  // the callback may have changed the map
  }
  return true;
}

EventLoop::EventLoop() : state_(std::make_unique<State>()) {
  if (!state_->epoll.valid()) throw Exception(KVFERRY_ERRNO("epoll_create1"));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = State::kWakeToken;
  if (::epoll_ctl(state_->epoll.get(), EPOLL_CTL_ADD, state_->wake.fd(), &event) != 0) {
    throw Exception(KVFERRY_ERRNO("epoll_ctl of the wake-up descriptor"));
  }
}

EventLoop::~EventLoop() = default;

void EventLoop::watch(int fd, Callback on_readable) {
  KVFERRY_CHECK(!state_->tokens.contains(fd), fmt::format("descriptor {} is watched twice", fd));
  const std::uint64_t token = state_->next_token++;
  DescriptorOrder::after_open();
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = token;
  if (::epoll_ctl(state_->epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw Exception(KVFERRY_ERRNO("epoll_ctl of descriptor {}", fd));
  }
  state_->watches.emplace(token,
                          std::make_shared<State::Watch>(State::Watch{fd, std::move(on_readable)}));
  state_->tokens.emplace(fd, token);
}

void EventLoop::unwatch(int fd) {
  const auto found = state_->tokens.find(fd);
  if (found == state_->tokens.end()) return;
  epoll_event unused{};
  (void)::epoll_ctl(state_->epoll.get(), EPOLL_CTL_DEL, fd, &unused);
  state_->watches.erase(found->second);
  state_->tokens.erase(found);
}

TimerId EventLoop::at(TimePoint when, Callback callback) {
  const TimerId timer = state_->next_timer++;
  state_->timers.emplace(std::pair(when, timer), std::move(callback));
  state_->timer_times.emplace(timer, when);
  return timer;
}

void EventLoop::cancel(TimerId timer) {
  const auto found = state_->timer_times.find(timer);
  if (found == state_->timer_times.end()) return;
  state_->timers.erase(std::pair(found->second, timer));
  state_->timer_times.erase(found);
}

void EventLoop::post(Callback callback) {
  {
    const std::lock_guard lock(state_->posted_mutex);
    state_->posted.push_back(std::move(callback));
  }
  // Who runs the rounds looks before it sleeps.
  if (state_->runner.load(std::memory_order_relaxed) != std::this_thread::get_id()) {
    state_->wake.signal();
  }
}

bool EventLoop::run() {
  constexpr auto kLong = std::chrono::hours(1);
  while (!state_->stopped.load(std::memory_order_relaxed)) run_once(Deadline::after(kLong));
  state_->stopped.store(false, std::memory_order_relaxed);
  return !std::exchange(state_->failed, false);
}

void EventLoop::stay_awake(Duration time) noexcept {
  if (!state_->has_processors) return;
  state_->awake_until = MonotonicClock::now() + time;
}

void EventLoop::run_once(Deadline deadline) {
  state_->runner.store(std::this_thread::get_id(), std::memory_order_relaxed);
  if (state_->has_posted() || state_->stopped.load(std::memory_order_relaxed)) {
    deadline = Deadline::at(TimePoint{});
  } else if (!state_->timers.empty()) {
    deadline = deadline.earlier(Deadline::at(state_->timers.begin()->first.first));
  }
  constexpr int kMaxEvents = 64;
  std::array<epoll_event, kMaxEvents> events{};
  int count = 0;
  const auto look = [&](int timeout_ms) {
    // wait: descriptors and timers of the loop; timeout_ms, at most until its next timer, which
    // every call that is owed an answer has set; stop() and post(), and the pidfds among its
    // descriptors
    count = ::epoll_wait(state_->epoll.get(), events.data(), kMaxEvents, timeout_ms);
    return count != 0;
  };
  const Deadline awake = Deadline::at(state_->awake_until).earlier(deadline);
  if (!look_for(awake.when() - MonotonicClock::now(), [&] { return look(0); })) {
    (void)look(deadline.poll_timeout_ms());
  }
  if (count < 0 && errno != EINTR) {
    KVFERRY_CHECK(false, KVFERRY_ERRNO("epoll_wait").to_string());
  }
  for (int i = 0; i < count; ++i) {
    if (events.at(static_cast<std::size_t>(i)).data.u64 == State::kWakeToken) {
      (void)state_->wake.drain();
    }
  }
  if (!state_->run_posted()) return;
  for (int i = 0; i < count; ++i) {
    const auto found = state_->watches.find(events.at(static_cast<std::size_t>(i)).data.u64);
    if (found == state_->watches.end()) continue;
    const std::shared_ptr<State::Watch> watch = found->second;  // it may remove itself
    if (!state_->call(watch->on_readable)) return;
  }
  (void)state_->run_timers();
}

void EventLoop::stop() {
  state_->stopped.store(true, std::memory_order_relaxed);
  state_->wake.signal();
}

SignalFd::SignalFd() {
  sigset_t mask{};
  sigemptyset(&mask);
  sigaddset(&mask, SIGTERM);
  sigaddset(&mask, SIGINT);
  // Blocked, an ignored signal would be queued all the same.
  struct sigaction hangup {};
  if (::sigaction(SIGHUP, nullptr, &hangup) != 0 || hangup.sa_handler != SIG_IGN) {
    sigaddset(&mask, SIGHUP);
  }
  if (const int error = ::pthread_sigmask(SIG_BLOCK, &mask, nullptr); error != 0) {
    errno = error;
    throw Exception(KVFERRY_ERRNO("blocking SIGTERM, SIGINT and SIGHUP"));
  }
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  if (::sigaction(SIGPIPE, &ignore, nullptr) != 0) {
    throw Exception(KVFERRY_ERRNO("ignoring SIGPIPE"));
  }
  fd_ = UniqueFd(::signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_.valid()) throw Exception(KVFERRY_ERRNO("signalfd"));
}

int SignalFd::take() noexcept {
  signalfd_siginfo info{};
  // wait-none: a signalfd, SFD_NONBLOCK
  const ssize_t size = retry_interrupted([&] { return ::read(fd_.get(), &info, sizeof(info)); });
  return size == static_cast<ssize_t>(sizeof(info)) ? static_cast<int>(info.ssi_signo) : 0;
}

}  // namespace kvferry::ipc
