// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/worker.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/rank/rank_service.hpp"
#include "kvferry/worker/caching_allocator.hpp"
#include "service_thread.hpp"
#include "staging_agent.hpp"
#include "step_runner.hpp"
#include "worker_arena.hpp"

#include <optional>
#include <utility>

namespace kvferry::worker {

using ipc::Envelope;
using ipc::Error;
using ipc::MessageKind;

namespace {

ipc::RuntimeDir open_runtime_dir(const ipc::RankConfig& config) {
  auto dir = ipc::RuntimeDir::open(config.runtime_dir, config.instance);
  if (!dir) throw ipc::Exception(std::move(dir).error());
  return std::move(dir).value();
}

/// Members are declared so that users end before what they use: the service first (it ends the
/// arena, while runner and agent still finish what is in flight), the threads next, then the rest.
class Worker {
 public:
  explicit Worker(const WorkerConfig& config)
      : config_(config.rank),
        device_(ipc::open_device(config_.device)),
        dir_(open_runtime_dir(config_)),
        allocator_(*device_),
        arena_(*device_, config_.rank),
        runner_(
            [this](ipc::EventLoop& loop) {
              return std::make_unique<StepRunner>(loop, dir_, config_, *device_, arena_, allocator_,
                                                  [this](const Error& error) { end(error); });
            },
            [this] { end(KVFERRY_ERROR(kCancelled, "the runner's thread ended; see the log")); }),
        agent_(
            [this](ipc::EventLoop& loop) {
              return std::make_unique<StagingAgent>(loop, dir_, config_, *device_, arena_,
                                                    [this](const Error& error) { end(error); });
            },
            [this] { end(KVFERRY_ERROR(kCancelled, "the agent's thread ended; see the log")); }) {
    arena_.add_revoke_listener([this] {
      runner_.post([](StepRunner& runner) { runner.on_revoked(); });
      agent_.post([](StagingAgent& agent) { agent.on_revoked(); });
    });
    loop_.watch(signals_.fd(), [this] {
      const int signal = signals_.take();
      if (signal == 0) return;
      ipc::log_info("signal {}: shutting down", signal);
      stopped_ = true;
      loop_.stop();
    });
    service_.emplace(loop_, config_, ipc::ProcessKind::kWorker, *device_, arena_, hooks());
    ipc::log_info("worker {}/{} of instance {} on {} ({}): cache owner {}, {} handles",
                  config_.engine, config_.rank.value, config_.instance, device_->name(),
                  config_.device.to_string(), ipc::to_string(config_.cache_owner),
                  ipc::to_string(config_.handles));
  }

  void run() {
    loop_.run();
    if (fatal_) throw ipc::Exception(*fatal_);
    if (!stopped_) {
      throw ipc::Exception(KVFERRY_ERROR(kCancelled, "the worker's event loop ended; see the log"));
    }
  }

 private:
  ipc::RankService::Hooks hooks() {
    ipc::RankService::Hooks hooks;
    hooks.on_message = [this](Envelope envelope) { on_message(std::move(envelope)); };
    hooks.on_manager = [](const ipc::RegistryWelcome& welcome, const ipc::UniqueFd&) {
      ipc::log_info("manager {} accepted this worker", welcome.manager_session.hex());
    };
    hooks.on_manager_lost = [] {
      ipc::log_warn("the manager is gone; serving steps without offload until one is back");
    };
    hooks.empty_allocator = [this] { allocator_.empty_cache(); };
    hooks.on_fatal = [this](const Error& error) { end(error); };
    return hooks;
  }

  /// Any thread: the first reason counts.
  void end(const Error& error) {
    loop_.post([this, error] {
      ipc::log_error("worker ends: {}", error.to_string());
      if (!fatal_) fatal_ = error;
      loop_.stop();
    });
  }

  void on_message(Envelope envelope) {
    if (envelope.is_reply) return;
    if (envelope.kind != MessageKind::kQuiesceStaging) {
      ipc::log_warn("manager sent message kind {}, which is not for a worker",
                    static_cast<unsigned>(envelope.kind));
      if (envelope.request.value != 0) {
        answer(envelope, KVFERRY_ERROR(kProtocol, "message kind {} is not for a worker",
                                       static_cast<unsigned>(envelope.kind)));
      }
      return;
    }
    auto quiesce = ipc::decode<ipc::QuiesceStaging>(envelope.body, "QuiesceStaging");
    envelope.body.clear();
    if (!quiesce) {
      answer(envelope, std::move(quiesce).error());
      return;
    }
    const ipc::Deadline deadline = ipc::Deadline::after(quiesce->deadline);
    agent_.post([this, mover = quiesce->mover, deadline,
                 envelope = std::move(envelope)](StagingAgent& agent) {
      agent.quiesce(mover, deadline, [this, envelope](const ipc::Status& status) {
        loop_.post([this, envelope, status] { answer(envelope, status); });
      });
    });
  }

  void answer(const Envelope& request, const ipc::Status& status) {
    if (!service_) return;
    const ipc::Status sent = status ? service_->reply(request, ipc::Empty{})
                                    : service_->reply_error(request, status.error());
    if (!sent) ipc::log_warn("no answer to the manager: {}", sent.error().to_string());
  }

  const ipc::RankConfig config_;
  ipc::SignalFd signals_;  ///< Before every thread, so that all of them inherit the mask.
  ipc::EventLoop loop_;
  std::unique_ptr<ipc::Device> device_;
  ipc::RuntimeDir dir_;
  CachingAllocator allocator_;
  WorkerArena arena_;
  bool stopped_ = false;
  std::optional<Error> fatal_;
  ServiceThread<StepRunner> runner_;
  ServiceThread<StagingAgent> agent_;
  std::optional<ipc::RankService> service_;
};

}  // namespace

void run_worker(const WorkerConfig& config) {
  Worker worker(config);
  worker.run();
}

}  // namespace kvferry::worker
