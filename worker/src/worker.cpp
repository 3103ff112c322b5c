// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/worker.hpp"

#include "compute_load.hpp"
#include "engine_regions.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/caching_allocator.hpp"
#include "kvferry/worker/registration.hpp"
#include "model_tables.hpp"
#include "runner_calls.hpp"
#include "scheduler/scheduler.hpp"
#include "service_thread.hpp"
#include "step_runner.hpp"
#include "weights_store.hpp"
#include "worker_components.hpp"
#include "worker_memory.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace kvferry::worker {

using ipc::Error;

namespace {

/// A large model from a slow disk; longer than that, and the disk hangs.
constexpr std::chrono::minutes kLoadTime{30};
constexpr std::chrono::seconds kLoopLook{1};

/// An engine's worker as far as kvferry is concerned: it computes steps on an arena that it
/// registered, allocated by kvferry or by itself.
class Worker {
 public:
  explicit Worker(const WorkerConfig& config)
      : config_(config.rank),
        device_(ipc::open_device(config_.device)),
        dir_(value_or_throw(ipc::RuntimeDir::open(config_.runtime_dir, config_.instance))),
        allocator_(*device_),
        tables_(*device_, allocator_) {
    if (config.arena_memory == ArenaMemory::kEngine) {
      regions_.emplace(*device_, config_.handles);
    }
    loop_.watch(signals_.fd(), [this] {
      const int signal = signals_.take();
      if (signal == 0) return;
      ipc::log_info("signal {}: shutting down", signal);
      stopped_ = true;
      loop_.stop();
    });
    if (!config.weights.empty()) make_weights(config);
    components_.emplace(allocator_, weights_ ? &*weights_ : nullptr, graph_bytes_, runner_calls_);
    if (weights_) load_weights(config);
    if (stopped_) return;
    registered_ = std::make_unique<RegisteredWorker>(
        *device_, config_, regions_ ? &*regions_ : nullptr, hooks(config.copies));
    // Steps can come as soon as the arena is there, so their server stands before it starts.
    runner_.emplace(
        "kvf-steps",
        [this, idle_trim = config.idle_trim](ipc::EventLoop& loop) {
          return std::make_unique<StepRunner>(
              loop, dir_, config_, idle_trim, *device_,
              [this](const ipc::SessionId& session, ipc::Epoch epoch) {
                return registered_->enter(session, epoch);
              },
              allocator_, tables_, registered_->layers(), registered_->activity(), graph_bytes_,
              [this](const Error& error) { end(error); });
        },
        [this] { end(KVFERRY_ERROR(kCancelled, "the runner's thread ended; see the log")); });
    try {
      registered_->start();
      if (config.serve && config_.rank.value == 0) start_scheduler(config.tier);
      if (config.load) {
        registered_->activity().begin();
        load_.emplace(*device_, *config.load, [this](const Error& error) { end(error); });
      }
    } catch (...) {
      close();
      throw;
    }
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  /// The arena ends while the runner still finishes what is in flight on it.
  ~Worker() { close(); }

  void run() {
    loop_.run();
    if (fatal_) throw ipc::Exception(*fatal_);
    if (!stopped_) {
      throw ipc::Exception(KVFERRY_ERROR(kCancelled, "the worker's event loop ended; see the log"));
    }
  }

 private:
  void make_weights(const WorkerConfig& config) {
    const bool replicated = std::any_of(
        config_.geometry.groups.begin(), config_.geometry.groups.end(),
        [](const ipc::GroupSpec& group) {
          return std::any_of(group.regions.begin(), group.regions.end(),
                             [](const ipc::RegionSpec& region) { return region.replicated; });
        });
    weights_.emplace(*device_, allocator_, tables_, config_.rank, config_.geometry.ranks,
                     replicated, config.weights_strategy, config.weights_broadcast);
  }

  void load_weights(const WorkerConfig& config) {
    // Beside the loop, so that a signal ends it.
    std::optional<ipc::Status> loaded;
    ipc::OwnThread loader("kvf-load", ipc::OwnThread::Runs::kOurCode, [this, &config, &loaded] {
      const auto deadline = ipc::Deadline::after(kLoadTime);
      ipc::WeightsUser& weights = components_->weights();
      const auto bytes = weights.prepare({ipc::WeightsFrom::kDisk, config.weights}, deadline);
      ipc::Status status = bytes ? weights.commit(deadline) : ipc::Status(bytes.error());
      loop_.post([&loaded, status = std::move(status)] { loaded = status; });
    });
    while (!loaded) {
      loop_.run_once(ipc::Deadline::after(kLoopLook));
      if (stopped_) weights_->cancel();
    }
    if (!*loaded && !stopped_) throw ipc::Exception(loaded->error());
    weights_id_ = config.weights_id;
  }

  void close() {
    load_.reset();
    scheduler_.reset();
    if (registered_ != nullptr) registered_->close();
    runner_.reset();
  }

  void start_scheduler(const TierOptions& tier) {
    scheduler_.emplace(
        "kvf-sched",
        [this, tier](ipc::EventLoop& loop) {
          return std::make_unique<Scheduler>(loop, dir_, config_, weights_.has_value(), tier);
        },
        [this] { end(KVFERRY_ERROR(kCancelled, "the scheduler's thread ended; see the log")); });
  }

  WorkerHooks hooks(const CopyBudget& copies) {
    WorkerHooks hooks;
    hooks.on_revoked = [this] { runner_->post([](StepRunner& runner) { runner.on_revoked(); }); };
    hooks.empty_allocator = [this](EmptyReason reason) { return allocator_.empty_cache(reason); };
    if (weights_) {
      hooks.weights = &components_->weights();
      hooks.weights_id = weights_id_;
    }
    memory_.emplace(weights_ ? &*weights_ : nullptr, runner_calls_);
    hooks.memory = &*memory_;
    hooks.components = &components_->registry();
    hooks.copies = copies;
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

  const ipc::RankConfig config_;
  ipc::SignalFd signals_;  ///< Before every thread, so that all of them inherit the mask.
  ipc::EventLoop loop_;
  std::unique_ptr<ipc::Device> device_;
  ipc::RuntimeDir dir_;
  CachingAllocator allocator_;  ///< Of everything but the arena.
  ModelTables tables_;
  std::optional<WeightsStore> weights_;  ///< Only with WorkerConfig::weights.
  ipc::Digest weights_id_;
  std::atomic<std::uint64_t> graph_bytes_{0};
  const RunnerCalls runner_calls_{
      [this](std::function<void(StepRunner&)> call) { runner_->post(std::move(call)); }};
  std::optional<WorkerComponents> components_;
  std::optional<WorkerMemory> memory_;
  std::optional<EngineRegions> regions_;  ///< Only with ArenaMemory::kEngine.
  bool stopped_ = false;
  std::optional<Error> fatal_;
  std::unique_ptr<RegisteredWorker> registered_;
  std::optional<ServiceThread<StepRunner>> runner_;
  std::optional<ServiceThread<Scheduler>> scheduler_;  ///< Only with WorkerConfig::serve.
  std::optional<ComputeLoad> load_;                    ///< Only with WorkerConfig::load.
};

}  // namespace

std::string_view to_string(ArenaMemory memory) noexcept {
  switch (memory) {
    case ArenaMemory::kKvferry: return "kvferry";
    case ArenaMemory::kEngine: return "engine";
  }
  return "invalid";
}

void run_worker(const WorkerConfig& config) {
  Worker worker(config);
  worker.run();
}

}  // namespace kvferry::worker
