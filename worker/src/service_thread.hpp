// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"

#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace kvferry::worker {

/// A service with an event loop on a thread of its own: made, run and destroyed there.
/// @threading constructor and destructor one thread; post() any.
template <typename Service> class ServiceThread {
 public:
  using Make = std::function<std::unique_ptr<Service>(ipc::EventLoop&)>;

  /// Returns once the service stands; rethrows what make() threw. on_broken is called (on the
  /// service's thread) when the loop ended by itself, after an exception.
  ServiceThread(std::string name, Make make, std::function<void()> on_broken)
      : on_broken_(std::move(on_broken)) {
    std::promise<void> standing;
    // wait-none: below
    std::future<void> stands = standing.get_future();
    const std::string who = name;
    // The service calls hooks of the engine, and makes the engine's arena.
    thread_.emplace(std::move(name), ipc::OwnThread::Runs::kEngineCode,
                    [this, &standing, make = std::move(make)] { serve(make, standing); });
    constexpr auto kStandsWithin = ipc::OwnThread::kEndsWithin;
    // wait: a service to stand, which maps the first epoch; kStandsWithin, then says so and goes
    // on, an engine's code may run in it; its end
    while (stands.wait_for(kStandsWithin) == std::future_status::timeout) {
      ipc::log_error(
          "thread {} does not stand after another {} s; look for a callback of the engine that "
          "does "
          "not return",
          who, kStandsWithin.count());
    }
    try {
      stands.get();
    } catch (...) {
      // wait: a thread that has said that it ends; wait_end() gives it kEndsWithin; at once
      thread_->wait_end();
      throw;
    }
  }

  ServiceThread(const ServiceThread&) = delete;
  ServiceThread& operator=(const ServiceThread&) = delete;

  ~ServiceThread() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      if (loop_ != nullptr) loop_->stop();
    }
    // wait-brief: the service's own thread; its loop was stopped and its members' limits add up to
    // less than OwnThread::kEndsWithin
    thread_->wait_end();
  }

  /// Runs the call on the service's thread; dropped when the service is gone.
  void post(std::function<void(Service&)> call) {
    const std::lock_guard lock(mutex_);
    if (loop_ == nullptr) return;
    loop_->post([service = service_, call = std::move(call)] { call(*service); });
  }

 private:
  void serve(const Make& make, std::promise<void>& standing) {
    try {
      ipc::EventLoop loop;
      const std::unique_ptr<Service> service = make(loop);
      {
        const std::lock_guard lock(mutex_);
        loop_ = &loop;
        service_ = service.get();
      }
      standing.set_value();
      loop.run();
      const std::lock_guard lock(mutex_);
      loop_ = nullptr;
      service_ = nullptr;
    } catch (...) {
      standing.set_exception(std::current_exception());
      return;
    }
    const std::lock_guard lock(mutex_);
    if (!stopping_) on_broken_();
  }

  std::function<void()> on_broken_;
  std::mutex mutex_;  ///< Guards the three below.
  ipc::EventLoop* loop_ = nullptr;
  Service* service_ = nullptr;
  bool stopping_ = false;
  std::optional<ipc::OwnThread> thread_;
};

}  // namespace kvferry::worker
